"""A long run stays flat: memory, open files, threads, disk and log of ``latemask pretrain``, sampled from outside.

    python benchmarks/soak.py --seconds 3600 [--out local/soak] [--json results/soak.json]

The run is the command a user types, as a process of its own on a CPU; the text is the demo's. It writes a journal line
every 5 steps, validates and saves every 50, and is stopped by SIGTERM when the time is over. What counts as flat is
decided after the warm-up: the first sixth of the time, two minutes at most. Ends with status 1 where anything grows or
is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from disk import folder_bytes

LOG_EVERY, SAVE_EVERY, KEEP = 5, 50, 2
MOST_KEPT = KEEP + 2
"""Step folders that a run keeps: the newest, the first and the best."""
SETTINGS = {"steps": 10**6, "batch-rows": 16, "micro-rows": 16, "log-every": LOG_EVERY, "save-every": SAVE_EVERY,
            "validate-every": SAVE_EVERY, "validation-rows": 64, "keep": KEEP, "max-skips": 20}  # fmt: skip
MEMORY_GROWTH_BYTES = 24e6
"""A trend of this much over the whole time is no trend: what the allocator keeps back moves by as much."""
LOG_BYTES, LINE_BYTES = 120, 600
"""Most bytes that one line of the log and one line of the journal take, on average."""


def prepare_data(out: Path) -> Path:
    """The demo's text as a token store."""
    from latemask.demo import find_corpus, prepared, write_corpus

    text = write_corpus(find_corpus(), out / "text")
    return prepared(text, out).folder


def sample(process: psutil.Process, run: Path, log: Path) -> dict[str, float]:
    """What the process and its folder hold now. Raises ``psutil.Error`` where it has ended."""
    with process.oneshot():
        memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    journal = run / "journal.jsonl"
    return {
        "rss_bytes": memory,
        "open_files": files,
        "threads": threads,
        "journal_bytes": journal.stat().st_size if journal.exists() else 0,
        "disk_bytes": folder_bytes(run),
        "step_folders": sum(1 for path in run.glob("step-*")),
        "log_bytes": log.stat().st_size,
    }


def trend(samples: list[dict[str, float]], name: str) -> float:
    """Growth over the whole time: the slope of the least-squares line times the time."""
    seconds = [one["seconds"] for one in samples]
    line = statistics.linear_regression(seconds, [one[name] for one in samples])
    return line.slope * (seconds[-1] - seconds[0])


def watch(run: Path, data: Path, seconds: float, every: float) -> tuple[list[dict[str, float]], int]:
    """Run it for ``seconds``; the samples, and the exit status after SIGTERM."""
    flags = [word for name, value in SETTINGS.items() for word in (f"--training.{name}", str(value))]
    shape = ["--shape.depth", "2", "--shape.row-tokens", "64"]
    command = [sys.executable, "-m", "latemask", "pretrain", "mae_lm_tiny", "--data", str(data), "--out", str(run)]
    samples: list[dict[str, float]] = []
    log = run.parent / "log.txt"
    with log.open("wb") as written:
        child = subprocess.Popen([*command, *shape, *flags], stdin=subprocess.DEVNULL, stdout=written, stderr=written)
        process, begun = psutil.Process(child.pid), time.monotonic()
        try:
            while child.poll() is None and time.monotonic() < begun + seconds:
                time.sleep(every)
                try:
                    samples.append({"seconds": time.monotonic() - begun} | sample(process, run, log))
                except psutil.Error:
                    break
        finally:
            child.terminate()
            status = child.wait(timeout=300)
    return samples, status


def journal_faults(lines: list[dict[str, Any]]) -> list[str]:
    """What is missing from a journal, or stands in it twice."""
    of = {kind: [line["step"] for line in lines if line["kind"] == kind] for kind in ("train", "validation", "save")}
    last, faults = lines[-1]["step"], []
    wanted = {"train": list(range(LOG_EVERY, last + 1, LOG_EVERY))}
    wanted |= {kind: list(range(0, last + 1, SAVE_EVERY)) for kind in ("validation", "save")}
    wanted["save"] += [last] * (last % SAVE_EVERY > 0)
    for kind, steps in of.items():
        if steps != wanted[kind]:
            faults.append(f"{kind}: {len(steps)} lines for {len(wanted[kind])} steps, or out of order")
    if [lines[0]["kind"], lines[-1]["kind"], lines[-1].get("reason")] != ["start", "end", "signal"]:
        faults.append("the journal does not go from start to end")
    return faults + [f"skipped an update at step {line['step']}" for line in lines if line["kind"] == "skip"]


def judged(samples: list[dict[str, float]], lines: list[dict[str, Any]], run: Path, status: int) -> dict[str, Any]:
    """The figures, and what is wrong with them."""
    warm = min(samples[-1]["seconds"] / 6, 120)
    flat = [one for one in samples if one["seconds"] > warm]
    half = len(flat) // 2
    step_bytes = max(folder_bytes(step) for step in run.glob("step-*"))
    growth = {name: trend(flat, name) for name in ("rss_bytes", "open_files", "threads")}
    most = {name: max(one[name] for one in flat) for name in flat[0]}
    losses = [line["loss"] for line in lines if line["kind"] == "validation"]
    faults = journal_faults(lines)
    if growth["rss_bytes"] > MEMORY_GROWTH_BYTES:
        faults.append(f"memory grew by {growth['rss_bytes'] / 1e6:.1f} MB")
    for name in ("open_files", "threads"):
        before, after = (statistics.median(one[name] for one in part) for part in (flat[:half], flat[half:]))
        if after > before or growth[name] > 1:
            faults.append(f"{name} grew from {before:.0f} to {after:.0f}")
    stored = max(one["disk_bytes"] - one["journal_bytes"] for one in flat)
    if stored > (MOST_KEPT + 2) * step_bytes:  # one more while it is written, one while it is deleted
        faults.append(f"{stored / 1e6:.1f} MB of checkpoints, each {step_bytes / 1e6:.1f} MB")
    for name, bytes_a_line in (("log_bytes", LOG_BYTES), ("journal_bytes", LINE_BYTES)):
        if most[name] > bytes_a_line * len(lines) + 10_000:
            faults.append(f"{most[name]:.0f} {name} for {len(lines)} lines")
    if status != 75:
        faults.append(f"exit status {status} after SIGTERM, not 75")
    return {
        "seconds": samples[-1]["seconds"],
        "warm_up_seconds": warm,
        "samples": len(samples),
        "steps": lines[-1]["step"],
        "saves": sum(line["kind"] == "save" for line in lines),
        "exit_status": status,
        "growth_after_warm_up": growth,
        "median_after_warm_up": {name: statistics.median(one[name] for one in flat) for name in flat[0]},
        "most_after_warm_up": most,
        "journal_lines": len(lines),
        "step_bytes": step_bytes,
        "validation_loss": {"first": losses[0], "last": losses[-1]},
        "faults": faults,
    }


def main() -> int:
    """Measure, judge, write; 1 where something is not flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="how long the run is watched")
    parser.add_argument("--every", type=float, default=None, help="seconds between samples; a 300th of the time")
    parser.add_argument("--out", type=Path, default=Path("local/soak"), help="folder for the run; emptied first")
    parser.add_argument("--json", type=Path, default=Path("results/soak.json"), help="where the figures go")
    given = parser.parse_args()
    from latemask.training import journal
    from latemask.writing import write_json

    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    data, run = prepare_data(given.out), given.out / "run"
    samples, status = watch(run, data, given.seconds, given.every or max(0.5, given.seconds / 300))
    found = judged(samples, journal.read(run / "journal.jsonl"), run, status)
    packages = ("latemask", "torch", "numpy")
    result = {
        "what": "latemask pretrain mae_lm_tiny on a CPU, watched from outside: what it holds after the warm-up",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "threads_of_torch": os.environ.get("OMP_NUM_THREADS"),
        **found,
        "samples_at": samples,
    }
    write_json(given.json, result)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""A long run stays flat: memory, open files, threads, disk and log of ``latemask pretrain``, sampled from outside.

    python benchmarks/soak.py --seconds 3600 [--out local/soak] [--json results/soak.json]
    python benchmarks/soak.py --seconds 500 --recipe mae_lm_small --data data/en --json results/soak_gpu.json

The run is the command a user types, as a process of its own: a tiny model on the demo's text, or a recipe as it stands
on prepared text. It writes a journal line every few steps, validates and saves every few dozen or hundred, and is
stopped by SIGTERM when the time is over. What counts as flat is decided after the warm-up: a sixth of the time, two
minutes at most, counted from the first trained step (before it, a GPU's run compiles). On a GPU its memory is watched
too: what the driver says the process holds, and the peak in the journal. Ends with status 1 where anything grows or is
missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import tyro
from disk import emptied, folder_bytes
from refusals import program
from scipy.stats import theilslopes

KEEP = 2
MOST_KEPT = KEEP + 2
"""Step folders that a run keeps: the newest, the first and the best."""
SHORT = {"shape.depth": 2, "shape.row-tokens": 64, "training.batch-rows": 16, "training.micro-rows": 16}
"""What makes a tiny recipe a fast one on a CPU."""
MEMORY_GROWTH_BYTES = 24e6
"""A trend of this much over the whole time is no trend: what the allocator keeps back moves by as much. Nor is more,
where the samples scatter so widely that the interval reaches below it."""
LOG_BYTES, LINE_BYTES = 120, 600
"""Most bytes that one line of the log and one line of the journal take, on average."""


@dataclass(frozen=True)
class Options:
    """Watch a long run."""

    seconds: float = 3600
    """How long the run is watched."""
    every: float | None = None
    """Seconds between samples; None: a 300th of the time."""
    recipe: str = "mae_lm_tiny"
    """What is pretrained; without --data with two blocks, rows of 64 and 16 of them a step."""
    data: Path | None = None
    """Folder of prepared text; None: the demo's text."""
    log_every: int | None = None
    """Steps between lines of the journal; None: 5, and with --data 25."""
    save_every: int | None = None
    """Steps between saves and validations; None: 50, and with --data 250."""
    card_memory: Literal["auto", "on", "off"] = "auto"
    """Whether the memory of the GPU is sampled (nvidia-smi); auto: where there is one."""
    out: Path = Path("local/soak")
    """Folder for the run; emptied first."""
    json: Path = Path("results/soak.json")
    """Where the figures go."""

    @property
    def logs(self) -> int:
        return self.log_every or (5 if self.data is None else 25)

    @property
    def saves(self) -> int:
        return self.save_every or (50 if self.data is None else 250)

    @property
    def samples_every(self) -> float:
        return self.every or max(0.5, self.seconds / 300)

    def flags(self) -> list[str]:
        """Of ``latemask pretrain``."""
        changes = dict(SHORT) if self.data is None else {}
        training = {"steps": 10**6, "log-every": self.logs, "save-every": self.saves, "validate-every": self.saves,
                    "validation-rows": 64, "keep": KEEP, "max-skips": 20}  # fmt: skip
        changes |= {f"training.{name}": value for name, value in training.items()}
        return [word for name, value in changes.items() for word in (f"--{name}", str(value))]


@dataclass
class Card:
    """The GPU's memory as nvidia-smi tells it: this process's, or where it cannot tell (in a container it may not know
    our process ids), that of all processes on the cards."""

    program: str
    of: set[str] = field(default_factory=set)
    """Whose memory was told: "process", "card"."""

    def held(self, pid: int) -> int:
        """Bytes."""
        mine = [int(memory) for number, memory in self._ask("--query-compute-apps=pid,used_memory")
                if number == str(pid) and memory.isdigit()]  # fmt: skip
        self.of.add("process" if mine else "card")
        return (sum(mine) if mine else sum(int(used) for (used,) in self._ask("--query-gpu=memory.used"))) << 20

    def _ask(self, query: str) -> list[list[str]]:
        said = subprocess.run([self.program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
        return [[word.strip() for word in line.split(",")] for line in said.stdout.splitlines() if line.strip()]


def prepare_data(out: Path) -> Path:
    """The demo's text as a token store."""
    from latemask.demo import find_corpus, prepared, write_corpus

    text = write_corpus(find_corpus(), out / "text")
    return prepared(text, out).folder


def trained_steps(journal: Path) -> int:
    """The step of the last training line near the end of a journal; 0 where there is none."""
    if not journal.exists():
        return 0
    with journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[:-1]
    found = [line for line in lines if line.startswith(b'{"kind": "train", ')]
    return json.loads(found[-1])["step"] if found else 0


def sample(process: psutil.Process, run: Path, log: Path, card: Card | None) -> dict[str, float]:
    """What the process and its folder hold now. Raises ``psutil.Error`` where it has ended."""
    with process.oneshot():
        memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    journal = run / "journal.jsonl"
    found: dict[str, float] = {
        "step": trained_steps(journal),
        "rss_bytes": memory,
        "open_files": files,
        "threads": threads,
        "journal_bytes": journal.stat().st_size if journal.exists() else 0,
        "disk_bytes": folder_bytes(run),
        "step_folders": sum(1 for path in run.glob("step-*")),
        "log_bytes": log.stat().st_size,
    }
    return found if card is None else found | {"card_bytes": card.held(process.pid)}


def trend(samples: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Growth over the whole time: the median of the slopes between any two samples (Theil and Sen) times the time, and
    the lower end of its 95 % interval. What a save holds for a second is no trend."""
    seconds = [one["seconds"] for one in samples]
    found: Any = theilslopes([one[name] for one in samples], seconds)
    took = seconds[-1] - seconds[0]
    return float(found.slope) * took, float(found.low_slope) * took


def watch(run: Path, data: Path, options: Options, card: Card | None) -> tuple[list[dict[str, float]], int]:
    """Run it for so long; the samples, and the exit status after SIGTERM."""
    command = [sys.executable, "-m", "latemask", "pretrain", options.recipe, "--data", str(data), "--out", str(run)]
    samples: list[dict[str, float]] = []
    log = run.parent / "log.txt"
    with log.open("wb") as written:
        child = subprocess.Popen([*command, *options.flags()], stdin=subprocess.DEVNULL, stdout=written, stderr=written)
        process, begun = psutil.Process(child.pid), time.monotonic()
        try:
            while child.poll() is None and time.monotonic() < begun + options.seconds:
                time.sleep(options.samples_every)
                try:
                    samples.append({"seconds": time.monotonic() - begun} | sample(process, run, log, card))
                except psutil.Error:
                    break
        finally:
            child.terminate()
            status = child.wait(timeout=300)
    return samples, status


def journal_faults(lines: list[dict[str, Any]], logs: int, saves: int) -> list[str]:
    """What is missing from a journal, or stands in it twice."""
    of = {kind: [line["step"] for line in lines if line["kind"] == kind] for kind in ("train", "validation", "save")}
    last, faults = lines[-1]["step"], []
    wanted = {"train": list(range(logs, last + 1, logs))}
    wanted |= {kind: list(range(0, last + 1, saves)) for kind in ("validation", "save")}
    wanted["save"] += [last] * (last % saves > 0)
    for kind, steps in of.items():
        if steps != wanted[kind]:
            faults.append(f"{kind}: {len(steps)} lines for {len(wanted[kind])} steps, or out of order")
    if [lines[0]["kind"], lines[-1]["kind"], lines[-1].get("reason")] != ["start", "end", "signal"]:
        faults.append("the journal does not go from start to end")
    return faults + [f"skipped an update at step {line['step']}" for line in lines if line["kind"] == "skip"]


def peak_growth(lines: list[dict[str, Any]], warm_step: float) -> int:
    """By how many bytes the peak in the journal rose after ``warm_step``."""
    peaks = [line["memory_bytes"] for line in lines if line["kind"] == "train" and line["step"] >= warm_step]
    return peaks[-1] - peaks[0] if peaks else 0


def judged(
    samples: list[dict[str, float]], lines: list[dict[str, Any]], run: Path, status: int, options: Options
) -> dict[str, Any]:
    """The figures, and what is wrong with them. Raises ``SystemExit`` where the run never trained for long enough."""
    trained = [one["seconds"] for one in samples if one["step"] > 0]
    warm = min(samples[-1]["seconds"] / 6, 120) + trained[0] if trained else float("inf")
    flat = [one for one in samples if one["seconds"] > warm]
    if len(flat) < 10:
        sys.exit(f"{len(flat)} samples after the warm-up; status {status}; see {run.parent / 'log.txt'}")
    half = len(flat) // 2
    step_bytes = max(folder_bytes(step) for step in run.glob("step-*"))
    has_card = "card_bytes" in flat[0]
    watched = ("rss_bytes", "open_files", "threads", *(("card_bytes",) if has_card else ()))
    trends = {name: trend(flat, name) for name in watched}
    growth = {name: grown for name, (grown, _) in trends.items()}
    surely = {name: least for name, (_, least) in trends.items()}
    most = {name: max(one[name] for one in flat) for name in flat[0]}
    losses = [line["loss"] for line in lines if line["kind"] == "validation"]
    faults = journal_faults(lines, options.logs, options.saves)
    if surely["rss_bytes"] > MEMORY_GROWTH_BYTES:
        faults.append(f"memory grew by {growth['rss_bytes'] / 1e6:.1f} MB")
    if has_card:
        growth["journal_memory_bytes"] = surely["journal_memory_bytes"] = peak_growth(lines, flat[0]["step"])
        for name in ("card_bytes", "journal_memory_bytes"):
            if surely[name] > MEMORY_GROWTH_BYTES:
                faults.append(f"{name} grew by {growth[name] / 1e6:.1f} MB")
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
        "growth_at_least": surely,
        "median_after_warm_up": {name: statistics.median(one[name] for one in flat) for name in flat[0]},
        "most_after_warm_up": most,
        "journal_lines": len(lines),
        "step_bytes": step_bytes,
        "validation_loss": {"first": losses[0], "last": losses[-1]},
        "faults": faults,
    }


def main() -> int:
    """Measure, judge, write; 1 where something is not flat."""
    given = tyro.cli(Options)
    from latemask.errors import Refusal
    from latemask.training import journal
    from latemask.training.distributed import pick_device
    from latemask.training.parts import device_name
    from latemask.writing import check_file, write_json

    check_file(given.json, "--json")
    emptied(given.out)
    device, program = pick_device(), shutil.which("nvidia-smi")
    watches_card = given.card_memory == "on" or (given.card_memory == "auto" and device.type == "cuda")
    if watches_card and program is None:
        raise Refusal("--card-memory", "no nvidia-smi", "the program of NVIDIA's driver", "Pass --card-memory off")
    card = Card(program) if watches_card and program is not None else None
    data, run = given.data or prepare_data(given.out), given.out / "run"
    samples, status = watch(run, data, given, card)
    found = judged(samples, journal.read(run / "journal.jsonl"), run, status, given)
    packages = ("latemask", "torch", "numpy")
    name = device_name(device)
    result = {
        "what": f"latemask pretrain {given.recipe} on {name}, watched from outside: what it holds after the warm-up",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "card": name,
        "card_memory_of": sorted(card.of) if card else None,
        "flags": given.flags(),
        "threads_of_torch": os.environ.get("OMP_NUM_THREADS"),
        **found,
        "samples_at": samples,
    }
    write_json(given.json, result)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    program(main)

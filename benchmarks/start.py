"""Start of a run: seconds from the command to its first trained step, with an empty compile cache and with a full one.

    python benchmarks/start.py --data data/en --out results/start.json

The command is the one a user types, ``latemask pretrain RECIPE``, each time in a process of its own: first with new
folders for what torch.compile, Triton and CUDA keep of what they compiled (cold), then again with the same folders
(warm). Python's bytecode of torch is there before the first, as an installation leaves it: some images hold torch
without, where it cannot be written beside the source. The clock runs from the launch of the process to each line of its
journal: ``start`` (imported, built, rows per pass found), ``save`` (step 0 written), ``train`` (compiled, and the first
step trained). Nothing is validated, unless ``--flags="--training.validate-every 500"`` says so. Beside it stands what a
fresh process takes to import all of that and to wake the GPU.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asked import asked, counts, read, words
from children import said
from disk import emptied
from refusals import program

from latemask import console
from latemask.errors import Refusal
from latemask.training import journal
from latemask.training.compiler import COMPILER
from latemask.writing import write_json

GOALS_SECONDS = {"cold": 60.0, "warm": 20.0}
"""From the command to the first trained step of ``GOALS_RECIPE``, on one H100."""
GOALS_RECIPE = "mlm_base"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "PYTHONPYCACHEPREFIX")
"""Where torch.compile (and in it Triton), the driver and Python keep what they compiled."""
NOT_PASSED_ON = ("TRITON_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
"""What would keep it elsewhere, or not at all."""
LAST_LINES = 15


@dataclass(frozen=True)
class Options:
    """Time `latemask pretrain` from the command to its first trained step."""

    data: Path
    """Folder of prepared text."""
    out: Path = Path("results/start.json")
    """The JSON."""
    runs: Path = Path("local/start")
    """Run folders, logs and compile caches; emptied first."""
    recipe: str = "mlm_base"
    """What is trained."""
    flags: str = "--shape.positions absolute"
    """Its flags, such as --flags="--shape.positions absolute --training.batch-rows 128"."""
    warm: int = 2
    """Starts with a full cache, or 0."""
    steps: int = 3
    """Of each run; the first one is timed."""
    most_seconds: float = 280.0
    """A start that takes longer has failed."""

    def __post_init__(self) -> None:
        counts(self, "steps")
        if self.warm < 0:
            raise Refusal("--warm", str(self.warm), "0 or more")
        words(self, "flags")


def command_of(options: Options, run: Path) -> list[str]:
    """What a user types."""
    steps = ["--training.steps", str(options.steps), "--training.log-every", "1", "--training.validate-every", "0"]
    folders = ["--data", str(options.data), "--out", str(run)]
    return [sys.executable, "-m", "latemask", "pretrain", options.recipe, *folders, *steps, *shlex.split(options.flags)]


def measured(command: Sequence[str], run: Path, environment: Mapping[str, str], most_seconds: float) -> dict[str, Any]:
    """Seconds from the launch to the first journal line of each kind, and to the end of the process.

    Raises ``Refusal`` with the end of the log where the command fails, trains nothing or takes longer.
    """
    log, lines_at = run.with_name(f"{run.name}.log"), run / "journal.jsonl"
    seen: dict[str, float] = {}
    with log.open("wb") as written:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=written, env=environment)
        try:
            while process.poll() is None and time.perf_counter() < begun + most_seconds:
                note(seen, lines_at, begun)
                time.sleep(0.02)
        finally:
            if is_late := process.poll() is None:
                process.kill()
            process.wait()
        note(seen, lines_at, begun)
        ended = time.perf_counter() - begun
    if is_late or process.returncode or "train" not in seen:
        found = f"nothing after {ended:.0f} s" if is_late else f"exit status {process.returncode}"
        raise Refusal(log, "; ".join([found, *said(log).splitlines()[-LAST_LINES:]]), "a trained step")
    return {"seconds": seen["train"], "to": seen, "parts": parts_of(seen), "process_seconds": ended}


def note(seen: dict[str, float], path: Path, begun: float) -> None:
    """Add to ``seen`` the kinds of line that a journal holds now and did not before."""
    if path.exists():
        for line in journal.read(path):
            seen.setdefault(line["kind"], time.perf_counter() - begun)


def parts_of(seen: Mapping[str, float]) -> dict[str, float]:
    """Where the seconds to the first step went."""
    return {
        "importing_and_building": seen["start"],
        "saving_step_0": seen["save"] - seen["start"],
        "compiling_and_first_step": seen["train"] - seen["save"],
    }


def judged(starts: Mapping[str, Sequence[Mapping[str, Any]]], recipe: str, card: str) -> dict[str, dict[str, Any]]:
    """The median of each kind of start beside its goal; nothing for another recipe than the goals', or on a CPU."""
    found = {}
    for kind, goal in GOALS_SECONDS.items():
        if starts.get(kind) and recipe == GOALS_RECIPE and card != "cpu":
            seconds = statistics.median(start["seconds"] for start in starts[kind])
            found[kind] = {"median_seconds": seconds, "goal_seconds": goal, "is_met": seconds <= goal}
    return found


def floors(on_gpu: bool, environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds of fresh processes that do more and more of what every start has to, warm."""
    loop, compiler = "import latemask.training.loop", f"; import {COMPILER}"
    code = {"importing": loop, "importing_with_compiler": loop + compiler}
    if on_gpu:
        code["importing_and_waking_the_gpu"] = f"{loop}{compiler}; import torch; torch.zeros(1, device='cuda')"
    return {what: seconds_of(one, environment) for what, one in code.items()}


def seconds_of(code: str, environment: Mapping[str, str]) -> float:
    """Of a fresh process that runs it."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    return time.perf_counter() - begun


def main(arguments: Sequence[str] | None = None) -> None:
    """Start cold, then warm, and write the numbers."""
    options = read(Options, arguments)
    emptied(options.runs)
    caches = {name: str((options.runs / "caches" / name.lower()).resolve()) for name in CACHES}
    for folder in caches.values():
        Path(folder).mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON} | caches
    floors(False, environment)  # writes torch's bytecode
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    first: dict[str, Any] = {}
    for number, kind in enumerate(["cold", *["warm"] * options.warm]):
        run = options.runs / f"run-{number}"
        found = measured(command_of(options, run), run, environment, options.most_seconds)
        first = journal.read(run / "journal.jsonl")[0]
        starts[kind].append(found | {"micro_rows": first["micro_rows"]})
        for step in run.glob("step-*"):
            shutil.rmtree(step)
        print(f"{kind}: {found['seconds']:.1f} s to the first step", flush=True)
    goals = judged(starts, options.recipe, first["card"])
    write_json(options.out, {"kind": "benchmark", "what": "from the command to the first trained step",
                             "goals": goals, "starts": starts, "settings": asked(options),
                             "floor_seconds": floors(first["card"] != "cpu", environment),
                             "card": first["card"], "versions": first["versions"]})  # fmt: skip
    shutil.rmtree(options.runs / "caches")
    columns = ("start", "seconds", "goal", *(name.replace("_", " ") for name in starts["cold"][0]["parts"]))
    console.table(f"{options.recipe} on {first['card']}: seconds to the first trained step", columns,
                  [(kind, start["seconds"], goals[kind]["goal_seconds"] if kind in goals else None,
                    *start["parts"].values())
                   for kind, found in starts.items() for start in found])  # fmt: skip


if __name__ == "__main__":
    program(main)

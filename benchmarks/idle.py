"""Waiting: how much of the time a GPU stands still because the next batch is not there, in a real run on real text.

    python benchmarks/idle.py --data data/en --out results/idle.json

``latemask pretrain``'s own loop runs for so many seconds after its start, with the journal, the prefetching and the
masking of any run. Two shares are measured of it, goal for both below 1 %:

* waiting: time that the loop's thread was blocked inside ``Prefetch.take``, counted where the device had finished
  all that was queued before the batch came (all of it then counts, so this is at most too much; a CPU queues nothing,
  so there all of it counts);
* lost: one minus the journal's rate over the rate of the same step on one batch that stays on the device (the stepper
  of ``latemask bench``): what data, journal and host take together, waiting included.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from asked import asked, counts, read
from refusals import program

from latemask import console, pretrain
from latemask.batch import Batch
from latemask.bench import Entry, built
from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.feed.prefetch import Prefetch
from latemask.machine import machine_of
from latemask.recipes import recipe
from latemask.text.store import open_store
from latemask.training import journal, loop
from latemask.training.distributed import pick_device
from latemask.writing import write_json


@dataclass(frozen=True)
class Options:
    """Measure how long a run waits for its data."""

    data: Path
    """Folder of prepared text."""
    out: Path = Path("results/idle.json")
    """The JSON."""
    recipes: tuple[str, ...] = ("mlm_base", "mlm_small")
    """What is trained, with absolute positions."""
    seconds: float = 25
    """Of training that count, for each recipe."""
    warm_up_seconds: float = 5
    """Of training before them, when all is compiled."""
    batch_rows: int = 128
    """Rows of a step, in one forward pass."""
    log_every: int = 50
    """Steps between lines of the journal."""
    row_tokens: int | None = None
    """Tokens of a row; None: the recipe's."""
    rounds: int = 3
    """Rounds of timed steps on one batch."""
    steps: int = 20
    """Timed steps of a round."""

    def __post_init__(self) -> None:
        counts(self, "batch_rows", "log_every", "rounds", "steps")


@dataclass(frozen=True)
class Take:
    """One call of ``Prefetch.take``."""

    index: int
    """Of the batch."""
    blocked_seconds: float
    """From call to return."""
    stood_still: bool
    """Whether the device had nothing left to do when the batch came."""


class TimedPrefetch(Prefetch):
    """Prefetch, each take of which is noted."""

    takes: list[Take]
    """Of all that were made since it was emptied."""

    def take(self, index: int) -> list[Batch]:
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()  # behind all that the loop has queued
        began = time.perf_counter()
        batches = super().take(index)
        blocked = time.perf_counter() - began
        self.takes.append(Take(index, blocked, done is None or done.query()))
        return batches


def run_of(name: str, options: Options) -> Run:
    """The recipe as it is trained here: whole batches, no validation, saves at both ends alone."""
    changes: dict[str, Any] = {
        "shape.positions": "absolute", "training.batch_rows": options.batch_rows,
        "training.micro_rows": options.batch_rows, "training.steps": 10**6, "training.log_every": options.log_every,
        "training.save_every": 10**6, "training.validate_every": 0,
        "training.max_seconds": options.warm_up_seconds + options.seconds,
    }  # fmt: skip
    if options.row_tokens is not None:
        changes["shape.row_tokens"] = options.row_tokens
    return open_store(options.data).fitted(replace(recipe(name), changes))


def window(lines: Sequence[dict[str, Any]], warm_up_seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last training line after the warm-up. Raises ``Refusal`` where there are not two."""
    late = [line for line in lines if line["kind"] == "train" and line["seconds"] >= warm_up_seconds]
    if len(late) < 2:
        raise Refusal("the journal", f"{len(late)} lines after the warm-up", "two or more", "Take more --seconds")
    return late[0], late[-1]


def shares(lines: Sequence[dict[str, Any]], takes: Iterable[Take], warm_up_seconds: float) -> dict[str, float]:
    """Rate and waiting between two lines of the journal. Raises ``Refusal`` where updates were skipped."""
    if any(line["kind"] == "skip" for line in lines):
        raise Refusal("the journal", "skipped updates", "none: a batch then is a step")
    first, last = window(lines, warm_up_seconds)
    seconds = last["seconds"] - first["seconds"]
    inside = [take for take in takes if first["step"] <= take.index < last["step"]]
    return {
        "seconds": seconds,
        "steps": last["step"] - first["step"],
        "tokens_per_second": (last["tokens"] - first["tokens"]) / seconds,
        "blocked_share": sum(take.blocked_seconds for take in inside) / seconds,
        "waiting_share": sum(take.blocked_seconds for take in inside if take.stood_still) / seconds,
        "longest_wait_seconds": max(take.blocked_seconds for take in inside),
    }


def in_the_loop(run: Run, options: Options) -> dict[str, float]:
    """What the real loop does with it. Raises ``KeyboardInterrupt`` where it was told to stop."""
    TimedPrefetch.takes = []
    with tempfile.TemporaryDirectory() as folder, patch.object(loop, "Prefetch", TimedPrefetch):
        outcome = pretrain(run, options.data, Path(folder) / "run")
        lines = journal.read(Path(folder) / "run" / "journal.jsonl")
    if outcome.was_signalled:
        raise KeyboardInterrupt
    counted = len([line for line in lines if line["kind"] == "train"])
    return shares(lines, TimedPrefetch.takes, options.warm_up_seconds) | {"journal_lines": counted}


def on_one_batch(run: Run, options: Options, device: torch.device) -> dict[str, float]:
    """Tokens a second of the same step on a batch that stays. Raises ``Refusal`` where it does not fit."""
    torch._dynamo.reset()
    stepper = built(
        Entry(run.recipe, run, options.batch_rows, compiled="blocks" if device.type == "cuda" else "no"), device
    )
    if stepper is None:
        raise Refusal("--batch-rows", str(options.batch_rows), "what fits the card")
    stepper.time(options.steps)
    stepper.rounds.clear()  # to warm up
    for _ in range(options.rounds):
        stepper.time(options.steps)
    found = stepper.result(None)
    return {"tokens_per_second": found.tokens_per_second, "milliseconds": found.milliseconds, "spread": found.spread}


def measure(options: Options) -> dict[str, Any]:
    """All recipes, written down after each."""
    device = pick_device()
    found: dict[str, Any] = {"kind": "benchmark", "what": "waiting for data", "recipes": {}, "settings": asked(options),
                             "train_tokens": len(open_store(options.data).train.tokens),
                             **machine_of(device)}  # fmt: skip
    for name in options.recipes:
        run = run_of(name, options)
        torch._dynamo.reset()
        real = in_the_loop(run, options)
        gc.collect()
        still = on_one_batch(run, options, device)
        lost = 1 - real["tokens_per_second"] / still["tokens_per_second"]
        found["recipes"][name] = {"loop": real, "one_batch": still, "lost_share": lost}
        write_json(options.out, found)
    return found


def main() -> None:
    found = measure(read(Options))
    console.table(f"Waiting for data: {found['card']}",
                  ("recipe", "steps", "tokens/s, loop", "tokens/s, one batch", "waiting", "blocked", "lost"),
                  [(name, one["loop"]["steps"], one["loop"]["tokens_per_second"], one["one_batch"]["tokens_per_second"],
                    f"{one['loop']['waiting_share']:.2%}", f"{one['loop']['blocked_share']:.2%}",
                    f"{one['lost_share']:.2%}") for name, one in found["recipes"].items()])  # fmt: skip


if __name__ == "__main__":
    program(main)

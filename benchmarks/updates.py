"""Updates of few rows: milliseconds of one with CUDA graphs off and on, by turns, and whether the host holds the GPU.

    python benchmarks/updates.py --data data/full --rows 32 64 --out results/updates.json

An update is what the loop of ``latemask pretrain`` makes of a batch, its own functions and thread for the data
included: one pass of so many rows with rotary positions, clipping, optimizer, and the verdict on the update before.
Without ``--data`` the ids are random. On a GPU stand beside it, of updates one at a time on a batch that stays:

* host: from the call until all is launched;
* device: from the first kernel to the end of the last, all of them launched while the GPU was kept from beginning. It
  waits for nothing then, so that an update is as long as the longer of the two.

The JSON is written anew after each recipe and number of rows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
import torch._dynamo
from asked import asked, counts, read
from gpu_time import gpu_milliseconds
from refusals import program

from latemask import console
from latemask.batch import Batch
from latemask.bench import random_batches, spread
from latemask.config import Run, replace
from latemask.console import percent
from latemask.errors import Refusal
from latemask.feed.prefetch import Prefetch
from latemask.machine import machine_of
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import Size, recipe
from latemask.text.store import open_store
from latemask.training.distributed import World, pick_device
from latemask.training.loop import _accumulate
from latemask.training.optimizer import Verdict, update
from latemask.training.parts import assemble
from latemask.writing import write_json

RATE = 1e-4
WARMUP, ALONE = 2, 5
"""Updates that do not count, and those that are timed one at a time."""
HELD = 2.0
"""So many times as long as the host needs the GPU is kept from beginning."""
Way = Literal["off", "on"]


@dataclass(frozen=True)
class Options:
    """Time updates of few rows, with CUDA graphs and without."""

    data: Path | None = None
    """Folder of prepared text; none: random ids."""
    out: Path = Path("results/updates.json")
    """The JSON."""
    size: Size = "base"
    """Of the recipes."""
    systems: tuple[str, ...] = ("mlm", "mae_lm")
    """Their names without the size."""
    rows: tuple[int, ...] = (32, 64, 128)
    """Of an update, each number by itself."""
    rounds: int = 3
    """Times that both ways are gone through."""
    updates: int = 10
    """Of each way in each round."""

    def __post_init__(self) -> None:
        counts(self, "rows", "rounds", "updates")
        if not self.systems:
            raise Refusal("--systems", "nothing", "one or more")
        for system in self.systems:
            recipe(f"{system}_{self.size}")


def run_of(name: str, rows: int, graphs: Way) -> Run:
    """The recipe as it is trained in few tokens: rotary positions, also where a decoder attends to itself."""
    run = recipe(name)
    changes: dict[str, Any] = {
        "shape.positions": "rotary", "training.batch_rows": rows, "training.micro_rows": rows,
        "training.steps": 10**6, "training.validate_every": 0, "training.graphs": graphs,
    }  # fmt: skip
    if run.decoder is not None and "self" in run.decoder.sublayers:
        changes["decoder.positions"] = "absolute+rotary"
    return replace(run, changes)


class Updates:
    """The updates of a run, made as its loop makes them, on ``device``."""

    def __init__(self, run: Run, data: Path | None, device: torch.device, stack: ExitStack) -> None:
        if data is None:
            stream = random_batches(run, run.training.batch_rows).rows.stream
            store: Any = SimpleNamespace(train=stream, valid=stream, folder=Path("random ids"))
        else:
            store = open_store(data)
            run = store.fitted(run)
        torch.manual_seed(0)
        self.world = World(0, 1, device)
        self.parts = parts = assemble(run, store, Pretrainer(run), {}, None, self.world)
        feed = Prefetch(parts.batches, parts.first_row, parts.last_row, parts.micro_rows, device)
        self.prefetch, self.verdict = stack.enter_context(feed), Verdict(device)
        self.indices = itertools.count()
        self.rounds: list[float] = []
        self.make(WARMUP)

    def one(self, micro_batches: list[Batch], index: int) -> None:
        parts, clip_norm = self.parts, self.parts.run.training.clip_norm
        loss = _accumulate(parts, micro_batches, index, self.world)
        assert loss is not None
        self.verdict.read()
        _, skipped = update(parts.model, parts.optimizer, RATE, clip_norm, loss, parts.uses_graphs)
        self.verdict.watch(skipped)

    def make(self, updates: int) -> float:
        """Milliseconds of one of ``updates``."""
        self._wait()
        begun = time.perf_counter()
        for index in itertools.islice(self.indices, updates):
            self.one(self.prefetch.take(index), index)
        self._wait()
        return 1e3 * (time.perf_counter() - begun) / updates

    def split(self) -> dict[str, float]:
        """Milliseconds of host and device, medians of updates one at a time."""
        index = next(self.indices)
        batch = self.prefetch.take(index)
        host = statistics.median(self._launched(lambda: self.one(batch, index)) for _ in range(ALONE))
        cycles = 10_000_000
        asleep = gpu_milliseconds(lambda: torch.cuda._sleep(cycles))
        held = round(cycles * max(1.0, HELD * host / asleep))
        device = [gpu_milliseconds(lambda: self.one(batch, index), held) for _ in range(ALONE)]
        return {"host_milliseconds": host, "device_milliseconds": statistics.median(device)}

    def _launched(self, work: Callable[[], None]) -> float:
        """Milliseconds until ``work`` returns, the device idle before."""
        self._wait()
        begun = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begun)

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


def timed(options: Options, name: str, rows: int, device: torch.device) -> list[dict[str, Any]]:
    """What the JSON says of a recipe and number of rows: an entry for each way, on a CPU without graphs alone."""
    torch._dynamo.reset()  # else shapes of all that went before would count as recompilations
    ways: tuple[Way, ...] = get_args(Way) if device.type == "cuda" else ("off",)
    with ExitStack() as stack:
        both = {way: Updates(run_of(name, rows, way), options.data, device, stack) for way in ways}
        for _ in range(options.rounds):
            for made in both.values():
                made.rounds.append(made.make(options.updates))
        split = {way: made.split() if device.type == "cuda" else {} for way, made in both.items()}
        tokens = rows * both["off"].parts.run.shape.row_tokens
    return [judged(name, rows, way, tokens, made.rounds) | split[way] for way, made in both.items()]


def judged(name: str, rows: int, graphs: Way, tokens: int, rounds: list[float]) -> dict[str, Any]:
    """Of one way: the median round, and the largest minus the smallest over it."""
    middle = statistics.median(rounds)
    return {"recipe": name, "rows": rows, "graphs": graphs, "milliseconds": middle,
            "spread": spread(rounds, middle), "rounds": rounds,
            "tokens_per_second": 1e3 * tokens / middle}  # fmt: skip


def measure(options: Options) -> dict[str, Any]:
    """All recipes and numbers of rows, written down after each."""
    device = pick_device()
    found: dict[str, Any] = {"kind": "benchmark", "what": "updates with CUDA graphs off and on", "updates": [],
                             "settings": asked(options), **machine_of(device)}  # fmt: skip
    for name in (f"{system}_{options.size}" for system in options.systems):
        for rows in options.rows:
            found["updates"] += timed(options, name, rows, device)
            write_json(options.out, found)
            console.say(f"{name}, {rows} rows")
    return found


def main() -> None:
    found = measure(read(Options))
    columns = ("recipe", "rows", "graphs", "ms", "spread", "tokens/s", "host ms", "device ms")
    console.table(f"Updates: {found['card']}", columns,
                  [(one["recipe"], one["rows"], one["graphs"], one["milliseconds"], percent(one["spread"]),
                    one["tokens_per_second"], one.get("host_milliseconds"), one.get("device_milliseconds"))
                   for one in found["updates"]])  # fmt: skip


if __name__ == "__main__":
    program(main)

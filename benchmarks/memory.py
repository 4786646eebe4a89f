"""Memory: the largest micro-batch of rows of 512 that runs, at base and large, on a whole card and on 24 GB.

    python benchmarks/memory.py --seconds 240 --out results/memory.json

A full step (forward, backward, clipping, fused AdamW; compiled blocks, bf16, the recipe's dropout) is run with few rows
at two row counts, then at an eighth and a quarter of what the line through these two peaks predicts; the line through
their peaks predicts the most rows; then that many are really run, and where they do not fit fewer, until the most is
known to 3 %: only what ran is stated. Beside it stand the rows that latemask picks by itself and the speed at the
largest. A size below the card's is simulated: the allocator may then take no more than what a card of that size would
leave it. What no longer fits into the time is listed as left out; the JSON is written anew after each measurement.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._dynamo.config as dynamo
from asked import asked, read
from refusals import check_gpu, program

from latemask import console
from latemask.bench import Entry, Stepper, random_batches
from latemask.cards import card_of_device
from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.machine import machine_of
from latemask.model.pretrainer import Pretrainer
from latemask.out_of_memory import is_out_of_memory
from latemask.recipes import recipe
from latemask.training.distributed import World, pick_device
from latemask.training.micro import (
    compile_blocks,
    counted_micro_rows,
    find_micro_rows,
    recompute_blocks,
)
from latemask.training.optimizer import make_optimizer, update
from latemask.training.parts import autocast
from latemask.writing import write_json

WHOLE = 1.1
"""A card of at most this times the stated size counts as one of that size: makers' gigabytes vary."""
MOST_OF_OTHERS = 2e9
"""Bytes that CUDA's context may hold; more is another program's."""
STEP, MOST_TRIES = 0.03, 8
TIMED_STEPS = 4


@dataclass(frozen=True)
class Options:
    """Find the largest micro-batches."""

    out: Path = Path("results/memory.json")
    """The JSON."""
    seconds: float = 240
    """Time for all of it; what does not fit is listed as left out."""
    gigabytes: tuple[float, ...] = (80, 24)
    """Sizes of cards, in 1e9 bytes."""
    only: tuple[str, ...] = ()
    """Names of models to measure; none given: all."""
    row_tokens: int = 512
    """Tokens of a row."""
    measured_rows: tuple[int, int] = (8, 24)
    """The two row counts that are run first."""

    def __post_init__(self) -> None:
        few, more = self.measured_rows
        if not 1 <= few < more:
            raise Refusal("--measured-rows", f"{few} {more}", "two row counts that rise, from 1")
        if unknown := set(self.only) - set(models(self)):
            raise Refusal("--only", ", ".join(sorted(unknown)), f"some of: {'; '.join(models(self))}")


def models(options: Options) -> dict[str, Run]:
    """What is measured, by name."""
    changes = {"shape.positions": "absolute", "shape.row_tokens": options.row_tokens}
    names = ("mlm_base", "mae_lm_base", "mlm_large", "mae_lm_large")
    wide = {"masking.rate": 0.5, "shape.vocabulary": 64_000}
    found = {name: replace(recipe(name), changes) for name in names}
    return found | {"three_ml_self_large, rate .5, vocabulary 64,000": replace(recipe("three_ml_self_large"),
                                                                               changes | wide)}  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """A step that ran: the most bytes that it held at once, all of them (weights and moments too)."""

    rows: int
    bytes: int
    tokens_per_second: float | None = None
    """Of the steps after it."""


def predicted_rows(few: Peak, more: Peak, room: int) -> int:
    """The most rows whose peak lies within ``room`` bytes, on the line through two peaks; 0 where none does."""
    a_row = (more.bytes - few.bytes) / (more.rows - few.rows)
    if a_row <= 0:
        raise ValueError(f"{more.rows} rows hold no more than {few.rows}")
    return max(0, few.rows + int((room - few.bytes) // a_row))


def settled(measure: Callable[[int], Peak | None], few: Peak, more: Peak, room: int) -> tuple[Peak, Peak]:
    """Two peaks to predict from: at an eighth and a quarter of the rows that ``few`` and ``more`` predict, or as many
    as run, where that is further up: few rows may have their peak at another moment than many."""
    far = predicted_rows(few, more, room) // 4
    while far // 2 > more.rows:
        near_peak, far_peak = measure(far // 2), measure(far)
        if near_peak is not None and far_peak is not None and far_peak.bytes > near_peak.bytes:
            return near_peak, far_peak
        far //= 2
    return few, more


def largest(measure: Callable[[int], Peak | None], few: Peak, more: Peak, room: int) -> tuple[Peak | None, list[int]]:
    """The largest step that ``measure`` runs within ``room`` bytes, to 3 %, and the row counts that it could not; None
    where ``MOST_TRIES`` failed.

    The line through two peaks says what to try first. Where that fails it is not straight (few rows have their peak at
    another moment than many): then halfway down, and up again on the line to what ran, or halfway.
    """
    ran, best, failed = [few, more], None, list[int]()
    rows = predicted_rows(few, more, room)
    while rows >= 1 and len(failed) < MOST_TRIES:
        if (peak := measure(rows)) is None:
            failed.append(rows)
            rows = ((best.rows if best else 0) + rows) // 2
        else:
            nearest = next(other for other in reversed(ran) if other.rows != rows)
            ran.append(best := peak)
            rows = predicted_rows(nearest, peak, room)
            if failed and rows * (1 + STEP) >= failed[-1]:
                rows = (best.rows + failed[-1]) // 2
        if best and rows <= best.rows * (1 + STEP):
            break
    return best, failed


class Trained:
    """A model on the GPU with its optimizer, to be stepped with any number of rows."""

    def __init__(self, name: str, run: Run, device: torch.device):
        torch.manual_seed(0)
        self.name, self.run, self.device = name, run, device
        self.model = Pretrainer(run).to(device).train()
        self.precision = autocast(run.training.precision, device)
        if run.training.recompute:
            recompute_blocks(self.model)
        self.optimizer: torch.optim.AdamW | None = None

    def picked_rows(self, room: int) -> int | None:
        """What latemask sets for itself where ``room`` bytes are free; before anything is compiled, as it does it. None
        where it refuses."""
        batches, total = random_batches(self.run, 4), torch.cuda.get_device_properties(self.device).total_memory
        world, rows = World(0, 1, self.device), self.run.training.batch_rows
        free = room - torch.cuda.memory_allocated(self.device)
        try:
            with patch.object(torch.cuda, "mem_get_info", lambda *_: (free, total)):
                counted = counted_micro_rows(self.run, rows, world)
                return counted or find_micro_rows(self.model, batches, rows, self.precision, world)
        except Refusal:
            self.model.zero_grad(set_to_none=True)
            return None

    def begin(self) -> None:
        """Compile, and make the optimizer."""
        compile_blocks(self.model)
        dynamo.recompile_limit = 256  # each row count is a shape of its own
        self.optimizer = make_optimizer(self.model, self.run.training)

    def stepper(self, rows: int) -> Stepper:
        """A full step on ``rows`` rows that stay on the device."""
        batch, optimizer = random_batches(self.run, rows).batch_at(0).to(self.device), self.optimizer
        assert optimizer is not None

        def step() -> None:
            with self.precision():
                loss = self.model(batch).mean()
            loss.backward()
            update(self.model, optimizer, 1e-4, 1.0, loss.detach())

        return Stepper(Entry(self.name, self.run, rows), step, self.device)

    def peak(self, rows: int) -> Peak | None:
        """Of the second of two steps (the first makes the moments and compiles), and the speed of those that follow;
        None where they do not fit."""
        try:
            stepper = self.stepper(rows)
            stepper.step()
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            stepper.step()
            torch.cuda.synchronize(self.device)
            held = torch.cuda.max_memory_allocated(self.device)
            stepper.time(TIMED_STEPS)
            return Peak(rows, held, stepper.result(None).tokens_per_second)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.model.zero_grad(set_to_none=True)
        free(self.device)
        return None


def free(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@contextmanager
def card_of(gigabytes: float, device: torch.device) -> Iterator[tuple[int, bool]]:
    """The allocator behaves as on a card of this size: (bytes that it may take, whether that is simulated).

    Raises ``Refusal`` for a size beyond the card's, and where other programs hold some of it.
    """
    free(device)
    left, total = torch.cuda.mem_get_info(device)
    others = total - left - torch.cuda.memory_reserved(device)  # the context's
    if others > MOST_OF_OTHERS:
        raise Refusal("the card", f"{others / 1e9:.1f} GB held by other programs", "one that nothing else runs on")
    wanted = gigabytes * 1e9
    if wanted > WHOLE * total:
        raise Refusal("--gigabytes", f"{gigabytes:g}", f"at most the card's {total / 1e9:.1f}")
    is_simulated = total > WHOLE * wanted
    room = int(wanted if is_simulated else total) - others
    torch.cuda.set_per_process_memory_fraction(room / total if is_simulated else 1.0, device)
    try:
        yield room, is_simulated
    finally:
        free(device)
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def measure(options: Options) -> dict[str, Any]:
    """Measure what fits into the seconds; write after each card size. Raises ``Refusal`` without a GPU."""
    begun, device = time.monotonic(), pick_device()
    check_gpu(device, "memory")
    machine = machine_of(device)
    card = card_of_device(machine["card"])
    found: dict[str, Any] = {
        "kind": "benchmark", "what": "largest micro-batch", "results": [], "failed": [], "left_out": [],
        "card_bytes": torch.cuda.get_device_properties(device).total_memory, "data_sheet_bytes": card and card.memory,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "settings": asked(options), **machine,
    }  # fmt: skip
    longest = 0.0
    for name, plain in models(options).items():
        if options.only and name not in options.only:
            continue
        for recompute in (False, True):
            since = time.monotonic()
            if since - begun + longest > options.seconds:
                found["left_out"].append({"name": name, "recompute": recompute})
                write_json(options.out, found)
                continue
            try:
                one(name, replace(plain, {"training.recompute": recompute}), device, options, found)
            except RuntimeError as error:  # the others are worth their time still
                failed = str(error).partition("\n")[0]
                found["failed"].append({"name": name, "recompute": recompute, "error": failed})
                console.warn(f"{name}, recompute {recompute}: {failed}")
            torch._dynamo.reset()
            free(device)
            longest = max(longest, time.monotonic() - since)
    write_json(options.out, found)
    return found


def one(name: str, run: Run, device: torch.device, options: Options, found: dict[str, Any]) -> None:
    """All card sizes of one model, added to what was found."""
    held = torch.cuda.memory_allocated(device)
    trained = Trained(name, run, device)
    picked = {}
    for gigabytes in options.gigabytes:
        with card_of(gigabytes, device) as (room, _):
            picked[gigabytes] = trained.picked_rows(room)
    trained.begin()
    few, more = (trained.peak(rows) for rows in options.measured_rows)
    for gigabytes in options.gigabytes:
        with card_of(gigabytes, device) as (room, is_simulated):
            told: dict[str, Any] = {
                "name": name, "recompute": run.training.recompute, "gigabytes": gigabytes, "is_simulated": is_simulated,
                "room_bytes": room, "held_before_bytes": held, "picked_rows": picked[gigabytes], "rows": None,
            }  # fmt: skip
            if few is not None and more is not None:
                near, far = settled(trained.peak, few, more, room)
                told |= {"a_row_bytes": (far.bytes - near.bytes) / (far.rows - near.rows)}
                told |= {"predicted_rows": predicted_rows(near, far, room)}
                peak, failed = largest(trained.peak, near, far, room)
                told |= {"failed_rows": failed}
                if peak is not None:
                    told |= {"rows": peak.rows, "peak_bytes": peak.bytes, "tokens_per_second": peak.tokens_per_second}
        found["results"].append(told)
        write_json(options.out, found)
        console.say(f"{name}, recompute {run.training.recompute}, {gigabytes:g} GB: {told['rows']} rows")


def rows_of_table(results: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What is printed of each result."""
    return [(told["name"], "on" if told["recompute"] else "off",
             f"{told['gigabytes']:g} GB{' (simulated)' if told['is_simulated'] else ''}", told["rows"],
             told.get("predicted_rows"), told["picked_rows"], told["peak_bytes"] / 1e9 if told["rows"] else None,
             told.get("tokens_per_second")) for told in results]  # fmt: skip


def main() -> None:
    options = read(Options)
    found = measure(options)
    columns = ("model", "recompute", "card", "rows that ran", "predicted", "picked by itself", "GB", "tokens/s")
    console.table(f"Largest micro-batch of rows of {options.row_tokens}: {found['card']}", columns,
                  rows_of_table(found["results"]))  # fmt: skip
    for left in found["left_out"]:
        console.say(f"left out: {left['name']}, recompute {left['recompute']} (no time left)")


if __name__ == "__main__":
    program(main)

"""A training step with our attention kernel and with torch's attention, timed by turns in one run.

    python benchmarks/attention.py --out results/attention.json

``ours``: wherever there is no bias, ``torch``: nowhere, ``shipped``: where ``relative_attention.pays`` says. Blocks are
compiled, in bf16. Each way has a model of its own; the choice is made while a step is traced and is part of what
torch.compile checks, so that it stands as it was whenever the model's turn comes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from asked import asked, counts, read
from refusals import check_gpu, program

from latemask import console
from latemask.bench import ROWS, BenchOptions, built, entries_of
from latemask.cards import card_of_device
from latemask.config import replace
from latemask.console import percent
from latemask.errors import Refusal
from latemask.kernels import relative_attention
from latemask.machine import machine_of
from latemask.training.distributed import pick_device
from latemask.writing import write_json

Way = Literal["ours", "torch", "shipped"]
SHIPPED = relative_attention.pays


@dataclass(frozen=True)
class Options:
    """Time steps with both attentions."""

    out: Path = Path("results/attention.json")
    """The JSON."""
    size: Literal["tiny", "base", "large"] = "base"
    """Of the models."""
    only: tuple[str, ...] = ("mlm", "mlm, rotary", "mlm, dropout", "mlm, dropout, rotary", "mae_lm, dropout")
    """Entries of `latemask bench`."""
    ways: tuple[Way, ...] = ("ours", "torch", "shipped")
    """Attentions, torch's among them: with dropout or rotary positions ours is what ships, else for 256 to 512 keys."""
    rows: int | None = None
    """A step; none given: as `latemask bench` has them."""
    row_tokens: int | None = None
    """Of a row; none given: the recipe's."""
    rounds: int = 6
    """Turns of each model."""
    steps: int = 8
    """A turn, after one that does not count."""

    def __post_init__(self) -> None:
        counts(self, "row_tokens")
        if "torch" not in self.ways:
            raise Refusal("--ways", " ".join(self.ways) or "none", "torch among them: the others stand over it")


def is_ours(projected: Any, head_width: int, dropout: float, keys: int, *, rotates: bool = False) -> bool:
    """Our kernel also where there is no dropout."""
    return SHIPPED(projected, head_width, 1.0, keys)


CHOICES: dict[Way, Callable[..., bool]] = {"ours": is_ours, "torch": lambda *_, **__: False, "shipped": SHIPPED}


@contextmanager
def chosen(way: Way) -> Iterator[None]:
    """Attention without a bias goes this way."""
    with patch.object(relative_attention, "pays", CHOICES[way]):
        yield


def measure(options: Options) -> dict[str, Any]:
    """All entries in the ways. Raises ``Refusal`` without a GPU: the kernel runs on no other device."""
    device = pick_device()
    check_gpu(device, "attention")
    bench = BenchOptions(size=options.size, only=options.only, against="none", rows=options.rows,
                         rounds=options.rounds, steps=options.steps)  # fmt: skip
    longer = {} if options.row_tokens is None else {"shape.row_tokens": options.row_tokens}
    entries = [(dataclasses.replace(entry, run=replace(entry.run, longer)), way)
               for entry in entries_of(options.size, bench, compiles=True) for way in options.ways]  # fmt: skip
    steppers = []
    for entry, way in entries:
        console.say(f"building {entry.name}, {way}")
        with chosen(way):
            stepper = built(entry, device)
        if stepper is None:
            raise Refusal("--rows", str(options.rows or ROWS[options.size]), "what fits the card with all models")
        steppers.append((way, stepper))
    for number in range(options.rounds):
        for way, stepper in steppers:
            with chosen(way):
                stepper.time(options.steps)
        console.say(f"round {number + 1} of {options.rounds} done")
    machine = machine_of(device)
    peak = card.peak if (card := card_of_device(machine["card"])) else None
    timed = [{"way": way, **dataclasses.asdict(stepper.result(peak))} for way, stepper in steppers]
    return {"kind": "benchmark", "what": "training steps with our attention and with torch's", "timed": timed,
            "ratios": ratios(timed), "settings": asked(options), **machine}  # fmt: skip


def ratios(timed: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds of each way over torch's, by entry."""
    found: dict[str, dict[str, float]] = {}
    for one in timed:
        other = next(each for each in timed if each["name"] == one["name"] and each["way"] == "torch")
        found.setdefault(one["name"], {})[one["way"]] = one["milliseconds"] / other["milliseconds"]
    return found


def main() -> None:
    options = read(Options)
    found = measure(options)
    write_json(options.out, found)
    columns = ("entry", "attention", "ms", "spread", "over torch's", "tokens/s", "MFU plain")
    console.table(f"Training steps, {found['card']}", columns,
                  [(one["name"], one["way"], one["milliseconds"], percent(one["spread"]),
                    found["ratios"][one["name"]][one["way"]], one["tokens_per_second"], one["plain_mfu"])
                   for one in found["timed"]])  # fmt: skip


if __name__ == "__main__":
    program(main)

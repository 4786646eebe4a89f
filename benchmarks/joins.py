"""What an update costs at each of 3ML's joins and masking rates: milliseconds alone on the card, beside its FLOPs.

    python benchmarks/joins.py --size base --rows 64 --out results/joins.json

The trials are those of the study `three-ml` (studies.py), the most telling first, each built, timed and freed before
the next; an update is what the loop of ``latemask pretrain`` makes of a batch (updates.py), of random ids. Where the
runs of a study share their card, their own seconds say little: these are what their scores stand beside. The JSON is
written anew after each trial.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from asked import asked, counts, read
from refusals import program
from studies import Trial, named, trials_of
from updates import Updates, judged

from latemask import console
from latemask.bench import spread
from latemask.cli import pretrain
from latemask.config import Run, replace
from latemask.console import percent
from latemask.counts import flops_per_token
from latemask.machine import machine_of
from latemask.recipes import Size
from latemask.training.distributed import pick_device
from latemask.writing import write_json

AGREES = 0.05
"""Rounds that do: the largest minus the smallest, over their median."""


@dataclass(frozen=True)
class Options:
    """Time updates at 3ML's joins and rates."""

    out: Path = Path("results/joins.json")
    """The JSON."""
    size: Size = "base"
    """Of the recipes."""
    rows: int = 64
    """An update, all in one pass."""
    only: tuple[str, ...] = ()
    """Names of trials, such as self,rate=0.5; none given: all."""
    rounds: int = 3
    """Of each trial; up to three times as many until so many in a row agree."""
    updates: int = 50
    """Of a round. Ten are a tenth of a second at small size: a moment slows all rounds of a trial alike."""

    def __post_init__(self) -> None:
        counts(self, "rows", "rounds", "updates")
        self.trials()  # an unknown name ends the program here

    def trials(self) -> list[Trial]:
        """Those to time. Raises ``Refusal`` for a name that is none of the study's."""
        told: Any = SimpleNamespace(study="three-ml", size=self.size, rows=self.rows, seeds=None, seconds=None,
                                    tokens=None, rate=None)  # fmt: skip
        return named(trials_of(told)[0], self.only)


def run_of(trial: Trial) -> Run:
    """As ``latemask pretrain`` reads its flags."""
    _, run = pretrain.read([trial.recipe, "--data", "DATA", "--out", "OUT", *trial.flags])
    assert run is not None
    return run


def agreeing(make: Callable[[], float], rounds: int) -> list[float]:
    """So many rounds in a row that differ by no more than ``AGREES``, for what else a machine does makes some slow; the
    last ones where three times as many do not bring them."""
    made = [make() for _ in range(rounds)]
    while (spread(made[-rounds:], statistics.median(made[-rounds:])) or 0.0) > AGREES and len(made) < 3 * rounds:
        made.append(make())
    return made[-rounds:]


def timed(trial: Trial, options: Options, device: torch.device) -> dict[str, Any]:
    """What the JSON says of a trial."""
    torch._dynamo.reset()  # else shapes of all that went before would count as recompilations
    run = replace(run_of(trial), {"training.micro_rows": options.rows, "training.validate_every": 0})
    with ExitStack() as stack:
        updates = Updates(run, None, device, stack)
        rounds = agreeing(lambda: updates.make(options.updates), options.rounds)
        graphs = "on" if updates.parts.uses_graphs else "off"
    tokens = options.rows * run.shape.row_tokens
    return {"trial": trial.name, **judged(trial.recipe, options.rows, graphs, tokens, rounds),
            "executed_flops_per_token": flops_per_token(run).executed}  # fmt: skip


def measure(options: Options) -> dict[str, Any]:
    """All trials, written down after each."""
    device = pick_device()
    found: dict[str, Any] = {"kind": "benchmark", "what": "updates at 3ML's joins and rates, each alone on the card",
                             "trials": [], "settings": asked(options), **machine_of(device)}  # fmt: skip
    for trial in options.trials():
        found["trials"].append(timed(trial, options, device))
        write_json(options.out, found)
        console.say(f"{trial.name}: {found['trials'][-1]['milliseconds']:.1f} ms")
    return found


def main() -> None:
    found = measure(read(Options))
    first = found["trials"][0]
    columns = ("trial", "ms", "spread", "of the first", "FLOPs of the first", "graphs")
    console.table(f"Updates: {found['card']}", columns,
                  [(one["trial"], one["milliseconds"], percent(one["spread"]),
                    percent(one["milliseconds"] / first["milliseconds"]),
                    percent(one["executed_flops_per_token"] / first["executed_flops_per_token"]), one["graphs"])
                   for one in found["trials"]])  # fmt: skip


if __name__ == "__main__":
    program(main)

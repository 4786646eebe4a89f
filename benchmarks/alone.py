"""A report of runs that shared their card, by the clock that each would have had alone on it.

    python benchmarks/alone.py results/evidence/masks/mlm results/evidence/three-ml/{k=0,k=6,k=9}*,rate=0.5 \
        --costs results/joins_small.json --out three-ml.html

The costs are those of joins.py, milliseconds of an update of each trial alone: a run's seconds are its updates times
those of the trial of its own shape, masking and decoder. All else is ``latemask report``'s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from joins import Options as JoinsOptions
from joins import run_of
from refusals import program

from latemask import console
from latemask.errors import Refusal
from latemask.fields import dotted
from latemask.report.folders import RunFolder, read_folders
from latemask.report.page import write_report

PARTS = ("shape.", "masking.", "decoder.", "training.batch_rows", "training.micro_rows", "training.precision",
         "training.compile", "training.recompute", "training.graphs")  # fmt: skip
"""Of a run's fields: what an update costs depends on them."""


@dataclass(frozen=True)
class Options:
    """Report runs by the clock of an update alone on the card."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Their folders."""
    costs: tuple[Path, ...]
    """JSON of joins.py on one kind of card; of a trial that several hold the first counts."""
    out: Path = Path("alone.html")
    """The page; Markdown and figures stand beside it."""


def milliseconds_of(costs: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Of each trial: the fields that tell what its update costs, and the milliseconds of one."""
    settings = costs["settings"]
    measured = {one["trial"]: one["milliseconds"] for one in costs["trials"]}
    trials = JoinsOptions(size=settings["size"], rows=settings["rows"], only=tuple(measured)).trials()
    return [(_telling(dotted(json.loads(run_of(trial).to_json()))), measured[trial.name]) for trial in trials]


def _telling(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name.startswith(PARTS)}


def alone(folder: RunFolder, costs: list[tuple[dict[str, Any], float]]) -> RunFolder:
    """``folder`` with seconds and speeds in its journal and results as they would be alone. Raises ``Refusal`` where no
    trial is like it."""
    telling = _telling(folder.fields)
    milliseconds = next((taken for fields, taken in costs if fields == telling), None)
    if milliseconds is None:
        raise Refusal(str(folder.path), "a run like none of the trials of --costs", "one of them")
    row_tokens = folder.fields["training.batch_rows"] * folder.fields["shape.row_tokens"]
    speed = 1e3 * row_tokens / milliseconds

    def by_the_clock(told: dict[str, Any], name: str) -> dict[str, Any]:
        if told.get(name) is None or told.get("step") is None:
            return dict(told)
        return told | {name: told["step"] * milliseconds / 1e3}

    def result(told: dict[str, Any]) -> dict[str, Any]:
        model = told.get("model")
        return told | {"model": by_the_clock(model, "pretraining_seconds")} if isinstance(model, dict) else told

    def line(told: dict[str, Any]) -> dict[str, Any]:
        new = by_the_clock(told, "seconds")
        if (shared := told.get("tokens_per_second")) is not None:
            new["tokens_per_second"] = speed
            if told.get("mfu") is not None:
                new["mfu"] = told["mfu"] * speed / shared
        return new

    return dataclasses.replace(folder, lines=list(map(line, folder.lines)), results=list(map(result, folder.results)))


def read_costs(paths: Sequence[Path]) -> tuple[list[tuple[dict[str, Any], float]], str]:
    """``milliseconds_of`` each file, and the card. Raises ``Refusal`` for what is no such file, and for two cards."""
    found, cards = [], {}
    for path in paths:
        try:
            costs = json.loads(path.read_text())
            found += milliseconds_of(costs)
            cards[costs["card"]] = path
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refusal("--costs", f"{path} ({error})", "JSON of benchmarks/joins.py") from None
    if len(cards) != 1:
        told = ", ".join(f"{path} of a {card}" for card, path in cards.items())
        raise Refusal("--costs", told or "nothing", "one or more, all of one kind of card")
    return found, next(iter(cards))


def main() -> None:
    options = tyro.cli(Options)
    found, card = read_costs(options.costs)
    title = f"By the clock of an update alone on a {card}"
    folders = [alone(folder, found) for folder in read_folders(options.runs)]
    for path in write_report(folders, options.out, title):
        console.say(f"wrote {path}")


if __name__ == "__main__":
    program(main)

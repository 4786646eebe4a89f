"""What a run that goes on may change, its training settings, and what it may not: all that makes it another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latemask.config import Run
from latemask.errors import Refusal
from latemask.fields import dotted

FIXED = ("recipe", "shape", "decoder", "masking")
FITTING = ("training.micro_rows", "training.recompute")
"""Training settings that make a run fit its card; micro-batches change the order of sums, and nothing else."""
ROOM = ("precision", "recompute", "data_parallel")
"""Training settings that change how many rows fit in one forward pass."""


def refuse_another_run(out: Path, saved: Run, wanted: Run) -> None:
    """Raise ``Refusal`` naming each field of ``wanted`` that would make the run in ``out`` another than ``saved``; of
    another recipe that alone."""
    before, now = ({name: json.loads(run.to_json())[name] for name in FIXED} for run in (saved, wanted))
    if differing := differences(before, now):
        found, held = told([one for one in differing if one[0] == "recipe"] or differing)
        raise Refusal(out, f"a run with {held}", found, "Give the settings it was started with, or another --out")
    for name, was, asked in zip(("training.batch_rows", "training.seed"), _order(saved), _order(wanted), strict=True):
        if was != asked:
            as_it_began = f"{was}, as the run began: else some rows would come twice and others never"
            raise Refusal(name, str(asked), as_it_began)
    if saved.masking.later_rates and saved.updates != wanted.updates:
        raise Refusal("training.steps", f"{wanted.updates:,} updates", f"{saved.updates:,}, as the run began",
                      "masking.later_rates follow the planned number of them")  # fmt: skip


def has_the_same_room(before: Run, now: Run) -> bool:
    """Whether as many rows fit in one forward pass as before, on the same device and as many processes."""
    return all(getattr(before.training, name) == getattr(now.training, name) for name in ROOM)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Dotted name and both values of each field in which two runs' JSON differ; None where there is no such field."""
    one, other = dotted(before), dotted(now)
    return [(name, was, asked) for name in dict.fromkeys([*one, *other])
            if (was := one.get(name)) != (asked := other.get(name))]  # fmt: skip


def told(differing: list[tuple[str, Any, Any]]) -> tuple[str, str]:
    """The values now and the values before, with their names."""
    now = ", ".join(f"{name} {json.dumps(value)}" for name, _, value in differing)
    return now, ", ".join(f"{name} {json.dumps(value)}" for name, value, _ in differing)


def _order(run: Run) -> tuple[int, int]:
    """What the order of rows depends on besides the data: rows in a batch, and the seed."""
    return run.training.batch_rows, run.training.order_seed

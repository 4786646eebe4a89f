"""What a run that goes on may change, its training settings, and what it may not: all that makes it another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latemask.config import Run
from latemask.errors import Refusal

FIXED = ("recipe", "shape", "decoder", "masking")


def refuse_another_run(out: Path, saved: Run, wanted: Run) -> None:
    """Raise ``Refusal`` naming each field of ``wanted`` that would make the run in ``out`` another than ``saved``."""
    before, now = ({name: json.loads(run.to_json())[name] for name in FIXED} for run in (saved, wanted))
    if differing := differences(before, now):
        found, held = told(differing)
        raise Refusal(out, f"a run with {held}", found, "Give the settings it was started with, or another --out")
    for name, was, asked in zip(("training.batch_rows", "training.seed"), _order(saved), _order(wanted), strict=True):
        if was != asked:
            as_it_began = f"{was}, as the run began: else some rows would come twice and others never"
            raise Refusal(name, str(asked), as_it_began)
    if saved.masking.later_rates and saved.updates != wanted.updates:
        raise Refusal("training.steps", f"{wanted.updates:,} updates", f"{saved.updates:,}, as the run began",
                      "masking.later_rates follow the planned number of them")  # fmt: skip


def differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted name and both values of each field in which two runs' JSON differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        inside = f"{name}." if name else ""
        fields = dict.fromkeys([*before, *now])
        return [one for field in fields for one in differences(before.get(field), now.get(field), f"{inside}{field}")]
    return [] if before == now else [(name, before, now)]


def told(differing: list[tuple[str, Any, Any]]) -> tuple[str, str]:
    """The values now and the values before, with their names."""
    now = ", ".join(f"{name} {json.dumps(value)}" for name, _, value in differing)
    return now, ", ".join(f"{name} {json.dumps(value)}" for name, value, _ in differing)


def _order(run: Run) -> tuple[int, int]:
    """What the order of rows depends on besides the data: rows in a batch, and the seed."""
    return run.training.batch_rows, run.training.order_seed

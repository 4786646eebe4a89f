"""What a run has spent after so many tokens: FLOPs of the plain objective, each token's at the masking rate of its
batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from latemask.config import Run, typed
from latemask.counts import flops_per_token
from latemask.errors import Refusal


def last_start(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The journal's line that says the settings and facts of the run since it began or was last resumed; empty without
    one."""
    begun = (line for line in reversed(lines) if line["kind"] in ("start", "resume"))
    return next((line for line in begun if isinstance(line.get("run"), dict)), {})


def plain_flops(start: Mapping[str, Any]) -> Callable[[float], float]:
    """FLOPs by the tokens that were trained on, from what ``last_start`` finds.

    One rate: the line's own count (0 where it says none). Several: that of each, from the settings in the line; where
    this version cannot read them, the line's mean over the whole run.
    """
    stages = [(0, float(start.get("plain_flops_per_token") or 0))]
    try:
        run = typed(Run, start.get("run"), "run.json")
    except Refusal:
        run = None
    if run is not None and run.masking.later_rates:
        a_batch = run.training.batch_rows * run.shape.row_tokens
        stages = [(stage.first_batch * a_batch, flops_per_token(stage.run).plain) for stage in run.stages]
    stops = [*(first for first, _ in stages[1:]), math.inf]

    def until(tokens: float) -> float:
        return sum(each * (min(tokens, stop) - first)
                   for (first, each), stop in zip(stages, stops, strict=True) if tokens > first)  # fmt: skip

    return until

"""What a run has spent after so many tokens: FLOPs of the plain objective, each token's at the masking rate of its
batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from latemask.config import Run, typed
from latemask.counts import flops_per_token
from latemask.errors import Refusal


def plain_flops(start: Mapping[str, Any]) -> Callable[[float], float]:
    """FLOPs by the tokens that were trained on, from the journal's line of kind start.

    One rate: the line's own count. Several: that of each, from the settings in the line; where this version cannot read
    them, the line's mean over the whole run.
    """
    told = (start[name] for name in ("plain_flops_per_token", "flops_per_token") if start.get(name) is not None)
    mean = float(next(told, 0.0))
    stages = [(0, mean)]
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

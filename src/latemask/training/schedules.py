"""The learning rate as a pure function of how much of the run is done: linear warm-up, then decay."""

from __future__ import annotations

import math

from latemask.config import Training


def learning_rate(training: Training, done_share: float) -> float:
    """``done_share`` (0..1) of the run is done: by updates, or by the clock where a run is stopped by seconds."""
    if done_share < training.warmup_share:
        return training.learning_rate * done_share / training.warmup_share
    left = (1 - done_share) / max(1 - training.warmup_share, 1e-12)
    match training.decay:
        case "linear":
            height = left
        case "cosine":
            height = 0.5 - 0.5 * math.cos(math.pi * left)
        case "constant":
            height = 1.0
    return training.learning_rate * min(max(height, 0.0), 1.0)


def share_of_updates(updates: int, steps: int) -> float:
    """The share in the middle of update ``updates`` (counted from 0) of ``steps``: no update has a rate of 0."""
    return min((updates + 0.5) / steps, 1.0)

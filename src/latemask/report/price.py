"""What quality is bought with, and how a page says so: seconds, or FLOPs where the runs' seconds say little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cost = Literal["seconds", "flops"]
AS_CHEAP = 1.001
"""Who costs no more than so many times as much is as cheap: runs that the clock ends differ by a step."""


@dataclass(frozen=True)
class Price:
    """One of them, in words."""

    quality: str
    """The head of the table that says what quality took."""
    spent: str
    """What such a table counts."""
    equal: str
    unit: str
    digits: str
    """How a number in this unit is written."""
    less: str
    least: str
    more: str
    """A run that took less than another, least of all, or more."""
    column: str
    """The head of a column of a run's whole cost."""
    across: str
    """An axis."""
    size: float = 1.0
    """Of the unit, in seconds or FLOPs."""

    def text(self, amount: float) -> str:
        return f"{amount:{self.digits}} {self.unit}"


PRICES: Mapping[Cost, Price] = {
    "seconds": Price("Time to quality", "Seconds", "at equal seconds", "s", ",.0f", "quicker", "quickest", "slower",
                     "card-seconds", "card-seconds of pretraining"),
    "flops": Price("FLOPs to quality", "PFLOP", "at equal FLOPs", "PFLOP", ",.4g", "cheaper", "cheapest", "dearer",
                   "PFLOP, plain", "PFLOP of pretraining (plain objective)", 1e15),
}  # fmt: skip

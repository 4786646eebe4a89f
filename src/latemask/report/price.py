"""What quality is bought with, and how a page says so: seconds, or FLOPs where the runs' seconds say little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cost = Literal["seconds", "flops"]
PETA = 1e15


@dataclass(frozen=True)
class Price:
    """One of them, in words."""

    word: str
    """What is equal in "at equal seconds"."""
    unit: str
    """Behind a number."""
    digits: str
    """How a number is written."""
    column: str
    """The head of a column of a run's whole cost."""
    across: str
    """An axis."""

    @property
    def equal(self) -> str:
        return f"at equal {self.word}"

    def text(self, amount: float) -> str:
        return f"{amount:{self.digits}} {self.unit}"


PRICES: Mapping[Cost, Price] = {
    "seconds": Price("seconds", "s", ",.0f", "card-seconds", "card-seconds of pretraining"),
    "flops": Price("FLOPs", "PFLOP", ",.4g", "PFLOP, plain", "PFLOP of pretraining (plain objective)"),
}

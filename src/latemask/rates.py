"""The masking rate in steps: from a share of the run on, another rate. Data, as joins are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from latemask.errors import Refusal
from latemask.fields import Spelled

MOST_RATES = 6
"""Of one run: each is a row length of its own, which every block is compiled for."""


@dataclass(frozen=True)
class RateStep(Spelled):
    """From the share ``start`` of the run's updates on, the share ``rate`` of each row is masked.

    Raises ``Refusal`` unless both lie between 0 and 1: a run begins with ``masking.rate``.
    """

    example: ClassVar[str] = "0.5:0.3"
    metavar: ClassVar[str] = "START:RATE"

    start: float
    rate: float

    def __post_init__(self) -> None:
        for name, share in (("start", self.start), ("rate", self.rate)):
            if not 0 < share < 1:
                raise Refusal("masking.later_rates", f"{name} {share}", "more than 0 and less than 1")

    def __str__(self) -> str:
        return f"{float(self.start)!r}:{float(self.rate)!r}"

    @classmethod
    def parse(cls, text: str) -> RateStep:
        """``"0.5:0.3"``: from half of the run on, 30 %."""
        try:
            start, rate = map(float, text.split(":"))
        except ValueError:
            raise Refusal("masking.later_rates", repr(text), "'start:rate', as in '0.5:0.3'") from None
        return cls(start, rate)

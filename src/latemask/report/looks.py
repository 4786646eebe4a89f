"""How lines are told apart: a run by colour and marker, its several lines by dash, what is beyond an eye not at all.

Okabe and Ito's colours, which colour-blind people can tell apart; dash and marker for grey print. A run looks the same
in every figure of a page. Beyond 16 runs lines are thin and grey.
"""

from __future__ import annotations

from typing import Any, NamedTuple

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C8C00")
PLAIN_DASHES = ("-", "--", "-.", ":")
DASHES: tuple[Any, ...] = (*PLAIN_DASHES, (0, (8, 2)), (0, (4, 1, 1, 1, 1, 1)), (0, (1, 4)), (0, (9, 2, 3, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_RUNS = 2 * len(COLOURS)
REST = {"color": "#B0B0B0", "linewidth": 0.7, "zorder": 1.9}


class Look(NamedTuple):
    """The number of a run on its page, and that of a line among those of the run."""

    run: int
    line: int = 0

    @property
    def is_told_apart(self) -> bool:
        return self.run < MOST_RUNS and self.line < len(DASHES)

    @property
    def style(self) -> dict[str, Any]:
        """What matplotlib's ``plot`` takes."""
        if not self.is_told_apart:
            return REST
        shifted = self.run + self.run // len(COLOURS)
        return {
            "color": COLOURS[self.run % len(COLOURS)],
            "linestyle": DASHES[(shifted % len(PLAIN_DASHES) + self.line) % len(DASHES)],
            "marker": MARKERS[shifted % len(MARKERS)],
        }

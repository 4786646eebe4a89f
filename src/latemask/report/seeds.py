"""Systems set side by side seed by seed: is a difference between them more than what another seed makes?

Runs of one seed saw the same rows in the same order, so their difference is taken pair by pair. Seed noise is the
spread of these differences: a difference is beyond it where the 95 % interval of their mean (Student's t, as many
degrees of freedom as pairs less one) leaves out 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

from latemask.report.folders import RunFolder
from latemask.report.measures import LOSSES, Measure, cautions, curves, measures
from latemask.report.plots import Point
from latemask.report.rank import last_ranks
from latemask.report.runs import losses_compare
from latemask.report.systems import System, reference, systems
from latemask.report.tables import Table, Value

COVERAGE = 0.95
WITHIN, BEYOND, UNKNOWN = "within seed noise", "beyond seed noise", "one seed: noise unknown"
SECONDS = "card-seconds of pretraining"
EQUAL_SECONDS = "at equal seconds"
SAME_TOKENS_SHARE = 0.01
"""Runs whose tokens differ by no more than this share have seen equally many."""


class Difference(NamedTuple):
    """Of pairs: their mean difference and its interval, infinite for one pair."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, pairs: Sequence[float]) -> Difference:
        mean = statistics.fmean(pairs)
        if len(pairs) < 2:
            return cls(mean, math.inf)
        quantile = float(stdtrit(len(pairs) - 1, (1 + COVERAGE) / 2))
        return cls(mean, quantile * statistics.stdev(pairs) / math.sqrt(len(pairs)))

    def word(self, is_loss: bool, is_neutral: bool = False) -> str:
        """Better, worse (of what is neutral: higher, lower), or nothing that these seeds can tell."""
        if math.isinf(self.half_width):
            return UNKNOWN
        if abs(self.mean) <= self.half_width:
            return WITHIN
        if is_neutral:
            return f"{'higher' if self.mean > 0 else 'lower'}, {BEYOND}"
        return f"{'better' if (self.mean < 0) == is_loss else 'worse'}, {BEYOND}"


def seeds_tables(folders: Sequence[RunFolder]) -> list[Table]:
    """For each system that shares two seeds or more with the reference: every measure of both, and their difference."""
    found = systems(folders)
    if len(found) < 2:
        return []
    base = reference(found)
    others = [system for system in found if system is not base and len(_shared(base, system)) > 1]
    return [_table(base, other) for other in others]


def _shared(one: System, other: System) -> list[str]:
    return [seed for seed in one.by_seed if seed in other.by_seed]


def _table(base: System, other: System) -> Table:
    seeds = _shared(base, other)
    pairs = {seed: _paired(base.by_seed[seed], other.by_seed[seed]) for seed in seeds}
    names = list(dict.fromkeys(name for found in pairs.values() for name in found))
    rows: list[tuple[Value, ...]] = []
    for name in sorted(names, key=lambda name: name == SECONDS):
        having = {seed: found[name] for seed, found in pairs.items() if name in found}
        first, second = ([pair[side] for pair in having.values()] for side in (0, 1))
        changes = [after.value - before.value for before, after in having.values()]
        is_loss, difference = first[0].is_loss, Difference.of(changes)
        digits = 3 if is_loss else 1
        spread = "" if math.isinf(difference.half_width) else f" ± {difference.half_width:.{digits}f}"
        verdict = difference.word(is_loss, first[0].is_neutral)
        each = " ".join(f"{change:+.{digits}f}" for change in changes)
        means = (_mean(side, digits) for side in (first, second))
        rows.append((name, *means, each, ", ".join(having), f"{difference.mean:+.{digits}f}{spread}", verdict))
    columns = ("measure", base.name, other.name, "difference by seed", "seeds", "mean difference ± 95 %", "verdict")
    return Table(f"{other.name} against {base.name}, seed by seed", columns, tuple(rows), _note(base, other, rows))


def _mean(side: Sequence[Measure], digits: int) -> str:
    marks = "".join(dict.fromkeys(measure.mark for measure in side if measure.mark))
    return f"{statistics.fmean(measure.value for measure in side):.{digits}f} {marks}".rstrip()


def _paired(before: RunFolder, after: RunFolder) -> dict[str, tuple[Measure, Measure]]:
    """By name what both runs have: at the end, and at the seconds of the quicker one where both have a curve. Losses
    of runs that have not ended, or were not validated alike, are not compared."""
    mine, its, curve, its_curve = measures(before), measures(after), curves(before), curves(after)
    skipped = set() if _losses_compare(before, after) else set(LOSSES)
    found: dict[str, tuple[Measure, Measure]] = {}
    for name in [name for name in mine if name in its and name not in skipped]:
        found[name] = (mine[name], its[name])
        if name in curve and name in its_curve:
            at = min(points[-1][0] for points in (curve[name], its_curve[name]))
            first, second = (value_at(points, at) for points in (curve[name], its_curve[name]))
            found[f"{name}, {EQUAL_SECONDS}"] = (
                mine[name]._replace(value=first),
                its[name]._replace(value=second),
            )
    first, second = (Measure(run.card_seconds, is_neutral=True) for run in (before, after))
    ranks, its_ranks = last_ranks(before), last_ranks(after)
    studied = {name: (Measure(ranks[name], is_neutral=True), Measure(its_ranks[name], is_neutral=True))
               for name in ranks if name in its_ranks}  # fmt: skip
    return found | studied | {SECONDS: (first, second)}


def _losses_compare(before: RunFolder, after: RunFolder) -> bool:
    return before.has_ended and after.has_ended and losses_compare([before, after])


def value_at(points: Sequence[Point], seconds: float) -> float:
    """The curve's value at ``seconds``, on the straight line between the points around it; its first or last value
    outside of them."""
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if x <= seconds < next_x:
            return y + (next_y - y) * (seconds - x) / (next_x - x)
    return points[-1][1] if seconds >= points[-1][0] else points[0][1]


def _note(base: System, other: System, rows: Sequence[tuple[Value, ...]]) -> str:
    runs = [system.by_seed[seed] for seed in _shared(base, other) for system in (base, other)]
    tokens = [run.reached["tokens"] for run in runs]
    if max(tokens) - min(tokens) <= SAME_TOKENS_SHARE * max(tokens):
        said = f"At equal tokens ({max(tokens) / 1e6:,.4g} million a run), and {EQUAL_SECONDS} where it says so."
    else:
        each = ", ".join(f"{run.name} {run.reached['tokens'] / 1e6:,.4g} million" for run in runs)
        said = f"Not at equal tokens: {each}."
    said += (
        f" Means over pretraining seeds; fine-tuned scores are medians over fine-tuning seeds before that. Verdict: "
        f"{WITHIN} where the 95 % interval of the mean paired difference holds 0 (Student's t); of twenty measures one "
        f"leaves it out by chance."
    )
    if any(EQUAL_SECONDS in str(row[0]) for row in rows):
        said += (
            f" {EQUAL_SECONDS.capitalize()}: both curves at the seconds that the quicker run took. The slower one's "
            "learning rate had not come down by then, which speaks against it."
        )
    if not all(_losses_compare(base.by_seed[seed], other.by_seed[seed]) for seed in _shared(base, other)):
        said += " Without the losses of pairs that have not ended, or were not validated alike."
    return said + cautions(runs, [str(row[0]) for row in rows], " ".join(f"{row[1]} {row[2]}" for row in rows))

"""Systems set side by side seed by seed: is a difference between them more than what another seed makes?

Runs of one seed saw the same rows in the same order, so their difference is taken pair by pair. Seed noise is the
spread of these differences: a difference is beyond it where the 95 % interval of their mean (Student's t, as many
degrees of freedom as pairs less one) leaves out 0. Where all differences are equal nothing is known of their spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from latemask.downstream.tasks import GLUE
from latemask.report.comparable import SUBSET, are_equal_tokens
from latemask.report.folders import RunFolder
from latemask.report.material import Material
from latemask.report.measures import LOSS, Measure, cautions, is_validation, marked, mean_of
from latemask.report.plots import Point
from latemask.report.price import AS_CHEAP, PRICES
from latemask.report.systems import System, reference
from latemask.report.tables import Table, Value

COVERAGE = 0.95
WITHIN, BEYOND, UNKNOWN = "within seed noise", "beyond seed noise", "one seed: noise unknown"
NO_SPREAD = "no verdict: equal differences"
WIDEST = 0.15
"""Of the cost, between two points of a curve that is read between them."""
SAME = 1e-9
"""Differences that are no further apart than this, beside their size, are equal."""
SECONDS = PRICES["seconds"].across

Pairs = dict[str, tuple[Measure, Measure]]
"""What two runs have in common, by name."""


class Difference(NamedTuple):
    """Of pairs: their mean difference and its interval, infinite where their spread is not known: of one pair, or of
    equal differences other than 0."""

    mean: float
    half_width: float
    pairs: int

    @classmethod
    def of(cls, pairs: Sequence[float]) -> Difference:
        mean = statistics.fmean(pairs)
        if len(pairs) < 2 or (abs(mean) > 0 and max(pairs) - min(pairs) <= SAME * abs(mean)):
            return cls(mean, math.inf, len(pairs))
        return cls(mean, quantile(len(pairs)) * statistics.stdev(pairs) / math.sqrt(len(pairs)), len(pairs))

    def word(self, is_loss: bool, is_neutral: bool = False) -> str:
        """Better, worse (of what is neutral: higher, lower), or nothing that these seeds can tell."""
        if math.isinf(self.half_width):
            return UNKNOWN if self.pairs < 2 else NO_SPREAD
        if abs(self.mean) <= self.half_width:
            return WITHIN
        if is_neutral:
            return f"{'higher' if self.mean > 0 else 'lower'}, {BEYOND}"
        return f"{'better' if (self.mean < 0) == is_loss else 'worse'}, {BEYOND}"


def quantile(values: int) -> float:
    """Student's t of ``COVERAGE``, where the deviation is known from so many values."""
    return float(stdtrit(values - 1, (1 + COVERAGE) / 2))


def seeds_tables(material: Material) -> list[Table]:
    """For each system that shares two seeds or more with the reference: every measure of both, and their difference."""
    if len(material.systems) < 2:
        return []
    base = reference(material.systems)
    others = [system for system in material.systems if system is not base and len(_shared(base, system)) > 1]
    return [_table(material, base, other) for other in others]


def _shared(one: System, other: System) -> list[str]:
    return [seed for seed in one.by_seed if seed in other.by_seed]


def _table(material: Material, base: System, other: System) -> Table:
    seeds = _shared(base, other)
    pairs = _with_mean({seed: _paired(material, base.by_seed[seed], other.by_seed[seed]) for seed in seeds})
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
    return Table(f"{other.name} against {base.name}, seed by seed", columns, tuple(rows),
                 _note(material, base, other, rows))  # fmt: skip


def _with_mean(pairs: Mapping[str, Pairs]) -> dict[str, Pairs]:
    """The pairs of each seed, with the mean of GLUE's tasks that all of them have, where some lack one."""
    names = dict.fromkeys(name for found in pairs.values() for name in found)
    tasks = [name for name in names if all(name in found and found[name][0].is_task for found in pairs.values())]
    if not 1 < len(tasks) < len(GLUE):
        return dict(pairs)
    mean = f"mean of {len(tasks)} tasks of GLUE" + f" {SUBSET}" * any(name.endswith(SUBSET) for name in tasks)
    return {seed: found | {mean: (_over([found[name][0] for name in tasks]), _over([found[name][1] for name in tasks]))}
            for seed, found in pairs.items()}  # fmt: skip


def _over(ones: Sequence[Measure]) -> Measure:
    return Measure(mean_of(ones), marked(ones))


def _mean(side: Sequence[Measure], digits: int) -> str:
    return f"{mean_of(side):.{digits}f} {marked(side)}".rstrip()


def _paired(material: Material, before: RunFolder, after: RunFolder) -> Pairs:
    """By name what both runs have: at the end, and at the cost of the cheaper one where both have a curve and one was.
    Validation losses of runs that have not ended are not compared."""
    mine, its = material.measures[before.name], material.measures[after.name]
    curve, its_curve = material.curves[before.name], material.curves[after.name]
    have_ended = before.has_ended and after.has_ended
    found: Pairs = {}
    for name in [name for name in mine if name in its and (have_ended or not is_validation(name))]:
        found[name] = (mine[name], its[name])
        if name in curve and name in its_curve:
            ends = [points[-1][0] for points in (curve[name], its_curve[name])]
            first, second = (value_at(points, min(ends)) for points in (curve[name], its_curve[name]))
            if max(ends) > min(ends) * AS_CHEAP and first is not None and second is not None:
                found[f"{name}, {material.price.equal}"] = (
                    mine[name]._replace(value=first),
                    its[name]._replace(value=second),
                )
    ranks, its_ranks = material.last_ranks[before.name], material.last_ranks[after.name]
    found |= {name: (ranks[name], its_ranks[name]) for name in ranks if name in its_ranks}
    if material.by == "seconds":  # FLOPs have no noise
        first, second = (Measure(run.card_seconds, is_neutral=True) for run in (before, after))
        found[SECONDS] = (first, second)
    return found


def value_at(points: Sequence[Point], at: float) -> float | None:
    """The curve's value ``at`` a cost, on the straight line between the points around it; None outside of them, and
    where they are further apart than ``WIDEST`` of the cost, for curves are bent."""
    xs, ys = zip(*points, strict=True)
    if not xs[0] <= at <= xs[-1]:
        return None
    before, after = max(x for x in xs if x <= at), min(x for x in xs if x >= at)
    return float(np.interp(at, xs, ys)) if after - before <= WIDEST * at else None


def _apart(material: Material, systems: Sequence[System]) -> list[str]:
    """Measures of one kind that both of two systems have, but under names that do not compare."""
    found: dict[str, None] = {}
    for seed in _shared(*systems):
        runs = [system.by_seed[seed].name for system in systems]
        for known in (material.measures, material.last_ranks):
            alone = [[name for name in known[run] if name not in known[other]] for run, other in (runs, runs[::-1])]
            shared = set.intersection(*({_kind(name) for name in names} for names in alone))
            found |= {f"{name} ({system.name})": None for system, names in zip(systems, alone, strict=True)
                      for name in names if _kind(name) in shared}  # fmt: skip
    return list(found)


def _kind(name: str) -> str:
    return LOSS if is_validation(name) else name.split(",")[0].removesuffix(f" {SUBSET}")


def _note(material: Material, base: System, other: System, rows: Sequence[tuple[Value, ...]]) -> str:
    runs = [system.by_seed[seed] for seed in _shared(base, other) for system in (base, other)]
    equal = material.price.equal
    if are_equal_tokens(runs):
        tokens = max(run.reached["tokens"] for run in runs)
        said = f"At equal tokens ({tokens / 1e6:,.4g} million a run), and {equal} where it says so."
    else:
        each = ", ".join(f"{run.name} {run.reached['tokens'] / 1e6:,.4g} million" for run in runs)
        said = f"Not at equal tokens: {each}."
    said += (
        f" Means over pretraining seeds; fine-tuned scores are medians over fine-tuning seeds before that. Verdict: "
        f"{WITHIN} where the 95 % interval of the mean paired difference holds 0 (Student's t); of twenty measures one "
        f"leaves it out by chance."
    )
    if any(equal in str(row[0]) for row in rows):
        said += (
            f" {equal[0].upper()}{equal[1:]}: both curves where the {material.price.less} run had ended. The "
            f"{material.price.more} one's learning rate had not come down by then, which speaks against it."
        )
    elif any(is_validation(name) for run in runs for name in material.curves[run.name]):
        said += f" Nothing {equal}: validations around them are too far apart, or lacking."
    if not all(run.has_ended for run in runs):
        said += " Without the validation losses of pairs that have not ended."
    if apart := _apart(material, (base, other)):
        said += f" Not measured alike, so that they do not compare: {'; '.join(apart)}."
    if any(row[-1] == NO_SPREAD for row in rows):
        said += " Equal differences of all pairs have no spread: too few seeds to tell what is noise."
    return said + cautions(
        runs, [str(row[0]) for row in rows], " ".join(f"{row[1]} {row[2]}" for row in rows), material.by
    )

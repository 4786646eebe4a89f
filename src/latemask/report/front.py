"""What quality costs: each system's scores beside its card-seconds, and the Pareto front of the two."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from latemask.report import plots
from latemask.report.folders import RunFolder
from latemask.report.looks import Look
from latemask.report.measures import LOSSES, Measure, cautions, measures
from latemask.report.runs import NOT_ALIKE, losses_compare
from latemask.report.systems import System, reference, systems
from latemask.report.tables import Drawing, Table, Value, anchor

FEWEST = 3
"""A front of fewer systems says no more than the table."""
ON_FRONT = "◆"


@dataclass(frozen=True)
class Priced:
    """A system, its ``runs`` that came to their end, and what each of these is worth."""

    system: System
    runs: list[RunFolder]
    scores: Mapping[str, list[Measure]]

    @property
    def card_seconds(self) -> float:
        """Of a run: the mean over seeds."""
        return statistics.fmean(run.card_seconds for run in self.runs)


def _priced(folders: Sequence[RunFolder]) -> list[Priced]:
    """Without systems no run of which has ended, and without the tasks whose average stands beside them."""
    found = []
    for system in systems(folders):
        runs, scores = [run for run in system.runs if run.has_ended], {}
        for run in runs:
            for name, measure in measures(run).items():
                if not measure.is_part:
                    scores.setdefault(name, []).append(measure)
        found += [Priced(system, runs, scores)] if runs else []
    return found


def _names(found: Sequence[Priced]) -> list[str]:
    return list(dict.fromkeys(name for priced in found for name in priced.scores))


def _front(name: str, found: Sequence[Priced]) -> tuple[dict[str, plots.Point], list[str]]:
    """(card-seconds, mean) of each system that has a measure, and those on the front; none there of fewer than
    ``FEWEST``."""
    having = [priced for priced in found if name in priced.scores]
    points = {priced.system.name: (priced.card_seconds, statistics.fmean(one.value for one in priced.scores[name]))
              for priced in having}  # fmt: skip
    return points, front(points, having[0].scores[name][0].is_loss) if len(points) >= FEWEST else []


def front(points: Mapping[str, plots.Point], is_loss: bool) -> list[str]:
    """The names of (cost, quality) ``points`` that no other at the same or a lower cost equals, cheapest first."""
    sign, best, found = -1 if is_loss else 1, float("-inf"), []
    for name in sorted(points, key=lambda name: (points[name][0], -sign * points[name][1])):
        if sign * points[name][1] > best:
            best = sign * points[name][1]
            found.append(name)
    return found


def cost_table(folders: Sequence[RunFolder]) -> Table | None:
    """One row a system: tokens, card-seconds, and every score; None for fewer than two."""
    found = _priced(folders)
    if len(found) < 2:
        return None
    base = reference([priced.system for priced in found])
    base_cost = next(priced.card_seconds for priced in found if priced.system is base)
    names = _names(found)
    fronts = {name: _front(name, found)[1] for name in names}
    rows: list[tuple[Value, ...]] = []
    for priced in found:
        own, cost = priced.system.name, priced.card_seconds
        cells = (_cell(priced.scores.get(name, []), own in fronts[name]) for name in names)
        tokens = statistics.fmean(run.reached["tokens"] for run in priced.runs)
        share = f"{cost / base_cost:.1%}" if base_cost else None
        rows.append((own, len(priced.runs), tokens / 1e6, cost, share, *cells))
    columns = ("system", "seeds", "million tokens", "card-seconds", f"of {base.name}'s", *names)
    return Table("Quality beside cost", columns, tuple(rows), _note(found, rows, names))


def _cell(ones: Sequence[Measure], is_on_front: bool) -> str | None:
    if not ones:
        return None
    values, digits = [one.value for one in ones], 3 if ones[0].is_loss else 1
    spread = f"± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    marks = "".join(dict.fromkeys(one.mark for one in ones if one.mark))
    text = (f"{statistics.fmean(values):.{digits}f}", spread, marks, ON_FRONT if is_on_front else "")
    return " ".join(part for part in text if part)


def _note(found: Sequence[Priced], rows: Sequence[tuple[Value, ...]], names: Sequence[str]) -> str:
    text = " ".join(str(cell) for row in rows for cell in row)
    every = [run for priced in found for run in priced.runs]
    said = "Means over pretraining seeds (± their deviation) of runs that came to their end."
    if ON_FRONT in text:
        said += f" {ON_FRONT} On the Pareto front: no system that is as cheap is as good."
    if any(len(priced.runs) == 1 for priced in found):
        said += " Of systems with one seed it is not known which differences are seed noise."
    if not losses_compare(every) and any(name in LOSSES for name in names):
        said += f" {NOT_ALIKE}"
    return said + cautions(every, names, text)


def front_drawings(folders: Sequence[RunFolder]) -> list[Drawing]:
    """A figure a measure: quality against card-seconds, of three systems or more."""
    found = _priced(folders)
    drawings = []
    for name in _names(found):
        points, on_front = _front(name, found)
        if not on_front:
            continue
        having = [priced for priced in found if name in priced.scores]
        looks = {priced.system.name: Look(priced.runs[0].number) for priced in having}
        drawn = plots.front(points, on_front, "card-seconds of pretraining", LOSSES.get(name, name), looks)
        note = "Joined: the Pareto front, the best for their price. Means over seeds; the table has every system."
        marks = " ".join(measure.mark for priced in having for measure in priced.scores[name])
        note += cautions([run for priced in having for run in priced.runs], [name], marks)
        title = f"{name[0].upper()}{name[1:]} against card-seconds"
        drawings.append(Drawing(f"front-{anchor(name)}", title, plots.svg(drawn), note))
    return drawings

"""What quality costs: each system's scores beside its card-seconds, and the front that no other beats at its price."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from latemask.report import plots
from latemask.report.folders import RunFolder
from latemask.report.looks import Look
from latemask.report.measures import LOSSES, Measure, cautions, losses_compare, measures
from latemask.report.systems import System, reference, systems
from latemask.report.tables import Drawing, Table, Value, anchor

FEWEST = 3
"""A front of fewer systems says no more than the table."""
ON_FRONT = "◆"


def front(points: Mapping[str, plots.Point], is_loss: bool) -> list[str]:
    """The names of (cost, quality) ``points`` that no other at the same or a lower cost equals, cheapest first."""
    sign, best, found = -1 if is_loss else 1, float("-inf"), []
    for name in sorted(points, key=lambda name: (points[name][0], -sign * points[name][1])):
        if sign * points[name][1] > best:
            best = sign * points[name][1]
            found.append(name)
    return found


def _ended(folders: Sequence[RunFolder]) -> list[tuple[System, list[RunFolder]]]:
    """Systems with their runs that have come to their end."""
    found = [(system, [run for run in system.runs if run.has_ended]) for system in systems(folders)]
    return [(system, runs) for system, runs in found if runs]


def _scores(runs: Sequence[RunFolder]) -> dict[str, list[Measure]]:
    """What each run is worth, without the tasks whose average stands beside them."""
    found: dict[str, list[Measure]] = {}
    for run in runs:
        for name, measure in measures(run).items():
            if not measure.is_part:
                found.setdefault(name, []).append(measure)
    return found


def _cost(runs: Sequence[RunFolder]) -> float:
    return statistics.fmean(run.card_seconds for run in runs)


def _points(found: Sequence[tuple[System, list[RunFolder]]]) -> dict[str, tuple[dict[str, plots.Point], bool]]:
    """By measure: (card-seconds, value) of each system, means over seeds, and whether less is better."""
    points: dict[str, tuple[dict[str, plots.Point], bool]] = {}
    for system, runs in found:
        for name, ones in _scores(runs).items():
            value = statistics.fmean(one.value for one in ones)
            points.setdefault(name, ({}, ones[0].is_loss))[0][system.name] = (_cost(runs), value)
    return points


def cost_table(folders: Sequence[RunFolder]) -> Table | None:
    """One row a system: tokens, card-seconds, and every score; None for fewer than two."""
    found = _ended(folders)
    if len(found) < 2:
        return None
    base = reference([system for system, _ in found])
    base_cost = next(_cost(runs) for system, runs in found if system is base)
    points = _points(found)
    fronts = {name: front(of, is_loss) for name, (of, is_loss) in points.items()}
    rows: list[tuple[Value, ...]] = []
    for system, runs in found:
        scores, cost = _scores(runs), _cost(runs)
        cells = [_cell(scores.get(name, []), system.name in fronts[name] and len(points[name][0]) >= FEWEST)
                 for name in points]  # fmt: skip
        tokens = statistics.fmean(run.reached["tokens"] for run in runs)
        rows.append(
            (system.name, len(runs), tokens / 1e6, cost, f"{cost / base_cost:.1%}" if base_cost else None, *cells)
        )
    columns = ("system", "seeds", "million tokens", "card-seconds", f"of {base.name}'s", *points)
    return Table("Quality beside cost", columns, tuple(rows), _note(found, rows, list(points)))


def _cell(ones: Sequence[Measure], is_on_front: bool) -> str | None:
    if not ones:
        return None
    values, digits = [one.value for one in ones], 3 if ones[0].is_loss else 1
    spread = f"± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    marks = "".join(dict.fromkeys(one.mark for one in ones if one.mark))
    text = (f"{statistics.fmean(values):.{digits}f}", spread, marks, ON_FRONT if is_on_front else "")
    return " ".join(part for part in text if part)


def _note(found: Sequence[tuple[System, list[RunFolder]]], rows: Sequence[tuple[Value, ...]],
          names: Sequence[str]) -> str:  # fmt: skip
    text = " ".join(str(cell) for row in rows for cell in row)
    every = [run for _, runs in found for run in runs]
    said = "Means over pretraining seeds (± their deviation) of runs that came to their end."
    if ON_FRONT in text:
        said += f" {ON_FRONT} On the front: no system that is as cheap is as good."
    if any(len(runs) == 1 for _, runs in found):
        said += " Of systems with one seed it is not known which differences are seed noise."
    if not losses_compare(every) and any(name in LOSSES for name in names):
        said += " Validated at different masking rates: these losses do not compare."
    return said + cautions(every, names, text)


def front_drawings(folders: Sequence[RunFolder]) -> list[Drawing]:
    """A figure a measure: quality against card-seconds, of three systems or more."""
    drawings = []
    ended = _ended(folders)
    looks = {system.name: Look(runs[0].number) for system, runs in ended}
    for name, (points, is_loss) in _points(ended).items():
        if len(points) < FEWEST:
            continue
        across, up = "card-seconds of pretraining", LOSSES.get(name, name)
        drawn = plots.front(points, front(points, is_loss), across, up, {each: looks[each] for each in points})
        title = f"{name[0].upper()}{name[1:]} against card-seconds"
        marks = " ".join(measures(run)[name].mark for _, runs in ended for run in runs if name in measures(run))
        note = "Joined: the front, the best for its price. Means over seeds; the table has every system."
        note += cautions([run for _, runs in ended for run in runs], [name], marks)
        drawings.append(Drawing(f"front-{anchor(name)}", title, plots.svg(drawn), note))
    return drawings

"""What quality costs: each system's scores beside its card-seconds or FLOPs, and the Pareto front of the two."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from latemask.report import plots
from latemask.report.folders import RunFolder
from latemask.report.looks import MOST_RUNS, Look
from latemask.report.material import Material, Worth
from latemask.report.measures import axis, cautions, mean_of, of_part, shown_mean
from latemask.report.objectives import by_objective, number_that_varies, other_settings
from latemask.report.price import AS_CHEAP, Cost
from latemask.report.runs import setting
from latemask.report.systems import reference
from latemask.report.tables import Drawing, Table, Value, anchor, shown

FEWEST = 3
"""A front of fewer systems says no more than the table."""
ON_FRONT = "◆"
ALIKE = 0.1
"""Seeds of one system take the same seconds, but for this share."""


def _ended(material: Material) -> list[Worth]:
    return [worth for worth in material.worth if worth.has_ended]


def _cost(worth: Worth, by: Cost) -> float | None:
    """Of a run: the mean over seeds; None where a journal does not say it."""
    costs = [run.cost(by) for run in worth.runs]
    return None if None in costs else statistics.fmean(cost for cost in costs if cost is not None)


def _shown(cost: float | None, worth: Worth, by: Cost) -> Value:
    """The ``cost`` of a system, with the deviation of seconds over seeds: FLOPs have none."""
    if by != "seconds" or len(worth.runs) < 2:
        return cost
    return f"{shown(cost)} ± {shown(statistics.stdev(run.card_seconds for run in worth.runs))}"


def _other_seconds(found: Sequence[Worth]) -> str:
    """Which systems' seeds took seconds that differ by more than ``ALIKE``."""
    spread = {worth.system.name: max(each) / min(each) - 1 for worth in found
              if min(each := [run.card_seconds for run in worth.runs]) > 0}  # fmt: skip
    told = ", ".join(f"{name} by {more:.0%}" for name, more in spread.items() if more > ALIKE)
    return (f" Seconds of seeds differ: {told} (another load on the machine, or another machine); `--cost flops` does "
            "not depend on it.") if told else ""  # fmt: skip


def _runs(found: Sequence[Worth]) -> list[RunFolder]:
    return [run for worth in found for run in worth.runs]


def _names(found: Sequence[Worth]) -> list[str]:
    return list(dict.fromkeys(name for worth in found for name in worth.scores))


def _front(name: str, found: Sequence[Worth], by: Cost) -> tuple[dict[str, plots.Point], list[str]]:
    """(cost, mean) of each system that has a measure and learned more than word frequencies, and those on the front;
    none there of fewer than ``FEWEST``."""
    having = [worth for worth in found if name in worth.scores and worth.has_learned]
    points = {worth.system.name: (cost, mean_of(worth.scores[name]))
              for worth in having if (cost := _cost(worth, by)) is not None}  # fmt: skip
    return points, front(points, having[0].scores[name][0].is_loss) if len(points) >= FEWEST else []


def front(points: Mapping[str, plots.Point], is_loss: bool) -> list[str]:
    """The names of (cost, quality) ``points`` that none as cheap is as good as, cheapest first; of equals the first."""
    sign = -1 if is_loss else 1
    order = {name: (sign * quality, -cost, -number) for number, (name, (cost, quality)) in enumerate(points.items())}

    def is_beaten(name: str) -> bool:
        enough = points[name][0] * AS_CHEAP
        return any(points[one][0] <= enough and order[one] > order[name] for one in points)

    return sorted((name for name in points if not is_beaten(name)), key=lambda name: points[name][0])


def cost_table(material: Material) -> Table | None:
    """One row a system that has ended: tokens, cost, and every score; None for fewer than two."""
    found = _ended(material)
    if len(found) < 2:
        return None
    base = reference([worth.system for worth in found])
    base_cost = next(_cost(worth, material.by) for worth in found if worth.system is base)
    names = _names(found)
    fronts = {name: _front(name, found, material.by)[1] for name in names}
    rows: list[tuple[Value, ...]] = []
    for worth in found:
        own, cost = worth.system.name, _cost(worth, material.by)
        cells = (
            shown_mean(worth.scores.get(name, []), len(worth.runs), ON_FRONT * (own in fronts[name])) for name in names
        )
        tokens = statistics.fmean(run.reached["tokens"] for run in worth.runs)
        share = f"{cost / base_cost:.1%}" if base_cost and cost is not None else None
        rows.append((own, len(worth.runs), tokens / 1e6, _shown(cost, worth, material.by), share, *cells))
    columns = ("system", "seeds", "million tokens", material.price.column, f"of {base.name}'s", *names)
    return Table("Quality beside cost", columns, tuple(rows), _note(material, found, rows, names))


def _note(material: Material, found: Sequence[Worth], rows: Sequence[tuple[Value, ...]], names: Sequence[str]) -> str:
    text = " ".join(str(cell) for row in rows for cell in row)
    said = "Means over pretraining seeds (± their deviation) of runs that came to their end."
    if ON_FRONT in text:
        said += f" {ON_FRONT} On the Pareto front: no system that is as cheap is as good."
    said += _no_place(found, "No place on a front")
    if any(len(worth.runs) == 1 for worth in found):
        said += " Of systems with one seed it is not known which differences are seed noise."
    if material.by == "seconds":
        said += _other_seconds(found)
    return said + of_part(text) + material.apart(names) + cautions(_runs(found), names, text, material.by)


def _no_place(found: Sequence[Worth], what: str) -> str:
    names = ", ".join(worth.system.name for worth in found if not worth.has_learned)
    return f" {what}: {names}, with a run that learned no more than word frequencies." if names else ""


def _families(
    objectives: Sequence[tuple[str, Sequence[Worth]]], field: str, points: Collection[str]
) -> list[plots.Family]:
    """Each objective with those of its systems that have ``points``, in the order of a number that they vary; none of
    an objective without."""
    found = []
    for number, (title, group) in enumerate(objectives):
        having = [worth for worth in group if worth.system.name in points]
        ordered = sorted(having, key=lambda worth: worth.runs[0].fields[field])
        labels = {worth.system.name: setting(worth.runs[0], field) or "" for worth in ordered}
        if labels:
            found.append(plots.Family(title, Look(number), labels))
    return found


def front_drawings(material: Material) -> list[Drawing]:
    """A figure a measure: quality against cost, of three systems or more."""
    found = _ended(material)
    objectives = by_objective(found)
    field = number_that_varies([group for _, group in objectives]) if len(objectives) <= MOST_RUNS else None
    drawings = []
    for name in _names(found):
        points, on_front = _front(name, found, material.by)
        if not on_front:
            continue
        scored = [worth for worth in found if name in worth.scores]
        having = [worth for worth in scored if worth.system.name in points]
        note = "Joined: the Pareto front, the best for their price. Means over seeds; the table has every system."
        families = _families(objectives, field, points) if field else []
        if field and len(families) < len(having):
            drawn = plots.families(points, on_front, material.price.across, axis(name), families)
            note += (f" Beside each point its {field}; thin lines join the trials of one objective in its order; "
                     "edged in black: the front.")  # fmt: skip
            if others := other_settings(having, field):
                note += f" Not the same in all of them: {', '.join(others)}."
        else:
            looks = {worth.system.name: Look(worth.runs[0].number) for worth in having}
            drawn = plots.front(points, on_front, material.price.across, axis(name), looks)
        if len(found) < len(material.worth):
            note += " Without the runs that have not ended."
        note += _no_place(scored, "Not drawn")
        marks = " ".join(measure.mark for worth in having for measure in worth.scores[name])
        note += material.apart([name]) + cautions(_runs(scored), [name], marks, material.by)
        title = f"{name[0].upper()}{name[1:]} against {material.price.column}"
        drawings.append(Drawing(f"front-{anchor(name)}", title, plots.svg(drawn), note))
    return drawings

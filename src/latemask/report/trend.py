"""How a measure changes with a field that runs vary: Figure 4 of MAE-LM (delta), or any other sweep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from latemask.report import plots
from latemask.report.comparable import marks, why_losses_do_not
from latemask.report.folders import RunFolder
from latemask.report.material import Material
from latemask.report.measures import Measure, axis, is_validation, plain
from latemask.report.runs import are_numbers, differing, setting
from latemask.report.systems import SEEDS, WATCHING
from latemask.report.tables import Drawing, Table, anchor

RECIPE, JOINS, DELTA = "recipe", "masking.joins", "masking.delta"


def sweeps(runs: Sequence[RunFolder]) -> list[tuple[tuple[str, ...], list[RunFolder]]]:
    """Runs that are one sweep, with the fields they vary: by ``sweep.json``, or runs that differ in one field alone
    (besides seeds and how they are watched); of several recipes it is a number, else they are systems of their own."""
    by_folder: dict[Any, list[RunFolder]] = {}
    for run in runs:
        if run.varied:
            by_folder.setdefault(run.path.parent, []).append(run)
    found = [(members[0].varied, members) for members in by_folder.values() if len(members) > 1]
    if not by_folder:
        differ, said = differing(runs), {*SEEDS, *WATCHING, RECIPE}
        if all(run.fields.get(DELTA) is not None for run in runs):
            said.add(JOINS)  # which delta comes to, and which may stand beside it: MAE-LM itself is delta 0
        fields = [name for name in differ if name not in said]
        if len(fields) == 1 and (RECIPE not in differ or are_numbers(runs, fields[0])):
            found.append(((fields[0],), list(runs)))
    return found


def _measured(material: Material, run: RunFolder) -> dict[str, Measure]:
    """A validation's loss in one column, however it was measured."""
    return {plain(name): found for name, found in material.compared[run.name].items()}


def _comparable(material: Material, run: RunFolder) -> dict[str, Measure]:
    """The measures under names that compare, without the loss of a run that has not ended: it would be one of fewer
    steps."""
    return {name: found for name, found in material.compared[run.name].items()
            if run.has_ended or not is_validation(name)}  # fmt: skip


def trend_drawings(
    material: Material, fields: Sequence[str], runs: Sequence[RunFolder], where: str = ""
) -> list[Drawing]:
    """A figure a measure against the first field; a line for each setting of the others. Seeds: their median.
    ``where``: what titles say beside other sweeps."""
    fields = [name for name in fields if name not in SEEDS]
    if not fields:
        return []
    first, others = fields[0], fields[1:]
    values: list[Any] = [run.fields.get(first) for run in runs]
    has_numbers = are_numbers(runs, first)
    texts = [str(setting(run, first)) for run in runs]
    categories = list(dict.fromkeys(texts))
    if len({repr(value) for value in values}) < 2:
        return []
    measured = [_comparable(material, run) for run in runs]
    drawings = []
    for name in dict.fromkeys(name for found in measured for name in found):
        points: dict[str, dict[float, list[float]]] = {}
        for run, value, text, found in zip(runs, values, texts, measured, strict=True):
            if name in found:
                series = ", ".join(f"{other} {setting(run, other)}" for other in others)
                x = float(value) if has_numbers else categories.index(text)
                points.setdefault(series, {}).setdefault(x, []).append(found[name].value)
        if len({x for at in points.values() for x in at}) < 2:
            continue
        medians = {series: [(x, statistics.median(ys)) for x, ys in at.items()] for series, at in points.items()}
        said = [material.apart([name]).strip()]
        if is_validation(name) and not all(run.has_ended for run in runs):
            said.append("Without the runs that have not ended.")
        said += marks(" ".join([name, *(found[name].mark for found in measured if name in found)]))
        if any(len(ys) > 1 for at in points.values() for ys in at.values()):
            said.append("Medians over runs of the same settings.")
        title = f"{name[0].upper()}{name[1:]} against {first}{where}"
        drawn = plots.svg(plots.trend(medians, first, axis(name), None if has_numbers else categories))
        drawings.append(Drawing(f"trend-{anchor(first)}-{anchor(name)}", title, drawn, " ".join(filter(None, said))))
    return drawings


def trend_table(material: Material, fields: Sequence[str], runs: Sequence[RunFolder], where: str = "") -> Table:
    """One row a run of a sweep: the fields that vary and every measure."""
    measured = [_measured(material, run) for run in runs]
    names = list(dict.fromkeys(name for found in measured for name in found))
    rows = tuple((*(setting(run, name) for name in fields), run.reached["step"],
                  *(found[name].text if name in found else None for name in names), run.ending)
                 for run, found in zip(runs, measured, strict=True))  # fmt: skip
    note = why_losses_do_not(runs)
    return Table(f"Sweep over {' and '.join(fields)}{where}", (*fields, "steps", *names, "end"), rows, note)

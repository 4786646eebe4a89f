"""How a measure changes with a field that runs vary: Figure 4 of MAE-LM (delta), or any other sweep."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from latemask.downstream.tasks import GLUE, SQUAD, glue_average
from latemask.report import plots
from latemask.report.downstream import DEGENERATE, SUBSET, entries
from latemask.report.folders import RunFolder
from latemask.report.runs import differing, setting
from latemask.report.tables import Drawing, Table, Value, anchor
from latemask.training.journal import PER_MASKED, PER_TOKEN

SEEDS = ("training.seed", "training.data_seed")
LOSS, LOSS_OF_ROWS = "validation loss", "validation loss per token of the row"
LOSSES = {LOSS: f"{LOSS}, {PER_MASKED}", LOSS_OF_ROWS: f"{LOSS}, {PER_TOKEN}"}
"""Two measures that do not compare, and what an axis says of each; the second is that of decoders that rewrite rows."""


def sweeps(runs: Sequence[RunFolder]) -> list[tuple[tuple[str, ...], list[RunFolder]]]:
    """Runs that are one sweep, with the fields they vary: by ``sweep.json``, or runs that differ in one field alone
    (besides seeds)."""
    by_folder: dict[Any, list[RunFolder]] = {}
    for run in runs:
        if run.varied:
            by_folder.setdefault(run.path.parent, []).append(run)
    found = [(members[0].varied, members) for members in by_folder.values() if len(members) > 1]
    if not by_folder:
        fields = [name for name in differing(runs) if name not in SEEDS]
        if len(fields) == 1:
            found.append(((fields[0],), list(runs)))
    return found


class Measure(NamedTuple):
    value: float
    mark: str = ""
    """‡ where seeds failed."""


def measures(run: RunFolder) -> dict[str, Measure]:
    """What a run is worth, each by its name: loss, GLUE's average or its tasks, SQuAD, minimal pairs. Downstream: of
    its newest checkpoint that has the score."""
    found: dict[str, Measure] = {}
    if run.validation:
        found[LOSS_OF_ROWS if run.rewrites else LOSS] = Measure(run.validation["loss"])
    newest: dict[str, Any] = {}
    for entry in sorted(entries([run]), key=lambda entry: entry.step or 0):
        newest[entry.task] = entry
    average = glue_average({task: entry.shown for task, entry in newest.items()})
    if average is not None:
        marks = {mark for task in GLUE for mark in newest[task].marks}
        found[_marked("GLUE average", marks)] = Measure(average, DEGENERATE if DEGENERATE in marks else "")
    for task, entry in newest.items():
        mark = DEGENERATE if DEGENERATE in entry.marks else ""
        if task == SQUAD.name and entry.summary is not None:
            exact = next(iter(entry.summary["scores"].values()))["exact"]
            found[_marked("SQuAD 2.0 EM", entry.marks)] = Measure(exact, mark)
        elif average is None or task not in GLUE:
            found[_marked(entry.title, entry.marks)] = Measure(entry.shown, mark)
    return found


def _marked(name: str, marks: Collection[str]) -> str:
    return f"{name} {SUBSET}" if SUBSET in marks else name


def _comparable(run: RunFolder) -> dict[str, Measure]:
    """The measures without the loss of a run that has not ended: it would be one of fewer steps."""
    return {name: value for name, value in measures(run).items() if run.has_ended or name not in LOSSES}


def trend_drawings(fields: Sequence[str], runs: Sequence[RunFolder]) -> list[Drawing]:
    """A figure a measure against the first field; a line for each setting of the others. Seeds: their median."""
    fields = [name for name in fields if name not in SEEDS]
    if not fields:
        return []
    first, others = fields[0], fields[1:]
    values: list[Any] = [run.fields.get(first) for run in runs]
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    texts = [str(setting(run, first)) for run in runs]
    categories = list(dict.fromkeys(texts))
    if len({repr(value) for value in values}) < 2:
        return []
    measured = [_comparable(run) for run in runs]
    rates = {run.validation["rate"] for run in runs if run.validation.get("rate")}
    drawings = []
    for name in dict.fromkeys(name for found in measured for name in found):
        points: dict[str, dict[float, list[float]]] = {}
        for run, value, text, found in zip(runs, values, texts, measured, strict=True):
            if name in found:
                series = ", ".join(f"{other} {setting(run, other)}" for other in others)
                x = float(value) if are_numbers else categories.index(text)
                points.setdefault(series, {}).setdefault(x, []).append(found[name].value)
        if len({x for at in points.values() for x in at}) < 2:
            continue
        medians = {series: [(x, statistics.median(ys)) for x, ys in at.items()] for series, at in points.items()}
        is_loss = name in LOSSES
        note = (
            "Validated at different masking rates: these losses do not compare." if is_loss and len(rates) > 1 else ""
        )
        if SUBSET in name:
            note = f"{SUBSET} On subsets of the data: not to be set beside published numbers."
        if is_loss and not all(run.has_ended for run in runs):
            note = f"{note} Without the runs that have not ended.".strip()
        if any(name in found and found[name].mark for found in measured):
            note = f"{note} {DEGENERATE} Some of these fine-tunings failed: see the tables.".strip()
        if any(len(ys) > 1 for at in points.values() for ys in at.values()):
            note = f"{note} Medians over runs of the same settings.".strip()
        title = f"{name[0].upper()}{name[1:]} against {first}"
        drawn = plots.svg(plots.trend(medians, first, LOSSES.get(name, name), None if are_numbers else categories))
        drawings.append(Drawing(f"trend-{anchor(first)}-{anchor(name)}", title, drawn, note))
    return drawings


def trend_table(fields: Sequence[str], runs: Sequence[RunFolder]) -> Table:
    """One row a run of a sweep: the fields that vary and every measure."""
    measured = [measures(run) for run in runs]
    names = list(dict.fromkeys(name for found in measured for name in found))
    rows = tuple((*(setting(run, name) for name in fields), run.reached["step"],
                  *(_measure(name, found) for name in names), run.ending)
                 for run, found in zip(runs, measured, strict=True))  # fmt: skip
    return Table(f"Sweep over {' and '.join(fields)}", (*fields, "steps", *names, "end"), rows)


def _measure(name: str, found: Mapping[str, Measure]) -> Value:
    if name not in found:
        return None
    value, mark = found[name]
    return f"{value:.4f}" if name in LOSSES else f"{value:.1f} {mark}".rstrip()

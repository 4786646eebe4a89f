"""Which settings are best: trials of one objective that differ in settings alone, side by side, the best first.

A trial is a system, over its seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latemask.report.comparable import Facts, are_equal_tokens, of_validation, told_apart
from latemask.report.comparable import differing as differing_facts
from latemask.report.folders import RunFolder
from latemask.report.material import Material, Worth
from latemask.report.measures import Measure, cautions, is_validation, mean_of, of_part, shown_mean
from latemask.report.objectives import by_objective, settings_that_differ
from latemask.report.plots import Point
from latemask.report.runs import median, setting
from latemask.report.seeds import value_at
from latemask.report.tables import Table, Value

BEST = "★"


@dataclass(frozen=True)
class Trial:
    """What a system is worth, the name of its validation loss, which is that of all with which it compares ("" without
    one), and each run's curve of it."""

    worth: Worth
    validation: str
    curves: list[Sequence[Point]]

    @classmethod
    def of(cls, worth: Worth, material: Material) -> Trial:
        name = next(filter(is_validation, worth.scores), "")
        known = (material.curves[run.name].get(name) for run in worth.runs)
        return cls(worth, name, [curve for curve in known if curve])

    @property
    def some(self) -> RunFolder:
        return self.worth.runs[0]

    @property
    def losses(self) -> list[Measure]:
        return self.worth.scores.get(self.validation, [])

    def losses_at(self, cost: float) -> list[Measure]:
        """Of the runs that have got as far, with validations around it."""
        values = (value_at(curve, cost) for curve in self.curves)
        return [Measure(value, is_loss=True) for value in values if value is not None]


def tuning_tables(material: Material, shown: Collection[str]) -> list[Table]:
    """A table for each objective of which there are several trials; not where all of its runs are ``shown`` as a
    sweep."""
    return [_table(material, f"Settings of {title}", [Trial.of(worth, material) for worth in group])
            for title, group in by_objective(material.worth)
            if len(group) > 1 and not set(_names(group)) <= set(shown)]  # fmt: skip


def _names(group: Iterable[Worth]) -> list[str]:
    return [run.name for worth in group for run in worth.system.runs]


def _table(material: Material, title: str, trials: Sequence[Trial]) -> Table:
    ended = [trial.validation for trial in trials if trial.worth.has_ended and trial.validation]
    usual = max(dict.fromkeys(ended), key=ended.count, default="")
    trials = sorted(trials, key=lambda trial: _place(trial, usual))
    facts = differing_facts(of_validation(trial.some) for trial in trials)
    alike = [trial for trial in trials if trial.worth.has_ended and trial.validation == usual]
    least = min((curve[-1][0] for trial in alike for curve in trial.curves), default=None)
    fields = settings_that_differ([trial.some for trial in trials])
    columns: dict[str, list[Value]] = {"trial": [trial.worth.system.name for trial in trials]}
    columns |= {name: [setting(trial.some, name) for trial in trials] for name in fields}
    if any(len(trial.worth.runs) > 1 for trial in trials):
        columns["seeds"] = [len(trial.worth.runs) for trial in trials]
    columns["million tokens"] = [_mean(run.reached["tokens"] / 1e6 for run in trial.worth.runs) for trial in trials]
    if material.by == "seconds":
        columns["seconds"] = [_mean(float(run.reached["seconds"]) for run in trial.worth.runs) for trial in trials]
    else:
        columns[material.price.column] = [_mean(run.cost(material.by) for run in trial.worth.runs) for trial in trials]
    losses = {"validation loss": [trial.losses for trial in trials]}
    if least is not None:
        losses[f"validation loss at {material.price.text(least)}"] = [trial.losses_at(least) for trial in trials]
    for name, each in losses.items():
        cells = _cells(trials, each, [trial in alike for trial in trials])
        columns[name] = [_told(cell, trial, usual, facts) for cell, trial in zip(cells, trials, strict=True)]
    names = [name for name in dict.fromkeys(name for trial in trials for name in trial.worth.scores)
             if not is_validation(name)]  # fmt: skip
    for name in names:
        each = [trial.worth.scores.get(name, []) for trial in trials]
        columns[name] = _cells(trials, each, [trial.worth.has_ended for trial in trials])
    if material.by == "seconds":
        columns["tokens/s"] = [_mean(median(run, "tokens_per_second") for run in trial.worth.runs) for trial in trials]
    every = [run for trial in trials for run in trial.worth.system.runs]
    if not all(run.has_ended for run in every):
        columns["end"] = [_joined(run.ending for run in trial.worth.system.runs) for trial in trials]
    if any(run.learned for run in every):
        columns["learned"] = [_joined(run.learned for run in trial.worth.system.runs) for trial in trials]
    rows = tuple(zip(*columns.values(), strict=True))
    has_odd = any(trial.validation not in ("", usual) for trial in trials)
    return Table(title, tuple(columns), rows, _note(material, trials, least, has_odd, names, rows))


def _place(trial: Trial, usual: str) -> tuple[Any, ...]:
    """Those that came to their end first, of these those whose losses compare with most others, the lowest first."""
    loss = mean_of(trial.losses) if trial.losses else math.inf
    return not trial.worth.has_ended, not trial.losses, trial.validation != usual, trial.validation, loss


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _joined(words: Iterable[str]) -> str:
    return ", ".join(filter(None, dict.fromkeys(words)))


def _cells(trials: Sequence[Trial], each: Sequence[Sequence[Measure]], may_be_best: Sequence[bool]) -> list[Value]:
    """What each trial is worth in one measure, the best marked where there are two or more to choose from,
    but none that learned no more than word frequencies."""
    sign = -1 if any(ones[0].is_loss for ones in each if ones) else 1
    found = [(sign * mean_of(ones), trial) for trial, ones, may_be in zip(trials, each, may_be_best, strict=True)
             if ones and may_be]  # fmt: skip
    best = max((worth for worth, trial in found if trial.worth.has_learned), default=None)
    chosen = [trial for worth, trial in found if worth == best and trial.worth.has_learned] if len(found) > 1 else []
    return [shown_mean(ones, len(trial.worth.runs), BEST * (trial in chosen))
            for trial, ones in zip(trials, each, strict=True)]  # fmt: skip


def _told(cell: Value, trial: Trial, usual: str, facts: Mapping[str, Any]) -> Value:
    """A loss that does not compare says how it was measured."""
    its: Facts = of_validation(trial.some)
    if cell is None or trial.validation == usual:
        return cell
    return f"{cell} ({told_apart('', its, facts).removeprefix(', ')})"


def _note(
    material: Material, trials: Sequence[Trial], least: float | None, has_odd: bool, names: Sequence[str],
    rows: Sequence[tuple[Value, ...]],
) -> str:  # fmt: skip
    runs = [run for trial in trials for run in trial.worth.runs]
    said = f"The lowest validation loss first; {BEST} the best of its column."
    if not all(trial.worth.has_learned for trial in trials):
        said += f" No {BEST} for trials with a run that learned no more than word frequencies."
    if not are_equal_tokens(runs):
        said += " Not at equal tokens."
    if has_odd:
        said += " A loss that says how it was measured does not compare with the others."
    if least is not None:
        said += (
            f" At {material.price.text(least)}: when the {material.price.least} had ended (empty without validations "
            "close to it); the learning rate of the others had not come down by then, which speaks against them."
        )
    if any(len(trial.worth.runs) == 1 for trial in trials):
        said += " Of trials with one seed it is not known which differences are seed noise."
    cells = " ".join(str(cell) for row in rows for cell in row)
    return said + of_part(cells) + material.apart(names) + cautions(runs, names, cells, material.by)

"""What a run is worth, each score by its name: at its newest checkpoint, and on the way against its cost."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from latemask.downstream.tasks import GLUE, SQUAD
from latemask.report import plots
from latemask.report.comparable import (
    DEGENERATE,
    ROWS_NOTE,
    SUBSET,
    Facts,
    data_of,
    differing,
    marks,
    of_masked_loss,
    of_validation,
    other_cards,
    told_apart,
    without_flops,
)
from latemask.report.downstream import AVERAGE, Entry, averages
from latemask.report.folders import RunFolder
from latemask.report.owners import is_own
from latemask.report.price import PRICES, Cost
from latemask.training.journal import PER_MASKED, PER_TOKEN

RANK = "rank_"
"""How names of effective ranks begin."""
LOSS, LOSS_OF_ROWS = "validation loss", "validation loss per token of the row"
"""Two measures that do not compare; the second is that of decoders that rewrite rows."""


class Measure(NamedTuple):
    value: float
    mark: str = ""
    """‡ where seeds failed."""
    is_loss: bool = False
    """Whether less is better."""
    is_task: bool = False
    """Whether it is one of GLUE's tasks."""
    is_part: bool = False
    """Whether it is one of the tasks whose average there is too."""
    is_neutral: bool = False
    """Whether more is neither better nor worse."""
    facts: Facts = {}  # noqa: RUF012
    """What it was measured on, beside what its name says."""

    @property
    def text(self) -> str:
        return f"{self.value:.4f}" if self.is_loss else f"{self.value:.1f} {self.mark}".rstrip()


Named = tuple[str, Measure]
Curves = dict[str, list[plots.Point]]
Kind = tuple[str, ...]
"""A measure's name and what it was measured on: what is of one kind compares."""


def kind_of(name: str, measure: Measure) -> Kind:
    return name, *measure.facts.values()


def shown_mean(ones: Sequence[Measure], runs: int, sign: str = "") -> str | None:
    """The mean of a measure over those of so many ``runs`` that have it, ± their deviation, with its marks and a
    ``sign``; None of none."""
    if not ones:
        return None
    values, digits = [one.value for one in ones], 3 if ones[0].is_loss else 1
    spread = f"± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    part = f"({len(ones)} of {runs})" if len(ones) < runs else ""
    return " ".join(filter(None, (f"{mean_of(ones):.{digits}f}", spread, marked(ones), part, sign)))


def marked(ones: Sequence[Measure]) -> str:
    """Their marks, each once."""
    return "".join(dict.fromkeys(one.mark for one in ones if one.mark))


def of_part(cells: str) -> str:
    """What a reader of means must know, where some in ``cells`` are over a part of the runs."""
    return " (2 of 3): the mean of two seeds, for the third has none." if re.search(r"\(\d+ of \d+\)", cells) else ""


def mean_of(ones: Sequence[Measure]) -> float:
    return statistics.fmean(one.value for one in ones)


def is_validation(name: str) -> bool:
    """Whether a measure of this name is the loss of a validation, which depends on where the run stands."""
    return name.startswith(LOSS)


def plain(name: str) -> str:
    """A validation's loss by its name alone; other names as they are."""
    return next((loss for loss in (LOSS_OF_ROWS, LOSS) if name.startswith(loss)), name)


def axis(name: str) -> str:
    """What an axis says of a measure."""
    unit = PER_TOKEN if name.startswith(LOSS_OF_ROWS) else PER_MASKED
    return f"{name}, {unit}" if is_validation(name) else name


def measures(run: RunFolder, entries: Sequence[Entry]) -> list[Named]:
    """Loss, GLUE's average and tasks, SQuAD, minimal pairs, masked losses: what is the run's own of its ``entries`` and
    evaluations. Downstream: of the newest checkpoint that has the score."""
    found: list[Named] = []
    if run.validation:
        found.append(_loss(run))
    losses = {}
    for one in sorted(run.of("evaluation"), key=lambda one: one["model"].get("step") or 0):
        if one["suite"] == "masked-loss" and is_own(run, one):
            name = f"masked loss, {data_of(one)}, {100 * one['rate']:.4g}%"
            measure = Measure(one["loss"], is_loss=True, facts=of_masked_loss(one))
            losses[kind_of(name, measure)] = (name, measure)
    found += losses.values()
    newest = {entry.task: entry for entry in sorted(_scored(entries), key=lambda entry: entry.step or 0)}
    for task in sorted(newest, key=[AVERAGE, *GLUE, SQUAD.name, *newest].index):
        found += _named(newest[task], AVERAGE in newest)
    return found


def curves(run: RunFolder, entries: Sequence[Entry], by: Cost) -> dict[Kind, list[plots.Point]]:
    """(seconds or PFLOP of pretraining, value) of what was measured at several times alike."""
    found: dict[Kind, list[plots.Point]] = {}
    size = PRICES[by].size
    if run.cost(by) is None:
        return found
    if run.validation and plots.kind_of_loss(run.lines) == "validation":
        found[kind_of(*_loss(run))] = [(x / size, y) for x, y in plots.loss_points(run.lines, by)]
    for entry in sorted(_scored(entries), key=lambda entry: entry.step or 0):
        spent = entry.seconds if by == "seconds" else entry.flops
        if spent is not None:
            for name, measure in _named(entry, False):
                found.setdefault(kind_of(name, measure), []).append((spent / size, measure.value))
    return {kind: points for kind, points in found.items() if len({spent for spent, _ in points}) > 1}


def named_apart(found: Mapping[str, Sequence[Named]]) -> dict[str, list[Named]]:
    """The measures of each run by names under which all compare: where one name stands for measures of different facts,
    each says its own."""
    facts: dict[str, list[Facts]] = {}
    for name, measure in itertools.chain(*found.values()):
        facts.setdefault(name, []).append(measure.facts)
    differ = {name: differing(each) for name, each in facts.items()}
    return {run: [(told_apart(name, measure.facts, differ[name]), measure) for name, measure in measured]
            for run, measured in found.items()}  # fmt: skip


def cautions(runs: Sequence[RunFolder], names: Sequence[str], cells: str, by: Cost = "seconds") -> str:
    """What a reader of measures of these ``names`` must know: of their cost, other cards, or which runs have none in
    FLOPs; and the marks that stand in ``cells``, and what a rank is."""
    said = other_cards(runs) if by == "seconds" else without_flops(runs)
    if LOSS_OF_ROWS in names and any(is_validation(name) and not name.startswith(LOSS_OF_ROWS) for name in names):
        said.append(ROWS_NOTE)
    for rank in dict.fromkeys(name.split()[0] for name in names if name.startswith(RANK)):
        share = rank.removeprefix(RANK)
        said.append(f"{rank}: how many directions hold {share} of the energy of the last layer's vectors.")
    said += marks(" ".join([*names, cells]))
    return "".join(f" {sentence}" for sentence in said)


def _loss(run: RunFolder) -> Named:
    measure = Measure(run.validation["loss"], is_loss=True, facts=of_validation(run))
    return LOSS_OF_ROWS if run.rewrites else LOSS, measure


def _scored(entries: Sequence[Entry]) -> list[Entry]:
    found = [entry for entry in entries if entry.is_own]
    return [*found, *averages(found)]


def _named(entry: Entry, has_average: bool) -> list[Named]:
    mark, facts = DEGENERATE if DEGENERATE in entry.marks else "", entry.facts
    if entry.task == SQUAD.name and entry.summary is not None:
        scores = next(iter(entry.summary["scores"].values()))
        return [(_marked(f"SQuAD 2.0 {name}", entry.marks), Measure(scores[key], mark, facts=facts))
                for name, key in (("EM", "exact"), ("F1", "f1"))]  # fmt: skip
    title = entry.title.replace("-(m/mm)", "-m")  # of MNLI's two sets the matched one is its score
    is_task = entry.task in GLUE
    measure = Measure(entry.shown, mark, is_task=is_task, is_part=is_task and has_average, facts=facts)
    return [(_marked(title, entry.marks), measure)]


def _marked(name: str, marks: Collection[str]) -> str:
    return f"{name} {SUBSET}" if SUBSET in marks else name

"""What a run is worth, each score by its name: at its newest checkpoint, and on the way against seconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from latemask.downstream.tasks import GLUE, SQUAD
from latemask.report import plots
from latemask.report.curves import ROWS_NOTE
from latemask.report.downstream import AVERAGE, DEGENERATE, SUBSET, Entry, averages, data_of, entries
from latemask.report.folders import RunFolder
from latemask.training.journal import PER_MASKED, PER_TOKEN

LOSS, LOSS_OF_ROWS = "validation loss", "validation loss per token of the row"
LOSSES = {LOSS: f"{LOSS}, {PER_MASKED}", LOSS_OF_ROWS: f"{LOSS}, {PER_TOKEN}"}
"""Two measures that do not compare, and what an axis says of each; the second is that of decoders that rewrite rows."""


class Measure(NamedTuple):
    value: float
    mark: str = ""
    """‡ where seeds failed."""
    is_loss: bool = False
    """Whether less is better."""
    is_part: bool = False
    """Whether it is one of the tasks whose average there is too."""
    is_neutral: bool = False
    """Whether more is neither better nor worse."""

    @property
    def text(self) -> str:
        return f"{self.value:.4f}" if self.is_loss else f"{self.value:.1f} {self.mark}".rstrip()


def measures(run: RunFolder) -> dict[str, Measure]:
    """Loss, GLUE's average and tasks, SQuAD, minimal pairs, masked losses. Downstream: of the newest checkpoint that
    has the score."""
    found: dict[str, Measure] = {}
    if run.validation:
        found[_loss(run)] = Measure(run.validation["loss"], is_loss=True)
    for one in sorted(run.of("evaluation"), key=lambda one: one["model"].get("step") or 0):
        if one["suite"] == "masked-loss" and _is_its_own(run, one["model"]):
            found[f"masked loss, {data_of(one)}, {100 * one['rate']:.4g}%"] = Measure(one["loss"], is_loss=True)
    newest: dict[str, Entry] = {}
    for entry in sorted(_scored(run), key=lambda entry: entry.step or 0):
        newest[entry.task] = entry
    for task in sorted(newest, key=[AVERAGE, *GLUE, SQUAD.name, *newest].index):
        found |= _named(newest[task], AVERAGE in newest)
    return found


def curves(run: RunFolder) -> dict[str, list[plots.Point]]:
    """(seconds of pretraining, value) of what was measured at several times."""
    found: dict[str, list[plots.Point]] = {}
    if run.validation and plots.kind_of_loss(run.lines) == "validation":
        found[_loss(run)] = plots.loss_points(run.lines, "seconds")
    for entry in sorted(_scored(run), key=lambda entry: entry.step or 0):
        if entry.seconds is not None:
            for name, measure in _named(entry, False).items():
                found.setdefault(name, []).append((entry.seconds, measure.value))
    return {name: points for name, points in found.items() if len({seconds for seconds, _ in points}) > 1}


def cautions(runs: Sequence[RunFolder], names: Sequence[str], cells: str) -> str:
    """What a reader of measures of these ``names`` must know: other cards, and the marks that stand in ``cells``."""
    said = []
    if len(cards := sorted({str(run.cards) for run in runs})) > 1:
        said.append(f"On different cards, so seconds do not compare: {', '.join(cards)}.")
    if LOSS in names and LOSS_OF_ROWS in names:
        said.append(ROWS_NOTE)
    if any(SUBSET in name for name in names):
        said.append(f"{SUBSET} On subsets of the data: not to be set beside published numbers.")
    if DEGENERATE in cells:
        said.append(f"{DEGENERATE} Some of these fine-tunings failed: see the tables.")
    return "".join(f" {sentence}" for sentence in said)


def _loss(run: RunFolder) -> str:
    return LOSS_OF_ROWS if run.rewrites else LOSS


def _scored(run: RunFolder) -> list[Entry]:
    found = [entry for entry in entries([run]) if _is_its_own(run, entry.model)]
    return [*found, *averages(found)]


def _is_its_own(run: RunFolder, model: Mapping[str, Any]) -> bool:
    """Whether a model is the run's: one of no run that lies elsewhere is a guest in its folder of results."""
    return bool(model.get("run")) or run.path.name in Path(str(model.get("folder", ""))).parts


def _named(entry: Entry, has_average: bool) -> dict[str, Measure]:
    mark = DEGENERATE if DEGENERATE in entry.marks else ""
    if entry.task == SQUAD.name and entry.summary is not None:
        scores = next(iter(entry.summary["scores"].values()))
        return {_marked(f"SQuAD 2.0 {name}", entry.marks): Measure(scores[key], mark)
                for name, key in (("EM", "exact"), ("F1", "f1"))}  # fmt: skip
    title = entry.title.replace("-(m/mm)", "-m")  # of MNLI's two sets the matched one is its score
    return {_marked(title, entry.marks): Measure(entry.shown, mark, is_part=has_average and entry.task in GLUE)}


def _marked(name: str, marks: Collection[str]) -> str:
    return f"{name} {SUBSET}" if SUBSET in marks else name

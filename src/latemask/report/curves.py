"""Loss against what it cost, and Figure 3 of MAE-LM: what the checkpoints on the way are worth after fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from latemask.report import plots
from latemask.report.comparable import ROWS_NOTE, SUBSET, differing, marks, told_apart, why_losses_do_not, without_flops
from latemask.report.downstream import Entry, averages, without_seconds
from latemask.report.folders import RunFolder
from latemask.report.tables import Drawing, anchor
from latemask.training.plateau import NAME

CLOSEST_NATS = 0.25
"""Levels nearer to each other than this are one line of a figure."""
OF_WHAT = {"step": "steps", "seconds": "seconds", "flops": "FLOPs"}


def loss_drawings(runs: Sequence[RunFolder]) -> list[Drawing]:
    """Loss against steps, seconds and, of runs that they are known of, FLOPs; what does not compare in any of the three
    is said under the first."""
    note = why_losses_do_not(runs)
    if len({run.rewrites for run in runs}) > 1:
        note = f"{note} {ROWS_NOTE}".strip()
    rewriting = [run.name for run in runs if run.rewrites]
    levels = levels_of(runs)
    drawings = []
    for against in get_args(plots.Against):
        shown = [run for run in runs if against != "flops" or run.cost("flops") is not None]
        if not shown:
            continue
        looks = {run.name: run.look for run in shown}
        figure = plots.losses({run.name: run.lines for run in shown}, against, looks, rewriting)
        for level, name in levels.items():
            plots.level(figure, level, name)
        title = f"Loss against {OF_WHAT[against]}"
        said = without_flops(runs) if against == "flops" else [] if drawings else [note]
        drawings.append(Drawing(against, title, plots.svg(figure), " ".join(said)))
    return drawings


def levels_of(runs: Sequence[RunFolder]) -> dict[float, str]:
    """The losses of word frequencies alone that a figure can show apart, and their names: where losses of both kinds
    stand in it, those of whole rows say so."""
    kinds = {run.rewrites: [one.unigram_loss for one in runs if one.rewrites == run.rewrites] for run in runs}
    found: dict[float, str] = {}
    for rewrites in sorted(kinds):
        name = f"{NAME} (per token of the row)" if rewrites and len(kinds) > 1 else NAME
        levels = apart([level for level in kinds[rewrites] if level is not None])
        found |= {level: name for level in levels if all(abs(level - other) > CLOSEST_NATS for other in found)}
    return found


def apart(levels: Sequence[float]) -> list[float]:
    """From the lowest on, those that a figure can show apart."""
    found: list[float] = []
    for level in sorted(levels):
        if not found or level - found[-1] > CLOSEST_NATS:
            found.append(level)
    return found


def checkpoint_drawings(entries: Sequence[Entry]) -> list[Drawing]:
    """For GLUE's average and each task that several checkpoints of one run were tried on alike: scores against
    pretraining seconds and FLOPs, on other data in figures of their own.

    Runs of which one checkpoint was tried are points beside them.
    """
    tried = [entry for entry in [*averages(entries), *entries] if entry.step is not None and entry.is_own]
    alike: dict[tuple[str, str], dict[str, list[Entry]]] = {}
    for entry in tried:
        alike.setdefault((entry.task, entry.data), {}).setdefault(entry.folder.name, []).append(entry)
    drawings = []
    for (task, _), by_run in alike.items():
        if max(len({entry.step for entry in found}) for found in by_run.values()) < 2:
            continue
        differ = differing(entry.facts for entry in tried if entry.task == task)
        drawings += [_against(by_run, across, differ) for across in ("seconds", "flops")]
    return [drawing for drawing in drawings if drawing is not None]


def _against(by_run: dict[str, list[Entry]], across: str, differ: Iterable[str]) -> Drawing | None:
    """``differ``: the facts that a title says."""
    series = {}
    for name, found in by_run.items():
        points = [(x, entry.shown) for entry in found
                  if (x := entry.seconds if across == "seconds" else entry.flops) is not None]  # fmt: skip
        if points:
            series[name] = sorted(points)
    if not series:
        return None
    some = next(iter(by_run.values()))[0]
    axis = "seconds of pretraining" if across == "seconds" else "FLOPs of pretraining (plain objective)"
    every = [entry for found in by_run.values() for entry in found]
    marked = any(entry.subset for entry in every)
    note = "The best setting's median over seeds at each checkpoint (MAE-LM Figure 3)." if some.is_finetuned else ""
    marked_with = "".join(mark for entry in every for mark in entry.marks)
    lacking = without_seconds(every) if across == "seconds" else without_flops([entry.folder for entry in every])
    note = " ".join([note, *marks(marked_with), *lacking])
    called, file = (told_apart(word, some.facts, differ) for word in (some.title, some.task))
    title = f"{called}{f' {SUBSET}' if marked else ''} of checkpoints against {OF_WHAT[across]}"
    looks = {name: by_run[name][0].folder.look for name in series}
    figure = plots.lines(series, axis, f"{some.title}, {some.metric}", looks=looks)
    figure.axes[0].set_xlim(left=0)
    return Drawing(f"checkpoints-{anchor(file)}-{across}", title, plots.svg(figure), note.strip())

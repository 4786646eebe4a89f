"""Effective rank at every layer, as figures (MAE-LM Figure 1) and tables: the seeds of a system are one line.

After each task that models were fine-tuned on, clean input has a figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from latemask.report import plots
from latemask.report.downstream import task_title
from latemask.report.studies import (
    FEW,
    ORDER,
    PRETRAINED,
    SETS,
    STARRED,
    by_tau,
    full_name,
    in_order,
    looking,
    masked_so,
    rates_of,
    without_masks,
)
from latemask.report.tables import Drawing, Table, crossed

NOTES = {
    "clean_input": "Real tokens of text without [MASK] (the paper's H tilde).",
    "masked_input": "All tokens of masked text (the paper's H, Figure 1a).",
    "masked_input_real": "The same masked text without its [MASK] tokens: how much of the gap is [MASK] itself.",
    "masks": "Representations of [MASK] itself (MAE-LM Figure 1b).",
}
BAND = " Medians over pretraining seeds; the band is from the lowest to the highest."


def rank_drawings(found: Sequence[dict[str, Any]]) -> list[Drawing]:
    """The sets of a single model in one figure, or a figure a set with a line a system, of studies with the seeds of a
    system as one (``over_seeds``)."""
    groups = by_tau(found)
    drawings: list[Drawing] = []
    for tau, group in groups.items():
        end = f"-{tau:g}" if len(groups) > 1 else ""
        for on, members in _by_task(group).items():
            after = "" if on is None else f" after {task_title(on)}"
            ending = end if on in (None, PRETRAINED) else f"-{on}{end}"
            if len(members) == 1 and len(group) == 1:
                drawings.append(_alone(members[0], ending))
                having = {"masks": SETS["masks"]}
            else:  # nothing is masked in fine-tuning
                having = SETS if on in (None, PRETRAINED) else {"clean_input": SETS["clean_input"]}
            for key, title in having.items():
                if shown := looking([study for study in members if any(layer[key] for layer in study["layers"])]):
                    called = f"{title}{after}" if on != PRETRAINED else f"{title}, pretrained"
                    drawings.append(_drawn(shown, key, called, f"rank-{key.replace('_', '-')}{ending}"))
    return drawings


def _by_task(group: Sequence[dict[str, Any]]) -> dict[str | None, list[dict[str, Any]]]:
    """Studies by the task their model was fine-tuned on; all of them as one (None) where one run alone was studied, or
    nothing was fine-tuned."""
    tasks = {study["on"] for study in group}
    if len(tasks) == 1 or len({study["number"] for study in group}) == 1:
        return {None: [{**study, "name": full_name(study)} for study in group]}
    return {task: [study for study in group if study["on"] == task] for task in in_order(tasks)}


def _alone(study: dict[str, Any], ending: str) -> Drawing:
    masked = f" {masked_so([study])}" if rates_of([study]) else ""
    band = BAND if study["seeds"] > 1 else ""
    note = f"{study['name']} (MAE-LM Figure 1a).{masked}{band}{_hollow([study], [*SETS][:3])}"
    return Drawing(f"rank{ending}", "Effective rank by layer", plots.svg(plots.rank_by_layer([study])), note)


def _drawn(shown: Sequence[dict[str, Any]], key: str, title: str, name: str) -> Drawing:
    masked = f" {masked_so(shown)}" if key != "clean_input" else ""
    alone = f"{shown[0]['name']}. " if len(shown) == 1 else ""
    band = BAND if any(study["seeds"] > 1 for study in shown) else ""
    note = f"{alone}{NOTES[key]}{masked}{band}{_hollow(shown, [key])}"
    return Drawing(name, title, plots.svg(plots.ranks_of_set(shown, key)), note)


def _hollow(found: Sequence[Mapping[str, Any]], sets: Iterable[str]) -> str:
    """What hollow markers say, where there are some."""
    few = any(layer[key] and layer[key]["few_vectors"] for study in found for layer in study["layers"] for key in sets)
    return f" Hollow: {FEW}." if few else ""


def layer_tables(studied: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """The numbers behind the figures: a table a set, with a column for each system and task."""
    groups = by_tau(studied)
    for (tau, group), (key, title) in ((group, one) for group in groups.items() for one in SETS.items()):
        found = [study for study in group if any(layer[key] for layer in study["layers"])]
        found.sort(key=lambda study: [*ORDER, study["on"]].index(study["on"]))
        if not found:
            continue
        layers = max((study["layers"] for study in found), key=len)
        called = title if len(groups) == 1 else f"{title} (tau {tau:g})"
        note = NOTES[key] + (f" {masked_so(found)}{without_masks(group)}" if key != "clean_input" else "")
        if any(study["seeds"] > 1 for study in found):
            note += " Medians over pretraining seeds [lowest..highest]."
        if _hollow(found, [key]):
            note += STARRED

        def cell(row: int, column: int, found: Sequence[dict[str, Any]] = found, key: str = key) -> str | None:
            its = found[column]["layers"]
            return _cell(its[row][key]) if row < len(its) else None

        yield crossed(called, ("layer", "model"), [str(layer["layer"]) for layer in layers],
                      [full_name(study) for study in found], cell, note)  # fmt: skip


def _cell(found: Mapping[str, Any] | None) -> str | None:
    if not found:
        return None
    spread = f" [{found['lowest']}..{found['highest']}]" if "lowest" in found else ""
    return f"{found['rank']:g}{spread}{'*' * found['few_vectors']}"

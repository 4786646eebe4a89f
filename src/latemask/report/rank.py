"""Effective rank and the theory behind it, of several models: Figure 1 and Table 3 of MAE-LM, and section 2.2."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latemask.downstream.tasks import GLUE, SQUAD
from latemask.report import plots
from latemask.report.folders import RunFolder
from latemask.report.published import TABLE_3
from latemask.report.tables import Drawing, Table, Value

FINETUNED = re.compile(r"(?P<task>[A-Za-z0-9]+)-e\d+-lr.*\.model")
"""Folder of a model that ``latemask finetune --save`` wrote."""
PRETRAINED = "pretrained"
ORDER = (PRETRAINED, *GLUE, SQUAD.name)
SETS = {
    "clean_input": "Effective rank by layer, clean input",
    "masked_input": "Effective rank by layer, masked input",
    "masked_input_real": "Effective rank by layer, real tokens of masked input",
}
FIGURE_NOTES = {
    "clean_input": "Real tokens of text without [MASK] (the paper's H tilde).",
    "masked_input": "All tokens of masked text (the paper's H, Figure 1a).",
    "masked_input_real": "The same masked text without its [MASK] tokens: how much of the gap is [MASK] itself.",
}


def studies(folders: Sequence[RunFolder], kind: str) -> list[dict[str, Any]]:
    """The studies of a kind, each with the ``name`` it has in tables and the task it was fine-tuned on (``on``)."""
    found = []
    for folder in folders:
        start = len(found)
        for study in folder.of(kind):
            model = Path(study["model"])
            tuned = FINETUNED.fullmatch(model.name)
            step = re.fullmatch(r"step-0*(\d+)", model.name)
            name = folder.name if folder.path.is_dir() else model.name
            name = f"{name}, step {int(step[1]):,}" if step else name
            found.append({**study, "name": name, "on": tuned["task"] if tuned else PRETRAINED})
        # Pretrained first, then what came of it.
        found[start:] = sorted(found[start:], key=lambda study: study["on"] != PRETRAINED)
    return found


def rank_drawings(folders: Sequence[RunFolder]) -> list[Drawing]:
    """Figure 1(a) and 1(b): the three sets of one model in one figure, or a figure a set with a line a model."""
    groups = _by_tau(studies(folders, "rank"))
    drawings = []
    for tau, group in groups.items():
        end = f"-{tau:g}" if len(groups) > 1 else ""
        named = [{**study, "name": _full_name(study)} for study in group]
        if len(named) == 1:
            drawings.append(Drawing(f"rank{end}", "Effective rank by layer", plots.svg(plots.rank_by_layer(named)),
                                    f"{named[0]['name']} (MAE-LM Figure 1a)."))  # fmt: skip
        else:
            drawings += [Drawing(f"rank-{key.replace('_', '-')}{end}", title,
                                 plots.svg(plots.ranks_of_set(named, key)), FIGURE_NOTES[key])
                         for key, title in SETS.items() if any(_last(study, key) for study in named)]  # fmt: skip
        seeing = [study for study in named if _last(study, "masks")]
        if seeing:
            title = "Effective rank of [MASK] by layer"
            drawings.append(Drawing(f"rank-masks{end}", title, plots.svg(plots.mask_rank_by_layer(seeing)),
                                    "Representations of [MASK] itself (MAE-LM Figure 1b)."))  # fmt: skip
    return drawings


def _by_tau(found: Sequence[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    groups: dict[float, list[dict[str, Any]]] = {}
    for study in found:
        groups.setdefault(study["tau"], []).append(study)
    return groups


def _full_name(study: Mapping[str, Any]) -> str:
    return study["name"] if study["on"] == PRETRAINED else f"{study['name']} on {_title(study['on'])}"


def _title(task: str) -> str:
    titles = {**{name: one.title for name, one in GLUE.items()}, SQUAD.name: SQUAD.title, PRETRAINED: "pretrained"}
    return titles.get(task, task).removesuffix("-(m/mm)")


def _last(study: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    return study["layers"][-1][key]


def rank_table(folders: Sequence[RunFolder]) -> Table | None:
    """Table 3: effective rank of the last layer's real tokens on clean text, pretrained and fine-tuned."""
    found = studies(folders, "rank")
    if not found:
        return None
    on = {study["on"] for study in found} | {PRETRAINED}
    tasks = [task for task in ORDER if task in on] + sorted(on - set(ORDER))
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for study in found:
        clean = _last(study, "clean_input")
        if clean is None:
            continue
        key = (study["name"], study["width"], study["tau"], study["specials"])
        flag = "*" if clean["few_vectors"] else ""
        rows.setdefault(key, {})[study["on"]] = f"{clean['rank']} ({clean['centred']}){flag}"
    cells: list[tuple[Value, ...]] = [
        (name, *(by_task.get(task) for task in tasks), width, f"{tau:g}", specials)
        for (name, width, tau, specials), by_task in rows.items()
    ]
    if {768} == {study["width"] for study in found}:
        cells += [(name, *(None if task not in numbers else str(numbers[task]) for task in tasks), 768, "0.9", None)
                  for name, numbers in TABLE_3.items()]  # fmt: skip
    note = "Vectors of real tokens on clean text (MAE-LM Table 3), uncentred as in the paper (centred in brackets)."
    if any("*" in cell for row in rows.values() for cell in row.values()):
        note += " * More than a tenth of the number of vectors: more tokens would show a higher rank."
    columns = ("model", *(_title(task) for task in tasks), "dimensions", "tau", "special tokens")
    return Table("Effective rank of the last layer", columns, tuple(cells), note)


def theory_parts(folders: Sequence[RunFolder]) -> list[Drawing | Table]:
    """Section 2.2 by layer and at the last layer, and appendix A's bounds."""
    found = [{**study, "name": _full_name(study)} for study in studies(folders, "theory")]
    if not found:
        return []
    parts: list[Drawing | Table] = []
    seeing = [study for study in found if study["sees_masks"]]
    if seeing:
        title = "Energy of [MASK] outside the real tokens' leading directions"
        note = f"Leading: those that carry {seeing[0]['tau']:.0%} of the real tokens' energy."
        parts.append(Drawing("outside", title, plots.svg(plots.outside_energy_by_layer(seeing)), note))
    return [*parts, _last_layers(found), _bounds(found[0])]


def _last_layers(found: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for study in found:
        layer = study["layers"][-1]
        residuals = [layer[name] and _percent(layer[name]["share"])
                     for name in ("residual_masked_input", "residual_clean_input")]  # fmt: skip
        shares = [_percent(layer[name]) for name in ("masks_outside", "masks_spread_outside", "real_outside")]
        rows.append((study["name"], layer["layer"], layer["real_rank"], *shares, *residuals,
                     "*" if layer["few_vectors"] else None))  # fmt: skip
    columns = ("model", "layer", "leading directions", "[MASK] outside", "its spread outside", "real outside",
               "|R|/|H_R|, masked input", "|R|/|H_R|, clean input", "few vectors")  # fmt: skip
    note = (
        "Shares of energy outside the leading directions of the real tokens of the same forward pass (section 2.2), "
        "and how far real tokens are from being all one vector. Empty: the encoder sees no [MASK]."
    )
    return Table("Theory at the last layer", columns, tuple(rows), note)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _bounds(study: Mapping[str, Any]) -> Table:
    names = {"scaled": "attention as sharp, R grows", "inside": "[MASK] inside the row space",
             "outside": "[MASK] partly outside (control)"}  # fmt: skip
    rows: list[tuple[Value, ...]] = [
        (names.get(setting, setting), *(f"{row[key]:.2g}" for key in (
            "residual", "one", "infinity_printed", "infinity_corrected", "cubic")))
        for setting, tried in study["bounds"].items() for row in tried
    ]  # fmt: skip
    note = (
        "Largest left side over right side in random attention layers; above 1 a bound is violated. (10) as printed "
        "breaks; with |R|_inf squared it holds."
    )
    columns = ("setting", "|R|", "(9)", "(10) printed", "(10) corrected", "cubic")
    return Table("Bounds of appendix A", columns, tuple(rows), note)

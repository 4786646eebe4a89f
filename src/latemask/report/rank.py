"""Effective rank and the theory behind it, of several models: Figure 1 and Table 3 of MAE-LM, and section 2.2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latemask.downstream.tasks import GLUE, SQUAD
from latemask.report import plots
from latemask.report.folders import RunFolder
from latemask.report.looks import Look
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
MASKED_SETS = {"masked_input": "all tokens", "masked_input_real": "its real tokens", "masks": "[MASK]"}
FIGURE_NOTES = {
    "clean_input": "Real tokens of text without [MASK] (the paper's H tilde).",
    "masked_input": "All tokens of masked text (the paper's H, Figure 1a).",
    "masked_input_real": "The same masked text without its [MASK] tokens: how much of the gap is [MASK] itself.",
}


FEW = "few vectors: the number of directions is more than a tenth of theirs, and more tokens would show more of them"
STARRED = f" * {FEW[0].upper()}{FEW[1:]}."
TOLD_APART_BY: dict[str, Callable[[Any], str]] = {
    "rate": lambda value: f"{100 * value:.4g}% masked",
    "tau": lambda value: f"tau {value:g}",
    "specials": lambda value: f"special tokens {value}",
    "data": lambda value: f"on {value}",
}
"""What studies of one model may differ in, and how a name says it."""


def studies(folders: Sequence[RunFolder], kind: str) -> list[dict[str, Any]]:
    """The studies of a kind, each once, with the ``name`` it has in tables, the task it was fine-tuned on (``on``) and
    its ``look`` in figures.

    A name says in what the studies of one model differ, and where models were studied at several masking rates, at
    which. No two of one name and task remain.
    """
    numbers = {folder.name: folder.number for folder in reversed(folders) if folder.lines}
    found: list[dict[str, Any]] = []
    for folder in folders:
        start = len(found)
        for study in folder.of(kind):
            model = Path(study["model"])
            tuned = FINETUNED.fullmatch(model.name)
            step = re.fullmatch(r"step-0*(\d+)", model.name)
            name = folder.name if folder.path.is_dir() else (model.parent if step else model).name
            number = numbers.setdefault(name, folder.number)
            name = f"{name}, step {int(step[1]):,}" if step else name
            on = tuned["task"] if tuned else PRETRAINED
            if not any({**one, **study} == one for one in found):
                found.append({**study, "name": name, "on": on, "number": number})
        # Pretrained first, then what came of it.
        found[start:] = sorted(found[start:], key=lambda study: study["on"] != PRETRAINED)
    names = [_told_apart(study, found) for study in found]
    keys = [(name, study["on"]) for name, study in zip(names, found, strict=True)]
    by_run: Counter[int] = Counter()
    for place, study in enumerate(found):
        again = keys[:place].count(keys[place])
        study["name"] = f"{names[place]} ({again + 1})" if again else names[place]
        study["look"] = Look(study["number"], by_run[study["number"]])
        by_run[study["number"]] += 1
    return found


def _told_apart(study: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """The name of one of the studies ``found``, with all that tells it from those of the same name."""
    alike = [other for other in found if other["name"] == study["name"]]
    differ = [field for field in TOLD_APART_BY if len({repr(other.get(field)) for other in alike}) > 1]
    if study["sees_masks"] and "rate" not in differ and len(_rates(found)) > 1:
        differ.insert(0, "rate")
    name = ", ".join([study["name"], *(TOLD_APART_BY[field](study.get(field)) for field in differ)])
    same = [Path(other["model"]) for other in alike
            if all(other.get(field) == study.get(field) for field in ("on", *differ))]  # fmt: skip
    if len(set(same)) > 1:
        model = Path(study["model"])
        name = f"{name}, {model.name if len({other.name for other in same}) == len(set(same)) else model}"
    return name


def _rates(found: Sequence[Mapping[str, Any]]) -> set[float]:
    """The masking rates of studies whose encoder sees [MASK]: in others no set depends on it."""
    return {study["rate"] for study in found if study["sees_masks"]}


def _masked_so(found: Sequence[Mapping[str, Any]]) -> str:
    rates = _rates(found)
    return f"{100 * rates.pop():.4g}% of the tokens masked." if len(rates) == 1 else "Masked at the rates named."


def rank_drawings(folders: Sequence[RunFolder]) -> list[Drawing]:
    """Figure 1(a) and 1(b): the three sets of one model in one figure, or a figure a set with a line a model."""
    groups = _by_tau(studies(folders, "rank"))
    drawings = []
    for tau, group in groups.items():
        end = f"-{tau:g}" if len(groups) > 1 else ""
        named = [{**study, "name": _full_name(study)} for study in group]
        if len(named) == 1:
            masked = f" {_masked_so(named)}" if _rates(named) else ""
            note = f"{named[0]['name']} (MAE-LM Figure 1a).{masked}{_hollow(named, SETS)}"
            drawings.append(
                Drawing(f"rank{end}", "Effective rank by layer", plots.svg(plots.rank_by_layer(named)), note)
            )
        else:
            for key, title in SETS.items():
                having = [study for study in named if any(layer[key] for layer in study["layers"])]
                if having:
                    masked = f" {_masked_so(having)}" if key != "clean_input" else ""
                    drawings.append(Drawing(f"rank-{key.replace('_', '-')}{end}", title,
                                            plots.svg(plots.ranks_of_set(having, key)),
                                            f"{FIGURE_NOTES[key]}{masked}{_hollow(having, [key])}"))  # fmt: skip
        seeing = [study for study in named if any(layer["masks"] for layer in study["layers"])]
        if seeing:
            title = "Effective rank of [MASK] by layer"
            note = (f"Representations of [MASK] itself (MAE-LM Figure 1b). {_masked_so(seeing)}"
                    f"{_hollow(seeing, ['masks'])}")  # fmt: skip
            drawings.append(Drawing(f"rank-masks{end}", title, plots.svg(plots.mask_rank_by_layer(seeing)), note))
    return drawings


def _hollow(found: Sequence[Mapping[str, Any]], sets: Iterable[str]) -> str:
    """What hollow markers say, where there are some."""
    few = any(layer[key] and layer[key]["few_vectors"] for study in found for layer in study["layers"] for key in sets)
    return f" Hollow: {FEW}." if few else ""


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
        clean = _rank(_last(study, "clean_input"))
        if clean is None:
            continue
        key = (study["name"], study["width"], study["tau"], study["specials"])
        rows.setdefault(key, {})[study["on"]] = clean
    cells: list[tuple[Value, ...]] = [
        (name, *(by_task.get(task) for task in tasks), width, f"{tau:g}", specials)
        for (name, width, tau, specials), by_task in rows.items()
    ]
    if {768} == {study["width"] for study in found}:
        cells += [(name, *(None if task not in numbers else str(numbers[task]) for task in tasks), 768, "0.9", None)
                  for name, numbers in TABLE_3.items()]  # fmt: skip
    note = "Vectors of real tokens on clean text (MAE-LM Table 3), uncentred as in the paper (centred in brackets)."
    if any("*" in cell for row in rows.values() for cell in row.values()):
        note += STARRED
    columns = ("model", *(_title(task) for task in tasks), "dimensions", "tau", "special tokens")
    return Table("Effective rank of the last layer", columns, tuple(cells), note)


def masked_table(folders: Sequence[RunFolder]) -> Table | None:
    """The last layer's sets of masked input, where an encoder sees [MASK]."""
    found = [study for study in studies(folders, "rank") if any(_last(study, key) for key in MASKED_SETS)]
    rows = [(_full_name(study), f"{100 * study['rate']:.4g}%", *(_rank(_last(study, key)) for key in MASKED_SETS),
             f"{study['tau']:g}", study["specials"]) for study in found]  # fmt: skip
    note = "Uncentred (centred in brackets), of masked text: Figures 1(a) and 1(b) at their last layer."
    if any("*" in str(cell) for row in rows for cell in row[2:-2]):
        note += STARRED
    columns = ("model", "masked", *MASKED_SETS.values(), "tau", "special tokens")
    return Table("Effective rank of the last layer, masked input", columns, tuple(rows), note) if rows else None


def _rank(found: Mapping[str, Any] | None) -> str | None:
    return None if found is None else f"{found['rank']} ({found['centred']}){'*' * found['few_vectors']}"


def theory_parts(folders: Sequence[RunFolder]) -> list[Drawing | Table]:
    """Section 2.2 by layer and at the last layer, and appendix A's bounds."""
    found = [{**study, "name": _full_name(study)} for study in studies(folders, "theory")]
    if not found:
        return []
    parts: list[Drawing | Table] = []
    groups = _by_tau([study for study in found if study["sees_masks"]])
    for tau, seeing in groups.items():
        note = f"Leading: those that carry {tau:.4%} of the real tokens' energy.".replace(".0000%", "%")
        few = any(layer["few_vectors"] for study in seeing for layer in study["layers"])
        note = f"{note} {_masked_so(seeing)}{f' Hollow: {FEW}.' if few else ''}"
        title = "Energy of [MASK] outside the real tokens' leading directions"
        title = f"{title} (tau {tau:g})" if len(groups) > 1 else title
        end = f"-{tau:g}" if len(groups) > 1 else ""
        parts.append(Drawing(f"outside{end}", title, plots.svg(plots.outside_energy_by_layer(seeing)), note))
    return [*parts, _last_layers(found), _bounds(found[0])]


def _last_layers(found: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for study in found:
        layer = study["layers"][-1]
        residuals = [layer[name] and _percent(layer[name]["share"])
                     for name in ("residual_masked_input", "residual_clean_input")]  # fmt: skip
        shares = [_percent(layer[name]) for name in ("masks_outside", "masks_spread_outside", "real_outside")]
        rows.append((study["name"], f"{study['tau']:g}", f"{100 * study['rate']:.4g}%", study["specials"],
                     layer["layer"], layer["real_rank"], *shares, *residuals,
                     "*" if layer["few_vectors"] else None))  # fmt: skip
    columns = ("model", "tau", "masked", "special tokens", "layer", "leading directions", "[MASK] outside",
               "its spread outside", "real outside", "|R|/|H_R|, masked input", "|R|/|H_R|, clean input",
               "few vectors")  # fmt: skip
    note = (
        "Shares of energy outside the leading directions of the real tokens of the same forward pass (section 2.2), "
        "and how far real tokens are from being all one vector. Empty: the encoder sees no [MASK]."
    )
    if any(row[-1] for row in rows):
        note += STARRED
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
    columns = ("setting", "scale of R's entries", "(9)", "(10) printed", "(10) corrected", "cubic")
    return Table("Bounds of appendix A", columns, tuple(rows), note)

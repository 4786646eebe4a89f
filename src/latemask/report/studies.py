"""Which studies of layers there are, and what each is called: `latemask rank`'s and `latemask theory`'s."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from latemask.downstream.tasks import GLUE, SQUAD
from latemask.report.downstream import task_title
from latemask.report.folders import RunFolder
from latemask.report.looks import Look
from latemask.report.owners import FINETUNED, called, is_own, model_of
from latemask.report.systems import System

PRETRAINED = "pretrained"
ORDER = (PRETRAINED, *GLUE, SQUAD.name)
SETS = {
    "clean_input": "Effective rank by layer, clean input",
    "masked_input": "Effective rank by layer, masked input",
    "masked_input_real": "Effective rank by layer, real tokens of masked input",
    "masks": "Effective rank of [MASK] by layer",
}
"""The sets of vectors that are ranked at each layer."""

FEW = "few vectors: the number of directions is more than a tenth of theirs, and more tokens would show more of them"
STARRED = f" * {FEW[0].upper()}{FEW[1:]}."
TOLD_APART_BY: dict[str, Callable[[Any], str]] = {
    "rate": lambda value: f"{100 * value:.4g}% masked",
    "tau": lambda value: f"tau {value:g}",
    "specials": lambda value: f"special tokens {value}",
    "data": lambda value: f"on {Path(str(value)).name}",
}
"""What studies of one model may differ in, and how a name says it."""


def studies(folders: Sequence[RunFolder], kind: str) -> list[dict[str, Any]]:
    """The studies of a kind, each once, with the ``name`` it has in tables, the task it was fine-tuned on (``on``) and
    its ``look`` in figures.

    A name says in what the studies of one model after one task differ, and where models were studied at several masking
    rates, at which. No two of one name and task remain. ``whose`` is the name without all that: the run's, or a
    guest's.
    """
    numbers = {folder.name: folder.number for folder in reversed(folders) if folder.lines}
    found: list[dict[str, Any]] = []
    for folder in folders:
        start = len(found)
        for study in folder.of(kind):
            model = Path(study["model"])
            tuned = FINETUNED.fullmatch(model.name)
            step = re.fullmatch(r"step-0*(\d+)", model.name)
            name = _whose(study, folder, folders)
            number = numbers.setdefault(name, folder.number)
            on = tuned["task"] if tuned else PRETRAINED
            if not any({**one, **study} == one for one in found):  # what it says is there already
                title = f"{name}, step {int(step[1]):,}" if step else name
                found.append({**study, "name": title, "whose": name, "on": on, "number": number})
        # The folder's own before guests', pretrained before what came of it.
        order = [(study["whose"] != folder.name, study["on"] != PRETRAINED) for study in found[start:]]
        found[start:] = [study for _, study in sorted(zip(order, found[start:], strict=True), key=lambda pair: pair[0])]
    names = [_told_apart(study, found) for study in found]
    keys = [(name, study["on"]) for name, study in zip(names, found, strict=True)]
    for place, study in enumerate(found):
        again = keys[:place].count(keys[place])
        study["name"] = f"{names[place]} ({again + 1})" if again else names[place]
    return looking(found)


def _whose(study: Mapping[str, Any], folder: RunFolder, folders: Sequence[RunFolder]) -> str:
    """The name of the run that it measured, first of all its ``folder``'s; else of the folder where that holds no run,
    or of the model."""
    if (owner := next((one for one in (folder, *folders) if is_own(one, study)), None)) is not None:
        return owner.name
    if folder.path.is_dir() and not folder.lines:
        return folder.name
    name = called(model_of(study))
    return str(study["model"]) if name in {one.name for one in folders if one.lines} else name


def looking(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the ``look`` of each in a figure of these."""
    by_run: Counter[int] = Counter()
    shown = []
    for study in found:
        shown.append({**study, "look": Look(study["number"], by_run[study["number"]])})
        by_run[study["number"]] += 1
    return shown


def _told_apart(study: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """The name of one of the studies ``found``, with all that tells it from those of the same name."""
    alike = [other for other in found if (other["name"], other["on"]) == (study["name"], study["on"])]
    differ = [field for field in TOLD_APART_BY if len({repr(other.get(field)) for other in alike}) > 1]
    if study["sees_masks"] and "rate" not in differ and len(rates_of(found)) > 1:
        differ.insert(0, "rate")
    name = ", ".join([study["name"], *(TOLD_APART_BY[field](study.get(field)) for field in differ)])
    same = [Path(other["model"]) for other in alike
            if all(other.get(field) == study.get(field) for field in differ)]  # fmt: skip
    if len(set(same)) > 1:
        model = Path(study["model"])
        name = f"{name}, {model.name if len({other.name for other in same}) == len(set(same)) else model}"
    return name


def rates_of(found: Sequence[Mapping[str, Any]]) -> set[float]:
    """The masking rates of studies whose encoder sees [MASK]: in others no set depends on it."""
    return {study["rate"] for study in found if study["sees_masks"]}


def masked_so(found: Sequence[Mapping[str, Any]]) -> str:
    """How many tokens of the input were masked, as a sentence."""
    rates = rates_of(found)
    return f"{100 * rates.pop():.4g}% of the tokens masked." if len(rates) == 1 else "Masked at the rates named."


def without_masks(found: Sequence[Mapping[str, Any]]) -> str:
    """Which of these studies have nothing to show of masked input, and why, as a sentence; "" where all have."""
    whose: dict[str, list[str]] = {}
    for study in found:
        if not study["sees_masks"] and study["on"] == PRETRAINED:
            why = study.get("without_masks") or "the encoder never sees [MASK]"
            whose.setdefault(why, []).append(study["name"])
    return "".join(f" Without {'; '.join(dict.fromkeys(names))}: {why}." for why, names in whose.items())


def in_order(tasks: Set[str]) -> list[str]:
    """Pretrained first, then GLUE's tasks and SQuAD, then others."""
    return [task for task in ORDER if task in tasks] + sorted(tasks - set(ORDER))


def by_tau(found: Sequence[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    """Studies by the share of the energy that their ranks stand for."""
    groups: dict[float, list[dict[str, Any]]] = {}
    for study in found:
        groups.setdefault(study["tau"], []).append(study)
    return groups


def full_name(study: Mapping[str, Any]) -> str:
    """Its name, with the task that its model was fine-tuned on."""
    return study["name"] if study["on"] == PRETRAINED else f"{study['name']} on {task_title(study['on'])}"


def over_seeds(found: Sequence[dict[str, Any]], systems: Sequence[System]) -> list[dict[str, Any]]:
    """Studies of ranks with those of one system's seeds as one: at each layer the median, and ``lowest`` and
    ``highest``."""
    system_of = {run.name: system.name for system in systems for run in system.runs if len(system.runs) > 1}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for study in found:
        system = system_of.get(study["whose"])
        name = study["name"] if system is None else system + study["name"].removeprefix(study["whose"])
        key = (name, *(study[field] for field in ("on", "tau", "specials", "rate", "width")), len(study["layers"]))
        groups.setdefault(key, []).append(study)
    return [members[0] | {"name": key[0], "seeds": len(members), "layers": _medians(members)}
            for key, members in groups.items()]  # fmt: skip


def _medians(members: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if len(members) == 1:
        return members[0]["layers"]
    layers = []
    for each in zip(*(study["layers"] for study in members), strict=True):
        layer: dict[str, Any] = {"layer": each[0]["layer"]}
        for key in SETS:
            ones = [one[key] for one in each if one[key]]
            ranks = [one["rank"] for one in ones]
            layer[key] = {"rank": statistics.median(ranks), "lowest": min(ranks), "highest": max(ranks),
                          "few_vectors": any(one["few_vectors"] for one in ones)} if ones else None  # fmt: skip
        layers.append(layer)
    return layers

"""Effective rank of the last layer, of several models, pretrained and fine-tuned: Table 3 of MAE-LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latemask.report.downstream import task_title
from latemask.report.folders import RunFolder
from latemask.report.measures import RANK, Measure, Named
from latemask.report.published import TABLE_3
from latemask.report.studies import PRETRAINED, STARRED, full_name, in_order, without_masks
from latemask.report.tables import Table, Value

MASKED_SETS = {"masked_input": "all tokens", "masked_input_real": "its real tokens", "masks": "[MASK]"}


def _last(study: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    return study["layers"][-1][key]


def rank_table(found: Sequence[dict[str, Any]]) -> Table | None:
    """Table 3: effective rank of the last layer's real tokens on clean text, pretrained and fine-tuned."""
    if not found:
        return None
    on = {study["on"] for study in found} | {PRETRAINED}
    tasks = in_order(on)
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
    texts = {task: sorted({Path(str(study.get("data"))).name for study in found if study["on"] == task and
                           study.get("data")}) for task in tasks}  # fmt: skip
    if len({str(names) for names in texts.values() if names}) > 1:
        said = (f"{task_title(task)} {' '.join(names)}" for task, names in texts.items() if names)
        note += f" Of different texts: {', '.join(said)}."
    if any("*" in cell for row in rows.values() for cell in row.values()):
        note += STARRED
    columns = ("model", *(task_title(task) for task in tasks), "dimensions", "tau", "special tokens")
    return Table("Effective rank of the last layer", columns, tuple(cells), note)


def masked_table(studied: Sequence[dict[str, Any]]) -> Table | None:
    """The last layer's sets of masked input, where an encoder sees [MASK]."""
    found = [study for study in studied if any(_last(study, key) for key in MASKED_SETS)]
    rows = [(full_name(study), f"{100 * study['rate']:.4g}%", *(_rank(_last(study, key)) for key in MASKED_SETS),
             f"{study['tau']:g}", study["specials"]) for study in found]  # fmt: skip
    note = "Uncentred (centred in brackets), of masked text: Figures 1(a) and 1(b) at their last layer."
    note += without_masks(studied)
    if any("*" in str(cell) for row in rows for cell in row[2:-2]):
        note += STARRED
    columns = ("model", "masked", *MASKED_SETS.values(), "tau", "special tokens")
    return Table("Effective rank of the last layer, masked input", columns, tuple(rows), note) if rows else None


def _rank(found: Mapping[str, Any] | None) -> str | None:
    return None if found is None else f"{found['rank']} ({found['centred']}){'*' * found['few_vectors']}"


def last_ranks(run: RunFolder, found: Sequence[Mapping[str, Any]]) -> list[Named]:
    """Rank of the last layer's real tokens on clean text, by tau and task, of the run's own studies; not where it was
    studied in several ways."""
    named: dict[str, list[Named]] = {}
    for study in found:
        if (clean := _last(study, "clean_input")) is not None and study["whose"] == run.name:
            name = f"{RANK}{study['tau']:g} of the last layer, {task_title(study['on'])}".replace("_0.", "_.")
            facts = {"specials": f"special tokens {study['specials']}"}
            facts |= {"data": f"on {Path(str(study['data'])).name}"} if study.get("data") else {}
            named.setdefault(name, []).append((name, Measure(clean["rank"], is_neutral=True, facts=facts)))
    return [ranks[0] for ranks in named.values() if len(ranks) == 1]

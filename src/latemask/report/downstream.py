"""What encoders are worth after fine-tuning: a table like MAE-LM's Table 1, and each task's best setting.

A score is a median over seeds at the best setting of the grid. † marks data that are a subset of the official ones,
‡ a best setting some of whose seeds failed; both marks stay with a number wherever it goes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from latemask.downstream.grid import majority_said, said, summarize
from latemask.downstream.tasks import GLUE, SQUAD, glue_average, percent, shown
from latemask.report.comparable import DEGENERATE, SUBSET, data_names, subsets
from latemask.report.folders import RunFolder
from latemask.report.owners import called, is_own
from latemask.report.published import TABLE_1
from latemask.report.tables import Table, Value

AVERAGE = "AVG"
READ_SO = (
    "Development sets; medians over seeds at the best setting of each task [lowest..highest seed]. Matthews for CoLA, "
    "Spearman for STS-B, accuracy elsewhere (MNLI: matched/mismatched). AVG: over the eight tasks, MNLI by its matched "
    "set. Rows called published are printed in MAE-LM's Table 1: 12 x 768, 16 GB of text."
)
SQUAD_COLUMNS = {"EM": "exact", "F1": "f1"}


@dataclass(frozen=True)
class Entry:
    """One model (a checkpoint) on one task."""

    folder: RunFolder
    model: Mapping[str, Any]
    task: str
    title: str
    metric: str
    shown: float
    """The score as the papers print it: of 100."""
    subset: Mapping[str, str]
    summary: Mapping[str, Any] | None
    """Of ``downstream.grid.summarize``; None for an evaluation without fine-tuning."""
    data: str
    """What tells the data from others: their fingerprints, or how many pairs."""
    others: tuple[Entry, ...] = ()
    """The same model and task on other versions of the data, which stand in the table task by task alone."""

    @cached_property
    def is_own(self) -> bool:
        """Whether the model is the run's in whose folder the result lies."""
        return is_own(self.folder, {"model": self.model})

    @property
    def facts(self) -> dict[str, str]:
        """What it was measured on, beside what its title says."""
        return {"data": self.data}

    @property
    def marks(self) -> list[str]:
        """† and ‡, where they apply."""
        failed = self.summary is not None and self.summary["degenerate"]
        return [mark for mark, holds in ((SUBSET, self.subset), (DEGENERATE, failed)) if holds]

    @property
    def is_finetuned(self) -> bool:
        return self.summary is not None

    @property
    def step(self) -> int | None:
        return self.model.get("step")

    @property
    def seconds(self) -> float | None:
        """Of pretraining, until this checkpoint."""
        return self.model.get("pretraining_seconds")

    @property
    def flops(self) -> float | None:
        """Of pretraining, until this checkpoint; None where the folder has no journal of it."""
        return self.folder.flops_at(self.step) if self.step is not None and self.is_own else None


def entries(folders: Sequence[RunFolder]) -> list[Entry]:
    """Every model and task: fine-tuned (where a task's data come in several versions: the most complete, then the one
    with the most runs; the rest are its ``others``), and minimal pairs (of the most pairs)."""
    found: dict[tuple[str, str, str], Entry] = {}
    versions: dict[tuple[str, str, str], list[Entry]] = {}
    names = data_names([one for folder in folders for one in _of_pairs(folder)])
    for folder in folders:
        for one in summarize(folder.of("finetune")):
            data = json.dumps(one["data"], sort_keys=True)
            entry = Entry(folder, one["model"], one["task"], one["title"], one["metric"],
                          percent(one["task"], one["median"]), one["subset"], one, f"data {_digest(data)}")  # fmt: skip
            # Tasks of one's own may share a name: the development data tell them apart.
            known = one["task"] in (*GLUE, SQUAD.name)
            dev = "" if known else str(sorted(part for split, part in one["data"].items() if split != "train"))
            key = (folder.name, one["model"]["weights"], one["task"] + dev)
            versions.setdefault(key, []).append(entry)
        for one in sorted(_of_pairs(folder), key=_pairs):
            title = ", ".join(word for word in ("Minimal pairs", names[id(one)], how(one)) if word)
            entry = Entry(folder, one["model"], title, title, "accuracy", 100 * one["score"],
                          one.get("subset", {}), None, f"{one['pairs']:,} pairs")  # fmt: skip
            key = (folder.name, _identity(one["model"]), title)
            if key not in found or _completeness(entry) >= _completeness(found[key]):
                found[key] = entry
    return [*map(_most_complete, versions.values()), *found.values()]


def without_seconds(found: Iterable[Entry]) -> list[str]:
    """The runs of whose checkpoints some result does not say when they were saved."""
    lacking = (entry for entry in found if entry.step is not None and entry.is_own and entry.seconds is None)
    names = ", ".join(dict.fromkeys(entry.folder.name for entry in lacking))
    return [f"Without some checkpoints of {names}: their results do not say pretraining_seconds."] if names else []


def _of_pairs(folder: RunFolder) -> list[dict[str, Any]]:
    return [one for one in folder.of("evaluation") if one["suite"] == "blimp"]


def _pairs(evaluation: Mapping[str, Any]) -> int:
    return int(evaluation["pairs"])


def _most_complete(versions: Sequence[Entry]) -> Entry:
    first, *others = sorted(versions, key=_completeness, reverse=True)
    return dataclasses.replace(first, others=tuple(others))


def averages(found: Sequence[Entry]) -> list[Entry]:
    """GLUE's average of each model that all eight tasks were tried on, with the marks of all of them."""
    by_model: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in found:
        if entry.task in GLUE and entry.summary is not None:
            by_model.setdefault((entry.folder.name, entry.model["weights"]), {})[entry.task] = entry
    made = []
    for tasks in by_model.values():
        average = glue_average({task: entry.shown for task, entry in tasks.items()})
        if average is not None:
            some = next(iter(tasks.values()))
            subset = {f"{entry.title} {split}": of for entry in tasks.values() for split, of in entry.subset.items()}
            failed = sum(entry.summary["degenerate"] for entry in tasks.values() if entry.summary)
            data = f"data {_digest(' '.join(tasks[task].data for task in GLUE))}"
            made.append(Entry(some.folder, some.model, AVERAGE, "GLUE average", "mean of eight tasks", average, subset,
                              {"degenerate": failed}, data))  # fmt: skip
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _identity(model: Mapping[str, Any]) -> str:
    return f"{model['run']}, step {model.get('step')}" if model.get("run") else str(model.get("folder"))


def _completeness(entry: Entry) -> tuple[bool, int]:
    return not entry.subset, entry.summary["runs"] if entry.summary else 0


def task_title(task: str) -> str:
    """A task as a column or a sentence names it; other tasks than GLUE's and SQuAD are called as they are."""
    titles = {**{name: one.title for name, one in GLUE.items()}, SQUAD.name: SQUAD.title}
    return titles.get(task, task).removesuffix("-(m/mm)")


def how(evaluation: Mapping[str, Any]) -> str:
    """In what an evaluation departs from the usual."""
    return "whole words" if evaluation.get("options", {}).get("whole_words") else ""


def labels(found: Sequence[tuple[RunFolder, Mapping[str, Any]]]) -> dict[int, str]:
    """A name for each result, by its ``id``: the folder's, with the step where the folder has several; a model that is
    not the folder's run is named itself."""
    models = {id(result): result["model"] for _, result in found}
    names = _named([(id(result), folder, result["model"]) for folder, result in found])
    return _told_apart(names, models, {key: _identity(model) for key, model in models.items()})


def _named(found: Sequence[tuple[int, RunFolder, Mapping[str, Any]]]) -> dict[int, str]:
    """Names of models by their keys, with the step where one name stands for several steps."""
    names = {key: owner(folder, model) for key, folder, model in found}
    steps: dict[str, set[int]] = {}
    for key, _, model in found:
        steps.setdefault(names[key], set()).update({model["step"]} if model.get("step") is not None else ())
    return {key: f"{names[key]}, step {model['step']:,}"
            if model.get("step") is not None and len(steps[names[key]]) > 1 else names[key]
            for key, _, model in found}  # fmt: skip


def owner(folder: RunFolder, model: Mapping[str, Any]) -> str:
    """The name of the run, or of the guest, whose model it is."""
    own = called(model)
    is_folder_s = is_own(folder, {"model": model}) or own in ("", folder.path.name)
    return folder.name if is_folder_s else own


def _told_apart(names: Mapping[int, str], models: Mapping[int, Mapping[str, Any]],
                identities: Mapping[int, str]) -> dict[int, str]:  # fmt: skip
    """Names of results by their ``id``: where models of several identities share one, those of no run are called by
    their folder as it was given, and what then still shares a name by its identity too."""
    found = dict(names)
    for name in set(names.values()):
        keys = [key for key, own in names.items() if own == name]
        if len({identities[key] for key in keys}) == 1:
            continue
        called = {key: name if models[key].get("run") else str(models[key].get("folder") or name) for key in keys}
        for key, own in called.items():
            sharing = {identities[other] for other in keys if called[other] == own}
            found[key] = own if len(sharing) == 1 else f"{own} ({identities[key]})"
    return found


def _models(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by the name of their model, checkpoints in the order of their steps."""
    grouped: dict[str, list[Entry]] = {}
    models = {id(entry): entry.model for entry in found}
    names = _named([(id(entry), entry.folder, entry.model) for entry in found])
    names = _told_apart(names, models, {key: model["weights"] for key, model in models.items()})
    for entry in sorted(found, key=lambda entry: (entry.step or 0, _place(entry.task))):
        grouped.setdefault(names[id(entry)], []).append(entry)
    order = list(dict.fromkeys(entry.folder.name for entry in found))
    return dict(sorted(grouped.items(), key=lambda item: order.index(item[1][0].folder.name)))


def _place(task: str) -> int:
    return [*GLUE, SQUAD.name, task].index(task)


def glue_table(every: Sequence[Entry]) -> Table | None:
    """Table 1 of MAE-LM with our models in it, and the paper's own base rows below; None without GLUE and SQuAD."""
    models = _models([entry for entry in every if entry.task in (*GLUE, SQUAD.name) and entry.is_finetuned])
    tasks = {entry.task for found in models.values() for entry in found}
    if not tasks:
        return None
    columns = [name for name in GLUE if name in tasks]
    has_average = any({entry.task for entry in found} >= GLUE.keys() for found in models.values())
    columns += ["AVG"] if has_average else []
    columns += list(SQUAD_COLUMNS) if SQUAD.name in tasks else []
    rows: list[tuple[Value, ...]] = []
    for name, found in models.items():
        by_task = {entry.task: entry for entry in found}
        seeds = sorted({len(entry.summary["seeds"]) for entry in found if entry.summary})
        cells = [_cell(column, by_task) for column in columns]
        rows.append((name, *cells, "–".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))))
    rows += [(name, *(numbers[column] for column in columns), "5") for name, numbers in TABLE_1.items()]
    marked = {entry.task for found in models.values() for entry in found if entry.subset}
    heads = [_head(column, bool(marked & GLUE.keys()) if column == "AVG" else _task(column) in marked)
             for column in columns]  # fmt: skip
    return Table("GLUE and SQuAD 2.0", ("model", *heads, "seeds"), tuple(rows), _note(models))


def _task(column: str) -> str:
    return SQUAD.name if column in SQUAD_COLUMNS else column


def _head(column: str, is_marked: bool) -> str:
    title = GLUE[column].title if column in GLUE else f"SQuAD 2.0 {column}" if column in SQUAD_COLUMNS else column
    return f"{title} {SUBSET}" if is_marked else title


def _cell(column: str, by_task: Mapping[str, Entry]) -> str | None:
    if column == "AVG":
        average = glue_average({name: entry.shown for name, entry in by_task.items()})
        marks = "".join(dict.fromkeys(mark for name in GLUE if name in by_task for mark in by_task[name].marks))
        return None if average is None else " ".join(filter(None, (f"{average:.1f}", marks)))
    entry = by_task.get(_task(column))
    if entry is None or entry.summary is None:
        return None
    scores, first = entry.summary["scores"], next(iter(entry.summary["scores"].values()))
    if column in SQUAD_COLUMNS:
        number = f"{first[SQUAD_COLUMNS[column]]:.1f}"
    else:
        number = "/".join(shown(entry.task, split[entry.metric]) for split in scores.values())
    spread = _spread(entry) if column != "EM" else ""
    return " ".join(filter(None, (number, spread, "".join(entry.marks))))


def _spread(entry: Entry) -> str:
    if entry.summary is None or len(entry.summary["seeds"]) < 2:
        return ""
    return "..".join(shown(entry.task, entry.summary["spread"][end]) for end in ("min", "max")).join("[]")


def _note(models: Mapping[str, Sequence[Entry]]) -> str:
    found = [entry for ours in models.values() for entry in ours]
    parts = [READ_SO]
    if part := subsets(f"{entry.title} {split} {of}" for entry in found for split, of in entry.subset.items()):
        parts.append(part)
    failed = [f"{name} on {entry.title} ({_failed(entry.summary)})" for name, ours in models.items() for entry in ours
              if entry.summary and entry.summary["degenerate"]]  # fmt: skip
    if failed:
        parts.append(f"{DEGENERATE} Degenerate: {', '.join(failed)}.")
    return " ".join(parts)


def _failed(summary: Mapping[str, Any]) -> str:
    """How many of the seeds, and why where the results say so."""
    seeds = f"{summary['degenerate']} of {len(summary['seeds'])} seeds"
    return ": ".join(filter(None, [seeds, "; ".join(summary["degenerate_because"])]))


def tasks_table(every: Sequence[Entry]) -> Table | None:
    """Each model and task: every seed at the best setting, which that is, and what one answer to all would score."""
    columns = ("model", "task", "metric", "median", "lowest", "highest", "seeds", "majority", "degenerate",
               "best setting", "settings tried", "fine-tunings", "subset")  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    tried = [version for entry in every if entry.is_finetuned for version in (entry, *entry.others)]
    several = {id(version) for entry in tried if entry.others for version in (entry, *entry.others)}
    for name, found in _models(tried).items():
        for entry, one in ((entry, entry.summary) for entry in found if entry.summary):
            title = f"{entry.title}, {entry.data}" if id(entry) in several else entry.title
            subset = ", ".join(f"{split} {of}" for split, of in entry.subset.items())
            majority = one["majority"][next(iter(one["scores"]))][entry.metric]
            rows.append((
                name, title, entry.metric, *(shown(entry.task, value) for value in (
                    one["median"], one["spread"]["min"], one["spread"]["max"])),
                " ".join(shown(entry.task, score) for score in one["seeds"].values()),
                shown(entry.task, majority),
                f"{one['degenerate']} of {len(one['seeds'])} {DEGENERATE}" if one["degenerate"] else None,
                said(one["settings"]), one["points"], one["runs"],
                f"{SUBSET} {subset}" if subset else None,
            ))  # fmt: skip
    note = "The best setting is chosen on the development set that is reported, as in the paper."
    note += f" {majority_said(entry.summary for entry in tried if entry.summary)}".rstrip()
    if several:
        note += (" Of a task that was tried on several versions of its data the first row, of the most complete one or "
                 "else of the most fine-tunings, is what stands elsewhere on this page.")  # fmt: skip
    return Table("Fine-tuning, task by task", columns, tuple(rows), note) if rows else None

"""What a downstream task is, as data: its columns, its labels, its metrics, its official size, its place in Table 1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from latemask.errors import Refusal

Kind = Literal["classification", "regression", "tokens", "similarity", "span"]
"""A class or a number for a text or a pair; a class for each word; a number for a pair by the cosine of two vectors;
the place of an answer in a paragraph."""
CLASS, MEAN = "the training data's commonest class", "the training data's mean"
ALWAYS: Mapping[Kind, str] = {
    "classification": CLASS, "tokens": CLASS, "regression": MEAN, "similarity": MEAN, "span": "nothing",
}  # fmt: skip
"""The one answer to everything whose score stands as majority beside a task's."""
NO_LABEL = -100
"""Label of a token that does not count."""


@dataclass(frozen=True)
class Task:
    """A task, whatever its data come from. Splits are ``train`` and one or more development sets."""

    name: str
    kind: Kind
    texts: tuple[str, ...]
    """Columns of the one or two texts."""
    label: str
    """Column of the label."""
    metrics: tuple[str, ...]
    """Names in ``metrics.METRICS``; the first is the task's score."""
    title: str = ""
    """Column of Table 1."""
    files: Mapping[str, str] = field(default_factory=dict)
    """File of each split, inside the task's folder."""
    folder: str = ""
    """Folder of the task inside GLUE's."""
    header: tuple[str, ...] | None = None
    """The columns of files without a header row; None: the first line names them."""
    labels: tuple[str, ...] = ()
    """Class names in the order of their numbers; (): those of the training file, sorted."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Class name of each other spelling that files use."""
    official_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of each split as published."""
    hub: tuple[str, str] | None = None
    """Name and configuration of the public hub data set."""
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    """Name that the hub gives each split."""
    hub_columns: Mapping[str, str] = field(default_factory=dict)
    """Name that the hub gives each column, where it differs."""

    @property
    def dev_splits(self) -> tuple[str, ...]:
        return tuple(split for split in self.files if split != "train")

    def subset(self, rows: Mapping[str, int]) -> dict[str, str]:
        """The splits whose rows are fewer than the official ones: ``{"train": "10,293 of 104,743"}``.

        A score that rests on them never stands beside Table 1 without this mark.
        """
        return {
            split: f"{rows[split]:,} of {official:,}"
            for split, official in self.official_rows.items()
            if split in rows and rows[split] < official
        }


_DEV = {"train": "train.tsv", "dev": "dev.tsv"}
_HUB_DEV = {"train": "train", "dev": "validation"}


def _glue(name: str, folder: str, title: str, texts: tuple[str, ...], rows: tuple[int, int], **rest: object) -> Task:
    facts: dict[str, object] = {
        "kind": "classification", "label": "label", "metrics": ("accuracy",), "files": _DEV,
        "hub": ("nyu-mll/glue", name), "hub_splits": _HUB_DEV,
        "official_rows": dict(zip(("train", "dev"), rows, strict=True)),
    }  # fmt: skip
    return Task(name=name, folder=folder, title=title, texts=texts, **(facts | rest))  # type: ignore[arg-type]


GLUE: dict[str, Task] = {
    task.name: task
    for task in (
        _glue(
            "mnli", "MNLI", "MNLI-(m/mm)", ("sentence1", "sentence2"), (392_702, 9_815),
            label="gold_label", labels=("entailment", "neutral", "contradiction"),
            files={"train": "train.tsv", "matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
            official_rows={"train": 392_702, "matched": 9_815, "mismatched": 9_832},
            hub_splits={"train": "train", "matched": "validation_matched", "mismatched": "validation_mismatched"},
            hub_columns={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
        ),
        _glue(
            "qqp", "QQP", "QQP", ("question1", "question2"), (363_846, 40_430), label="is_duplicate",
            metrics=("accuracy", "f1"), labels=("not_duplicate", "duplicate"),
            spellings={"0": "not_duplicate", "1": "duplicate"}, hub_columns={"is_duplicate": "label"},
        ),
        _glue(
            "qnli", "QNLI", "QNLI", ("question", "sentence"), (104_743, 5_463), labels=("entailment", "not_entailment"),
        ),
        _glue(
            "sst2", "SST-2", "SST-2", ("sentence",), (67_349, 872), labels=("negative", "positive"),
            spellings={"0": "negative", "1": "positive"},
        ),
        _glue(
            "cola", "CoLA", "CoLA", ("sentence",), (8_551, 1_043), metrics=("matthews", "accuracy"),
            header=("source", "label", "notation", "sentence"), labels=("unacceptable", "acceptable"),
            spellings={"0": "unacceptable", "1": "acceptable"},
        ),
        _glue("rte", "RTE", "RTE", ("sentence1", "sentence2"), (2_490, 277), labels=("entailment", "not_entailment")),
        _glue(
            "mrpc", "MRPC", "MRPC", ("#1 String", "#2 String"), (3_668, 408), label="Quality",
            metrics=("accuracy", "f1"), labels=("not_equivalent", "equivalent"),
            spellings={"0": "not_equivalent", "1": "equivalent"},
            hub_columns={"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
        ),
        _glue(
            "stsb", "STS-B", "STS-B", ("sentence1", "sentence2"), (5_749, 1_500), kind="regression", label="score",
            metrics=("spearman", "pearson"), hub_columns={"score": "label"},
        ),
    )
}  # fmt: skip
"""The eight tasks in the order of Table 1's columns; its average is over their scores, MNLI by its matched set."""

SQUAD = Task("squad2", "span", ("question", "context"), "answers", ("f1", "exact"), title="SQuAD 2.0",
             files={"train": "train-v2.0.json", "dev": "dev-v2.0.json"},
             official_rows={"train": 130_319, "dev": 11_873})  # fmt: skip


def percent(task: str, score: float) -> float:
    """A score of a task times 100, as in Table 1; SQuAD's are percent from the start."""
    return score if task == SQUAD.name else 100 * score


def shown(task: str, score: float) -> str:
    """The same as people read it."""
    return f"{percent(task, score):.1f}"


def glue_average(scores: Mapping[str, float]) -> float | None:
    """The AVG column of Table 1: the mean of the eight tasks' scores (MNLI: matched); None where one is missing."""
    return sum(scores[name] for name in GLUE) / len(GLUE) if GLUE.keys() <= scores.keys() else None


CLASSES, NUMBERS = ("accuracy", "macro_f1", "f1", "matthews"), ("spearman", "pearson")
FITTING: dict[Kind, tuple[str, ...]] = {
    "classification": CLASSES, "regression": NUMBERS, "similarity": NUMBERS,
    "tokens": ("accuracy", "span_f1", "macro_f1", "matthews"),
}  # fmt: skip
"""Metrics of each kind of task of one's own; the first two where none are named."""


def own_task(
    kind: Kind, texts: Sequence[str], label: str, train: str, dev: str, name: str = "own", metrics: Sequence[str] = ()
) -> Task:
    """A task of the user's own: ``texts`` and ``label`` name columns of the files ``train`` and ``dev``.

    Raises ``Refusal`` where columns or metrics do not fit the kind, and for a name that is no plain one or another
    task's.
    """
    by_kind = {"classification": (1, 2), "regression": (1, 2), "tokens": (1,), "similarity": (2,)}
    if kind not in by_kind:
        raise Refusal("--kind", repr(kind), " or ".join(by_kind))
    if len(texts) not in by_kind[kind]:
        raise Refusal("--texts", f"{len(texts)} columns", f"{' or '.join(map(str, by_kind[kind]))} for {kind}")
    if not label:
        raise Refusal("--label", "nothing", "the column of the label")
    if label in texts or len(set(texts)) < len(texts):
        raise Refusal("--texts", f"{', '.join([*texts, label])}", "different columns for texts and label")
    if wrong := [metric for metric in metrics if metric not in FITTING[kind]]:
        raise Refusal("--metrics", wrong[0], f"{', '.join(FITTING[kind])} for {kind}")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name in (*GLUE, SQUAD.name, "glue"):
        raise Refusal("--name", repr(name), "letters, digits, _ . and -, and not the name of another task")
    return Task(name, kind, tuple(texts), label, tuple(metrics) or FITTING[kind][:2], title=name,
                files={"train": train, "dev": dev})  # fmt: skip

"""Examples of a task: texts and labels as numbers, with what was refused on the way and why.

Labels become numbers here: a class its place in the task's order, saved with every result and model, so that the order
of classes in a file, or of another source, changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from latemask.downstream.rows import Table
from latemask.downstream.tasks import Task
from latemask.errors import Refusal, kind_of


@dataclass
class Examples:
    """One split of a task."""

    split: str
    source: str
    """File or hub data set it was read from."""
    texts: list[tuple[Any, ...]]
    """One or two texts an example; for kind ``tokens`` a list of words."""
    labels: list[Any]
    """Class number, real number, or (kind ``tokens``) a class number for each word."""
    physical_rows: int
    """Rows of the file: read + refused."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """(line, reason)."""

    def __len__(self) -> int:
        return len(self.texts)

    def fingerprint(self) -> str:
        """SHA-256 of texts and labels in their order, 16 hex digits."""
        digest = hashlib.sha256()
        for texts, label in zip(self.texts, self.labels, strict=True):
            digest.update(json.dumps([texts, label], ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()[:16]

    def hashes(self) -> list[int]:
        """A number for each example, the same in this process for the same texts and label."""
        return [hash(repr(example)) for example in zip(self.texts, self.labels, strict=True)]

    def summary(self) -> dict[str, Any]:
        """What a result says of its data."""
        return {"source": self.source, "rows": self.physical_rows, "read": len(self), "refused": len(self.refused),
                "first_refusals": [f"line {line}: {reason}" for line, reason in self.refused[:3]],
                "fingerprint": self.fingerprint()}  # fmt: skip

    def first(self, most: int | None) -> Examples:
        """The first ``most`` examples (None: all)."""
        if most is None or most >= len(self):
            return self
        return dataclasses.replace(
            self, texts=self.texts[:most], labels=self.labels[:most], physical_rows=most, refused=[]
        )


def numbered(task: Task, tables: dict[str, Table]) -> tuple[Task, dict[str, Examples]]:
    """Tables of each split as examples, and the task with its class names.

    A row whose label is empty, or not a class or number of the task, is refused with its line. Where the task has no
    class names of its own they are those of the training table, sorted, and a development label that training lacks is
    a ``Refusal``, as are a split without any usable row, and F1 (of the second class) asked of three classes.
    """
    closed = bool(task.labels) or task.kind in ("regression", "similarity")
    if not closed:
        task = dataclasses.replace(task, labels=_class_names(task, tables["train"]))
        if len(task.labels) < 2:
            found = f"one class, {task.labels[0]!r}" if task.labels else "no label"
            raise Refusal(tables["train"].path, f"{found} in column {task.label!r}", "two classes or more")
    if "f1" in task.metrics and len(task.labels) != 2:
        raise Refusal("--metrics", f"f1, of {len(task.labels)} classes", "macro_f1, for more than two")
    return task, {split: _examples(task, split, table, closed) for split, table in tables.items()}


def _class_names(task: Task, table: Table) -> tuple[str, ...]:
    names: set[str] = set()
    for value in table.columns[task.label]:
        if task.kind == "tokens":
            names.update(_words(value))
        else:
            names.add(_text(value))
    return tuple(sorted(names - {""}, key=_whole_numbers_first))


def _whole_numbers_first(name: str) -> tuple[bool, int, str]:
    is_whole = re.fullmatch(r"-?[0-9]{1,18}", name) is not None
    return not is_whole, int(name) if is_whole else 0, name


def _text(value: Any) -> str:
    """A label as text, JSON's numbers and booleans included; "" for what names no class: a list, an object, NaN."""
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value) if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else ""


def _words(value: Any) -> list[str]:
    return (
        value.split() if isinstance(value, str) else [_text(item) for item in value] if isinstance(value, list) else []
    )


def _examples(task: Task, split: str, table: Table, closed: bool) -> Examples:
    number_of = {name: number for number, name in enumerate(task.labels)}
    number_of |= {spelling: number_of[name] for spelling, name in task.spellings.items()}
    result = Examples(split, str(table.path), [], [], table.physical_rows, list(table.refused))
    for place, line in enumerate(table.lines):
        texts = tuple(table.columns[name][place] for name in task.texts)
        label: Any = table.columns[task.label][place]
        try:
            texts, label = _read(task, texts, label, number_of)
        except _UnknownClass as error:
            if not closed:
                raise Refusal(f"{table.path}:{line}", f"label {error.args[0]!r}, unseen in training",
                              f"one of {', '.join(task.labels)}") from None  # fmt: skip
            result.refused.append((line, f"label {error.args[0]!r}"))
        except ValueError as error:
            result.refused.append((line, str(error)))
        else:
            result.texts.append(texts)
            result.labels.append(label)
    result.refused.sort()
    if not result.texts:
        line, reason = result.refused[0]
        raise Refusal(f"{table.path}:{line}", f"no usable row; this one has {reason}",
                      f"labels {', '.join(task.labels) or 'that are numbers'} in column {task.label!r}")  # fmt: skip
    return result


class _UnknownClass(ValueError):
    pass


def _read(task: Task, texts: Sequence[Any], label: Any, number_of: dict[str, int]) -> tuple[tuple[Any, ...], Any]:
    if task.kind == "tokens":
        words, names = _words(texts[0]), _words(label)
        if len(words) != len(names) or not words:
            raise ValueError(f"{len(words)} words and {len(names)} labels")
        if not all(names):
            raise ValueError("a word's label that is no class")
        return (words,), [_number(name, number_of) for name in names]
    for name, text in zip(task.texts, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"{kind_of(text)} in column {name!r}, not a text")
    if isinstance(label, str) and not label.strip():
        raise ValueError("no label")
    if task.kind == "classification":
        if not _text(label):
            raise ValueError(f"label {json.dumps(label, default=str)[:60]}, not a class")
        return tuple(texts), _number(_text(label), number_of)
    try:
        number = float(label)
    except (TypeError, ValueError):
        raise ValueError(f"label {label!r}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"label {label!r}, not a finite number")
    return tuple(texts), number


def _number(name: str, number_of: dict[str, int]) -> int:
    if name not in number_of:
        raise _UnknownClass(name)
    return number_of[name]

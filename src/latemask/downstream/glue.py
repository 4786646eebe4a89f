"""Reads a task's splits: GLUE's original TSV folders, files of the user's own, or a hub data set asked for by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latemask.downstream.examples import Examples, numbered
from latemask.downstream.rows import Table, read_table
from latemask.downstream.tasks import Task
from latemask.errors import Refusal

HUB = "hub:"
"""Data given as ``hub:NAME`` or ``hub:NAME/CONFIGURATION`` (``hub:`` alone: the task's own) come from the hub."""
HUB_SPLITS = {"train": "train", "dev": "validation"}
"""What the hub calls the splits of a task that does not say."""


def read_task(task: Task, data: str | Path) -> tuple[Task, dict[str, Examples]]:
    """The splits of ``task`` under ``data``: GLUE's folder, the task's own folder, or ``hub:...``.

    Returns the task with its class names, and the examples of each split. Raises ``Refusal`` naming what is missing.
    """
    if str(data).startswith(HUB):
        return numbered(*_from_hub(task, str(data).removeprefix(HUB)))
    return numbered(task, _tables(task, Path(data)))


def _tables(task: Task, folder: Path) -> dict[str, Table]:
    return {split: read_table(path, [*task.texts, task.label], task.header)
            for split, path in paths_of(task, folder).items()}  # fmt: skip


def paths_of(task: Task, folder: Path) -> dict[str, Path]:
    """The file of each split, in the task's folder or the one above it. Raises ``Refusal`` naming what is missing."""
    if task.folder and (folder / task.folder).is_dir():
        folder = folder / task.folder
    paths = {}
    for split, name in task.files.items():
        path = folder / name if folder.is_dir() else Path(name)
        if not path.is_file():
            if not folder.is_dir():
                raise Refusal(folder, "no such folder", f"the folder of {task.name} or the one above it")
            raise Refusal(path, "no such file", f"{split} of {task.name}, as {task.folder or '.'}/{name}",
                          "--data names the folder of the task or the one above it")  # fmt: skip
        paths[split] = path
    return paths


def read_development(task: Task, data: str | Path, dev: str = "") -> dict[str, Table]:
    """The development splits of ``task`` alone, as tables; ``dev`` names the file where it is another, or ``data`` is
    that file itself.

    Raises ``Refusal`` naming what is missing.
    """
    folder = Path(data)
    if not dev and folder.is_file():
        folder, dev = folder.parent, folder.name
    files = {"dev": dev} if dev else {split: name for split, name in task.files.items() if name and split != "train"}
    if not files:
        raise Refusal("--dev", "nothing", f"the development file, for {task.name} has no file names of its own")
    return _tables(dataclasses.replace(task, files=files), folder)


def _from_hub(task: Task, name: str) -> tuple[Task, dict[str, Table]]:
    try:
        from datasets import ClassLabel, load_dataset
    except ImportError:
        raise Refusal("--data", "a hub data set, without the library for it", "pip install datasets") from None
    if not name and task.hub is None:
        raise Refusal("--data", "hub: without a name", "hub:NAME or hub:NAME/CONFIGURATION")
    place = _hub_name(name) if name or task.hub is None else task.hub
    given = HUB + "/".join(filter(None, place))
    try:
        loaded: Any = load_dataset(*place)
    except (OSError, ValueError, FileNotFoundError) as error:
        raise Refusal(
            f"--data {given}",
            " ".join(str(error).split())[:200],
            "a data set the hub has",
            "Without a network: files of your own, or a folder that holds the data set",
        ) from None
    columns = {own: task.hub_columns.get(own, own) for own in (*task.texts, task.label)}
    splits = task.hub_splits or HUB_SPLITS
    tables = {}
    for split, theirs in splits.items():
        if theirs not in loaded:
            raise Refusal(given, f"splits {', '.join(loaded)}", f"a split {theirs!r}")
        rows = loaded[theirs]
        for own, column in columns.items():
            if column not in rows.column_names and own not in rows.column_names:
                raise Refusal(given, f"columns {', '.join(rows.column_names)}", f"a column {column!r}")
        values = {own: rows[column if column in rows.column_names else own][:] for own, column in columns.items()}
        feature = rows.features[columns[task.label] if columns[task.label] in rows.column_names else task.label]
        classes = getattr(feature, "feature", feature)  # of a list's items
        if isinstance(classes, ClassLabel):
            values[task.label] = [_named(label, classes.names) for label in values[task.label]]
        tables[split] = Table(Path(f"{given}:{theirs}"), values, lines=list(range(1, len(rows) + 1)))
    if not task.files:
        task = dataclasses.replace(task, files=dict(splits))
    return task, tables


def _named(label: Any, names: Sequence[str]) -> Any:
    """A class number (or a list of them) as the hub's names; "" where there is no label."""
    if isinstance(label, list):
        return [_named(item, names) for item in label]
    return names[label] if label is not None and label >= 0 else ""


def _hub_name(name: str) -> tuple[str, str | None]:
    """``owner/name/configuration`` or ``owner/name`` or a folder, as ``load_dataset`` takes them."""
    if Path(name).exists():
        return name, None
    parts = name.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]) or None

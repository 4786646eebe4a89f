"""A task's data as they are read, before a tokenizer has seen them. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from latemask.downstream.examples import Examples
from latemask.downstream.glue import paths_of, read_task
from latemask.downstream.options import FinetuneOptions
from latemask.downstream.squad import Squad, read_squad, refuse_shared
from latemask.downstream.tasks import Task


class TextData(NamedTuple):
    """Of a task of texts: the task with its class names, and the examples of each split."""

    task: Task
    examples: dict[str, Examples]


class SquadData(NamedTuple):
    """SQuAD's two files."""

    train: Squad
    dev: Squad


Data = TextData | SquadData


def read_data(task: Task, options: FinetuneOptions) -> Data:
    """The data of ``task`` as the options name them. Raises ``Refusal`` naming what is missing or wrong."""
    if task.kind != "span":
        return TextData(*read_task(task, options.data))
    data = SquadData(*map(read_squad, paths_of(task, Path(options.data)).values()))
    refuse_shared(*data)
    return data

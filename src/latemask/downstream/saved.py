"""What a saved fine-tuned model says of itself, read without torch: its task, its class names, the result it had."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from latemask.downstream.tasks import GLUE, Kind, Task
from latemask.errors import Refusal, kind_of, unreadable
from latemask.fields import typed

HEAD, FACTS = "head.safetensors", "finetuned.json"
A_SAVED_MODEL = "a model saved by `latemask finetune --save`"


@dataclasses.dataclass(frozen=True)
class _Held:
    """Of a task, what is saved with the model."""

    name: str
    kind: Kind
    texts: tuple[str, ...]
    label: str
    metrics: tuple[str, ...]


def read_facts(folder: Path | str) -> dict[str, Any]:
    """What ``finetuned.json`` says. Raises ``Refusal`` where it, or the head, is missing, and naming a field that is
    missing or ill-typed."""
    folder, where = Path(folder), str(Path(folder) / FACTS)
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refusal(folder, f"no {FACTS}", A_SAVED_MODEL) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(where, unreadable(error), A_SAVED_MODEL) from None
    if not (folder / HEAD).is_file():
        raise Refusal(folder, f"no {HEAD}", A_SAVED_MODEL)
    if not isinstance(facts, dict):
        raise Refusal(where, kind_of(facts), "a JSON object")
    for name in ("task", "labels", "centre", "spread"):
        if name not in facts:
            raise Refusal(f"{where}: {name}", "nothing", "this field")
    typed(_Held, facts["task"], f"{where}: task")
    typed(tuple[str, ...], facts["labels"], f"{where}: labels")
    for name in ("centre", "spread"):
        typed(float, facts[name], f"{where}: {name}")
    return facts


def task_of(facts: dict[str, Any]) -> Task:
    """The task of a saved model, with the class names that it was trained with, in their order."""
    held, labels = facts["task"], tuple(facts["labels"])
    if held["name"] in GLUE:
        return dataclasses.replace(GLUE[held["name"]], labels=labels)
    return Task(held["name"], held["kind"], tuple(held["texts"]), held["label"], tuple(held["metrics"]), labels=labels)

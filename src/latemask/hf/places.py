"""Where a model may be: what can be said of a folder or name before anything is loaded. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from latemask.errors import Refusal, kind_of, unreadable

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONFIG = "config.json"
OBJECTS = (CONFIG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files of a Hugging Face model that hold a JSON object each."""
SOURCES = "a run folder, a step folder, a folder with config.json, or the name of a Hugging Face model"


def refuse_no_place(model: Path | str) -> None:
    """Raise ``Refusal`` for what is no folder, nor can be the name of a Hugging Face model."""
    path = Path(model)
    if path.is_dir():
        return
    parent_is_here = len(path.parts) > 1 and path.parent.exists()
    if path.exists() or parent_is_here or not HUB_NAME.fullmatch(str(model)):
        raise Refusal(model, "a file" if path.exists() else "no such folder", SOURCES)


def of_no_run(model: Path | str) -> str:
    """What was found where a run or one of its steps was wanted."""
    return "a Hugging Face model" if Path(model).exists() else "no such folder"


def check_json(folder: Path) -> None:
    """Raise ``Refusal`` naming the first of a model's JSON files that is none."""
    for path in (folder / name for name in OBJECTS):
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise Refusal(path, unreadable(error), "a JSON object") from None
        if not isinstance(found, dict):
            raise Refusal(path, kind_of(found), "a JSON object")

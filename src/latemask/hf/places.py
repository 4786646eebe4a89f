"""Where a model may be: what can be said of a folder or name before anything is loaded. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from latemask.errors import Refusal

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONFIG = "config.json"
SOURCES = "a run folder, a step folder, a folder with config.json, or the name of a Hugging Face model"


def refuse_no_place(model: Path | str) -> None:
    """Raise ``Refusal`` for what is no folder, nor can be the name of a Hugging Face model."""
    path = Path(model)
    if path.is_dir():
        return
    parent_is_here = len(path.parts) > 1 and path.parent.exists()
    if path.exists() or parent_is_here or not HUB_NAME.fullmatch(str(model)):
        raise Refusal(model, "a file" if path.exists() else "no such folder", SOURCES)

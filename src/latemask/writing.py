"""A file appears whole under its name, or not at all: written aside, synced, renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

ESCAPED = "backslashreplace"
"""How JSON becomes bytes: the lone surrogates of a file name that is not UTF-8 become JSON's own escapes."""


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write ``content`` (text as UTF-8) to ``path``, whose folder is made where it is missing, and return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write ``value`` as indented JSON; numbers that are not finite are an error (``ValueError``)."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    return write_whole(path, text.encode(errors=ESCAPED))

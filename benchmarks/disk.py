"""Folders that a measurement writes in: emptied before it, and what they take on disk meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

from latemask.errors import Refusal

MARK = ".benchmark"
"""An empty file in a folder that may be emptied."""


def emptied(folder: Path) -> Path:
    """``folder``, made or emptied. Raises ``Refusal`` where it holds what no measurement wrote."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise Refusal(folder, f"other things (no {MARK})", "a new or empty folder, or one that a measurement left")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    return folder


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``; what vanishes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total

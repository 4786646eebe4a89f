"""What a folder takes on disk while something writes in it."""

from __future__ import annotations

from pathlib import Path


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below ``folder``; what vanishes meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total

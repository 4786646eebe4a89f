"""Output appears whole under its name, or not at all: written aside, synced, renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latemask.errors import Refusal


def check_free(out: Path, overwrite: bool, mark: str) -> None:
    """Raise ``Refusal`` where ``out`` may not be written: something is there, and it is not a folder with ``mark`` that
    ``overwrite`` gives up."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    if not overwrite:
        raise Refusal(out, "something already there", "a new or empty folder", "Take another --out, or --overwrite")
    if not (out / mark).is_file():
        raise Refusal(out, f"other things (no {mark})", "a folder that may be overwritten")


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A temporary folder next to ``out`` that takes its name when all went well, and else disappears."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o755)
        _sync(aside)
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent)) / "old"
        if out.exists():
            os.rename(out, old)
        os.rename(aside, out)
        _sync(out.parent)
        shutil.rmtree(old.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Processes that a measurement starts: how one that still runs is ended, and what it said last."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path


def ended(process: subprocess.Popen[bytes], patience_seconds: float, kill: Callable[[], None] | None = None) -> int:
    """The exit status; one that still runs is told to stop, and after ``patience_seconds`` killed, by ``kill`` where
    killing the process alone is not enough."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            (kill or process.kill)()
    return process.wait()


def said(log: Path) -> str:
    """What a process wrote, whatever the bytes."""
    return log.read_text(encoding="utf-8", errors="replace")

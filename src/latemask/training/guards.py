"""What guards a run folder: one process group at a time, signals answered at a step's end, a full disk named."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latemask.errors import Refusal
from latemask.training.distributed import World


@contextmanager
def signals() -> Iterator[list[int]]:
    """SIGTERM and the first Ctrl-C are noted, to be answered at the next step; a second Ctrl-C interrupts."""
    heard: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        heard.append(number)

    try:
        before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # Not the main thread: signals are the caller's.
        yield heard
        return
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(out: Path, world: World) -> Iterator[None]:
    """One run a folder: rank 0 holds a lock on it while it runs."""
    if not world.leads:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(out, "another process that is training in it", "a folder of its own for each run") from None
        yield


@contextmanager
def disk_full_is_refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder.parent).free / 1e9
        raise Refusal(
            folder, f"{os.strerror(error.errno or 0)}, {free:.1f} GB free", "room for a checkpoint"
        ) from error

"""What guards a run folder: one process group at a time, signals answered before the next pass."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latemask.training.distributed import World
from latemask.writing import alone_at, make_folder

STOPPING = "stopping after the pass that runs now, then saving"


@contextmanager
def signals(world: World) -> Iterator[list[int]]:
    """SIGTERM and the first Ctrl-C are noted, to be answered before the next pass, and rank 0 says so at once; a second
    Ctrl-C interrupts."""
    heard: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not heard and world.leads:
            again = " (again: stop now, without saving)" if number == signal.SIGINT else ""
            name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            with contextlib.suppress(OSError):  # past Python's buffers, which the signal may have come into
                os.write(2, f"\n{name}: {STOPPING}{again}\n".encode())
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
    """One run a folder: rank 0 holds a lock on it while it runs, and leaves no lock behind; nor, where nothing was
    written, a folder. Raises ``Refusal`` where another process holds it."""
    if not world.leads:
        yield
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        make_folder(out)
        with alone_at(out, out / ".lock", "training in it"):
            yield
    finally:
        with contextlib.suppress(OSError):  # where it holds something now
            for folder in made:
                folder.rmdir()

"""What guards a run folder: one process group at a time, signals answered at a step's end; a full disk and too
large a model named."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from latemask.config import Run
from latemask.counts import parameters
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
    """One run a folder: rank 0 holds a lock on it while it runs. Raises ``Refusal`` where another does."""
    if not world.leads:
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("ab+", buffering=0)
    except OSError as error:
        raise Refusal(out, f"a path that cannot be written ({error.strerror})", "a folder to write into") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            found = f"another process that is training in it ({file.read().decode()})"
            raise Refusal(out, found, "a folder of its own for each run") from None
        with disk_full_is_refused(out / ".lock"):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def refuse_beyond_memory(run: Run) -> None:
    """Raise ``Refusal`` where not even the weights in fp32 fit this machine's memory, before anything is built."""
    numbers, room = parameters(run).total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * numbers > room:
        size = f"{numbers:.3g} parameters of {run.recipe}, {4 * numbers / 1e9:.3g} GB"
        raise Refusal("shape, decoder", size, f"at most this machine's memory, {room / 1e9:,.0f} GB")


@contextmanager
def disk_full_is_refused(path: Path) -> Iterator[None]:
    """An error of the disk while ``path`` is written, as a ``Refusal``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        free = f", {shutil.disk_usage(path.parent).free / 1e6:,.1f} MB free" if path.parent.is_dir() else ""
        raise Refusal(path, f"{reason}{free}", "a disk with room for it") from error

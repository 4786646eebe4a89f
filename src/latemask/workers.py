"""Worker processes: Ctrl-C is their parent's alone to hear, and they end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

TOLD_AGAIN_SECONDS = 5.0
"""Who has been told to end and has not is told so again: what a signal's handler raises is lost where it comes inside
of a callback that cannot raise."""


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes that are spawned inside never hear Ctrl-C, not even while they import; this one hears it afterwards."""
    resource_tracker.ensure_running()  # which lets Ctrl-C through again as it starts
    before, handler = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), signal.getsignal(signal.SIGINT)
    heard: list[int] = []  # by another thread, whose mask is its own; what comes of it would be raised in the main one
    defers = callable(handler) and threading.current_thread() is threading.main_thread()
    if defers:
        signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        if defers:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def end(processes: Sequence[BaseProcess]) -> None:
    """Send SIGTERM, wait until all have ended."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(TOLD_AGAIN_SECONDS)
        while process.is_alive():
            process.terminate()
            process.join(TOLD_AGAIN_SECONDS)


def end_with_parent(end: Callable[[], object]) -> None:
    """Call ``end``, on a thread of its own, when the process that started this one has ended; in that one never."""
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_after, args=(parent, end), daemon=True).start()


def _end_after(parent: BaseProcess, end: Callable[[], object]) -> None:
    parent.join()
    while True:
        end()
        time.sleep(TOLD_AGAIN_SECONDS)

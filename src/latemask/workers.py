"""Processes that end well: told to, by an exit that gives up what they hold; workers with their parent, however it
ends, whose alone it is to hear Ctrl-C."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

PREEMPTED = 75
"""Exit status of a command that is not through and goes on where it is given again: after SIGTERM the run was saved."""
TOLD_AGAIN_SECONDS = 5.0


def exit_when_told(status: int) -> None:
    """From now on SIGTERM raises SystemExit(``status``); called in another thread than the main one it does nothing.

    What a signal's handler raises is lost where it comes inside of a callback that cannot raise (a weak reference's, a
    ``__del__``): an alarm has it raised again, until the process is leaving.
    """

    def leave(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, TOLD_AGAIN_SECONDS)
        if not _is_leaving():
            sys.exit(status)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, leave)
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


def _is_leaving() -> bool:
    """Whether what is run is the clean-up of an exit."""
    error = sys.exception()
    while error is not None and not isinstance(error, SystemExit):
        error = error.__context__
    return error is not None


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
        process.join()


def end_with_parent(end: Callable[[], object]) -> None:
    """Call ``end``, on a thread of its own, when the process that started this one has ended; in that one never."""
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_after, args=(parent, end), daemon=True).start()


def _end_after(parent: BaseProcess, end: Callable[[], object]) -> None:
    parent.join()
    end()

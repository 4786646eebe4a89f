"""Worker processes: Ctrl-C is their parent's alone to hear, and they end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes that are spawned inside never hear Ctrl-C, not even while they import; this one hears it afterwards."""
    resource_tracker.ensure_running()  # which lets Ctrl-C through again as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(end: Callable[[], object]) -> None:
    """Call ``end``, on a thread of its own, when the process that started this one has ended; in that one never."""
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=lambda: (parent.join(), end()), daemon=True).start()

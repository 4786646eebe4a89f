"""SIGTERM while nothing trains: exit at once with the status that asks a job queue to queue again."""

from __future__ import annotations

import os
import signal
import sys
import threading


def exit_on_sigterm() -> None:
    """Until training hears the signal itself, which saves first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.EX_TEMPFAIL))

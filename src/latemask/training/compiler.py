"""torch's compiler takes seconds to import: a thread does so while weights are drawn, which leaves Python free."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from threading import Thread
from typing import Literal

import torch

from latemask.config import Training

COMPILER = "torch._inductor.compile_fx"


def compiles(setting: Literal["auto", "on", "off"], device: torch.device, pays: bool = True) -> bool:
    """Whether blocks are compiled: as the ``setting`` says, with "auto" on CUDA where it ``pays``."""
    return setting == "on" or (setting == "auto" and device.type == "cuda" and pays)


@contextlib.contextmanager
def imported_meanwhile(training: Training, device: torch.device) -> Iterator[None]:
    """The compiler, where it ``compiles``, is imported while the body runs, and is there at its end.

    The body must import nothing of torch itself: two threads in one circle of imports see half a module each. What
    fails to import does so again, in the open, where it is first used.
    """
    thread = Thread(target=_import, daemon=True)
    if compiles(training.compile, device):
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _import() -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(COMPILER)

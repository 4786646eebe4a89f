"""torch's compiler takes seconds to import: a thread does so while weights are drawn, which leaves Python free."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from threading import Thread

import torch

from latemask.config import Training

COMPILER = "torch._inductor.compile_fx"


def compiles(training: Training, device: torch.device) -> bool:
    """Whether blocks are compiled: as the settings say, by default on CUDA."""
    return training.compile == "on" or (training.compile == "auto" and device.type == "cuda")


@contextlib.contextmanager
def imported_meanwhile(training: Training, device: torch.device) -> Iterator[None]:
    """The compiler, where it ``compiles``, is imported while the body runs, and is there at its end.

    The body must import nothing of torch itself: two threads in one circle of imports see half a module each. What
    fails to import does so again, in the open, where it is first used.
    """
    thread = Thread(target=_import, daemon=True)
    if compiles(training, device):
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _import() -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(COMPILER)

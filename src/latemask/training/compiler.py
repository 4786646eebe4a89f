"""torch's compiler takes seconds to import, a GPU to begin: threads do so while weights are drawn, which leaves Python
free."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import partial
from threading import Thread
from typing import Literal

import torch

from latemask.config import Training

COMPILER = "torch._inductor.compile_fx"


def compiles(setting: Literal["auto", "on", "off"], device: torch.device, pays: bool = True) -> bool:
    """Whether blocks are compiled: as the ``setting`` says, with "auto" on CUDA where it ``pays``."""
    return setting == "on" or (setting == "auto" and device.type == "cuda" and pays)


@contextlib.contextmanager
def begun_meanwhile(training: Training, device: torch.device) -> Iterator[None]:
    """The GPU, and the compiler where it ``compiles``, are made ready while the body runs, and are so at its end.

    The body must import nothing of torch itself: two threads in one circle of imports see half a module each. What
    fails does so again, in the open, where it is first used.
    """
    works = [_import] if compiles(training.compile, device) else []
    works += [partial(_begin, device)] if device.type == "cuda" else []
    threads = [Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _import() -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(COMPILER)


def _begin(device: torch.device) -> None:
    """The first tensor on it makes the driver's context."""
    with contextlib.suppress(Exception):
        torch.zeros(1, device=device)

"""torch's compiler takes seconds to import, a GPU to begin: threads do so while weights are drawn, which leaves Python
free.

Where Triton keeps compiled kernels is said to it then. torch says so only once it compiles something, so that a start
that finds all of torch's in its cache would look for ours elsewhere, and compile them a second time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from functools import partial
from threading import Thread
from typing import Literal

import torch

from latemask.config import Training
from latemask.errors import Refusal

COMPILER = "torch._inductor.compile_fx"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where a user has torch keep what it compiled."""


def compiles(setting: Literal["auto", "on", "off"], device: torch.device, pays: bool = True) -> bool:
    """Whether blocks are compiled: as the ``setting`` says, with "auto" on CUDA where it ``pays``."""
    return setting == "on" or (setting == "auto" and device.type == "cuda" and pays)


@contextlib.contextmanager
def begun_meanwhile(training: Training, device: torch.device) -> Iterator[None]:
    """The GPU, and the compiler where it ``compiles``, are made ready while the body runs, and are so at its end.

    The body must import nothing of torch itself: two threads in one circle of imports see half a module each. What
    fails does so again, in the open, where it is first used. Raises ``Refusal`` where torch's cache cannot be made: the
    compiler's import does that, and a second import of what failed halfway fails with other words.
    """
    imports = compiles(training.compile, device)
    if imports and (folder := os.environ.get(CACHE)):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise Refusal(CACHE, f"{folder} ({error.strerror})", "a folder that can be made and written to") from error
    works = [partial(_import, device)] if imports else []
    works += [partial(_begin, device)] if device.type == "cuda" else []
    threads = [Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _import(device: torch.device) -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(COMPILER)
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))


def _begin(device: torch.device) -> None:
    """The first tensor on it makes the driver's context."""
    with contextlib.suppress(Exception):
        torch.zeros(1, device=device)

"""A program's refusal, and Ctrl-C, are told in a line, not as a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from latemask.errors import Refusal

if TYPE_CHECKING:
    import torch


def program(main: Callable[[], int | None]) -> None:
    """Run ``main`` and exit with the status that it returns; with what it refuses, status 1."""
    try:
        sys.exit(main())
    except Refusal as refusal:
        sys.exit(str(refusal))
    except KeyboardInterrupt:
        sys.exit("interrupted")


def check_gpu(device: torch.device, name: str) -> None:
    """Raise ``Refusal`` of the program ``benchmarks/NAME.py`` where ``device`` is no GPU."""
    if device.type != "cuda":
        raise Refusal(f"benchmarks/{name}.py", f"a {device.type}", "a GPU (CUDA)")

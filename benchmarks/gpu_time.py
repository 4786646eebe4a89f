"""What work takes on the GPU, from its first kernel to the end of its last."""

from __future__ import annotations

from collections.abc import Callable

import torch


def gpu_milliseconds(work: Callable[[], object], held: int = 0) -> float:
    """Milliseconds of ``work``, which begins only after ``held`` cycles: where the host has launched all of it by then,
    the GPU never waits for the host."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if held:
        torch.cuda._sleep(held)
    begun.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended)

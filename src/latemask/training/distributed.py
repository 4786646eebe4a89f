"""One process or many: who am I, what does rank 0 decide, and what is the sum over all."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from latemask.errors import Refusal

TIMEOUT = datetime.timedelta(minutes=10)
"""A process that waits longer than this for another gives up; one that ended is noticed at once."""


@dataclass(frozen=True)
class World:
    """This process among ``size``; ``device`` is its own."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes files and decides by clock and signal."""
        return self.rank == 0

    def decide(self, *values: float) -> list[float]:
        """Rank 0's values, on every process."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(tensor, src=0)
        return tensor.tolist()

    def decide_text(self, text: str) -> str:
        """Rank 0's text, on every process."""
        (length,) = self.decide(len(text.encode()))
        if self.size == 1:
            return text
        letters = torch.zeros(int(length), dtype=torch.uint8)
        if self.leads:
            letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else letters
        dist.broadcast(letters, src=0)
        return bytes(letters.tolist()).decode()

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over all processes; the tensor may live on the CPU or on this process's device."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def least(self, number: int) -> int:
        """The smallest of all processes' numbers, on every process."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def share(self, rows: int) -> tuple[int, int]:
        """Rows ``start..stop`` of a batch of ``rows`` that are this process's."""
        return self.rank * rows // self.size, (self.rank + 1) * rows // self.size


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bfloat16 in hardware."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def pick_device(local_rank: int = 0) -> torch.device:
    """The GPU of this process (CUDA, then Apple's), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


@contextmanager
def joined_world() -> Iterator[World]:
    """The world that torchrun describes in the environment, or this process alone.

    Raises ``Refusal`` where another process ended or stalled while this one waited for it.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = pick_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 1, device)
        return
    if device.type == "mps":
        raise Refusal("torchrun", f"{size} processes on an Apple GPU", "one process")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if device.index is not None else None)
        yield World(dist.get_rank(), size, device)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        first = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])  # a place in the library's source
        found = f"another process gone or stalled ({first.split('. ')[0]})"
        raise Refusal(f"process {os.environ.get('RANK')} of {size}", found, "all of them until the end",
                      "Its own message says why; then go on with --resume") from error  # fmt: skip
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

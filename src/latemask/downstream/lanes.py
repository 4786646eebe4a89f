"""Several fine-tunings in turn on one device, each with a stream and with random numbers of its own.

An update of fine-tuning is too small to fill a GPU, and processes have it in turns, each the whole of it. Kernels on
different streams of one process run at the same time, so that the small ones of one lane fill what another leaves idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch

ENDED = object()
T = TypeVar("T")


class Lane:
    """A stream (CUDA), and the state of the random numbers that are drawn in it.

    A graph that is captured in a lane keeps to the lane's random numbers wherever it is launched.
    """

    def __init__(self, device: torch.device):
        self.drawn = torch.get_rng_state()
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.init()
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self.generator = torch.cuda.default_generators[self.stream.device_index]
            self.numbers = self.generator.clone_state()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What is launched and drawn in the block is this lane's; the state from before is there again after it."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.drawn)
        try:
            if self.stream is None:
                yield
                return
            shared = self.generator.graphsafe_get_state()
            self.generator.graphsafe_set_state(self.numbers)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                self.generator.graphsafe_set_state(shared)
        finally:
            self.drawn = torch.get_rng_state()
            torch.set_rng_state(outside)


def whole(work: Generator[None, None, T]) -> T:
    """What ``work`` returns, gone through to its end."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return ended.value


def in_turn(works: Iterable[Generator[None, None, Any]], device: torch.device) -> None:
    """Go on with each of ``works`` by one step after the other, until all have ended.

    Where one raises, the others are closed, and it is raised.
    """
    with contextlib.ExitStack() as closing:
        going = [(Lane(device), work) for work in works]
        for lane, work in going:
            closing.callback(_close, lane, work)
        while going:
            going = [(lane, work) for lane, work in going if _goes_on(lane, work)]


def _close(lane: Lane, work: Generator[None, None, Any]) -> None:
    with lane.entered():
        work.close()


def _goes_on(lane: Lane, work: Iterator[None]) -> bool:
    with lane.entered():
        return next(work, ENDED) is not ENDED

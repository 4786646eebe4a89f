"""The next batch is made on another thread while the device works on this one."""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from latemask.batch import Batch
from latemask.feed.batches import TrainingBatches


class Prefetch:
    """Micro-batches of ``micro_rows`` of this process's rows ``start..stop`` of each global batch.

    A context manager; leaving it stops the thread.
    """

    def __init__(self, batches: TrainingBatches, start: int, stop: int, micro_rows: int, device: torch.device):
        self.batches, self.device = batches, device
        edges = [*range(start, stop, micro_rows), stop]
        self.parts = list(itertools.pairwise(edges))
        self.pool = ThreadPoolExecutor(1)
        self.ahead: tuple[int, list[Future[Batch]]] | None = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def take(self, index: int) -> list[Batch]:
        """This process's micro-batches of batch ``index``, on the device."""
        if self.ahead is None or self.ahead[0] != index:
            self.ahead = (index, self._submit(index))
        futures = self.ahead[1]
        self.ahead = (index + 1, self._submit(index + 1))
        return [future.result() for future in futures]

    def _submit(self, index: int) -> list[Future[Batch]]:
        return [self.pool.submit(self._make, index, start, stop) for start, stop in self.parts]

    def _make(self, index: int, start: int, stop: int) -> Batch:
        return self.batches.batch_at(index, start, stop, self.device).to(self.device)

"""Batches of rows of about the same length, shuffled all the same, and the rows themselves kept on the device.

Rows are drawn in a random order, cut into pools of many batches, sorted by length inside a pool; then the batches are
shuffled. Order is keyed by (seed, epoch) alone. A batch is a vector of row numbers: its ids are gathered on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

POOL_BATCHES = 64
"""Batches sorted together: a few percent of padding, and the order of batches stays random."""
WIDTH_STEP = 8
"""Rows are padded to a multiple of this many tokens, so that few widths occur."""


@dataclass(frozen=True)
class Batch:
    """Row numbers, all of them in one batch of fixed size; a last, smaller one is filled up with rows of weight 0."""

    rows: np.ndarray
    """[B] int64."""
    weight: np.ndarray
    """[B] float32, 1 for a row that counts."""
    width: int
    """Tokens, the padding included."""


def padded_width(longest: int, most: int) -> int:
    return min(-(-longest // WIDTH_STEP) * WIDTH_STEP, most)


def epoch_batches(lengths: np.ndarray, batch_rows: int, most_tokens: int, seed: int, epoch: int) -> list[Batch]:
    """Every row exactly once, in batches of ``batch_rows``, or of all rows where they are fewer."""
    batch_rows = min(batch_rows, len(lengths))
    noise = np.random.default_rng([seed, epoch])
    order = noise.permutation(len(lengths))
    pool_rows = batch_rows * POOL_BATCHES
    batches = []
    for start in range(0, len(order), pool_rows):
        pool = order[start : start + pool_rows]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[place : place + batch_rows] for place in range(0, len(pool), batch_rows)]
    return [_filled(batches[number], lengths, batch_rows, most_tokens) for number in noise.permutation(len(batches))]


def _filled(rows: np.ndarray, lengths: np.ndarray, batch_rows: int, most_tokens: int) -> Batch:
    weight = (np.arange(batch_rows) < len(rows)).astype(np.float32)
    width = padded_width(int(lengths[rows].max()), most_tokens)
    return Batch(np.resize(rows, batch_rows), weight, width)


def sorted_batches(lengths: np.ndarray, most_batch_tokens: int, most_rows: int = 1024) -> list[np.ndarray]:
    """Every row once, longest first, in batches of at most ``most_batch_tokens`` tokens (at least one row each)."""
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        rows = max(1, min(most_rows, most_batch_tokens // int(lengths[order[start]])))
        batches.append(order[start : start + rows])
        start += rows
    return batches


class DeviceRows:
    """Rows of ids one after the other on a device."""

    def __init__(self, rows: Sequence[np.ndarray], pad: int, device: torch.device):
        self.lengths = np.array([len(row) for row in rows], np.int64)
        flat = np.concatenate(rows).astype(np.int32)
        self.pad = pad
        self.flat = torch.from_numpy(flat).to(device)
        self.start = torch.from_numpy(np.cumsum(self.lengths) - self.lengths).to(device)
        self.length = torch.from_numpy(self.lengths).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, rows: Int[Tensor, " B"], width: int) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N"]]:
        """Ids, padded on the right to ``width``, and which of them are real. Nothing waits for the device."""
        place = torch.arange(width, device=rows.device)
        real = place < self.length[rows][:, None]
        where = (self.start[rows][:, None] + place).clamp(max=len(self.flat) - 1)
        return torch.where(real, self.flat[where].long(), self.pad), real

"""``batch_at(index)`` is pure: rows, their order and their masks follow from (seed, index) alone, and, where the
masking rate changes, from the planned number of updates.

A row of N tokens is ``<s>`` and the next N - 1 tokens of the stream. Row order is keyed by (seed, epoch), masks by
(seed, epoch, row): the same batches on any number of processes, in any split, and resuming needs only an integer.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from latemask.batch import Batch
from latemask.config import Masking, Shape
from latemask.errors import Refusal
from latemask.feed.masking import lay_out, permuted

VALIDATION_SEED = 0x5EED
"""Seed of every validation's masks, whatever the run's: losses of different runs compare."""


@runtime_checkable
class Stream(Protocol):
    """What a batch needs of a prepared split (``latemask.text.store.Split``)."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids, each document followed by ``</s>``."""
        ...

    @property
    def starts(self) -> np.ndarray:
        """Offset of each document's first token, and the end: [documents + 1]."""
        ...

    @property
    def sources(self) -> np.ndarray | None:
        """Index of each document's source, [documents]."""
        ...

    @property
    def unknown_tokens(self) -> int:
        """How many ``<unk>`` the stream holds."""
        ...

    def read(self, begins: np.ndarray, length: int) -> np.ndarray:
        """``length`` tokens from each of ``begins`` [B] on: [B, length]. Raises ``Refusal`` where they have changed
        since they were written."""
        ...


class Rows:
    """The rows of a split that can carry the masks: all but those with fewer than M ordinary tokens.

    Raises ``Refusal`` where the split holds no usable row, with the counts.
    """

    def __init__(self, stream: Stream, shape: Shape, masked_tokens: int, where: str = "data"):
        self.stream, self.shape, self.where = stream, shape, where
        self.stride = shape.row_tokens - 1
        total = len(stream.tokens) // self.stride
        self.dropped_tokens = len(stream.tokens) - total * self.stride
        if total == 0:
            raise Refusal(where, f"{len(stream.tokens)} tokens", f"{self.stride} for one row",
                          "Prepare more text, or lower --shape.row-tokens")  # fmt: skip
        most_special = self.stride - masked_tokens
        self.refused = np.flatnonzero(self._specials_per_row(total) > most_special)
        self.count = total - len(self.refused)
        if self.count == 0:
            raise Refusal(where, f"{total} rows, each with fewer than {masked_tokens} tokens that may be masked",
                          "rows with enough ordinary tokens", "Lower --masking.rate")  # fmt: skip

    def _specials_per_row(self, total: int) -> np.ndarray:
        ends = np.asarray(self.stream.starts[1:]) - 1
        special = np.bincount(ends // self.stride, minlength=total)[:total]
        if self.stream.unknown_tokens:
            for first in range(0, total, 4096):
                last = min(first + 4096, total)
                tokens = self.stream.read(np.arange(first, last) * self.stride, self.stride)
                special[first:last] = np.isin(tokens, self.shape.specials.ids).sum(1)
        return special

    def row_number(self, index: np.ndarray) -> np.ndarray:
        """Row of the stream that the ``index``-th usable row is."""
        gaps = self.refused - np.arange(len(self.refused))
        return index + np.searchsorted(gaps, index, side="right")

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Token ids [B, N] int64 of these rows, each beginning with ``<s>``.

        Raises ``Refusal`` where the file has changed since it was written, and for an id outside the vocabulary.
        """
        tokens = self.stream.read(rows * self.stride, self.stride)
        if tokens.max(initial=0) >= self.shape.vocabulary:
            row = rows[(tokens >= self.shape.vocabulary).any(1)][0]
            raise Refusal(f"{self.where}, row {row}", f"id {tokens.max()}", f"ids below {self.shape.vocabulary}",
                          "The file was damaged: prepare the text again")  # fmt: skip
        begin = np.full((len(rows), 1), self.shape.specials.bos, np.int64)
        return np.concatenate([begin, tokens.astype(np.int64)], axis=1)

    def sources(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Index of the source of the tokens at ``positions`` [B, P] (from 1; 0 is ``<s>``) of these rows."""
        assert self.stream.sources is not None
        offset = rows[:, None] * self.stride + positions - 1
        return self.stream.sources[np.searchsorted(self.stream.starts, offset, side="right") - 1]

    def batch(
        self, rows: np.ndarray, masking: Masking, seed: int, epoch: np.ndarray, device: torch.device | None = None
    ) -> Batch:
        """These rows, masked on ``device`` (the CPU by default) with the noise of (seed, epoch, row)."""
        keys = torch.from_numpy(np.stack([epoch, rows]).astype(np.int64))
        ids = torch.from_numpy(self.ids(rows))
        if device is not None and device.type == "cuda":
            ids, keys = (tensor.pin_memory().to(device, non_blocking=True) for tensor in (ids, keys))
        shape = self.shape
        return lay_out(ids, masking, shape.specials, shape.vocabulary, seed=seed, epoch=keys[0], row=keys[1])


class TrainingBatches:
    """Global batches of ``batch_rows`` rows; a batch may straddle two epochs, but has one masking rate.

    ``updates``: the planned number of them, which the borders of ``masking.later_rates`` follow from; it may be None
    where there are none. ``rows`` must be able to carry the masks of every stage.
    """

    def __init__(self, rows: Rows, masking: Masking, batch_rows: int, seed: int, updates: int | None = None):
        if updates is None and masking.later_rates:
            raise ValueError("masking.later_rates without the planned number of updates")
        self.rows, self.batch_rows, self.seed = rows, batch_rows, seed
        self.stages = masking.stages(updates or 1)

    def masking_at(self, index: int) -> Masking:
        """How batch ``index`` is masked: at the rate of its stage."""
        return self.stages[bisect_right(self.stages, index, key=lambda stage: stage[0]) - 1][1]

    def new_shapes_from(self, index: int) -> list[int]:
        """Batch ``index`` and the first one of each later stage: every shape that is still to come, once."""
        return [index, *(first for first, _ in self.stages if first > index)]

    def epoch_of(self, index: int) -> float:
        """Epochs seen before batch ``index``."""
        return index * self.batch_rows / self.rows.count

    def keys_at(self, index: int, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, row) [B] of rows ``start..stop`` of batch ``index``."""
        stop = self.batch_rows if stop is None else stop
        epoch, place = np.divmod(np.arange(start, stop) + index * self.batch_rows, self.rows.count)
        return epoch, self.rows.row_number(permuted(place, self.rows.count, self.seed, epoch))

    def batch_at(
        self, index: int, start: int = 0, stop: int | None = None, device: torch.device | None = None
    ) -> Batch:
        """Rows ``start..stop`` of batch ``index`` (all of them by default), masked on ``device``."""
        epoch, row = self.keys_at(index, start, stop)
        return self.rows.batch(row, self.masking_at(index), self.seed, epoch, device)


class ValidationBatches:
    """The same rows with the same masks at every validation of every run: the first ``most`` rows, spread evenly."""

    def __init__(self, rows: Rows, masking: Masking, most: int):
        self.rows, self.masking = rows, masking
        chosen = min(most, rows.count)
        self.numbers = rows.row_number(np.arange(chosen) * rows.count // chosen)

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, start: int, stop: int) -> Batch:
        """Rows ``start..stop``."""
        numbers = self.numbers[start:stop]
        return self.rows.batch(numbers, self.masking, VALIDATION_SEED, np.zeros(len(numbers), np.int64))

    def sources(self, start: int, stop: int, batch: Batch) -> np.ndarray | None:
        """Source index of each predicted token [B, P] of ``batch(start, stop)``; None where the corpus names none."""
        if self.rows.stream.sources is None:
            return None
        return self.rows.sources(self.numbers[start:stop], batch.positions[:, batch.first_predicted :].numpy())

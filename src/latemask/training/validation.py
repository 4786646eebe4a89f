"""Validation: the same rows with the same masks every time, so two runs of it give the same bits."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from latemask.batch import Batch
from latemask.config import Run
from latemask.errors import Refusal
from latemask.feed.batches import Rows, ValidationBatches
from latemask.model.pretrainer import Pretrainer
from latemask.text.store import Split, TokenStore
from latemask.training.distributed import World

FREQUENCY_TOKENS = 50_000_000
"""Token frequencies are counted in the first so many training tokens."""
PIECE_TOKENS, PIECE_ROWS = 1 << 20, 256
"""How much is counted at once."""


class Loss(NamedTuple):
    """Mean nats per predicted token (masked ones; all but the first where the decoder rewrites the row), overall and
    for each source that the corpus names."""

    overall: float
    by_source: dict[str, float]


class Validation:
    """The held-out rows of a run, masked at ``training.validation_rate`` (by default the rate that the run begins
    with), the same throughout; every masked token is predicted.

    ``unigram_loss``: what word frequencies alone would reach on them; ``text``: which rows they are, however masked
    (``fingerprint``).
    """

    def __init__(self, run: Run, store: TokenStore):
        self.rate = run.validation_rate
        masking = dataclasses.replace(run.masking.at(self.rate), predicted_share=1.0)
        masked, row_tokens = masking.masked_tokens(run.shape.row_tokens), run.shape.row_tokens
        if not 1 <= masked <= row_tokens - 2:
            raise Refusal("training.validation_rate", f"{masked} masked tokens in a row of {row_tokens}",
                          f"1 to {row_tokens - 2}")  # fmt: skip
        rows = Rows(store.valid, run.shape, masked, f"{store.folder} (validation)")
        self.batches = ValidationBatches(rows, masking, run.training.validation_rows)
        self.source_names = store.source_names
        self.rewrites = run.rewrites
        self.unigram_loss = unigram_loss(run, store.train, self.batches)
        self.text = fingerprint(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @torch.no_grad()
    def loss(
        self,
        model: Pretrainer,
        micro_rows: int,
        precision: Callable,
        world: World,
        stops: Callable[[float], bool] = lambda done_share: False,
    ) -> Loss | None:
        """Measured in evaluation mode; each process takes its share of the rows. None where ``stops``, which is told
        before each pass how much is done, said so: on every process in the same pass."""
        was_training = model.training
        model.eval()
        sums = torch.zeros(len(self.source_names) + 1, 2, dtype=torch.float64)
        micro_rows = world.least(micro_rows)  # it differs where a batch does not divide; passes must not
        first, last = world.share(len(self))
        mine = [(start, min(start + micro_rows, last)) for start in range(first, last, micro_rows)]
        passes = math.ceil(math.ceil(len(self) / world.size) / micro_rows)
        for number in range(passes):
            if stops(number / passes):
                model.train(was_training)
                return None
            start, stop = mine[number] if number < len(mine) else [(0, 1), *mine][-1]
            batch = self.batches.batch(start, stop)
            with precision():
                losses = model(batch.to(world.device)).float().cpu().double().flatten()
            if number >= len(mine):  # all processes make as many passes, which a sharded model and a signal need
                continue
            sums[-1] += torch.stack([losses.sum(), torch.tensor(float(losses.numel()), dtype=torch.float64)])
            sources = self._sources(start, stop, batch)
            if sources is not None:
                where = torch.from_numpy(sources.astype(np.int64)).flatten()
                sums.index_add_(0, where, torch.stack([losses, torch.ones_like(losses)], 1))
        model.train(was_training)
        sums = world.total(sums)
        means = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
        return Loss(means[-1], {name: means[i] for i, name in enumerate(self.source_names) if sums[i, 1]})

    def _sources(self, start: int, stop: int, batch: Batch) -> np.ndarray | None:
        """Source of each predicted token [B, P]; None where the corpus names none."""
        rows = self.batches.rows
        if not self.rewrites or rows.stream.sources is None:
            return self.batches.sources(start, stop, batch)
        return rows.sources(self.batches.numbers[start:stop], np.arange(1, batch.ids.shape[1])[None])


def fingerprint(batches: ValidationBatches) -> str:
    """SHA-256 of the rows' ids (int64, in their natural order), 16 hex digits."""
    digest = hashlib.sha256()
    for first in range(0, len(batches), PIECE_ROWS):
        digest.update(batches.rows.ids(batches.numbers[first : first + PIECE_ROWS]).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def unigram_loss(run: Run, train: Split, batches: ValidationBatches) -> float:
    """Nats per predicted token for whom nothing is known but how often each id occurs in the training text.

    Counted in its first 50 million tokens, which takes a second or less, each id that may be predicted (no special one,
    where tokens are masked) once more than it occurs. Raises ``Refusal`` where these tokens have changed on disk.
    """
    specials, size = run.shape.specials, run.shape.vocabulary
    never = [specials.bos, specials.pad, specials.mask] if run.rewrites else list(specials.ids)
    seen, wanted = np.ones(size), np.zeros(size)
    stop = min(len(train.tokens), FREQUENCY_TOKENS)
    for first in range(0, stop, PIECE_TOKENS):
        tokens = train.read(np.array([first]), min(PIECE_TOKENS, stop - first))
        seen += np.bincount(tokens.ravel(), minlength=size)[:size]
    for first in range(0, len(batches), PIECE_ROWS):
        batch = batches.batch(first, first + PIECE_ROWS)
        targets = batch.ids if run.rewrites else batch.targets
        wanted += np.bincount(targets.flatten().numpy(), minlength=size)
    seen[never] = wanted[never] = 0
    may = seen > 0
    return float(-wanted[may] @ np.log(seen[may] / seen.sum()) / wanted.sum())

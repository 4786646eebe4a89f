"""Pseudo-log-likelihood: the sum over a text's tokens of the log probability of each, hidden, given all others.

One row for each token to be scored, with that token masked (Salazar et al. 2020). With whole words hidden, the tokens
behind the scored one in its word are masked too (Kauf and Ivanova 2023, "PLL-word-l2r"). The masks go through the
masked model: outside the encoder where the method has them outside.

A batch holds rows of one length with one number of masks, of any texts: nothing is padded, attention needs no mask, and
no size depends on data. Scores stay on the device until the last: the host never waits for it in between.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from latemask.downstream.bucketed import DeviceRows
from latemask.errors import Refusal

LEAST_ROW_TOKENS = 16
"""As which a row counts in a batch: each has logits over the whole vocabulary, however short it is."""


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: nn.Module,
    rows: Sequence[np.ndarray],
    scored: Sequence[np.ndarray],
    *,
    mask: int,
    pad: int,
    device: torch.device,
    words: Sequence[np.ndarray] | None = None,
    batch_tokens: int = 4096,
    precision: Callable[[], AbstractContextManager[None]] | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> np.ndarray:
    """Nats (0 or less) of each row, [n] float64.

    ``model``: (ids [B, N], None, M) -> logits [B * M, T] at the M masks of each row. ``rows``: ids with special tokens
    around; ``scored``: the places in each row that are scored; ``words``: the word of each place (scored tokens of one
    word share a number), where whole words are hidden. Raises ``Refusal`` where a row holds a mask already.
    """
    if any((row == mask).any() for row in rows):
        raise Refusal("text", "the mask token", "text without it")
    total = np.zeros(len(rows))
    owner = np.repeat(np.arange(len(rows)), [len(places) for places in scored])
    if not len(owner):
        return total
    place = np.concatenate([np.asarray(places, np.int64) for places in scored])
    masks = np.ones_like(owner) if words is None else _hidden_words(words, scored)
    lengths = np.array([len(row) for row in rows])[owner]
    order = np.lexsort((masks, -lengths))  # longest first: what does not fit says so at once
    batches = _alike(lengths[order], masks[order], batch_tokens)
    held = DeviceRows(rows, pad, device)
    word_rows = None if words is None else DeviceRows(words, -1, device)
    owner_there, place_there = (torch.from_numpy(part[order]).to(device) for part in (owner, place))
    with precision() if precision is not None else contextlib.nullcontext():
        chances = _log_chances(model, held, word_rows, owner_there, place_there, batches, mask, advance)
    np.add.at(total, owner[order], chances.double().cpu().numpy())
    return total


Alike = tuple[int, int, int, int]
"""Rows from the first to before the second number, their tokens, and the masks of each."""


def _alike(lengths: np.ndarray, masks: np.ndarray, most_tokens: int) -> Iterator[Alike]:
    """Batches of rows in order, alike in both, of at most ``most_tokens`` tokens (at least one row each)."""
    change = np.flatnonzero(np.diff(lengths) | np.diff(masks)) + 1
    edges = [0, *change.tolist(), len(lengths)]
    for first, last in itertools.pairwise(edges):
        length, masked = int(lengths[first]), int(masks[first])
        rows = max(1, most_tokens // max(length, LEAST_ROW_TOKENS))
        for start in range(first, last, rows):
            yield start, min(start + rows, last), length, masked


def _hidden_words(words: Sequence[np.ndarray], scored: Sequence[np.ndarray]) -> np.ndarray:
    """How many tokens are hidden for each scored one: itself and those behind it in its word."""
    counts = []
    for word, places in zip(words, scored, strict=True):
        places = np.asarray(places, np.int64)
        behind = np.arange(len(word)) >= places[:, None]
        counts.append((behind & (word == word[places, None])).sum(1))
    return np.concatenate(counts)


def _log_chances(
    model: nn.Module, held: DeviceRows, words: DeviceRows | None, owner: Tensor, place: Tensor,
    batches: Iterator[Alike], mask: int, advance: Callable[[float], None],
) -> Tensor:  # fmt: skip
    """Nats of the token at each ``place`` of each row ``owner``, both on the device, where the result stays too."""
    chances = torch.empty(len(owner), device=owner.device)
    for first, last, width, masked in batches:
        numbers, at = owner[first:last], place[first:last, None]
        ids, _ = held.gather(numbers, width)
        seat = torch.arange(width, device=owner.device)
        hidden = seat == at
        if words is not None:
            word, _ = words.gather(numbers, width)
            hidden |= (seat > at) & (word == word.gather(1, at))
        logits = model(ids.masked_fill(hidden, mask), None, masked)
        scores = logits.unflatten(0, (last - first, masked))[:, 0]  # the scored token is the first mask of its row
        chances[first:last] = scores.log_softmax(-1, dtype=torch.float32).gather(1, ids.gather(1, at)).squeeze(1)
        advance(last - first)
    return chances

"""Pseudo-log-likelihood: the sum over a text's tokens of the log probability of each, hidden, given all others.

One row for each token to be scored, with that token masked; rows of all texts together, sorted by length, so that a
batch holds one-mask variants of texts of about the same length (Salazar et al. 2020). With whole words hidden, the
tokens behind the scored one in its word are masked too (Kauf and Ivanova 2023, "PLL-word-l2r"). The masks go through
the masked model: outside the encoder where the method has them outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn

from latemask.downstream.bucketed import DeviceRows, sorted_batches
from latemask.errors import Refusal


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

    ``model``: (ids [B, N], real [B, N]) -> logits at the masks, in the order of ``(ids == mask).nonzero()``. ``rows``:
    ids with special tokens around; ``scored``: the places in each row that are scored; ``words``: the word of each
    place (scored tokens of one word share a number), where whole words are hidden. Raises ``Refusal`` where a row holds
    a mask already.
    """
    if any((row == mask).any() for row in rows):
        raise Refusal("text", "the mask token", "text without it")
    held = DeviceRows(rows, pad, device)
    word_rows = None if words is None else DeviceRows(words, -1, device)
    owner = np.repeat(np.arange(len(rows)), [len(places) for places in scored])
    place = np.concatenate([np.asarray(places, np.int64) for places in scored]) if len(owner) else np.empty(0, np.int64)
    lengths = held.lengths[owner]
    total = np.zeros(len(rows))
    for chosen in sorted_batches(lengths, batch_tokens, most_rows=4096):
        width = int(lengths[chosen].max())
        numbers, at = (torch.from_numpy(part[chosen]).to(device) for part in (owner, place))
        ids, real = held.gather(numbers, width)
        hidden = torch.arange(width, device=device) == at[:, None]
        if word_rows is not None:
            word, _ = word_rows.gather(numbers, width)
            behind = torch.arange(width, device=device) > at[:, None]
            hidden |= behind & (word == word.gather(1, at[:, None]))
        truth = ids.gather(1, at[:, None])
        with precision() if precision is not None else torch.autocast(device.type, enabled=False):
            logits = model(ids.masked_fill(hidden, mask), real)
        first = hidden.sum(1).cumsum(0) - hidden.sum(1)  # the scored token is the first mask of its row
        chances = logits[first].float().log_softmax(-1).gather(1, truth).squeeze(1)
        np.add.at(total, owner[chosen], chances.double().cpu().numpy())
        advance(len(chosen))
    return total

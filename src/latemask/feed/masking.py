"""The only place where chance enters the data: which tokens are masked, their order, and what early masks show.

All noise is a hash of integer keys (seed, epoch, row, place), so that any process can draw any row by itself, and a
stable sort of it, so that no backend can disagree: the same code runs on arrays and on tensors of any device. Nothing
here keeps state.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from latemask.batch import Batch
from latemask.config import Masking, Specials
from latemask.errors import Refusal

Integers = TypeVar("Integers", int, np.ndarray, Tensor)

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
ORDER, MASK, FILLER_KIND, FILLER_TOKEN, DROPOUT = 1, 2, 3, 4, 5
"""Streams of noise: one for each use, so that none repeats another."""
_LAST = 2**63 - 1


def _wrapped(x: Integers) -> Integers:
    """64-bit two's complement, as arrays and tensors do by themselves."""
    return (x + 2**63) % 2**64 - 2**63 if isinstance(x, int) else x


def _shifted(x: Integers, bits: int) -> Integers:
    """Shifted right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Integers) -> Integers:
    """The finalizer of SplitMix64: a bijection of 64-bit integers that leaves no visible pattern."""
    x = _wrapped((x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64))
    x = _wrapped((x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64))
    return x ^ _shifted(x, 31)


def noise(*keys: int | np.integer | np.ndarray | Tensor) -> Any:
    """64 even bits, as int64, for each element of the keys' broadcast shape: the same keys, the same bits, anywhere.

    Whole numbers may be mixed with int64 arrays or with int64 tensors of one device.
    """
    state: Any = 0
    for key in keys:
        is_number = isinstance(key, int | np.integer) or (isinstance(key, np.ndarray) and not key.ndim)
        term: Any = int(key) if is_number else key
        state = _mix(_mix(_wrapped(term + _GOLDEN)) ^ _wrapped(state + _GOLDEN))
    return state


def permuted(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where ``index`` (0 <= index < size) lands in the permutation of ``range(size)`` keyed by (seed, epoch).

    A four-round Feistel network over the next power of four, walked until it falls inside: no list of rows is kept,
    whatever the size of the corpus.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = (1 << half_bits) - 1
    epoch = np.broadcast_to(epoch, index.shape)

    def encrypt(value: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        left, right = value >> half_bits, value & low
        for round_number in range(4):
            left, right = right, left ^ (noise(seed, ORDER, epoch, round_number, right) & low)
        return (left << half_bits) | right

    result = encrypt(index.astype(np.int64), epoch)
    while (outside := result >= size).any():
        result[outside] = encrypt(result[outside], epoch[outside])
    return result


def lay_out(
    ids: Int[Tensor, "B N"],
    masking: Masking,
    specials: Specials,
    vocabulary: int,
    *,
    seed: int,
    epoch: Int[Tensor, " B"],
    row: Int[Tensor, " B"],
) -> Batch:
    """Mask exactly M = round(rate * N) ordinary tokens of each row of ``ids``, and append them shuffled; the last
    P = round(predicted_share * M) of them are to be predicted.

    ``epoch`` and ``row`` are the keys of each row's noise; all tensors are int64 on one device. On a GPU nothing waits
    for it, so rows with too few ordinary tokens must be kept out before (``feed.batches.Rows`` does). Raises
    ``Refusal`` for such a row on the CPU.
    """
    row_tokens = ids.shape[1]
    masked_tokens = masking.masked_tokens(row_tokens)
    place = torch.arange(row_tokens, device=ids.device)
    keys = (epoch[:, None], row[:, None])

    ordinary = torch.ones_like(ids, dtype=torch.bool)
    for special in specials.ids:
        ordinary &= ids != special
    if not ids.is_cuda:
        short = (ordinary.sum(1) < masked_tokens).nonzero()
        if len(short):
            first = int(short[0])
            found = f"{int(ordinary[first].sum())} tokens that may be masked in row {int(row[first])}"
            raise Refusal("masking.rate", found, f"{masked_tokens} ({masking.rate:g} of {row_tokens})")
    lottery = _shifted(noise(seed, MASK, *keys, place), 1).masked_fill(~ordinary, _LAST)
    drawn = lottery.argsort(dim=1, stable=True)
    masked, visible = drawn[:, :masked_tokens], drawn[:, masked_tokens:].sort(dim=1).values
    positions = torch.cat([visible, masked], 1)

    targets = ids.gather(1, masked)
    shows_mask, shows_random, _ = masking.filler
    filler = torch.full_like(targets, specials.mask)
    if shows_mask < 1:
        kind = _shifted(noise(seed, FILLER_KIND, *keys, place[:masked_tokens]), 11)
        drawn_ids = ordinary_id(noise(seed, FILLER_TOKEN, *keys, place[:masked_tokens]), specials, vocabulary)
        below_mask, below_random = (math.ceil(share * 2**53) for share in (shows_mask, shows_mask + shows_random))
        filler = filler.where(kind < below_mask, drawn_ids.where(kind < below_random, targets))
    ended = (ids == specials.eos).cumsum(1)
    document = torch.cat([torch.zeros_like(ids[:, :1]), ended[:, :-1]], 1)
    return Batch(
        ids=ids.gather(1, positions),
        positions=positions,
        seats=positions if masking.aligned else place.expand_as(positions),
        filler=filler,
        document=document.gather(1, positions),
        n_unpredicted=masked_tokens - masking.predicted_tokens(row_tokens),
    )


def ordinary_id(bits: Int[Tensor, "*n"], specials: Specials, vocabulary: int) -> Int[Tensor, "*n"]:
    """A uniform draw from the ids that are not special."""
    choices = vocabulary - len(specials.ids)
    drawn = (_shifted(bits, 1) % choices * 2 + (bits & 1)) % choices
    for special in sorted(specials.ids):
        drawn = drawn + (drawn >= special).long()
    return drawn

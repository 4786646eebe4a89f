"""The only place where chance enters the data: which tokens are masked, their order, and what early masks show.

All noise is a hash of integer keys (seed, epoch, row, place), so that any process can draw any row by itself, and a
stable sort of it, so that no backend can disagree. Nothing here keeps state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from latemask.config import Masking, Specials
from latemask.errors import Refusal

U64 = np.uint64
_GOLDEN = U64(0x9E3779B97F4A7C15)
ORDER, MASK, FILLER_KIND, FILLER_TOKEN = map(U64, (1, 2, 3, 4))
"""Streams of noise: one for each use, so that none repeats another."""


def _mix(x: np.ndarray | U64) -> np.ndarray | U64:
    """The finalizer of SplitMix64: a bijection of 64-bit integers that leaves no visible pattern."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
        return x ^ (x >> U64(31))


def noise(*keys: int | np.integer | np.ndarray) -> np.ndarray:
    """uint64 noise of the keys' broadcast shape: the same keys give the same bits, anywhere."""
    state: np.ndarray | U64 = U64(0)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _mix((state + _GOLDEN) ^ _mix(np.asarray(key).astype(U64) + _GOLDEN))
    return np.asarray(state)


def permuted(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where ``index`` (0 <= index < size) lands in the permutation of ``range(size)`` keyed by (seed, epoch).

    A four-round Feistel network over the next power of four, walked until it falls inside: no list of rows is kept,
    whatever the size of the corpus.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = U64((1 << half_bits) - 1)
    epoch = np.broadcast_to(epoch, index.shape)

    def encrypt(value: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        left, right = value >> U64(half_bits), value & low
        for round_number in range(4):
            left, right = right, left ^ (noise(seed, ORDER, epoch, round_number, right) & low)
        return (left << U64(half_bits)) | right

    result = encrypt(index.astype(U64), epoch)
    while (outside := result >= U64(size)).any():
        result[outside] = encrypt(result[outside], epoch[outside])
    return result.astype(np.int64)


class Layout(NamedTuple):
    """Rows laid out [ visible | masked ]: arrays [B, N], ``filler`` [B, M] (see ``latemask.batch.Batch``)."""

    ids: np.ndarray
    positions: np.ndarray
    seats: np.ndarray
    filler: np.ndarray
    document: np.ndarray


def lay_out(
    ids: np.ndarray,
    document: np.ndarray,
    masking: Masking,
    specials: Specials,
    vocabulary: int,
    *,
    seed: int,
    epoch: np.ndarray,
    row: np.ndarray,
) -> Layout:
    """Mask exactly M = round(rate * N) ordinary tokens of each row of ``ids`` [B, N], and append them shuffled.

    ``epoch`` and ``row`` [B] are the keys of each row's noise. Raises ``Refusal`` where a row has fewer than M
    ordinary tokens.
    """
    row_tokens = ids.shape[1]
    masked_tokens = masking.masked_tokens(row_tokens)
    place = np.arange(row_tokens)
    keys = (epoch[:, None], row[:, None])

    ordinary = ~np.isin(ids, specials.ids)
    short = np.flatnonzero(ordinary.sum(1) < masked_tokens)
    if short.size:
        found = f"{ordinary[short[0]].sum()} tokens that may be masked in row {row[short[0]]}"
        raise Refusal("masking.rate", found, f"{masked_tokens} ({masking.rate:g} of {row_tokens})")
    lottery = np.where(ordinary, noise(seed, MASK, *keys, place) >> U64(1), U64(2**64 - 1))
    drawn = np.argsort(lottery, axis=1, kind="stable")
    masked, visible = drawn[:, :masked_tokens], np.sort(drawn[:, masked_tokens:], axis=1)
    positions = np.concatenate([visible, masked], axis=1)

    targets = np.take_along_axis(ids, masked, 1)
    shows_mask, shows_random, _ = masking.filler
    filler = np.full_like(targets, specials.mask)
    if shows_mask < 1:
        kind = (noise(seed, FILLER_KIND, *keys, place[:masked_tokens]) >> U64(11)) * 2.0**-53
        drawn_ids = ordinary_id(noise(seed, FILLER_TOKEN, *keys, place[:masked_tokens]), specials, vocabulary)
        filler = np.where(kind < shows_mask, filler, np.where(kind < shows_mask + shows_random, drawn_ids, targets))
    return Layout(
        ids=np.take_along_axis(ids, positions, 1),
        positions=positions,
        seats=positions if masking.aligned else np.broadcast_to(place, positions.shape).copy(),
        filler=filler,
        document=np.take_along_axis(document, positions, 1),
    )


def ordinary_id(bits: np.ndarray, specials: Specials, vocabulary: int) -> np.ndarray:
    """A uniform draw from the ids that are not special, int64."""
    drawn = (bits % U64(vocabulary - len(specials.ids))).astype(np.int64)
    for special in sorted(specials.ids):
        drawn += drawn >= special
    return drawn

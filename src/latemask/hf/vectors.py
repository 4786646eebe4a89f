"""One vector for each text: the mean of the encoder's last hidden states over the text's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from latemask import console
from latemask.config import Specials
from latemask.errors import Refusal
from latemask.hf.card import warn_of_frequencies
from latemask.hf.source import Source


def encode(
    texts: Sequence[str], folder: Path | str, *, batch_rows: int = 32, device: torch.device | str | None = None
) -> Float[Tensor, "n D"]:
    """Mean-pooled vectors of ``texts``, fp32, on the CPU, in the order of the texts.

    Each text is a row ``<s> text </s>``, both special tokens counted in the mean; a text that does not fit into the
    encoder's row is cut at its end, and a warning says how many were. ``folder``: whatever ``load_encoder`` takes.
    ``batch_rows``: rows at a time, of about the same length. ``device``: None for a GPU where there is one. Raises
    ``Refusal`` as ``load_encoder`` does.

    >>> vectors = latemask.encode(["Paris is a city.", "So is Rome."], "runs/x")
    >>> vectors.shape
    torch.Size([2, 128])
    """
    if isinstance(texts, str):
        raise Refusal("texts", "one text", "a list of texts")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise Refusal("texts", f"{wrong[0]!r}, which is no text"[:80], "texts")
    source = Source.of(folder)
    warn_of_frequencies(source.step)
    encoder, tokenizer = source.encoder(), source.tokenizer()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder.to(device)
    encoded, most_tokens = tokenizer.encode_batch(texts), encoder.shape.row_tokens
    rows = [framed(ids.tolist(), tokenizer.specials, most_tokens) for ids in encoded]
    if cut := sum(len(ids) + 2 > most_tokens for ids in encoded):
        console.warn(f"{cut:,} of {len(texts):,} texts are longer than {most_tokens:,} tokens and were cut")
    vectors = torch.empty(len(rows), encoder.shape.width)
    by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    with torch.inference_mode():
        for start in range(0, len(rows), batch_rows):
            chosen = by_length[start : start + batch_rows]
            ids, real = padded([rows[number] for number in chosen], tokenizer.specials.pad, device)
            hidden = encoder(ids, real)
            weight = real[..., None].to(hidden.dtype)
            vectors[chosen] = ((hidden * weight).sum(1) / weight.sum(1)).float().cpu()
    return vectors


def framed(ids: Sequence[int], specials: Specials, row_tokens: int) -> list[int]:
    """``<s> ids </s>``, cut at the end of ``ids`` to ``row_tokens`` in all."""
    return [specials.bos, *ids[: row_tokens - 2], specials.eos]


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Ids [B, N] int64, padded on the right to the longest row, and which of them are real [B, N] bool."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]

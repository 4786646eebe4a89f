"""Rotary positions by the kernel: queries and keys turned by their angles, in one pass over their projection."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

TURNED_TOKENS = 16
"""Whose queries and keys a program turns."""


def turn(
    x: Float[Tensor, "B n 3*D"],
    out: Float[Tensor, "B n E"],
    heads: int,
    cosine: Float[Tensor, "#B 1 n d/2"] | None,
    sine: Float[Tensor, "#B 1 n d/2"] | None,
    direction: int,
) -> None:
    """The queries and keys of ``x`` into ``out``, which may be ``x``, turned by their angles, or back (-1)."""
    if cosine is None or sine is None:
        return
    from latemask.kernels import rotary_triton

    kernels: Any = rotary_triton

    rows, tokens, width = x.shape[0], x.shape[1], x.shape[2] // 3 // heads
    angles = [part.expand(rows, 1, tokens, width // 2).float().contiguous() for part in (cosine, sine)]
    kernels.turn_kernel[(rows, -(-tokens // TURNED_TOKENS))](
        x, *angles, out, *x.stride()[:2], *out.stride()[:2], tokens, 2 * heads, direction, TURNED_TOKENS, width
    )

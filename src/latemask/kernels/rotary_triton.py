"""Queries and keys turned by their rotary angles in one pass, as a Triton kernel; rotary.py launches it."""

# Triton is a language of its own: its types are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def turn_kernel(
    X, COSINE, SINE, OUT, x_b, x_n, out_b, out_n, tokens, heads, direction, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """The pairs (i, i + WIDTH/2) of every head, in ``direction`` 1 or back (-1). OUT may be X."""
    HALF: tl.constexpr = WIDTH // 2
    row = tl.program_id(0).to(tl.int64)
    token, pair = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, HALF)
    exists = (token < tokens)[:, None]
    angle = (row * tokens + token[:, None]) * HALF + pair[None, :]
    cosine, sine = tl.load(COSINE + angle, mask=exists), tl.load(SINE + angle, mask=exists) * direction
    x, out = X + row * x_b + token[:, None] * x_n + pair[None, :], OUT + row * out_b + token[:, None] * out_n + pair
    for _ in range(heads):
        a, b = tl.load(x, mask=exists).to(tl.float32), tl.load(x + HALF, mask=exists).to(tl.float32)
        tl.store(out, (a * cosine - b * sine).to(OUT.dtype.element_ty), mask=exists)
        tl.store(out + HALF, (b * cosine + a * sine).to(OUT.dtype.element_ty), mask=exists)
        x, out = x + WIDTH, out + WIDTH

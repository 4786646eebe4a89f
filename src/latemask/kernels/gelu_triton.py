"""The backward pass of GELU by the tail (gelu.py), and the sum of its gradient over the tokens, in one kernel."""

# Triton is a language of its own: its types are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def polynomial(COEFFICIENTS: tl.constexpr, a):
    """By Horner's rule, the lowest power first."""
    value = a * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for power in tl.static_range(3, len(COEFFICIENTS) + 1):
        value = value * a + COEFFICIENTS[-power]
    return value


@triton.jit
def gelu_gradients_kernel(
    X, GRADIENT, OUT, SUMS, tokens, width, LOG_TAIL: tl.constexpr, SLOPE: tl.constexpr, FAR: tl.constexpr,
    STEP: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """``TOKENS`` tokens' gradients in some columns, and their sum, without atomics: one row of SUMS."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * TOKENS
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for start in range(0, TOKENS, STEP):
        token = first + start + tl.arange(0, STEP)[:, None]
        exists = (token < tokens) & (column < width)
        place = token * width + column
        x = tl.load(X + place, mask=exists, other=0).to(tl.float32)
        gradient = tl.load(GRADIENT + place, mask=exists, other=0).to(tl.float32)
        a = tl.abs(x)
        below = tl.exp2(polynomial(LOG_TAIL, a)) * polynomial(SLOPE, tl.minimum(a, FAR))
        gradient *= tl.where(x > 0, 1 - below, below)
        tl.store(OUT + place, gradient.to(OUT.dtype.element_ty), mask=exists)
        total += gradient
    tl.store(SUMS + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)

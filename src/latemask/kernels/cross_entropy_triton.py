"""Triton kernels of the cross-entropy: forward a program a row of logits, backward a program some columns of many."""

# Triton is a language of its own: its types are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def cross_entropy_kernel(LOGITS, TARGETS, LOSS, LSE, ids, CHUNK: tl.constexpr):
    """Loss and log of the normaliser of one row, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    logits = LOGITS + row * ids
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for first in range(0, ids, CHUNK):
        places = first + tl.arange(0, CHUNK)
        x = tl.load(logits + places, mask=places < ids, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = new_top
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(LSE + row, lse)
    tl.store(LOSS + row, lse - tl.load(logits + tl.load(TARGETS + row)).to(tl.float32))


@triton.jit
def cross_entropy_gradient_kernel(
    LOGITS, TARGETS, LSE, D_LOSS, SUMS, rows, ids, STEP: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Overwrites ``ROWS`` rows' logits of some ids by their gradient; their sum is one row of SUMS."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * ROWS
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for start in range(0, ROWS, STEP):
        row = first + start + tl.arange(0, STEP)[:, None]
        exists = (row < rows) & (column < ids)
        where = LOGITS + row * ids + column
        x = tl.load(where, mask=exists, other=float("-inf")).to(tl.float32)
        lse, target = tl.load(LSE + row, mask=row < rows, other=0), tl.load(TARGETS + row, mask=row < rows, other=-1)
        gradient = tl.exp(x - lse) - tl.where(column == target, 1.0, 0.0)
        gradient *= tl.load(D_LOSS + row, mask=row < rows, other=0)
        tl.store(where, gradient.to(LOGITS.dtype.element_ty), mask=exists)
        total += gradient
    tl.store(SUMS + tl.program_id(1) * ids + column, tl.sum(total, 0), mask=column < ids)

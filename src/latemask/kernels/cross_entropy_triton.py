"""Triton kernels of the cross-entropy: one program a row of logits."""

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
def cross_entropy_gradient_kernel(LOGITS, TARGETS, LSE, D_LOSS, ids, CHUNK: tl.constexpr):
    """Overwrites CHUNK logits of one row by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    where = LOGITS + row * ids + places
    x = tl.load(where, mask=places < ids, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(x - tl.load(LSE + row)) - tl.where(places == tl.load(TARGETS + row), 1.0, 0.0)
    tl.store(where, (gradient * tl.load(D_LOSS + row)).to(LOGITS.dtype.element_ty), mask=places < ids)

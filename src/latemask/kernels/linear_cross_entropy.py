"""The last linear layer and its cross-entropy, the logits written once and overwritten by their gradient.

``cross_entropy(x table' + bias)`` with logits in the precision of the factors, sums and exponentials in float32
(Triton): one pass over the logits forward, one backward, which adds up the gradient of the bias too. ``plain`` is its
twin in torch, for every other device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from latemask.kernels import HAS_TRITON, INTERPRETED

CHUNK = 4096
"""Logits that a program works on at once, forward."""
STEP, COLUMNS, ROWS = 8, 256, 128
"""Backward it reads so many columns of ``STEP`` rows at once, of ``ROWS`` in all."""


def plain(
    x: Float[Tensor, "P E"], table: Float[Tensor, "T E"], bias: Float[Tensor, " T"], targets: Int[Tensor, " P"]
) -> Float[Tensor, " P"]:
    """Nats for each row of ``x``, in float32 or better."""
    logits = F.linear(x, table, bias)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none")


def is_supported(x: Tensor) -> bool:
    """Whether the kernel runs for these vectors."""
    return (x.is_cuda or INTERPRETED) and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and HAS_TRITON


def linear_cross_entropy(
    x: Float[Tensor, "P E"], table: Float[Tensor, "T E"], bias: Float[Tensor, " T"], targets: Int[Tensor, " P"]
) -> Float[Tensor, " P"]:
    """``plain`` by the kernel. The backward pass uses the logits up: it runs once."""
    return _LinearCrossEntropy.apply(x, table, bias, targets)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        from latemask.kernels import cross_entropy_triton

        kernels: Any = cross_entropy_triton
        logits = torch.addmm(bias, x, table.t())
        rows, ids = logits.shape
        loss, lse = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
        kernels.cross_entropy_kernel[(rows,)](logits, targets, loss, lse, ids, CHUNK=CHUNK, num_warps=8)
        ctx.save_for_backward(x, table, targets, lse)
        ctx.logits, ctx.bias_dtype = logits, bias.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss: Tensor):  # type: ignore[override]
        from latemask.kernels import cross_entropy_triton

        kernels: Any = cross_entropy_triton
        x, table, targets, lse = ctx.saved_tensors
        if ctx.logits is None:
            raise RuntimeError("linear_cross_entropy: its backward pass ran before and used the logits up")
        d_logits, ctx.logits = ctx.logits, None
        rows, ids = d_logits.shape
        parts = -(-rows // ROWS)
        sums = lse.new_empty(parts, ids)
        kernels.cross_entropy_gradient_kernel[(-(-ids // COLUMNS), parts)](
            d_logits, targets, lse, d_loss.contiguous(), sums, rows, ids, STEP, COLUMNS, ROWS
        )
        return d_logits @ table, d_logits.t() @ x, sums.sum(0).to(ctx.bias_dtype), None

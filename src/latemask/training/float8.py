"""Matrix products of the blocks in FP8, as an option, with scales known beforehand: no pass over an activation.

Scaling by the largest value reads a whole activation before each product, which cost more than FP8 gained. In these
blocks magnitudes are known: what is multiplied by a weight comes from a LayerNorm, a GELU or a mean of values, and the
loss is a mean over a known number of tokens, by which gradients shrink. So scales are fixed, and casts fuse into the
kernels before them. Rounding errs by at most 2 ** -4 of a number in e4m3 (3 bits of mantissa) and 2 ** -3 in e5m2 (2
bits), sums of many products at random by 4 and 6 %, whatever the scale, while numbers stay in range.

Formats as in Micikevicius et al., FP8 formats for deep learning (2022): e4m3 forward, e5m2 for gradients. Embeddings,
doors, attention itself, head, the weights' gradients and whatever slices a weight (the last block off the predicted
positions) stay in bf16. Weights stay float32 and keep their names: checkpoints, resume in another precision and export
know nothing of this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Stack

CAPABILITY = (8, 9)
"""Of the first cards that multiply FP8 (Ada, Hopper)."""
FACTOR, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
INPUT_UNIT = 2.0**-3
"""What 1 in FP8 stands for in a layer's input, so that the normal numbers are .002 to 56: a LayerNorm of gain 1 makes
none beyond the root of the width (32 where that is 1,024). At the start of training, where attention gives .03 to .16
and GELU .1 to .3, units from 1/4 to 1/64 round equally well."""
TOKEN_GRADIENT_UNIT = 2.0**-10
"""The same in a gradient, were the loss the sum over tokens in place of their mean. At the start of training gradients
then are about .02 for masked tokens, 1e-4 for seen ones (1e-5 before attention), the largest .12; units from 2 ** -4 to
2 ** -18 round them equally well. With about the middle one the normal numbers are 6e-8 to 56."""


def check_float8(device: torch.device) -> None:
    """Raise ``Refusal`` for a device without FP8 matrix products."""
    if device.type != "cuda":
        raise Refusal("training.precision", f"fp8 on {device.type}", "a GPU with FP8 (H100, L40, RTX 4090 and later)")
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise Refusal("training.precision", f"fp8 on {name} (compute capability {found[0]}.{found[1]})",
                      "compute capability 8.9 or later", "Take bf16")  # fmt: skip


def is_possible(device: torch.device) -> bool:
    """Whether this device multiplies FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def multiply_in_float8(model: Pretrainer, predictions: float) -> int:
    """Swap the linear layers inside all blocks, in place; how many.

    ``predictions``: the number of tokens over whose losses the backward pass of this process takes the mean; ten times
    more or less does no harm. Raises ``Refusal`` where the widths leave no layer (multiples of 16).
    """
    unit = TOKEN_GRADIENT_UNIT * 2.0 ** -round(math.log2(predictions))
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    parents = [module for stack in stacks for module in stack.modules()]
    swapped = 0
    for parent in parents:
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and layer.in_features % 16 == 0 and layer.out_features % 16 == 0:
                setattr(parent, name, Float8Linear(layer, unit))
                swapped += 1
    if not swapped:
        raise Refusal("training.precision", f"fp8 with a width of {model.run.shape.width}", "a multiple of 16")
    return swapped


class Float8Linear(nn.Linear):
    """A linear layer with the parameters of ``layer`` whose products with the weight are in FP8.

    ``gradient_unit``: what 1 in FP8 stands for in the gradient of its output.
    """

    def __init__(self, layer: nn.Linear, gradient_unit: float):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.input_unit: Tensor
        self.gradient_unit: Tensor
        for name, unit in (("input_unit", INPUT_UNIT), ("gradient_unit", gradient_unit)):
            self.register_buffer(name, torch.tensor(unit, device=layer.weight.device), persistent=False)

    def forward(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n O"]:
        """x W' + b in bfloat16."""
        return _Linear.apply(x, self.weight, self.bias, self.input_unit, self.gradient_unit)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    """y = x W' + b and dx = dy W in FP8, dW = dy' x in bfloat16.

    Nothing the size of an activation is transposed. What is not finite in x or dy reaches dW, which knows no range: the
    update is then skipped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_unit: Tensor, dy_unit: Tensor) -> Tensor:
        weight_unit = weight.abs().amax().float().clamp(min=1e-12) / torch.finfo(FACTOR).max
        weight8 = to_float8(weight.float(), weight_unit, FACTOR)
        ctx.save_for_backward(x, weight8, weight_unit, dy_unit)
        ctx.weight_dtype = weight.dtype
        x8 = to_float8(x, x_unit, FACTOR).view(-1, x.shape[-1])
        y = multiply(x8, x_unit, weight8.t(), weight_unit, bias, is_fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight8, weight_unit, dy_unit = ctx.saved_tensors
        columns = weight8.t().contiguous().t()
        dy8 = to_float8(dy, dy_unit, GRADIENT).view(-1, dy.shape[-1])
        dx = multiply(dy8, dy_unit, columns, weight_unit, is_fast=False).view(x.shape).to(x.dtype)
        dy = dy.reshape(-1, dy.shape[-1])
        dweight = (dy.t() @ x.reshape(-1, x.shape[-1]).to(dy.dtype)).to(ctx.weight_dtype)
        return dx, dweight, dy.sum(0, dtype=ctx.weight_dtype) if ctx.needs_input_grad[2] else None, None, None


def to_float8(x: Tensor, unit: Tensor, kind: torch.dtype) -> Tensor:
    """x / unit in FP8, contiguous; what is out of range, infinities too, becomes the end of the range. NaN stays."""
    most = torch.finfo(kind).max
    return (x / unit).clamp(-most, most).to(kind, memory_format=torch.contiguous_format)


def multiply(
    a: Float[Tensor, "m k"], a_unit: Tensor, b: Float[Tensor, "k n"], b_unit: Tensor, bias: Tensor | None = None, *,
    is_fast: bool
) -> Float[Tensor, "m n"]:  # fmt: skip
    """(a a_unit) (b b_unit) + bias in bfloat16, a in rows and b in columns; off GPUs exactly, in float64.

    ``is_fast``: tensor cores sum with fewer bits, too few for gradients.
    """
    if a.is_cuda:
        bias = None if bias is None else bias.bfloat16()
        return torch._scaled_mm(a, b, a_unit, b_unit, bias, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
    product = (a.double() @ b.double()) * (a_unit * b_unit)
    return (product if bias is None else product + bias).bfloat16()

"""Matrix products of the blocks in FP8, as an option: the linear layers are torchao's, the weights stay float32.

Dynamic scaling, one scale a tensor, the fastest of torchao's recipes. Embeddings, doors, attention itself, head and
whatever slices a weight (the last block off the predicted positions) stay in bf16. Parameters keep their names, so
checkpoints, resume in another precision and export know nothing of it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from latemask.console import hush_torchao
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Stack

CAPABILITY = (8, 9)
"""Of the first cards that multiply FP8 (Ada, Hopper)."""


def check_float8(device: torch.device) -> None:
    """Raise ``Refusal`` for a device without FP8 matrix products."""
    if device.type != "cuda":
        raise Refusal("training.precision", f"fp8 on {device.type}", "a GPU with FP8 (H100, L40, RTX 4090 and later)")
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise Refusal("training.precision", f"fp8 on {name} (compute capability {found[0]}.{found[1]})",
                      "compute capability 8.9 or later", "Take bf16")  # fmt: skip


def is_possible(device: torch.device) -> bool:
    """Whether this device multiplies FP8 and torchao is installed."""
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY
    return fits and importlib.util.find_spec("torchao") is not None


def multiply_in_float8(model: Pretrainer, *, emulates: bool = False) -> int:
    """Swap the linear layers inside all blocks; how many. ``emulates``: round to FP8, multiply in the input's type.

    Raises ``Refusal`` where torchao is not installed, and where the widths leave no layer (multiples of 16).
    """
    hush_torchao()
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError:
        raise Refusal("training.precision", "fp8 without torchao", "pip install latemask[fp8]") from None
    settings = Float8LinearConfig(pad_inner_dim=True, emulate=emulates)

    def fits(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and layer.in_features % 16 == 0 and layer.out_features % 16 == 0

    for module in model.modules():
        if isinstance(module, Stack):
            convert_to_float8_training(module, module_filter_fn=fits, config=settings)
    swapped = sum(isinstance(module, Float8Linear) for module in model.modules())
    if not swapped:
        raise Refusal("training.precision", f"fp8 with a width of {model.run.shape.width}", "a multiple of 16")
    return swapped

"""The weights of matrix products in bf16: all cast at once before an update, their gradients all cast back at once.

autocast casts each weight and bias by itself where it is used, and each gradient by itself: 300 small kernels of an
update of 12 blocks, most of whose time is their launch. The copies hold the same bits, and so do the gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Casts:
    """Copies in ``dtype`` of the weights of ``layers``, put in their places while ``model`` is called."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Linear], dtype: torch.dtype = torch.bfloat16):
        self.model = model
        chosen = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}
        held = {name: weight for name, weight in model.named_parameters() if id(weight) in chosen}
        self.weights: list[Tensor] = list(held.values())
        self.copies: dict[str, Tensor] = {
            name: nn.Parameter(weight.detach().to(dtype)) for name, weight in held.items()
        }

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What ``model`` returns for ``inputs``, from copies that are made anew."""
        if self.weights:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), self.weights)
        return torch.func.functional_call(self.model, self.copies, inputs)

    def give_gradients(self) -> None:
        """The gradients that a backward pass left with the copies become those of the weights."""
        given, found = [], []
        for weight, copy in zip(self.weights, self.copies.values(), strict=True):
            if copy.grad is not None:
                weight.grad, gradient, copy.grad = torch.empty_like(weight), copy.grad, None
                given.append(weight.grad)
                found.append(gradient)
        if given:
            torch._foreach_copy_(given, found)


def used_once(model: nn.Module, call: Callable[[], object], device: torch.device) -> list[nn.Linear]:
    """The Linear layers that ``call``, a forward pass of ``model``, runs exactly once and under autocast, and whose
    weights nothing else has: gradients of several uses would be summed in bf16."""
    calls: Counter[nn.Linear] = Counter()

    def seen(layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, nn.Linear)
        calls[layer] += 1 if torch.is_autocast_enabled(device.type) else 2  # 2: not to be chosen

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(seen) for layer in layers]
    try:
        with torch.no_grad():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    owners = Counter(id(weight) for part in model.modules() for weight in part.parameters(recurse=False))
    return [
        layer
        for layer in layers
        if calls[layer] == 1
        and all(owners[id(weight)] == 1 and weight.dtype == torch.float32 for weight in layer.parameters(recurse=False))
    ]

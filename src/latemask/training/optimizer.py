"""AdamW as in MAE-LM Table 4, which skips an update by itself where a gradient is not finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from latemask.config import Training
from latemask.errors import Refusal
from latemask.training.data_parallel import like, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """Decay on matrices and tables; none on biases, LayerNorms and single vectors. Fused: one kernel for all."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    plain = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    assert len(decayed) + len(plain) == len({id(parameter) for _, parameter in named})
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, eps=training.epsilon, fused=True)


def update(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    learning_rate: float,
    clip_norm: float | None,
    loss: Tensor,
    keeps_gradients: bool = False,
) -> tuple[Tensor, Tensor]:
    """Clip, then step unless the loss or the gradient norm is not finite: (gradient norm, whether it was skipped).

    Nothing here waits for the device: the fused kernel itself reads the flag ``found_inf``. ``keeps_gradients``: they
    are zeroed where they are, for graphs add to them there; else they are dropped.
    """
    most = clip_norm if clip_norm is not None else float("inf")
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), most))
    skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
    optimizer.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps_gradients)
    return norm, skipped


class Verdict:
    """Whether the update in flight was skipped, read without waiting for what was launched after it."""

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.pending: Tensor | None = None
        self.event = torch.cuda.Event() if self.is_cuda else None
        self.host = torch.empty((), dtype=torch.bool, pin_memory=self.is_cuda)

    def watch(self, skipped: Tensor) -> None:
        self.pending = self.host.copy_(skipped, non_blocking=self.is_cuda)
        if self.event is not None:
            self.event.record()

    def read(self) -> bool | None:
        """None where no update is in flight."""
        if self.pending is None:
            return None
        if self.event is not None:
            self.event.synchronize()
        self.pending = None
        return bool(self.host)


def optimizer_tensors(optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: ``<name>.exp_avg``, ``<name>.exp_avg_sq``, ``<name>.step``."""
    return {
        f"{name}.{key}": value.contiguous()
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    """The inverse of ``optimizer_tensors``; none at all is an optimizer that has not stepped.

    Raises ``Refusal`` naming what is missing, unknown or misshapen.
    """
    if not tensors:
        return
    shapes = {f"{name}.{key}": parameter.shape for name, parameter in model.named_parameters() for key in MOMENTS}
    shapes |= {f"{name}.step": torch.Size() for name, _ in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if odd := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        named = ", ".join(f"{name} {tuple(found[name]) if name in found else 'missing'}" for name in odd[:5])
        raise Refusal("optimizer.safetensors", named, "both moments and the step of every parameter")
    for name, parameter in model.named_parameters():
        state = {key: like(parameter, tensors[f"{name}.{key}"].to(parameter.dtype)) for key in MOMENTS}
        optimizer.state[parameter] = state | {"step": tensors[f"{name}.step"].to(parameter.device, torch.float32)}

"""Blocks computed again in the backward pass: the same loss and gradients to the last bit, and less kept."""

from __future__ import annotations

import pytest
import torch

from latemask.model.pretrainer import Pretrainer
from latemask.training.micro import recompute_blocks
from samples import batch_of, small


def trained_once(model: Pretrainer, batch) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients, and bytes that autograd kept."""
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(1)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch).mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None], kept


@pytest.mark.parametrize("system", ["mlm", "mae_lm", "three_ml_cross"])
def test_recomputing_changes_no_bit(system):
    run = small(system, dropout=0.1)
    torch.manual_seed(0)
    model, batch = Pretrainer(run).train(), batch_of(run)
    loss, gradients, kept = trained_once(model, batch)
    recompute_blocks(model)
    again, gradients_again, kept_again = trained_once(model, batch)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert kept_again < kept

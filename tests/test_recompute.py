"""Blocks computed again in the backward pass: the same loss and gradients to the last bit, and less kept."""

from __future__ import annotations

import pytest
import torch

from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Stack
from latemask.training import loop
from latemask.training.micro import recompute_blocks
from samples import batch_of, small
from training_support import tiny_run, write_store


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


def test_a_run_recomputes_where_it_is_told_to(tmp_path, monkeypatch):
    data = write_store(tmp_path / "data")
    assembled, assemble = [], loop.assemble
    monkeypatch.setattr(loop, "assemble", lambda *a: assembled.append(assemble(*a)) or assembled[-1])
    for recompute in (False, True):
        loop.pretrain(tiny_run(recompute=recompute, steps=1), data, tmp_path / str(recompute))
        stacks = [module for module in assembled[-1].model.modules() if isinstance(module, Stack)]
        assert stacks
        assert all(stack.recomputes is recompute for stack in stacks)

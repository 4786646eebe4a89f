"""FP8: the layers of all blocks are swapped, names and weights stay, and what they compute is near the plain layers."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from latemask.config import replace
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.training.float8 import check_float8, is_possible, multiply_in_float8
from samples import batch_of
from training_support import tiny_run


def run_of(system: str = "mae_lm"):
    return replace(tiny_run(system), {"shape.dropout": 0.0})


def test_blocks_multiply_in_float8_and_nothing_else_changes():
    pytest.importorskip("torchao")
    run = run_of()
    torch.manual_seed(0)
    plain = Pretrainer(run)
    swapped = Pretrainer(run)
    swapped.load_state_dict(plain.state_dict())
    blocks = run.shape.depth + run.decoder.depth
    assert multiply_in_float8(swapped, emulates=True) == 4 * blocks
    assert swapped.state_dict().keys() == plain.state_dict().keys()
    for layer in (swapped.head.dense, swapped.encoder.tokens):
        assert type(layer) in (nn.Linear, nn.Embedding)

    batch = batch_of(run, 8)
    losses = [model(batch).mean() for model in (plain, swapped)]
    assert losses[0] != losses[1]  # it does round
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(plain.named_parameters(), swapped.parameters(), strict=True):
        near = torch.cosine_similarity(ours.grad.flatten(), theirs.grad.flatten(), dim=0)
        assert near > 0.97, name


def test_float8_is_refused_by_name_where_it_cannot_be(monkeypatch):
    with pytest.raises(Refusal, match=r"training.precision: found fp8 on cpu"):
        check_float8(torch.device("cpu"))
    assert not is_possible(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(Refusal, match=r"A100 \(compute capability 8.0\)"):
        check_float8(torch.device("cuda"))
    assert not is_possible(torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Refusal, match=r"latemask\[fp8\]"):
        multiply_in_float8(Pretrainer(run_of()))


def test_widths_that_are_no_multiple_of_16_are_refused():
    pytest.importorskip("torchao")
    changes = {f"{part}.{name}": value for part in ("shape", "decoder")
               for name, value in {"width": 24, "feedforward": 40}.items()}  # fmt: skip
    with pytest.raises(Refusal, match="a width of 24"):
        multiply_in_float8(Pretrainer(replace(run_of(), changes)))

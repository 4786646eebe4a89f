"""The relative bias: T5's buckets, and a gradient equal to that of a plain softmax."""

from __future__ import annotations

import pytest
import torch

import reference
from latemask.model.attention import Geometry, RelativeBias, SelfAttention, relative_buckets


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (64, 128), (128, 256), (8, 20), (4, 2)])
def test_buckets_are_t5_s_and_those_of_exact_arithmetic(buckets, distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    found = relative_buckets(512, buckets, distance)
    assert found.tolist() == [reference.bucket(offset, buckets, distance) for offset in range(-511, 512)]
    assert torch.equal(found, T5Attention._relative_position_bucket(torch.arange(-511, 512), True, buckets, distance))
    assert found.min() == 0
    assert found.max() == buckets - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129])
def test_the_gradient_of_the_relative_bias_equals_a_plain_softmax(tokens, dtype):
    torch.manual_seed(tokens)
    heads, width, rows = 2, 16, 2
    bias, attention = RelativeBias(heads, 32, 128, 160).to(dtype), SelfAttention(width, heads, 0.0).to(dtype)
    x = torch.randn(rows, tokens, width, dtype=dtype)
    seats = torch.stack([torch.randperm(160)[:tokens] for _ in range(rows)])
    weight = torch.randn(rows, tokens, width, dtype=dtype)
    (attention(x, Geometry(bias(seats))) * weight).sum().backward()

    table = bias.table.weight.detach().clone().requires_grad_()
    names = ("query_key_value.weight", "query_key_value.bias", "output.weight", "output.bias")
    weights = {f"it.{name}": attention.get_parameter(name).detach() for name in names}
    total = torch.zeros((), dtype=dtype)
    for b in range(rows):
        places = seats[b].tolist()
        of = torch.tensor([[reference.bucket(k - q, 32, 128) for k in places] for q in places])
        allowed = torch.ones(tokens, tokens, dtype=torch.bool)
        out = reference._attention(weights, "it", heads, x[b], x[b], allowed, table[of].permute(2, 0, 1))
        total = total + (out * weight[b]).sum()
    total.backward()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5 * max(1.0, table.grad.abs().max().item())
    torch.testing.assert_close(bias.table.weight.grad, table.grad, rtol=0, atol=tolerance)
    assert (table.grad.abs().max() > 0) == (tokens > 1)

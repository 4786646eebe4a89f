"""GELU by the logarithm of the normal distribution's tail, against the error function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.polynomial import Chebyshev, Polynomial
from scipy.special import log_ndtr, ndtr
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from latemask.kernels import gelu as kernel
from latemask.kernels.gelu import FAR, GELU, LOG_TAIL, polynomial, tailed_gelu
from samples import batch_of, losses_and_gradients, pretrainer_of, small

EVERYWHERE = torch.cat([torch.linspace(-12, 12, 240_001), torch.linspace(-1, 1, 100_001)])


def with_gradient(function, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    out.backward(torch.ones_like(out))
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def test_values_and_gradients_are_those_of_the_normal_distribution():
    out, gradient = (found.double().numpy() for found in with_gradient(tailed_gelu, EVERYWHERE))
    x = EVERYWHERE.double().numpy()
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    assert np.abs(out - x * ndtr(x)).max() < 7e-7
    assert np.abs(gradient - (ndtr(x) + x * density)).max() < 3e-6
    counts = np.abs(x * ndtr(x)) > 1e-6  # also far out on the left, where it is next to nothing
    np.testing.assert_allclose(out[counts], (x * ndtr(x))[counts], rtol=1e-5)


def test_the_polynomial_is_the_logarithm_of_the_tail():
    def log_tail(a):
        return log_ndtr(-a) / np.log(2)

    a = np.linspace(0, FAR, 10_001)
    found = polynomial(LOG_TAIL, torch.from_numpy(a)).numpy()
    np.testing.assert_allclose(found, log_tail(a), rtol=0, atol=7.2e-6)
    series = Chebyshev.interpolate(log_tail, 60, domain=[0, FAR]).truncate(len(LOG_TAIL))
    np.testing.assert_allclose(LOG_TAIL, series.convert(kind=Polynomial).coef, rtol=2e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_rounds_as_the_error_function_does(kind):
    """As often as torch's to the number that is nearest to the true one, else to the next."""
    x = EVERYWHERE.to(kind).unique()
    true = [value.to(kind) for value in with_gradient(F.gelu, x.double())]
    for ours, torchs, nearest in zip(with_gradient(tailed_gelu, x), with_gradient(F.gelu, x), true, strict=True):
        assert ours.dtype == kind
        torch.testing.assert_close(ours, nearest, rtol=torch.finfo(kind).eps, atol=1e-5)
        shares = [(found == nearest).double().mean().item() for found in (ours, torchs)]
        assert shares[0] > shares[1] - 0.01


def test_what_is_far_out_stays_there():
    x = torch.tensor([-3e38, -1e7, -100.0, -7.0, 7.0, 100.0, 1e7, 3e38])
    out, gradient = with_gradient(tailed_gelu, x)
    torch.testing.assert_close(out, x.clamp(min=0), rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient, (x > 0).float(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_not_hidden(kind):
    """So that a bias that is not finite shows in the loss, where the update is then skipped."""
    x = torch.tensor([-torch.inf, torch.inf, torch.nan], dtype=kind)
    assert not torch.isfinite(tailed_gelu(x)).any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_compiled_it_is_the_same(kind):
    """As where it serves: of float32 torch 2.11 loses the gradient, for what is cast to float32 is the input itself."""
    x = torch.randn(1_000).to(kind)
    torch._dynamo.reset()
    compiled = torch.compile(tailed_gelu, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(with_gradient(compiled, x), with_gradient(tailed_gelu, x), strict=True):
        assert torch.equal(found, wanted)


def test_off_a_gpu_it_is_torchs():
    x = torch.randn(1_000)
    torch._dynamo.reset()
    for function in (GELU(), torch.compile(GELU(), backend="aot_eager")):
        assert torch.equal(function(x), F.gelu(x))


def test_compiled_for_a_gpu_it_goes_by_the_tail_in_half_precision_alone(monkeypatch):
    by_the_tail = []
    monkeypatch.setattr(kernel, "tailed_gelu", lambda x: by_the_tail.append((x.device.type, x.dtype)) or x)
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for compiles in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiles=compiles: compiles)
        with FakeTensorMode():
            for device in ("cpu", "cuda"):
                for kind in kinds:
                    GELU()(torch.empty(3, device=device, dtype=kind))
    assert by_the_tail == [("cuda", torch.bfloat16), ("cuda", torch.float16)]


class Other(nn.Linear):
    """A layer such as FP8's, with a backward pass of its own."""


def summed(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin of ``gelu_gradients``."""
    wide = torch.ops.aten.gelu_backward(gradient.float(), x.float())
    return wide.to(x.dtype), wide.flatten(0, -2).sum(0)


@pytest.mark.parametrize(("kind", "make", "serves"), [
    (torch.bfloat16, nn.Linear, True), (torch.bfloat16, Other, False), (torch.float32, nn.Linear, False),
])  # fmt: skip
def test_behind_a_layer_all_gradients_are_torchs(monkeypatch, kind, make, serves):
    """Of input, weight and bias, under autocast, compiled or not; in half precision, behind a plain layer, the bias's
    comes from GELU."""
    torch.manual_seed(0)
    layer, x = make(8, 12), torch.randn(5, 7, 8, requires_grad=True)
    wanted, served = [x, layer.weight, layer.bias], []

    def gradients(function: Callable[[nn.Linear, Tensor], Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            out = function(layer, x)
        return [out, *torch.autograd.grad(out.float().square().sum(), wanted)]

    plain = gradients(GELU().after)
    monkeypatch.setattr(kernel, "compiles_for_gpu", lambda _: True)
    monkeypatch.setattr(kernel, "gelu_gradients", lambda *given: served.append(given[1].shape) or summed(*given))
    ours = gradients(GELU().after)
    monkeypatch.setattr(kernel, "gelu_gradients", summed)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(GELU().after, backend="aot_eager", fullgraph=True))
    for torchs, *found in zip(plain, ours, compiled, strict=True):
        for one in found:
            assert one.dtype == torchs.dtype
            torch.testing.assert_close(one, torchs, rtol=4 * torch.finfo(kind).eps, atol=4 * torch.finfo(kind).eps)
    assert served == [(5, 7, 12)] * serves


def test_a_model_with_it_has_the_losses_and_gradients_of_the_plain_one(monkeypatch):
    run = small("mae_lm", dropout=0.0)
    losses, gradients = losses_and_gradients(pretrainer_of(run), batch_of(run))
    monkeypatch.setattr(GELU, "forward", lambda _, x: tailed_gelu(x))
    found, theirs = losses_and_gradients(pretrainer_of(run), batch_of(run))
    assert not torch.equal(found, losses)
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        assert (theirs[name] - gradient).norm() <= 1e-5 * gradient.norm(), name

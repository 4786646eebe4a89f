"""FP8: layers compute what rounding by hand gives, in range and out of it, in a model, compiled, sharded."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Block
from latemask.training import checkpoint, float8, loop, parts
from latemask.training.float8 import (
    FACTOR,
    GRADIENT,
    INPUT_UNIT,
    TOKEN_GRADIENT_UNIT,
    Float8Linear,
    check_float8,
    is_possible,
    multiply_in_float8,
    to_float8,
)
from latemask.training.loop import pretrain
from samples import batch_of, losses_and_gradients
from training_support import lines_of, on_ranks, tensors_of, tiny_run, without_dropout

UNIT = 2.0**-20
BITS = {FACTOR: (3, -6, 448.0), GRADIENT: (2, -14, 57344.0)}
"""Of each format the bits of mantissa, the exponent of the least normal number, and the largest number."""


def run_of(system: str = "mae_lm", **training) -> Run:
    return without_dropout(tiny_run(system, **training))


def rounded(x: Tensor, unit: Tensor | float, kind: torch.dtype) -> Tensor:
    """The multiples of ``unit`` that are nearest to x among those that the format has, by arithmetic in float64."""
    bits, least, most = BITS[kind]
    x = (x / unit).double()
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**least))) - bits)
    return ((x / step).round() * step).clamp(-most, most) * unit


def problem(rows: int = 6, inputs: int = 48, outputs: int = 32, seed: int = 0, size: float = 1.0, steep: float = 1.0):
    """Layer, input and gradient of its output: half of the gradient's rows are a thousand times smaller."""
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs)
    x = (torch.randn(2, rows, inputs) * size).bfloat16().requires_grad_()
    dy = (torch.randn(2, rows, outputs) * UNIT * 1000 * steep).bfloat16()
    dy[1] *= 1e-3
    return layer, x, dy


def results(layer: nn.Module, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """y, dx, dW, db."""
    x.grad = weight.grad = bias.grad = None
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, weight.grad, bias.grad]  # type: ignore[list-item]


def in_float8(layer: nn.Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    return results(Float8Linear(layer, UNIT), x, dy, layer.weight, layer.bias)


def by_hand(layer: nn.Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The same from the numbers that the formats have, multiplied in float64."""
    weight_unit = layer.weight.detach().abs().max() / 448
    weight = rounded(layer.weight.detach(), weight_unit, FACTOR)
    y = rounded(x.detach(), INPUT_UNIT, FACTOR) @ weight.T + layer.bias.detach()
    rows, gradients = x.detach().flatten(0, 1), dy.flatten(0, 1)
    return [y, rounded(dy, UNIT, GRADIENT) @ weight, gradients.double().T @ rows.double(), gradients.double().sum(0)]


@given(
    rows=st.integers(1, 9),
    inputs=st.sampled_from([16, 48, 80]),
    outputs=st.sampled_from([16, 64]),
    size=st.sampled_from([1e-3, 0.03, 1.0, 30.0]),
    steep=st.sampled_from([1e-4, 1.0, 40.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_products_are_those_of_the_rounded_numbers(rows, inputs, outputs, size, steep, seed):
    case = problem(rows, inputs, outputs, seed, size, steep)
    names = ("y", "dx", "dW", "db")
    for name, ours, plain in zip(names, in_float8(*case), by_hand(*case), strict=True):
        rounding = 2.0**-8 if name != "db" else 2.0**-20  # of a bfloat16 result; db is summed in float32
        error, most = (ours.double() - plain).abs(), plain.abs().max()
        assert (error <= rounding * plain.abs() + 2e-6 * most).all(), name


@pytest.mark.parametrize("size", [0.01, 0.1, 1.0, 10.0])
def test_results_are_near_the_exact_ones_by_what_the_mantissas_allow(size):
    """Three bits of mantissa err by at most 2 ** -4 of a number, two by 2 ** -3, those below the normal ones by half of
    the last bit; over a sum this adds up at most in absolute values, and at random to about 4 and 6 %."""
    layer, x, dy = problem(rows=64, inputs=256, outputs=128, size=size)
    y, dx, *_ = in_float8(layer, x, dy)
    weight, weight_unit = layer.weight.detach().double(), layer.weight.abs().max().item() / 448
    weight_error = (weight.abs() * 2**-4).clamp(min=2**-10 * weight_unit)
    exact = [x.detach().double() @ weight.T, dy.double() @ weight]
    for ours, true, factor, most, least, bias, other, other_error in [
        (y, exact[0], x, 2**-4, 2**-10 * INPUT_UNIT, layer.bias.detach(), weight.T, weight_error.T),
        (dx, exact[1], dy, 2**-3, 2**-17 * UNIT, torch.zeros(()), weight, weight_error),
    ]:
        factor = factor.detach().double().abs()
        error = (factor * most).clamp(min=least)
        bound = error @ other.abs() + (factor + error) @ other_error
        found = (ours.double() - true - bias.double()).abs()
        assert (found <= bound + 2**-8 * (true + bias).abs()).all()
        assert 0.01 < found.norm() / true.norm() < (0.05 if most == 2**-4 else 0.08)


def test_what_is_out_of_range_is_the_nearest_number_in_it():
    x = torch.tensor([0.0, 1.0, 448.0, 460.0, 5e4, 6e4, 3e38, torch.inf, torch.nan]).bfloat16()
    for kind, most in ((FACTOR, 448.0), (GRADIENT, 57344.0)):
        found = torch.cat([to_float8(sign * x, torch.tensor(1.0), kind).float() for sign in (1, -1)])
        assert found.isnan().sum() == 2
        assert found[[7, 16]].tolist() == [most, -most]
        assert found[~found.isnan()].abs().max() == most
        assert found[:2].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("spoiled", ["x", "dy"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_weights_gradient(spoiled, value):
    layer, x, dy = problem()
    (x.data if spoiled == "x" else dy)[1, 2, 3] = value
    y, dx, dweight, _ = in_float8(layer, x, dy)
    assert not dweight.isfinite().all()
    assert (y if spoiled == "x" else dx)[1, 2].isnan().all() == (value != torch.inf)
    assert (y if spoiled == "x" else dx)[0].isfinite().all()
    x.data[1, 2, 3] = dy[1, 2, 3] = 0
    assert in_float8(layer, x, dy)[2].isfinite().all()


def test_weights_of_zero_or_without_end_are_no_trap():
    layer, x, dy = problem()
    nn.init.zeros_(layer.weight)
    y, dx, dweight, _ = in_float8(layer, x, dy)
    torch.testing.assert_close(y, layer.bias.detach().bfloat16().expand_as(y), rtol=0, atol=0)
    assert (dx == 0).all()
    assert dweight.isfinite().all()
    layer.weight.data[3, 5] = torch.inf
    assert in_float8(layer, x, dy)[0].isnan().any()


def test_a_layer_has_the_types_of_a_layer_under_autocast():
    """Bias or none, autocast or not, inputs in two or more dimensions, with a gradient or without."""
    layer, x, dy = problem()
    bare = nn.Linear(48, 32, bias=False)
    for kind in (torch.float32, torch.bfloat16):
        given = x.detach().to(kind).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, dx, dweight, dbias = in_float8(layer, given, dy)
        assert (y.dtype, dx.dtype, dweight.dtype, dbias.dtype) == (torch.bfloat16, kind, torch.float32, torch.float32)
        torch.testing.assert_close(dx.float(), in_float8(layer, x, dy)[1].float(), rtol=0, atol=0)
    y = Float8Linear(bare, UNIT)(x.detach()[0])
    y.sum().backward()
    assert y.shape == (6, 32)
    assert bare.weight.grad is not None


@pytest.mark.parametrize("way", ["whole", "sliced", "turned", "expanded"])
def test_torchs_own_product_takes_the_layouts_and_gives_the_same(monkeypatch, way):
    """Its checks for GPUs, which it makes of tensors without data, and its kernel for CPUs."""
    plain, seen = float8.multiply, []

    def multiply(a, a_unit, b, b_unit, bias=None, *, is_fast):
        there = [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device="meta") for m in (a, b)]
        units = [unit.to("meta") for unit in (a_unit, b_unit)]
        torch._scaled_mm(*there, *units, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
        ours = plain(a, a_unit, b, b_unit, bias, is_fast=is_fast)
        bias = None if bias is None else bias.bfloat16()
        theirs = torch._scaled_mm(a, b, a_unit, b_unit, bias, out_dtype=torch.bfloat16)
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-7 * ours.abs().max().item())
        seen.append((a.dtype, b.dtype, is_fast))
        return ours

    monkeypatch.setattr(float8, "multiply", multiply)
    layer, x, dy = problem(outputs=96)
    layer8 = Float8Linear(layer, UNIT)
    if way == "whole":
        layer8(x).backward(dy)
    elif way == "sliced":
        layer8(x[:, 2:]).backward(dy[:, 2:])
    elif way == "turned":
        layer8(x.transpose(0, 1)).backward(dy.transpose(0, 1))
    else:
        (layer8(x) * UNIT).sum().backward()
    assert seen == [(FACTOR, FACTOR, True), (GRADIENT, FACTOR, False)]
    there, one = torch.empty(16, 16, dtype=FACTOR, device="meta"), torch.ones((), device="meta")
    with pytest.raises(RuntimeError, match="col_major"):  # the checks can fail
        torch._scaled_mm(there, there, one, one, out_dtype=torch.bfloat16)


def compare_compiled_blocks(backend: str) -> None:
    """A layer alone to the bit. Blocks, of all tokens and of the predicted ones, one graph for all alike: where
    code is generated, near by what roundings add up to, since it keeps in float32 what eager rounds."""
    layer, x, dy = problem()
    compiled = torch.compile(Float8Linear(layer, UNIT), dynamic=False, fullgraph=True, backend=backend)
    for ours, plain in zip(results(compiled, x, dy, layer.weight, layer.bias), in_float8(layer, x, dy), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)

    run = run_of("mlm")
    model = Pretrainer(run)
    multiply_in_float8(model, 10)
    batch = batch_of(run, 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain_losses, plain = losses_and_gradients(model, batch)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.compile(dynamic=False, fullgraph=True, backend=backend)
    limits = {"recompile_limit": 2, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits), torch.autocast("cpu", torch.bfloat16):
        losses, gradients = losses_and_gradients(model, batch)
    near = 0.0 if backend == "aot_eager" else 0.1
    torch.testing.assert_close(losses, plain_losses, rtol=near / 100, atol=0)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert (gradient - plain[name]).norm() <= near * plain[name].norm(), name


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_block_is_one_graph_and_gives_the_same(backend):
    """In a process where nothing checks the shapes of signatures, which cannot be compiled."""
    code = f"import test_float8; test_float8.compare_compiled_blocks({backend!r})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


@pytest.mark.parametrize("system", ["mae_lm", "mlm", "decoder_self_cross", "decoder_causal_cross"])
def test_blocks_multiply_in_float8_and_nothing_else_changes(system):
    run = run_of(system)
    torch.manual_seed(0)
    plain = Pretrainer(run)
    swapped = Pretrainer(run)
    swapped.load_state_dict(plain.state_dict())
    batch = batch_of(run, 8)
    inside = sum(isinstance(layer, nn.Linear) for block in plain.modules() if isinstance(block, Block)
                 for layer in block.modules())  # fmt: skip
    assert multiply_in_float8(swapped, batch.rows * run.predicted_tokens) == inside
    assert sum(isinstance(layer, Float8Linear) for layer in swapped.modules()) == inside
    assert swapped.state_dict().keys() == plain.state_dict().keys()
    assert [(name, p.shape, p.dtype) for name, p in swapped.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in plain.named_parameters()
    ]
    for layer in (swapped.head.dense, swapped.encoder.tokens):
        assert type(layer) in (nn.Linear, nn.Embedding)

    (losses, ours), (near_losses, near) = (losses_and_gradients(model, batch) for model in (plain, swapped))
    assert not torch.equal(losses, near_losses)  # it does round
    torch.testing.assert_close(near_losses.mean(), losses.mean(), rtol=0.02, atol=0)
    assert near.keys() == ours.keys()
    for name, gradient in ours.items():
        assert torch.cosine_similarity(gradient.flatten(), near[name].flatten(), dim=0) > 0.97, name


def test_gradients_are_measured_in_units_of_a_tokens_share_of_the_mean():
    """The unit is a power of two near the fixed one over the number of tokens; another scale of the loss that goes with
    it changes no bit."""
    run = run_of("mlm")
    found = []
    for share in (1, 16):
        torch.manual_seed(0)
        model = Pretrainer(run)
        batch = batch_of(run, 4)
        multiply_in_float8(model, share * (count := batch.rows * run.predicted_tokens))
        layer = next(module for module in model.modules() if isinstance(module, Float8Linear))
        assert 2**-0.5 <= float(layer.gradient_unit) * share * count / TOKEN_GRADIENT_UNIT <= 2**0.5
        (model(batch).mean() / share).backward()
        found.append([p.grad * share for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_float8_is_refused_by_name_where_it_cannot_be(monkeypatch):
    with pytest.raises(Refusal, match=r"training.precision: found fp8 on cpu"):
        check_float8(torch.device("cpu"))
    assert not is_possible(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(Refusal, match=r"A100 \(compute capability 8.0\)"):
        check_float8(torch.device("cuda"))
    assert not is_possible(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_float8(torch.device("cuda"))
    assert is_possible(torch.device("cuda"))


def test_widths_that_are_no_multiple_of_16_are_refused():
    changes = {f"{part}.{name}": value for part in ("shape", "decoder")
               for name, value in {"width": 24, "feedforward": 40}.items()}  # fmt: skip
    with pytest.raises(Refusal, match="a width of 24"):
        multiply_in_float8(Pretrainer(replace(run_of(), changes)), 10)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in FP8 is not refused on a CPU."""
    monkeypatch.setattr(parts, "check_float8", lambda device: None)


def train_losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines_of(out, "train")]


@pytest.mark.usefixtures("anywhere")
def test_training_in_float8_follows_training_in_bfloat16(data: Path, tmp_path: Path):
    for precision in ("bf16", "fp8"):
        pretrain(run_of(precision=precision, steps=30, validate_every=0, save_every=30), data, tmp_path / precision)
    ours, theirs = (torch.tensor(train_losses(tmp_path / precision)) for precision in ("fp8", "bf16"))
    assert not torch.equal(ours, theirs)
    assert theirs[-5:].mean() < theirs[:5].mean() - 0.2  # there is something to follow
    torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0)


@pytest.mark.usefixtures("anywhere")
def test_a_run_changes_its_precision_at_a_checkpoint(data: Path, tmp_path: Path):
    out, names = tmp_path / "run", []
    for steps, precision in ((2, "bf16"), (4, "fp8"), (6, "bf16")):
        pretrain(run_of(precision=precision, steps=steps, validate_every=0), data, out, resume="if-present")
        step = checkpoint.newest(out)
        names.append({name: (tensor.shape, tensor.dtype) for name, tensor in tensors_of(step).items()})
    assert names[0] == names[1] == names[2]
    runs = [line["run"]["training"] for line in lines_of(out, "start", "resume")]
    assert [training["precision"] for training in runs] == ["bf16", "fp8", "bf16"]
    pretrain(run_of(precision="bf16", validate_every=0), data, tmp_path / "plain")
    assert train_losses(out) == pytest.approx(train_losses(tmp_path / "plain"), rel=0.03)


def units_of_a_run(run: Run, data: Path, out: Path) -> set[float]:
    """What 1 stands for in this process's gradients."""
    assembled, assemble = [], loop.assemble
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "assemble", lambda *given: assembled.append(assemble(*given)) or assembled[-1])
        pretrain(run, data, out)
    layers = [module for module in assembled[0].model.modules() if isinstance(module, Float8Linear)]
    return {float(layer.gradient_unit) for layer in layers}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("way", "near"), [("replicate", 1e-3), ("shard", 0.02)])
def test_two_processes_train_in_float8_as_one_does(data: Path, tmp_path: Path, way: str, near: float):
    """Each sees gradients twice as large, in units twice as large; sharded weights are rounded to bfloat16 before."""
    run = run_of(precision="fp8", batch_rows=8, validate_every=0, data_parallel=way)
    (one,), *both = [on_ranks(count, partial(units_of_a_run, run, data, tmp_path / str(count))) for count in (1, 2)]
    exponent = round(math.log2(8 * run.predicted_tokens))
    assert (one, *both) == ({TOKEN_GRADIENT_UNIT * 2.0**-exponent}, [{TOKEN_GRADIENT_UNIT * 2.0 ** (1 - exponent)}] * 2)
    assert train_losses(tmp_path / "2") == pytest.approx(train_losses(tmp_path / "1"), rel=near)

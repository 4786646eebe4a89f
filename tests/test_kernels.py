"""Every kernel against its plain twin in float64, values and all gradients: in the interpreter, or on a GPU.

The interpreter is chosen when Triton is imported, so the checks run in a fresh process:
this file is its own program, and pytest reads what it found. On a machine with a GPU the same cases run on it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pytest
import torch

from benchmark_files import load

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF16: 2e-2, FP16: 2e-3, FP32: 2e-6}
"""Largest error ||out - wanted||, relative to ||wanted|| where that is above 1."""

# queries, keys, head width, largest told distance, dtype, dropout, groups, order of seats, packed, has a table
ATTENTION = [
    (1, 1, 32, 5, FP32, 0.0, False, "sorted", True, True),
    (1, 1, 64, 5, BF16, 0.0, False, "sorted", False, True),
    (31, 31, 16, 91, FP32, 0.1, False, "shuffled", True, True),  # nothing is far
    (33, 33, 16, 1, FP32, 0.1, True, "sorted", True, True),  # nothing but 0 is near
    (63, 64, 16, 3, FP32, 0.1, False, "half", False, True),
    (64, 65, 16, 8, FP32, 0.0, True, "sorted", False, True),
    (127, 127, 32, 20, FP32, 0.1, False, "sorted", True, True),
    (128, 128, 64, 20, BF16, 0.0, False, "shuffled", True, True),
    (129, 129, 128, 91, FP32, 0.0, True, "shuffled", False, True),
    (129, 129, 32, 20, FP32, 0.3, True, "half", True, True),
    (129, 129, 64, 20, BF16, 0.6, False, "half", True, False),
    (77, 512, 32, 91, FP32, 0.1, False, "half", False, True),
    (20, 65, 32, 20, FP32, 0.1, True, "half", False, True),
    (65, 33, 64, 20, BF16, 0.0, False, "sorted", False, True),
    (435, 435, 64, 91, BF16, 0.1, False, "sorted", True, True),
    (256, 256, 32, 91, FP32, 0.0, False, "sorted", True, True),
    (127, 127, 32, 20, BF16, 0.1, True, "half", True, True),
    (77, 512, 128, 91, BF16, 0.1, False, "half", False, True),
    (256, 256, 128, 91, BF16, 0.0, False, "sorted", True, True),
]

# tokens, head width, dtype, dtype of cosine and sine, dropout, has a table
ROTATED = [
    (1, 64, BF16, FP32, 0.1, False),
    (16, 16, FP16, FP32, 0.1, False),
    (17, 32, FP32, torch.float64, 0.1, True),
    (17, 128, BF16, torch.float64, 0.0, False),
    (33, 64, FP16, BF16, 0.3, True),
]

# rows, ids, dtype
CROSS_ENTROPIES = [(rows, ids, dtype) for rows, ids in ((7, 4160), (131, 300)) for dtype in (BF16, FP32)]

# shape, dtype, whether gradients come as the columns of a matrix
GELUS = [
    ((16,), BF16, False),
    ((0, 16), BF16, False),
    ((129, 257), BF16, True),
    ((5, 60, 48), FP16, False),
]


def attention_errors(case: tuple, device: str) -> list[float]:
    """Relative errors of the output and of the gradients of queries-keys-values, the table and its two ends."""
    from latemask.kernels import relative_attention as kernel

    queries, keys, width, far, dtype, dropout, has_groups, order, packed, has_table = case
    n = max(queries, keys)
    rows, heads = (1, 1) if n > 128 and device == "cpu" else (2, 2)
    torch.manual_seed(0)  # dropout's noise is not the generator's
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    reach = n + n // 6
    seats = torch.stack([torch.randperm(reach + 1, generator=generator)[:n] for _ in range(rows)]).int()
    if order != "shuffled":
        rising = n if order == "sorted" else n - n // 4
        seats = torch.cat([seats[:, :rising].sort(1)[0], seats[:, rising:]], 1)
    seats = seats.to(device)
    groups = (None, None)
    if has_groups:  # Group 2 of the queries sees nothing; -1 of the keys is seen by none.
        groups = (torch.randint(0, 3, (rows, n), generator=generator).int().to(device)[:, n - queries :],
                  torch.randint(-1, 2, (rows, n), generator=generator).int().to(device)[:, :keys])  # fmt: skip
    projected = normal(rows, n, 3 * heads * width).requires_grad_()
    table = torch.randn(heads, 2 * far + 1, generator=generator).to(device).requires_grad_()
    d_out = normal(rows, heads, queries, width)
    noise = kernel.draw_noise(keys, torch.device(device))
    kept = kernel.kept_by_dropout(noise, rows, heads, queries, keys, dropout) if dropout else None

    def split(projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
        return q[:, :, n - queries :], k[:, :, :keys], v[:, :, :keys]

    def relative(table: torch.Tensor) -> kernel.Relative | None:
        if not has_table:
            return None
        return kernel.Relative(table, seats[:, n - queries :], seats[:, :keys], *groups, reach)

    drawn, kernel.draw_noise = kernel.draw_noise, lambda *_: noise
    if packed:
        out = kernel.self_attention(projected, heads, relative(table), dropout)
        out = out.unflatten(-1, (heads, -1)).transpose(1, 2)
    else:
        out = kernel.attention(*split(projected), relative(table), dropout)
    kernel.draw_noise = drawn
    wide = [tensor.detach().double().requires_grad_() for tensor in (projected, table)]
    wanted = kernel.plain(*split(wide[0]), relative(wide[1]), kept, dropout)
    count = 2 if has_table else 1
    found = (out, *torch.autograd.grad(out, (projected, table)[:count], d_out))
    right = (wanted, *torch.autograd.grad(wanted, wide[:count], d_out.double()))
    if has_table:
        found, right = ((*parts, parts[2][:, :: 2 * far]) for parts in (found, right))
    return [_error(a, b) for a, b in zip(found, right, strict=True)]


def rotated_errors(case: tuple, device: str) -> list[float]:
    """Of the output and the gradients of queries-keys-values and the table, where each row has seats of its own."""
    from latemask.kernels import relative_attention as kernel
    from latemask.model.attention import rotate, rotation

    tokens, width, dtype, angles_dtype, dropout, has_table = case
    rows, heads, far = 2, 3, 4
    generator = torch.Generator().manual_seed(0)
    seats = torch.stack([torch.randperm(2 * tokens, generator=generator)[:tokens] for _ in range(rows)]).to(device)
    angles = tuple(part.to(angles_dtype) for part in rotation(seats, width, torch.float64))
    projected = torch.randn(rows, tokens, 3 * heads * width, generator=generator).to(device, dtype).requires_grad_()
    table = torch.randn(heads, 2 * far + 1, generator=generator).to(device).requires_grad_()
    d_out = torch.randn(rows, tokens, heads * width, generator=generator).to(device, dtype)

    def relative(table: torch.Tensor) -> kernel.Relative | None:
        return kernel.Relative(table, seats.int(), seats.int(), None, None, 2 * tokens) if has_table else None

    torch.manual_seed(1)
    out = kernel.self_attention(projected, heads, relative(table), dropout, angles)
    torch.manual_seed(1)
    noise = kernel.draw_noise(tokens, torch.device(device))
    kept = kernel.kept_by_dropout(noise, rows, heads, tokens, tokens, dropout) if dropout else None
    wide = [tensor.detach().double().requires_grad_() for tensor in (projected, table)]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in wide[0].chunk(3, -1))
    q, k = (rotate(part, *(angle.double() for angle in angles)) for part in (q, k))
    wanted = kernel.plain(q, k, v, relative(wide[1]), kept, dropout).transpose(1, 2).flatten(2)
    count = 2 if has_table else 1
    found = (out, *torch.autograd.grad(out, (projected, table)[:count], d_out))
    right = (wanted, *torch.autograd.grad(wanted, wide[:count], d_out.double()))
    return [_error(a, b) for a, b in zip(found, right, strict=True)]


def cross_entropy_errors(case: tuple, device: str) -> list[float]:
    """Of the loss and the gradients of vectors, table and bias; the last ids are padding (-inf)."""
    from latemask.kernels import linear_cross_entropy as kernel

    rows, ids, dtype = case
    generator = torch.Generator().manual_seed(0)
    x, table = (torch.randn(size, 32, generator=generator).to(device, dtype).requires_grad_() for size in (rows, ids))
    bias = torch.randn(ids, generator=generator)
    bias[-49:] = -torch.inf
    bias = bias.to(device, dtype).requires_grad_()
    targets = torch.randint(0, ids - 49, (rows,), generator=generator).to(device)
    weights = torch.rand(rows, generator=generator).to(device)
    parts = (x, table, bias)
    loss = kernel.linear_cross_entropy(*parts, targets)
    wide = [part.detach().double().requires_grad_() for part in parts]
    wanted = kernel.plain(*wide, targets)
    found = (loss, *torch.autograd.grad(loss @ weights, parts))
    right = (wanted, *torch.autograd.grad(wanted @ weights.double(), wide))
    return [_error(a, b) for a, b in zip(found, right, strict=True)]


def gelu_errors(case: tuple, device: str) -> list[float]:
    """Of the gradient and its sum over the tokens; then what torch's checks of an operator find wrong."""
    import torch.nn.functional as F

    from latemask.kernels.gelu import gelu_gradients

    shape, dtype, is_turned = case
    generator = torch.Generator().manual_seed(0)
    x, gradient = (2 * torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    gradient = gradient.t().contiguous().t() if is_turned else gradient
    wide = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(F.gelu(wide), wide, gradient.double())
    found = gelu_gradients(gradient, x)
    checked = torch.library.opcheck(gelu_gradients, (gradient, x), raise_exception=False)
    return [_error(found[0], wanted), 1e2 * _error(found[1], wanted.view(-1, shape[-1]).sum(0)),
            *(float(result != "SUCCESS") for result in checked.values())]  # fmt: skip


def model_errors(recipe: str, device: str) -> list[float]:
    """Loss and gradients of a whole model with isolated documents, the relative bias in the kernel and written out."""
    from dataclasses import replace

    from latemask.kernels import relative_attention
    from latemask.model.pretrainer import Pretrainer
    from samples import batch_of, small

    run = small(recipe)
    shape = replace(run.shape, isolate_documents=True, positions="absolute+relative")
    run = replace(run, shape=shape)
    torch.manual_seed(0)
    model = Pretrainer(run).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    batch = batch_of(run, 2).to(device)
    found = {}
    is_supported = relative_attention.is_supported
    for kind, supports in (("kernel", is_supported), ("plain", lambda *_: False)):
        relative_attention.is_supported = supports
        model.zero_grad()
        loss = model(batch)
        loss.mean().backward()
        found[kind] = [loss.detach(), *(p.grad.clone() for p in model.encoder.parameters() if p.grad is not None)]
    relative_attention.is_supported = is_supported
    return [_error(a, b) for a, b in zip(found["kernel"], found["plain"], strict=True)]


def layers_errors(device: str) -> list[float]:
    """Output and gradients of layers without a bias, by the kernel and by torch's own: of all tokens, rotated, asked
    from the fiftieth on, both, and across."""
    from latemask.kernels import relative_attention as kernel
    from latemask.model.attention import CrossAttention, Geometry, SelfAttention, rotation

    torch.manual_seed(0)
    alone, across = (layer.to(device, BF16) for layer in (SelfAttention(64, 2, 0.0), CrossAttention(64, 64, 2, 0.0)))
    x, memory = (torch.randn(2, 77, 64).to(device, BF16).requires_grad_() for _ in range(2))
    turned = Geometry(rotation=rotation(torch.randperm(99)[:77].to(device).expand(2, 77), 32, BF16))
    asked = [(alone, (x, Geometry())), (alone, (x, turned)), (alone, (x, Geometry(), 50)), (alone, (x, turned, 50)),
             (across, (x[:, 30:], memory, Geometry()))]  # fmt: skip
    errors, called = [], []
    kept = kernel.pays, kernel.self_attention, kernel.attention
    for layer, inputs in asked:
        found = []
        for pays in (True, False):
            kernel.pays = lambda *_, pays=pays, **__: pays
            kernel.self_attention = lambda *parts, pays=pays: called.append(pays) or kept[1](*parts)
            kernel.attention = lambda *parts, pays=pays: called.append(pays) or kept[2](*parts)
            torch.manual_seed(1)
            out = layer(*inputs)
            wanted = [part for part in (*inputs, *layer.parameters()) if isinstance(part, torch.Tensor)]
            found.append((out, *torch.autograd.grad(out, wanted, torch.randn_like(out))))
        errors += [_error(a, b) for a, b in zip(*found, strict=True)]
    kernel.pays, kernel.self_attention, kernel.attention = kept
    assert called == [True] * len(asked)
    return errors


def same_twice(device: str) -> list[float]:
    """Two runs of forward and backward with the same noise differ by nothing."""
    from latemask.kernels import relative_attention as kernel

    generator = torch.Generator().manual_seed(0)
    tokens = 70 if device == "cpu" else 500
    projected = torch.randn(2, tokens, 3 * 64, generator=generator).to(device, BF16).requires_grad_()
    table = torch.randn(2, 41, generator=generator).to(device).requires_grad_()
    seats = torch.stack([torch.randperm(tokens + 10, generator=generator)[:tokens] for _ in range(2)]).int().to(device)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        out = kernel.self_attention(projected, 2, kernel.Relative(table, seats, seats, None, None, tokens + 9), 0.1)
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), (projected, table))))
    return [float((a != b).sum()) for a, b in zip(*runs, strict=True)]


def in_pieces(device: str) -> list[float]:
    """Numbers of the gradients that change where scratch memory holds one row of a batch at once, and where padding,
    which is in no group, sits on seats that other tokens have."""
    from latemask.kernels import relative_attention as kernel

    generator = torch.Generator().manual_seed(0)
    n, real = 70, 50
    projected = torch.randn(2, n, 3 * 32, generator=generator).to(device, BF16).requires_grad_()
    table = torch.randn(2, 13, generator=generator).to(device).requires_grad_()
    seats = torch.arange(n, dtype=torch.int32, device=device).repeat(2, 1)
    groups = torch.where(seats < real, 0, -1).int()
    kept, found = kernel.SCRATCH_BYTES, []
    for scratch, pads in ((kept, 0), (1, 0), (kept, 30)):
        kernel.SCRATCH_BYTES = scratch
        key_seats = torch.where(seats < real, seats, seats - pads)
        told = kernel.Relative(table, seats, key_seats, torch.zeros_like(groups), groups, n - 1)
        torch.manual_seed(3)
        out = kernel.self_attention(projected, 2, told, 0.1)
        found.append(torch.autograd.grad(out.float().square().sum(), (projected, table)))
    kernel.SCRATCH_BYTES = kept
    whole, pieces, padded = found
    near = [(inputs, table[:, 1:-1]) for inputs, table in (whole, padded)]  # what is far adds up in another order
    return [float((a != b).sum()) for pair in ((whole, pieces), near) for a, b in zip(*pair, strict=True)]


def spilt(device: str) -> list[float]:
    """Of a batch, numbers of the middle row that change where the others hold what is not finite: in all of the first
    one's first token and of the last one's last token, which stands for what a tile lacks."""
    from latemask.kernels import relative_attention as kernel

    heads, width, n = 1, 16, 33
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(3, n, 3 * heads * width, generator=generator).to(device)
    table = torch.randn(heads, 17, generator=generator).to(device)
    seats = torch.arange(n, dtype=torch.int32, device=device).expand(3, n)
    documents = seats // 20
    told = {"bare": None, "table": kernel.Relative(table, seats, seats, None, None, n - 1),
            "groups": kernel.Relative(table, seats, seats, documents, documents, n - 1)}  # fmt: skip
    changed = []
    for relative in told.values():
        found = []
        for spills in (False, True):
            whole, d_out = projected.clone(), torch.ones(3, n, heads * width, device=device)
            if spills:
                for part in (whole, d_out):
                    part[0, 0], part[2, -1] = torch.nan, torch.inf
            torch.manual_seed(0)
            out = kernel.self_attention(whole.requires_grad_(), heads, relative, 0.1)
            found.append((out.detach(), *torch.autograd.grad(out, whole, d_out)))
        for clean, other in zip(*found, strict=True):
            assert clean.isfinite().all()
            assert not other[[0, 2]].isfinite().flatten(1).all(1).any()
            changed.append(float((clean[1] != other[1]).sum()))
    return changed


def laid_out(device: str) -> list[float]:
    """Numbers of output and gradient that change where the same angles are one row's for all rows, or stand otherwise
    in memory; a batch without rows has none."""
    from latemask.kernels import relative_attention as kernel
    from latemask.model.attention import rotation

    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(3, 17, 3 * 32, generator=generator).to(device, BF16).requires_grad_()
    angles = rotation(torch.randperm(30, generator=generator)[None, :17].to(device), 16, FP32)
    lies = {"written out": lambda x: x.repeat(3, 1, 1, 1), "of one row": lambda x: x, "expanded": lambda x:
            x.expand(3, -1, -1, -1), "transposed": lambda x: x.repeat(3, 1, 1, 1).mT.contiguous().mT}  # fmt: skip
    found = []
    for lie in lies.values():
        out = kernel.self_attention(projected, 2, None, 0.0, tuple(map(lie, angles)))
        found.append((out, *torch.autograd.grad(out.float().square().sum(), projected)))
    nobody = projected.detach()[:0].requires_grad_()
    out = kernel.self_attention(nobody, 2, None, 0.1, tuple(part[:0] for part in angles))
    assert (out.shape, torch.autograd.grad(out.sum(), nobody)[0].shape) == ((0, 17, 32), nobody.shape)
    return [float((a != b).sum()) for other in found[1:] for a, b in zip(found[0], other, strict=True)]


def foretold(device: str) -> list[float]:
    """What torch's own checks of an operator find wrong, and outputs unlike what a compiler is told of them, also where
    one row lies as no row alone would."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from latemask.kernels import relative_attention as kernel
    from latemask.model.attention import rotation

    heads, tokens, wrong = 2, 17, []
    for rows, dropout, has_table in ((2, 0.1, True), (1, 0.0, False)):
        projected = torch.randn(rows, tokens + 1, 3 * heads * 16, device=device)[:, :tokens]
        seats = torch.randperm(tokens, device=device).expand(rows, tokens)
        table = torch.randn(heads, 7, device=device) if has_table else None
        places = (seats.int().contiguous(),) * 2 if has_table else (None, None)
        noise = kernel.draw_noise(tokens, projected.device) if dropout else None
        inputs = (projected, heads, table, *places, None, None, tokens, noise, dropout, *rotation(seats, 16, FP32))
        checked = torch.library.opcheck(kernel._self_attention, (projected.clone().requires_grad_(), *inputs[1:]),
                                        raise_exception=False)  # fmt: skip
        wrong += [float(result != "SUCCESS") for result in checked.values()]
        outputs = kernel._self_attention(*inputs)
        inputs = (torch.randn_like(outputs[0]), *inputs)
        found = (*outputs, *kernel._self_attention_backward(*inputs, *outputs))
        with FakeTensorMode() as mode:
            told = [mode.from_tensor(part) if isinstance(part, torch.Tensor) else part for part in inputs]
            outputs = kernel._self_attention(*told[1:])
            told = (*outputs, *kernel._self_attention_backward(*told, *outputs))
        for a, b in zip(found, told, strict=True):
            wrong.append(float((a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype)))
    return wrong


def recomputed(device: str) -> list[float]:
    """Numbers of a stack's gradients, with dropout and rotary positions, that change where blocks are computed again in
    the backward pass: attention has to draw the same noise."""
    from latemask.kernels import relative_attention as kernel
    from latemask.model.attention import Geometry, rotation
    from latemask.model.stack import Stack

    torch.manual_seed(0)
    stack = Stack(2, 32, 2, 32, epsilon=1e-5, dropout=0.1).to(device, BF16)
    x = torch.randn(2, 33, 32).to(device, BF16).requires_grad_()
    geometry = Geometry(rotation=rotation(torch.randperm(33, device=device).expand(2, 33), 16, BF16))
    found, calls = [], []
    self_attention = kernel.self_attention
    kernel.self_attention = lambda *parts: calls.append(stack.recomputes) or self_attention(*parts)
    for stack.recomputes in (False, True):
        torch.manual_seed(1)
        out = stack(x, geometry)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), (x, *stack.parameters()))))
    kernel.self_attention = self_attention
    assert calls == [False] * 2 + [True] * 4
    return [float((a != b).sum()) for a, b in zip(*found, strict=True)]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1))


def _named(case: tuple) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in case)


def attention_check(case: tuple, device: str) -> dict[str, tuple[float, list[float]]]:
    if (device, *case[:2]) == ("cuda", 256, 256):
        case = (512, 512, *case[2:])  # too slow for the interpreter, which meets as many kinds of tiles in 256
    name = _named(case)
    errors = attention_errors(case, device)
    found = {f"attention {name}": (LIMIT[case[4]], errors[:3])}
    if case[-1]:  # where nothing lies farther below, what the others leave is only nearly 0
        found[f"ends {name}"] = (max(LIMIT[case[4]], 1e-5), errors[3:])
    return found


def rotated_check(case: tuple, device: str) -> dict[str, tuple[float, list[float]]]:
    name = _named(case)
    return {f"rotated {name}": (LIMIT[case[2]], rotated_errors(case, device))}


def cross_entropy_check(case: tuple, device: str) -> dict[str, tuple[float, list[float]]]:
    name = _named(case)
    return {f"cross-entropy {name}": (LIMIT[case[2]], cross_entropy_errors(case, device))}


def gelu_check(case: tuple, device: str) -> dict[str, tuple[float, list[float]]]:
    """The sum is of what is not rounded yet: its limit is a hundredth of the gradient's."""
    name = _named(case)
    return {f"gelu {name}": (LIMIT[case[1]], gelu_errors(case, device))}


def model_check(recipe: str, device: str) -> dict[str, tuple[float, list[float]]]:
    """In MLM the encoder's last block has queries where it predicts alone."""
    return {f"whole {recipe}": (1e-4, model_errors(recipe, device))}


def other_check(errors: Callable[[str], list[float]], device: str) -> dict[str, tuple[float, list[float]]]:
    limit = LIMIT[BF16] if errors is layers_errors else 0.0
    return {errors.__name__.removesuffix("_errors").replace("_", " "): (limit, errors(device))}


def run_checks(device: str, processes: int) -> list[str]:
    """Every check as a line of JSON as soon as it is found; one that breaks is a line too, and the others go on.
    Returns the names of those that are wrong."""
    jobs = [(attention_check, case) for case in sorted(ATTENTION, key=lambda case: -case[0] * case[1])]
    jobs += [(rotated_check, case) for case in ROTATED]
    jobs += [(cross_entropy_check, case) for case in CROSS_ENTROPIES]
    jobs += [(gelu_check, case) for case in GELUS]
    jobs += [(model_check, recipe) for recipe in ("mae_lm", "mlm")]
    others = (layers_errors, same_twice, in_pieces, spilt, laid_out, foretold, recomputed)
    jobs += [(other_check, each) for each in others]
    wrong = []
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(check, case, device): f"{check.__name__} {case}" for check, case in jobs}
        for done in as_completed(asked):
            broken = done.exception()
            found = {asked[done]: (0.0, [math.inf])} if broken else done.result()
            for name, (limit, errors) in found.items():
                said = {"case": name, "limit": limit, "errors": errors} | ({"because": str(broken)} if broken else {})
                print(json.dumps(said), flush=True)
                wrong += [] if is_right(limit, errors) else [name]
    return wrong


def is_right(limit: float, errors: list[float]) -> bool:
    """An error that is no number is a wrong one."""
    return all(error <= limit for error in errors)


def test_kernels_equal_their_plain_twins():
    on_gpu = torch.cuda.is_available()
    device, interprets = ("cuda", "0") if on_gpu else ("cpu", "1")
    done = subprocess.run([sys.executable, __file__, device, "2"], capture_output=True, text=True, timeout=280,
                          env={**os.environ, "TRITON_INTERPRET": interprets, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    cases = sum(map(len, (ATTENTION, ROTATED, CROSS_ENTROPIES, GELUS))) + sum(case[-1] for case in ATTENTION)
    assert done.stdout.count('{"case"') == cases + 2 + 7


@pytest.mark.parametrize("errors", [[math.nan, 0.0], [0.0, math.nan], [0.0, math.inf], [0.2, 0.0]])
def test_an_error_above_its_limit_or_no_number_is_wrong(errors):
    assert is_right(0.1, [0.0, 0.1])
    assert not is_right(0.1, errors)


def test_checks_that_break_make_the_program_fail(monkeypatch, capsys):
    """On a device that is none every one of them does, and each is told."""
    for cases in ("ATTENTION", "ROTATED", "CROSS_ENTROPIES", "GELUS"):
        monkeypatch.setitem(globals(), cases, globals()[cases][:1])
    wrong = run_checks("no such device", 1)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["case"] for each in found] == wrong
    assert len(wrong) == 4 + 2 + 7
    assert all(each["errors"] == [math.inf] and each["because"] for each in found)


@pytest.mark.parametrize("kernel", ["forward", "queries", "keys"])
@pytest.mark.parametrize("kind", ["bare", "drops", "table"])
def test_one_token_compiles_for_hopper(kernel, kind):
    """Triton compiles a length of 1 as a constant: ptxas of CUDA 12.8 crashed on three stages of such a loop. (It is
    compiled without a GPU, by what comes with Triton.)"""
    triton = pytest.importorskip("triton")
    instructions = load("instructions")
    from latemask.kernels import relative_attention

    q, table = torch.empty(1, 2, 1, 64, dtype=BF16), torch.empty(2, 11) if kind == "table" else None
    blocks = relative_attention._blocks(kernel, q, table, 0.1 * (kind == "drops"), 1)
    options = {name: blocks[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    source = instructions.source_of(kernel, kind != "bare", kind == "table", blocks["ROWS"], blocks["COLUMNS"], 64)
    names = source.fn.arg_names
    source.constants[(names.index("TILES"),)] = blocks["TILES"]
    for place in map(names.index, ("queries", "keys")):
        source.signature[names[place]], source.constants[(place,)] = "constexpr", 1
    made = triton.compile(source, target=instructions.HOPPER, options=options)
    assert f"{kernel}_kernel" in made.asm["ptx"]
    assert made.asm["cubin"]


@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("width", [16, 128])
def test_the_turn_compiles_for_hopper(width, tokens):
    triton = pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from latemask.kernels.rotary_triton import turn_kernel

    kinds = {"X": "*bf16", "COSINE": "*fp32", "SINE": "*fp32", "OUT": "*bf16"}
    chosen = {"TOKENS": 16, "WIDTH": width, "direction": 1} | ({"tokens": 1} if tokens == 1 else {})
    names = turn_kernel.arg_names
    signature = {name: "constexpr" if name in chosen else kinds.get(name, "i32") for name in names}
    source = ASTSource(turn_kernel, signature, {(names.index(name),): value for name, value in chosen.items()})
    assert triton.compile(source, target=load("instructions").HOPPER).asm["cubin"]


def test_gelus_gradients_compile_for_hopper():
    triton = pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from latemask.kernels import gelu
    from latemask.kernels.gelu_triton import gelu_gradients_kernel as kernel

    chosen = {name: getattr(gelu, name) for name in ("LOG_TAIL", "SLOPE", "FAR", "STEP", "COLUMNS", "TOKENS")}
    kinds = {"X": "*bf16", "GRADIENT": "*bf16", "OUT": "*bf16", "SUMS": "*fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in chosen else kinds.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in chosen.items()})
    made = triton.compile(source, target=load("instructions").HOPPER, options={"enable_fp_fusion": True})
    assert made.asm["cubin"]


def test_the_kernel_serves_where_it_pays(monkeypatch):
    """Without a bias, in half precision: with dropout, wherever all tokens are asked with rotary positions, and in
    compiled blocks that attend to as many keys as it was timed with."""
    from latemask.kernels import relative_attention as kernel
    from latemask.model.attention import CrossAttention, Geometry, SelfAttention

    served = []
    monkeypatch.setattr(kernel, "is_supported", lambda *_: True)
    monkeypatch.setattr(kernel, "self_attention", lambda x, *told: served.append(told[-1]) or x.chunk(3, -1)[0])
    monkeypatch.setattr(kernel, "attention", lambda q, *_: served.append("in parts") or q)
    x, angles = torch.randn(2, 5, 32, dtype=BF16), torch.ones(2, 1, 5, 8)

    def serves(dropout=0.1, dtype=BF16, start=0, **told) -> list:
        served.clear()
        SelfAttention(32, 2, dropout).to(dtype)(x.to(dtype), Geometry(**told), start)
        return list(served)

    assert serves() == [None]
    assert serves(rotation=(angles, angles)) == serves(0.0, rotation=(angles, angles)) == [(angles, angles)]
    assert serves(start=1) == serves(rotation=(angles, angles), start=1) == ["in parts"]
    assert not serves(0.0)
    assert not serves(0.0, rotation=(angles, angles), start=1)
    for start in (0, 1):
        for rotation in (None, (angles, angles)):
            assert not serves(causal=True, start=start, rotation=rotation)
            assert not serves(bias=torch.zeros(2, 1, 5, 5), start=start, rotation=rotation)
            assert not serves(blind=torch.zeros(2, 1, 5, 1, dtype=torch.bool), start=start, rotation=rotation)
            assert not serves(dtype=torch.float32, start=start, rotation=rotation)
            with torch.autocast("cpu", BF16):
                assert serves(dtype=torch.float32, start=start, rotation=rotation)
    served.clear()
    CrossAttention(32, 32, 2, 0.1).to(BF16)(x, x, Geometry())
    assert served.pop() == "in parts"
    SelfAttention(32, 2, 0.1).to(BF16).eval()(x, Geometry())
    assert not served
    monkeypatch.setattr(kernel, "compiles_for_gpu", lambda _: True)
    few, some, many = (torch.empty(2, tokens, 96, dtype=BF16, device="meta") for tokens in (255, 512, 513))
    assert [kernel.pays(rows, 16, 0.0, rows.shape[1]) for rows in (few, some, many)] == [False, True, False]
    assert [kernel.pays(rows, 16, 0.1, rows.shape[1]) for rows in (few, some, many)] == [True, True, True]
    assert not kernel.pays(some.float(), 16, 0.0, 512)
    monkeypatch.undo()
    assert not kernel.pays(some, 16, 0.0, 512)
    assert not kernel.pays(x, 16, 0.1, 5) or kernel.INTERPRETED


def test_any_number_of_rows_fits_the_grid(monkeypatch):
    """Axes of a CUDA grid end at 65,535, but for the first."""
    from latemask.kernels import relative_attention, relative_triton, rotary_triton

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]):
            grids.append(grid)
            return lambda *_, **__: None

    grids: list[tuple[int, ...]] = []
    for name in ("forward_kernel", "queries_kernel", "keys_kernel"):
        monkeypatch.setattr(relative_triton, name, Launches())
    monkeypatch.setattr(rotary_triton, "turn_kernel", Launches())
    rows, heads = 40_000, 2
    projected = torch.zeros(rows, 3, 3 * heads * 16, dtype=BF16, requires_grad=True)
    angles = torch.zeros(rows, 1, 3, 8)
    relative_attention.self_attention(projected, heads, None, 0.1, (angles, angles)).sum().backward()
    assert [math.prod(grid) for grid in grids] == [rows, *[rows * heads] * 3, rows]
    assert max(axis for grid in grids for axis in grid[1:]) <= 65_535


def test_attention_drops_the_share_it_is_told():
    from latemask.kernels import relative_attention as kernel

    for share in (0.1, 0.6):
        kept = kernel.kept_by_dropout(kernel.draw_noise(256, torch.device("cpu")), 8, 4, 256, 256, share).double()
        assert abs(1 - share - kept.mean()) < 5 * (share * (1 - share) / kept.numel()) ** 0.5
        centred = kept - (1 - share)
        for a, b in ((centred[..., 1:], centred[..., :-1]), (centred[..., 1:, :], centred[..., :-1, :]),
                     (centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):  # fmt: skip
            correlation = (a * b).mean() / (share * (1 - share))
            assert abs(correlation) < 6 / (a.numel() ** 0.5)
        for rows in (centred, centred.mT):  # any two queries, any two keys: as far from alike as chance has it
            alike = rows @ rows.mT / (256**0.5 * share * (1 - share))
            others = alike.flatten(0, 1)[:, ~torch.eye(256, dtype=torch.bool)]
            assert abs((others**2).mean() - 1) < 0.02


def test_hashed_dropout_is_dropout():
    from latemask.kernels.dropout import Dropout, hashed_dropout

    torch.manual_seed(0)
    x = torch.ones(4, 256, 512, requires_grad=True)
    y = hashed_dropout(x, 0.1)
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.9)]
    assert abs((y == 0).double().mean() - 0.1) < 5 * (0.09 / y.numel()) ** 0.5
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    again = hashed_dropout(x, 0.1)
    assert 0.15 < (again != y).double().mean() < 0.21  # 2 * .1 * .9: another mask
    assert torch.equal(Dropout(0.1).eval()(x), x)


def test_a_second_backward_pass_is_refused():
    if not torch.cuda.is_available():
        pytest.skip("the kernel needs a GPU or the interpreter")
    from latemask.kernels import linear_cross_entropy as kernel

    x, table = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (4, 128))
    loss = kernel.linear_cross_entropy(x, table, torch.zeros(128, device="cuda"), torch.arange(4, device="cuda")).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used the logits up"):
        loss.backward()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if wrong := run_checks(sys.argv[1], int(sys.argv[2])):
        sys.exit(f"wrong: {'; '.join(wrong)}")

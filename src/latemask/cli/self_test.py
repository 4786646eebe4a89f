"""What this machine has, which kernels a run takes on it, and whether a tiny run's passes are right."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from latemask.batch import Batch
from latemask.config import Run, replace
from latemask.feed.masking import lay_out
from latemask.kernels import HAS_TRITON, linear_cross_entropy, relative_attention
from latemask.kernels.gelu import HALF
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import recipe
from latemask.training.distributed import has_bf16

PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "pyarrow", "triton")


def machine(device: torch.device) -> list[tuple[str, str]]:
    """What is here: processor, card, versions, kernels."""
    rows = [
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        ("processor", f"{os.cpu_count()} cores, threads used by torch: {torch.get_num_threads()}"),
    ]
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            memory = f"{free / 1e9:.0f} of {total / 1e9:.0f} GB free"
            rows.append((f"card {number}", f"{card.name}, {memory}, compute capability {card.major}.{card.minor}"))
    rows.append(("runs on", str(device)))
    for package in PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    rows += [
        ("precision by default", "bf16" if has_bf16(device) else "fp32"),
        ("blocks compiled by default", "yes" if device.type == "cuda" else "no"),
        ("attention kernels allowed", ", ".join(attention_kernels(device))),
    ]
    return rows


def kernels(device: torch.device) -> list[tuple[str, str, str]]:
    """Each kernel of latemask's own: its name, whether a run with the default settings takes it, and why not."""
    kind, dtype = ("bf16", torch.bfloat16) if has_bf16(device) else ("fp32", torch.float32)
    why = f"a GPU of the CUDA kind is wanted, this runs on {device.type}" if device.type != "cuda" else (
        "Triton is not installed" if not HAS_TRITON else f"{kind} on {torch.cuda.get_device_name(device)}")  # fmt: skip
    shape = recipe("mae_lm_base").shape
    found = (
        ("attention, with a relative bias or rotary positions (Triton)",
         relative_attention.is_supported(device, dtype, shape.width // shape.heads),
         "heads 16, 32, 64 or 128 wide; rotary ones in half precision",
         "torch's attention, a relative bias written out for it, a row of it for every row"),
        ("cross-entropy of the head (Triton)",
         linear_cross_entropy.is_supported(torch.empty(0, dtype=dtype, device=device)), "", "torch's"),
        ("dropout by a hash (compiled)", device.type == "cuda", "where blocks are compiled", "torch.nn.Dropout"),
        ("GELU by the normal distribution's tail (compiled)", device.type == "cuda" and dtype in HALF,
         "where blocks are compiled", "torch.nn.GELU"),
    )  # fmt: skip
    return [
        (name, "yes" if used else "no", "; ".join(filter(None, (why, limit if used else f"instead: {instead}"))))
        for name, used, limit, instead in found
    ]


def attention_kernels(device: torch.device) -> list[str]:
    """The scaled-dot-product kernels that torch may choose from."""
    if device.type != "cuda":
        return ["torch's own for this device"]
    kernels = {
        "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "plain": torch.backends.cuda.math_sdp_enabled(),
    }
    return [name for name, allowed in kernels.items() if allowed]


@dataclass(frozen=True)
class Check:
    """One line of the self-test."""

    name: str
    found: str
    wanted: str
    holds: bool


def self_test(device: torch.device) -> list[Check]:
    """Untrained loss near ln T, a finite gradient for every parameter, and the same loss on the CPU in float64."""
    checks = []
    tried: tuple[tuple[str, dict[str, Any]], ...] = (
        ("mlm_tiny", {}), ("mae_lm_tiny", {}), ("three_ml_tiny", {"shape.positions": "rotary"})
    )  # fmt: skip
    for name, changes in tried:
        run = replace(recipe(name), {"shape.dropout": 0.0, "shape.vocabulary": 1000} | changes)
        batch = _random_batch(run, rows=4)
        torch.manual_seed(0)
        model = Pretrainer(run).to(device)
        loss = model(batch.to(device)).mean()
        loss.backward()
        exact = Pretrainer(run).double()
        exact.load_state_dict({key: tensor.cpu().double() for key, tensor in model.state_dict().items()})
        wanted, found = exact(batch).mean().item(), loss.item()
        chance = math.log(run.shape.vocabulary)
        named = list(model.named_parameters())
        good = sum(p.grad is not None and bool(p.grad.isfinite().all()) for _, p in named)
        checks += [
            Check(f"{name}: loss, untrained", f"{found:.3f}", f"about ln {run.shape.vocabulary} = {chance:.3f}",
                  abs(found - chance) < 0.5),
            Check(f"{name}: loss, against float64", f"{found:.5f}", f"{wanted:.5f}", abs(found - wanted) < 1e-3),
            Check(f"{name}: parameters with a finite gradient", str(good), str(len(named)), good == len(named)),
        ]  # fmt: skip
    return checks


def _random_batch(run: Run, rows: int) -> Batch:
    shape = run.shape
    ids = np.random.default_rng(0).integers(5, shape.vocabulary, (rows, shape.row_tokens))
    ids[:, 0] = shape.specials.bos
    keys = torch.arange(rows)
    return lay_out(torch.from_numpy(ids), run.masking, shape.specials, shape.vocabulary, seed=0,
                   epoch=torch.zeros_like(keys), row=keys)  # fmt: skip

"""GELU by the normal distribution's tail (latemask.kernels.gelu) beside torch's, all compiled, on a GPU.

    python benchmarks/gelu.py --out results/gelu.json

As much as one layer of base has of it, 128 rows: forward, and backward with what forward keeps, the gradient of a bias
added up too. ``tail``: as torch's compiler has it; ``ours``: with the kernel that adds up along the way.
Beside each time stands the rate of the bytes that a pass cannot do without, its inputs and outputs in bf16. Passes are
launched while the GPU is kept from beginning, so that what the host takes for a launch is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from asked import asked, counts, read
from gpu_time import gpu_milliseconds
from refusals import check_gpu, program
from torch import Tensor

from latemask import console
from latemask.kernels.gelu import gelu_of_biased, tailed_gelu
from latemask.machine import machine_of
from latemask.training.distributed import pick_device
from latemask.writing import write_json

WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": lambda x, bias: F.gelu(x + bias),
    "tail": lambda x, bias: tailed_gelu(x + bias),
    "ours": gelu_of_biased,
}
TENSORS = {"forward": 2, "backward": 3}
"""That a pass reads or writes at the least."""
WARMUP, TIMED = 3, 20
"""Passes that do not count, and those that do."""
HELD_CYCLES = 200_000_000
"""So long the GPU is kept from beginning: about .1 s."""


@dataclass(frozen=True)
class Options:
    """Time all of them."""

    out: Path = Path("results/gelu.json")
    """The JSON."""
    tokens: int = 128 * 512
    """Of a batch."""
    inner: int = 3072
    """Numbers a token."""

    def __post_init__(self) -> None:
        counts(self, "tokens", "inner")


def milliseconds(run: Callable[[], object]) -> float:
    """The mean on the GPU."""
    for _ in range(WARMUP):
        run()
    return gpu_milliseconds(lambda: [run() for _ in range(TIMED)], HELD_CYCLES) / TIMED


def measure(options: Options) -> dict[str, Any]:
    """All ways, both passes. Raises ``Refusal`` without a GPU."""
    device = pick_device()
    check_gpu(device, "gelu")
    x = torch.randn(options.tokens, options.inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(options.inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    found = []
    for way, function in WAYS.items():
        compiled = torch.compile(function)
        out = compiled(x, bias)

        def backward(out: Tensor = out) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (x, bias), gradient, retain_graph=True)

        for part, run in (("forward", lambda compiled=compiled: compiled(x, bias)), ("backward", backward)):
            took = milliseconds(run)
            rate = TENSORS[part] * x.numel() * x.element_size() / took * 1e3
            found.append({"way": way, "pass": part, "milliseconds": took, "bytes_per_second": rate})
    return {"kind": "benchmark", "what": "GELU", "timed": found, "settings": asked(options), **machine_of(device)}


def main() -> None:
    options = read(Options)
    found = measure(options)
    write_json(options.out, found)
    console.table(f"GELU, {found['card']}", ("way", "pass", "ms", "TB/s"),
                  [(one["way"], one["pass"], one["milliseconds"], one["bytes_per_second"] / 1e12)
                   for one in found["timed"]])  # fmt: skip


if __name__ == "__main__":
    program(main)

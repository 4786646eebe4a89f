"""What is faster than torch's own. Each kernel stands beside its plain twin, which runs wherever it does not."""

import importlib.util
import os

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on a CPU: for tests."""


def compiles_for_gpu(x: torch.Tensor) -> bool:
    """Whether what is done with ``x`` is being compiled for a GPU."""
    return x.is_cuda and torch.compiler.is_compiling()

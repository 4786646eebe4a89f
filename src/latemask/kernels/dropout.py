"""Dropout whose mask is a hash of two small random vectors, one number a token and one a feature.

Nothing the size of the input is drawn or kept: a compiler fuses the few integer operations into whatever stands beside
them, forward and backward. ``torch.nn.Dropout`` is its plain twin, and runs wherever nothing is compiled for a GPU.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latemask.kernels import compiles_for_gpu

GOLDEN = -1640531527
"""2 ** 32 / the golden ratio, as an int32: the odd multiplier of the hash."""


class Dropout(nn.Dropout):
    """``torch.nn.Dropout``, by the hash where it is compiled for a GPU."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        if self.training and self.p > 0 and compiles_for_gpu(x):
            return hashed_dropout(x, self.p)
        return super().forward(x)


def hashed_dropout(x: Float[Tensor, "*n D"], share: float) -> Float[Tensor, "*n D"]:
    """``x`` with a ``share`` of its numbers set to 0 and the others divided by 1 - share."""
    size = (*x.shape[:-1], 1)
    tokens = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=x.device)
    features = torch.randint(-(2**31), 2**31, x.shape[-1:], dtype=torch.int32, device=x.device)
    return torch.where(survives(tokens, features, share), x * (1 / (1 - share)), 0)


def survives(tokens: Int[Tensor, "*n 1"], features: Int[Tensor, " D"], share: float) -> Bool[Tensor, "*n D"]:
    """Which numbers stay; int32 products wrap around."""
    return (tokens ^ features) * GOLDEN >= int(share * 2**32) - 2**31

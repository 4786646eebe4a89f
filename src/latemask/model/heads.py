"""The language-model head: dense, GELU, LayerNorm, then the token table itself (tied) and a bias for each id."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from latemask.kernels import linear_cross_entropy
from latemask.model.stack import Norm


class Prediction(NamedTuple):
    """What a method predicts: final vectors at the P predicted positions, and the true ids there."""

    hidden: Float[Tensor, "B P D"]
    targets: Int[Tensor, "B P"]


class Head(nn.Module):
    """Logits over T ids from vectors of ``width``; a Linear leads to the token table where its width differs."""

    def __init__(self, width: int, table_width: int, vocabulary: int, epsilon: float):
        super().__init__()
        self.vocabulary = vocabulary
        self.dense = nn.Linear(width, width)
        self.norm = Norm(width, eps=epsilon)
        self.widen = nn.Linear(width, table_width) if width != table_width else None
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def logits(self, hidden: Float[Tensor, "*P D"], table: Float[Tensor, "Tp E"]) -> Float[Tensor, "*P Tp"]:
        """Over the padded vocabulary; ids from T on are -inf and never take probability."""
        return F.linear(self._ready(hidden), table, self._padded_bias(table))

    def forward(self, prediction: Prediction, table: Float[Tensor, "Tp E"]) -> Float[Tensor, "B P"]:
        """Nats for each predicted token."""
        x = self._ready(prediction.hidden.flatten(0, 1))
        bias, targets = self._padded_bias(table), prediction.targets.flatten()
        if linear_cross_entropy.is_supported(x):
            loss = linear_cross_entropy.linear_cross_entropy(x, table.to(x.dtype), bias.to(x.dtype), targets)
        else:
            loss = linear_cross_entropy.plain(x, table, bias, targets)
        return loss.view_as(prediction.targets)

    def _ready(self, hidden: Float[Tensor, "*P D"]) -> Float[Tensor, "*P E"]:
        x = self.norm(F.gelu(self.dense(hidden)))
        return x if self.widen is None else self.widen(x)

    def _padded_bias(self, table: Float[Tensor, "Tp E"]) -> Float[Tensor, " Tp"]:
        return F.pad(self.bias, (0, table.shape[0] - self.vocabulary), value=-torch.inf)

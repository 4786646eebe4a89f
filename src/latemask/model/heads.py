"""The language-model head: dense, GELU, LayerNorm, then the token table itself (tied) and a bias for each id."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


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
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.widen = nn.Linear(width, table_width) if width != table_width else None
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def logits(self, hidden: Float[Tensor, "*P D"], table: Float[Tensor, "Tp E"]) -> Float[Tensor, "*P Tp"]:
        """Over the padded vocabulary; ids from T on are -inf and never take probability."""
        x = self.norm(F.gelu(self.dense(hidden)))
        if self.widen is not None:
            x = self.widen(x)
        return F.linear(x, table, F.pad(self.bias, (0, table.shape[0] - self.vocabulary), value=-torch.inf))

    def forward(self, prediction: Prediction, table: Float[Tensor, "Tp E"]) -> Float[Tensor, "B P"]:
        """Nats for each predicted token."""
        logits = self.logits(prediction.hidden.flatten(0, 1), table)
        loss = F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits,
                               prediction.targets.flatten(), reduction="none")  # fmt: skip
        return loss.view_as(prediction.targets)

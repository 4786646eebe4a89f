"""An encoder with a new head: a class or a number for a row, a class for each word, or the two ends of an answer.

The head of rows is RoBERTa's (dropout, Linear, tanh, dropout, Linear on the first token), so that a saved model fits
the stock classes; the other two are one Linear. Losses and predictions stand beside each other for each kind.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latemask.downstream.tasks import NO_LABEL, Kind

INITIAL_DEVIATION = 0.02


class RowHead(nn.Module):
    """[B, N, D] -> [B, outputs], from the first token."""

    def __init__(self, width: int, outputs: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(width, width)
        self.output = nn.Linear(width, outputs)

    def forward(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B C"]:
        return self.output(self.dropout(torch.tanh(self.dense(self.dropout(hidden[:, 0])))))


class TokenHead(nn.Module):
    """[B, N, D] -> [B, N, outputs]."""

    def __init__(self, width: int, outputs: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, outputs)

    def forward(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N C"]:
        return self.output(self.dropout(hidden))


class FineTuned(nn.Module):
    """Encoder and head of one kind of task.

    Called with ids and real [B, N] it returns logits [B, C] (classification), values [B] (regression), logits [B, N, C]
    (tokens, span: C = 2) or vectors [B, D] (similarity: the mean over the tokens).
    """

    def __init__(
        self, encoder: nn.Module, kind: Kind, classes: int, dropout: float, second_type_from: int | None = None
    ):
        super().__init__()
        self.kind: Kind = kind
        self.encoder = encoder
        width = int(encoder.shape.width)  # type: ignore[union-attr,arg-type]
        outputs = {"classification": classes, "regression": 1, "tokens": classes, "span": 2, "similarity": 0}[kind]
        self.head: nn.Module | None = None
        if outputs:
            self.head = (RowHead if kind in ("classification", "regression") else TokenHead)(width, outputs, dropout)
        self.second_type_from = second_type_from
        """Id after whose first occurrence tokens are of type 1 (BERT's pairs); None: all are of one type."""
        set_dropout(self, dropout)

    def begin(self, seed: int) -> None:
        """The head's first weights, from ``seed`` alone: normal with deviation .02, biases 0 (BERT's)."""
        noise = torch.Generator().manual_seed(seed)
        for part in self.head.modules() if self.head is not None else ():
            if isinstance(part, nn.Linear):
                start = torch.normal(0.0, INITIAL_DEVIATION, part.weight.shape, generator=noise)
                with torch.no_grad():
                    part.weight.copy_(start)
                    part.bias.zero_()

    def hidden(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
        if self.second_type_from is None:
            return self.encoder(ids, real)
        ends = (ids == self.second_type_from).long()
        types = (ends.cumsum(1) - ends).clamp(max=1)
        encoder: Any = self.encoder  # of transformers
        return encoder.model(**encoder.inputs(ids, real), token_type_ids=types).last_hidden_state

    def forward(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"]) -> Tensor:
        hidden = self.hidden(ids, real)
        if self.head is None:
            weight = real[..., None].to(hidden.dtype)
            return (hidden * weight).sum(1) / weight.sum(1)
        scores = self.head(hidden)
        if self.kind == "span":
            return scores.masked_fill(~real[..., None], -torch.inf)
        return scores[:, 0] if self.kind == "regression" else scores


def set_dropout(module: nn.Module, dropout: float) -> None:
    """Set the dropout of every layer, also where attention keeps it as a number."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = dropout  # type: ignore[assignment]


def losses(kind: Kind, scores: Tensor, labels: Tensor) -> Float[Tensor, " B"]:
    """Loss of each row, fp32: cross entropy in nats (tokens: mean over the row's words; span: mean of the two ends), or
    the squared error (similarity: of the cosine).

    ``labels``: class numbers [B]; values [B]; class numbers [B, N] with ``NO_LABEL``; first and last token [B, 2].
    ``scores`` of kind similarity: vectors [2 B, D], the first texts', then the second ones'.
    """
    scores = scores.float()
    if kind == "classification":
        return F.cross_entropy(scores, labels, reduction="none")
    if kind == "regression":
        return (scores - labels) ** 2
    if kind == "similarity":
        first, second = scores.chunk(2)
        return (F.cosine_similarity(first, second) - labels) ** 2
    if kind == "span":
        ends = scores.transpose(1, 2)
        return F.cross_entropy(ends.flatten(0, 1), labels.flatten(), reduction="none").unflatten(0, (-1, 2)).mean(1)
    loss = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none", ignore_index=NO_LABEL)
    return loss.sum(1) / (labels != NO_LABEL).sum(1).clamp(min=1)

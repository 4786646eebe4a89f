"""What is thrown away after pretraining: three ways from the encoder's output to predictions.

``NoDecoder`` and ``FillingDecoder`` predict masked tokens, the last P of the M; ``RewritingDecoder`` rewrites the whole
row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Decoder, Shape
from latemask.joins import Arrival
from latemask.model.attention import Geometry, rotation, sight
from latemask.model.heads import Prediction
from latemask.model.stack import Door, Row, Stack


class PretrainingDecoder(Protocol):
    """From the encoder's output to what the head reads."""

    reads_predicted_only: bool
    """Whether the encoder's last block needs only the predicted tokens as queries."""
    width: int

    def __call__(self, encoded: Row, batch: Batch, mask: Tensor, tokens: nn.Embedding) -> Prediction: ...


class NoDecoder(nn.Module):
    """The encoder's own output at the predicted positions (MLM, 3ML with a join inside the encoder)."""

    reads_predicted_only = True

    def __init__(self, shape: Shape):
        super().__init__()
        self.width = shape.width

    def forward(self, encoded: Row, batch: Batch, mask: Tensor, tokens: nn.Embedding) -> Prediction:
        return Prediction(encoded.x, batch.targets)


class _Decoder(nn.Module):
    """What both decoders share: how they read the encoder's output, a door with true positions, and a stack."""

    reads_predicted_only = False

    def __init__(self, decoder: Decoder, shape: Shape):
        super().__init__()
        self.width, self.sublayers, self.isolates = decoder.width, decoder.sublayers, shape.isolate_documents
        self.is_centred = decoder.centred
        self.rotary_width = decoder.width // decoder.heads if decoder.positions == "absolute+rotary" else None
        self.narrow = nn.Linear(shape.width, decoder.width) if decoder.width != shape.width else None
        self.door = Door(decoder.width, shape.row_tokens, shape.norm_epsilon, decoder.dropout)
        self.stack = Stack(decoder.depth, decoder.width, decoder.heads, decoder.feedforward, epsilon=shape.norm_epsilon,
                           dropout=decoder.dropout, sublayers=decoder.sublayers, memory_width=shape.width,
                           pre_norm=shape.norm == "pre")  # fmt: skip

    def memory(self, encoded: Row) -> Float[Tensor, "B n E"]:
        """The encoder's output, of a centred decoder less its mean over the row's tokens.

        Attention averages, so that a loss which asks for the same everywhere (word frequencies, at first) pulls every
        output of the encoder one way; what all have in common a centred decoder does not see.
        """
        x = encoded.x
        if not self.is_centred:
            return x
        if encoded.real is None:
            return x - x.mean(1, keepdim=True)
        real = encoded.real[..., None]
        return x - (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)

    def enter(self, x: Float[Tensor, "B n E"], positions: Tensor) -> Float[Tensor, "B n D"]:
        """Through the decoder's door: the encoder's width to the decoder's, positions added to everybody again."""
        return self.door(x if self.narrow is None else self.narrow(x), positions)

    def sight(self, query_document: Tensor, key_document: Tensor, real: Tensor | None, like: Tensor) -> Geometry:
        """Who may look at whom; no relative bias here (appendix C: only absolute positions in the decoder)."""
        return sight(query_document, key_document, real, isolates=self.isolates, dtype=like.dtype)

    def self_sight(self, document: Tensor, positions: Tensor, real: Tensor | None, like: Tensor) -> Geometry:
        """The same among the decoder's own tokens, with rotary angles where it has them."""
        seen = self.sight(document, document, real, like)
        return (
            seen
            if self.rotary_width is None
            else seen._replace(rotation=rotation(positions, self.rotary_width, like.dtype))
        )


class FillingDecoder(_Decoder):
    """Mask vectors join the encoder's output at the decoder's door (MAE-LM section 3; 3ML_self, 3ML_cross).

    ``join`` says which masked tokens come in here as the mask vector; the others arrive from the encoder. With cross-
    attention only, visible tokens change nothing as queries: the stack runs on the P predicted positions alone.
    """

    def __init__(self, decoder: Decoder, shape: Shape, join: Arrival | None):
        super().__init__(decoder, shape)
        self.join = join

    def forward(self, encoded: Row, batch: Batch, mask: Tensor, tokens: nn.Embedding) -> Prediction:
        memory, real, visible = self.memory(encoded), encoded.real, batch.n_visible
        x = memory
        if self.join is not None:
            start, stop = self.join.tokens(batch.n_masked)
            x = torch.cat([x[:, : visible + start], mask.to(x.dtype).expand(batch.rows, stop - start, -1)], 1)
        if batch.real is not None:
            real = torch.cat([batch.real, batch.real.new_ones(batch.filler.shape)], 1)
        first = batch.first_predicted if self.sublayers == ("cross",) else 0
        positions, document = batch.positions[:, first:], batch.document[:, first:]
        x = self.enter(x[:, first:], positions)
        x = self.stack(
            x,
            self.self_sight(document, positions, real, x) if first == 0 else Geometry(),
            predict_from=batch.first_predicted - first,
            memory=memory,
            memory_geometry=self.sight(document, encoded.document, encoded.real, x),
        )
        return Prediction(x, batch.targets)


class RewritingDecoder(_Decoder):
    """Predicts every token of the row from those before it and the encoder's output (Table 2, "uni. self + cross").

    The row stands in its natural order here: token p predicts token p + 1, ``<s>`` is given.
    """

    def forward(self, encoded: Row, batch: Batch, mask: Tensor, tokens: nn.Embedding) -> Prediction:
        ids = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
        document = torch.empty_like(batch.document).scatter(1, batch.positions, batch.document)[:, :-1]
        positions = torch.arange(ids.shape[1] - 1, device=ids.device).expand(len(ids), -1)
        x = self.enter(tokens(ids[:, :-1]), positions)
        seen = self.self_sight(document, positions, None, x)
        if seen.bias is None:
            seen = seen._replace(causal=True)
        else:
            ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            seen = seen._replace(bias=seen.bias.masked_fill(ahead, -torch.inf))
        memory_seen = self.sight(document, encoded.document, encoded.real, x)
        return Prediction(self.stack(x, seen, memory=self.memory(encoded), memory_geometry=memory_seen), ids[:, 1:])

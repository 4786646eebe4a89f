"""The encoder: what is kept after pretraining."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latemask.config import Shape
from latemask.errors import Refusal
from latemask.kernels import relative_attention
from latemask.model.attention import Geometry, RelativeBias, groups, rotation, sight
from latemask.model.stack import Door, Row, Stack


class Encoder(nn.Module):
    """Token table, door, stack of blocks and, where the shape says so, one relative bias for all blocks.

    Called with ids [B, N] and ``real`` [B, N] (False: padding) it returns the last hidden states [B, N, D].
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.padded_vocabulary, shape.width)
        has_table = shape.positions != "rotary"
        self.door = Door(shape.width, shape.row_tokens if has_table else None, shape.norm_epsilon, shape.dropout)
        self.stack = Stack(shape.depth, shape.width, shape.heads, shape.feedforward, epsilon=shape.norm_epsilon,
                           dropout=shape.dropout, pre_norm=shape.norm == "pre")  # fmt: skip
        self.relative_bias = None
        if shape.has_relative_bias:
            self.relative_bias = RelativeBias(shape.heads, shape.relative_buckets, shape.relative_distance,
                                              shape.row_tokens)  # fmt: skip

    def enter(self, x: Float[Tensor, "B n D"], seats: Tensor, document: Tensor, real: Tensor | None = None) -> Row:
        """Token vectors come through the door and take their seats."""
        return Row(self.door(x, seats), seats, document, real)

    def geometry(self, row: Row) -> Geometry:
        """What every block of this encoder is told about the row."""
        shape, dtype = self.shape, row.x.dtype
        head_width = shape.width // shape.heads
        if self.relative_bias is not None and relative_attention.is_supported(row.x.device, dtype, head_width):
            seen = groups(row.document, row.real, isolates=shape.isolate_documents)
            return Geometry(relative=self.relative_bias.by_distance(row.seats, seen))
        geometry = sight(row.document, row.document, row.real, isolates=shape.isolate_documents, dtype=dtype)
        if self.relative_bias is not None:
            relative = self.relative_bias(row.seats)
            geometry = geometry._replace(bias=relative if geometry.bias is None else relative + geometry.bias)
        if shape.positions == "rotary":
            geometry = geometry._replace(rotation=rotation(row.seats, head_width, dtype))
        return geometry

    def run(self, row: Row, first: int = 0, last: int | None = None, predict_from: int = 0) -> Row:
        """Blocks ``first`` to ``last``; at the end of the stack only tokens from ``predict_from`` on come out."""
        if first == last:
            return row
        x = self.stack(row.x, self.geometry(row), first=first, last=last, predict_from=predict_from)
        start = row.x.shape[1] - x.shape[1]
        real = None if row.real is None else row.real[:, start:]
        return Row(x, row.seats[:, start:], row.document[:, start:], real)

    def forward(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N D"]:
        """Last hidden states. Padding may stand on either side; it is neither seen nor counted as a position.

        Raises ``Refusal`` where N is more than the row the encoder was trained on.
        """
        return self.run(self._seated(ids, real)).x

    def states(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None) -> list[Float[Tensor, "B N D"]]:
        """Hidden states before the first block and after each block: L + 1 tensors."""
        row = self._seated(ids, real)
        states = [row.x]
        for layer in range(self.shape.depth):
            row = self.run(row, layer, layer + 1)
            states.append(row.x)
        return states

    def _seated(self, ids: Tensor, real: Tensor | None) -> Row:
        tokens = ids.shape[1]
        if tokens > self.shape.row_tokens:
            raise Refusal("input", f"{tokens} tokens", f"at most {self.shape.row_tokens}", "Truncate or split the text")
        if real is None:
            seats = torch.arange(tokens, device=ids.device).expand_as(ids)
        else:
            seats = (real.long().cumsum(1) - 1).clamp(min=0)
        return self.enter(self.tokens(ids), seats, torch.zeros_like(ids), real)

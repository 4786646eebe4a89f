"""Door, Block, Stack: the Transformer. It knows rows, seats and documents, and has never heard of [MASK]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from latemask.config import Sublayer
from latemask.kernels.dropout import Dropout
from latemask.kernels.gelu import GELU
from latemask.model.attention import CrossAttention, Geometry, SelfAttention


@dataclass(frozen=True)
class Row:
    """Tokens inside a stack: their vectors, and who sits where."""

    x: Float[Tensor, "B n D"]
    seats: Int[Tensor, "B n"]
    """Position each token is told."""
    document: Int[Tensor, "B n"]
    real: Bool[Tensor, "B n"] | None = None
    """Which tokens are not padding; None: all."""

    def joined_at(self, start: int, newcomers: Row) -> Row:
        """The tokens before ``start``, then the newcomers: joining and resetting are the same act."""
        real = None
        if self.real is not None:
            real = torch.cat(
                [self.real[:, :start], newcomers.seats.new_ones(newcomers.seats.shape, dtype=torch.bool)], 1
            )
        return Row(
            torch.cat([self.x[:, :start], newcomers.x], 1),
            torch.cat([self.seats[:, :start], newcomers.seats], 1),
            torch.cat([self.document[:, :start], newcomers.document], 1),
            real,
        )


class Norm(nn.LayerNorm):
    """LayerNorm with float32 statistics; under autocast its result is as wide as the matrix products' factors, so that
    the residual stream moves half the bytes."""

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        out = super().forward(x)
        kind = x.device.type
        return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


class Door(nn.Module):
    """Where tokens enter a stack: their vector, plus a position (where there is a table), LayerNorm, dropout."""

    def __init__(self, width: int, row_tokens: int | None, epsilon: float, dropout: float):
        super().__init__()
        self.positions = nn.Embedding(row_tokens, width) if row_tokens else None
        self.norm = Norm(width, eps=epsilon)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "B n D"], seats: Int[Tensor, "B n"]) -> Float[Tensor, "B n D"]:
        return self.entered(x, None if self.positions is None else self.look_up(self.positions, seats))

    @staticmethod
    def look_up(table: nn.Embedding, seats: Int[Tensor, "B n"]) -> Float[Tensor, "B n D"]:
        """Of few vectors, each many times: torch adds up such an embedding's gradient in an order of its own each time
        on a GPU, where indexing's is always the same; on a CPU it is the other way round."""
        return table.weight[seats] if seats.is_cuda else table(seats)

    def entered(self, x: Float[Tensor, "B n D"], positions: Float[Tensor, "B n D"] | None) -> Float[Tensor, "B n D"]:
        return self.dropout(self.norm(x if positions is None else x + positions))

    def compile(self, *, dynamic: bool | None = None, backend: str | Callable[..., Any] = "inductor") -> None:
        """All but the look-up: its compiled gradient is added up by atomics, in an order that no two runs share."""
        self.entered = torch.compile(self.entered, dynamic=dynamic, backend=backend)

    def __getstate__(self) -> dict[str, Any]:
        """As of any module, without what is compiled: in a copy it would go on with the weights of the first."""
        return {name: value for name, value in super().__getstate__().items() if name != "entered"}


class FeedForward(nn.Sequential):
    """Linear, exact GELU, Linear."""

    def __init__(self, width: int, inner: int):
        super().__init__(nn.Linear(width, inner), GELU(), nn.Linear(inner, width))

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        widen, gelu, narrow = self
        return narrow(gelu.after(widen, x))  # type: ignore[operator]


class Block(nn.Module):
    """Attention sublayers and a feed-forward network, each with a residual and a LayerNorm.

    With ``start`` above 0 only the tokens from there on are computed and returned: keys and values still come from
    all. That is exact for the last block before a head, which reads only those tokens.

    Tokens of all rows are one axis but inside of attention: so torch's compiler adds a residual's gradient within a
    matrix product, and keeps a sum before LayerNorm that else it makes anew, dropout and all.
    """

    def __init__(
        self, width: int, heads: int, inner: int, *, sublayers: Sequence[Sublayer], memory_width: int, epsilon: float,
        dropout: float, pre_norm: bool
    ):  # fmt: skip
        super().__init__()
        self.pre_norm = pre_norm
        self.self_attention = SelfAttention(width, heads, dropout) if "self" in sublayers else None
        self.cross_attention = CrossAttention(width, memory_width, heads, dropout) if "cross" in sublayers else None
        self.feedforward = FeedForward(width, inner)
        self.norms = nn.ModuleList(Norm(width, eps=epsilon) for _ in range(len(sublayers) + 1))
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B n D"],
        geometry: Geometry,
        start: int = 0,
        memory: Float[Tensor, "B K E"] | None = None,
        memory_geometry: Geometry | None = None,
    ) -> Float[Tensor, "B Q D"]:
        norms, seen_shape, shape = iter(self.norms), x.shape[:2], (len(x), x.shape[1] - start)
        everyone = x.flatten(0, 1)
        tokens = x[:, start:].flatten(0, 1) if start else everyone
        if self.self_attention is not None:
            norm = next(norms)
            seen = (norm(everyone) if self.pre_norm else everyone).unflatten(0, seen_shape)
            tokens = tokens + self.dropout(self.self_attention(seen, geometry, start).flatten(0, 1))
            tokens = tokens if self.pre_norm else norm(tokens)
        if self.cross_attention is not None:
            assert memory is not None
            assert memory_geometry is not None
            norm = next(norms)
            seen = (norm(tokens) if self.pre_norm else tokens).unflatten(0, shape)
            found = self.cross_attention(seen, memory, memory_geometry.queries_from(start)).flatten(0, 1)
            tokens = tokens + self.dropout(found)
            tokens = tokens if self.pre_norm else norm(tokens)
        norm = next(norms)
        tokens = tokens + self.dropout(self.feedforward(norm(tokens) if self.pre_norm else tokens))
        return (tokens if self.pre_norm else norm(tokens)).unflatten(0, shape)


class Stack(nn.Module):
    """Blocks in a row; pre-norm stacks end with a LayerNorm."""

    def __init__(
        self, depth: int, width: int, heads: int, inner: int, *, epsilon: float, dropout: float,
        sublayers: Sequence[Sublayer] = ("self",), memory_width: int = 0, pre_norm: bool = False
    ):  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(width, heads, inner, sublayers=sublayers, memory_width=memory_width, epsilon=epsilon, dropout=dropout,
                  pre_norm=pre_norm)
            for _ in range(depth)
        )  # fmt: skip
        self.final_norm = Norm(width, eps=epsilon) if pre_norm else None
        self.recomputes = False
        """Whether blocks are computed again in the backward pass, in place of keeping what it needs of them."""

    def forward(
        self,
        x: Float[Tensor, "B n D"],
        geometry: Geometry,
        *,
        first: int = 0,
        last: int | None = None,
        predict_from: int = 0,
        memory: Float[Tensor, "B K E"] | None = None,
        memory_geometry: Geometry | None = None,
    ) -> Float[Tensor, "B Q D"]:
        """Blocks ``first`` to ``last`` (exclusive; None: to the end). Where the end is reached, only the tokens from
        ``predict_from`` on come out."""
        depth = len(self.blocks)
        last = depth if last is None else last
        for number in range(first, last):
            start = predict_from if number == depth - 1 else 0
            block, given = self.blocks[number], (x, geometry, start, memory, memory_geometry)
            recomputes = self.recomputes and torch.is_grad_enabled()
            x = checkpoint(block, *given, use_reentrant=False) if recomputes else block(*given)
        return x if last < depth or self.final_norm is None else self.final_norm(x)

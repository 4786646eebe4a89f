"""Attention that knows order only by being told: a bias added to the scores, or a rotation of queries and keys.

Nothing here depends on the order of tokens in memory, except ``Geometry.causal``, which the rewriting decoder uses on
rows in their natural order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latemask.kernels import relative_attention
from latemask.kernels.relative_attention import Relative


class Geometry(NamedTuple):
    """What attention is told about who sits where."""

    bias: Float[Tensor, "B #H Q K"] | None = None
    """Added to the scores: the relative bias, and -inf where a query must not look."""
    blind: Bool[Tensor, "B 1 Q 1"] | None = None
    """Queries that may look at nothing: attention gives them 0. None: there are none."""
    rotation: tuple[Float[Tensor, "B 1 K h"], Float[Tensor, "B 1 K h"]] | None = None
    """Cosine and sine of each token's rotary angles, h = head width / 2."""
    causal: bool = False
    """Whether a token sees only itself and what stands before it in memory."""
    relative: Relative | None = None
    """In place of ``bias`` and ``blind`` where the kernel runs."""

    @property
    def is_plain(self) -> bool:
        """Whether every token looks at every token and nothing is added to the scores."""
        return not self.causal and self.bias is None and self.blind is None and self.relative is None

    def queries_from(self, start: int) -> Geometry:
        """The same for the queries from ``start`` on."""
        bias = None if self.bias is None else self.bias[:, :, start:]
        blind = None if self.blind is None else self.blind[:, :, start:]
        relative = None if self.relative is None else self.relative.queries_from(start)
        return self._replace(bias=bias, blind=blind, relative=relative)


def heads_first(x: Float[Tensor, "B n D"], heads: int) -> Float[Tensor, "B H n d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(
    q: Float[Tensor, "B H Q d"],
    k: Float[Tensor, "B H K d"],
    v: Float[Tensor, "B H K d"],
    geometry: Geometry,
    dropout: float,
) -> Float[Tensor, "B Q D"]:
    """softmax(q k' / sqrt(d) + bias) v, heads joined again (MAE-LM section 2.1)."""
    pays = geometry.is_plain and relative_attention.pays(q, q.shape[-1], dropout, k.shape[-2])
    if pays or geometry.relative is not None:
        return relative_attention.attention(q, k, v, geometry.relative, dropout).transpose(1, 2).flatten(2)
    bias = None if geometry.bias is None else geometry.bias.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=geometry.causal)
    if geometry.blind is not None:
        out = out.masked_fill(geometry.blind, 0)
    return out.transpose(1, 2).flatten(2)


def rotate(x: Float[Tensor, "B H n d"], cosine: Tensor, sine: Tensor) -> Float[Tensor, "B H n d"]:
    """Rotary positions: the pairs (i, i + d/2) of each head turned by the token's angles, in their precision."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


def each(layer: nn.Module, x: Float[Tensor, "B n D"]) -> Float[Tensor, "B n E"]:
    """``layer`` of each token, all rows' tokens as one axis."""
    return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class SelfAttention(nn.Module):
    """Every token looks at every token; queries may be limited to the tokens from ``start`` on."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "B K D"], geometry: Geometry, start: int = 0) -> Float[Tensor, "B Q D"]:
        tokens, width = x.shape[1:]
        dropout = self.dropout if self.training else 0.0
        if start == 0:
            projected = each(self.query_key_value, x)
            rotates = geometry.rotation is not None
            pays = geometry.is_plain and relative_attention.pays(
                projected, width // self.heads, dropout, tokens, rotates=rotates
            )
            if pays or geometry.relative is not None:
                told = geometry.relative, dropout, geometry.rotation
                return each(self.output, relative_attention.self_attention(projected, self.heads, *told))
            q, k, v = projected.chunk(3, dim=-1)
        else:
            weight, bias = self.query_key_value.weight, self.query_key_value.bias
            q = F.linear(x[:, start:], weight[:width], bias[:width])
            k, v = F.linear(x, weight[width:], bias[width:]).chunk(2, dim=-1)
        q, k, v = (heads_first(part, self.heads) for part in (q, k, v))
        if geometry.rotation is not None:
            cosine, sine = geometry.rotation
            q, k = rotate(q, cosine[:, :, start:], sine[:, :, start:]), rotate(k, cosine, sine)
        return each(self.output, attend(q, k, v, geometry.queries_from(start), dropout))


class CrossAttention(nn.Module):
    """Tokens of a decoder look at the encoder's output, which may have another width."""

    def __init__(self, width: int, memory_width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(memory_width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: Float[Tensor, "B Q D"], memory: Float[Tensor, "B K E"], geometry: Geometry
    ) -> Float[Tensor, "B Q D"]:
        q = heads_first(each(self.query, x), self.heads)
        k, v = (heads_first(part, self.heads) for part in each(self.key_value, memory).chunk(2, dim=-1))
        return each(self.output, attend(q, k, v, geometry, self.dropout if self.training else 0.0))


def relative_buckets(row_tokens: int, buckets: int, distance: int) -> Int[Tensor, " 2*{row_tokens}-1"]:
    """T5's bucket of each distance key - query, from -(N-1) to N-1 (Raffel et al. 2019; MAE-LM Table 4).

    Half the buckets serve each direction; half of those are single distances, the rest grow by a constant factor up
    to ``distance``. Computed once, on the CPU in float32, as the public implementations do: another precision flips
    the distances that are powers of two.
    """
    with torch.device("cpu"):
        offset = torch.arange(1 - row_tokens, row_tokens)
        half, exact = buckets // 2, buckets // 4
        size = offset.abs()
        far = (
            exact + (torch.log(size.clamp(min=1).float() / exact) / math.log(distance / exact) * (half - exact)).long()
        )
        return (offset > 0) * half + torch.where(size < exact, size, far.clamp(max=half - 1))


class RelativeBias(nn.Module):
    """One learned number for each head and bucket of distance, added to the scores of every block."""

    def __init__(self, heads: int, buckets: int, distance: int, row_tokens: int):
        super().__init__()
        self.row_tokens = row_tokens
        self.table = nn.Embedding(buckets, heads)
        bucket_of = relative_buckets(row_tokens, buckets, distance)
        self.far = int((bucket_of != bucket_of[-1])[row_tokens - 1 :].sum())
        self.bucket_of: Tensor
        self.register_buffer("bucket_of", bucket_of, persistent=False)

    def forward(self, seats: Int[Tensor, "B n"]) -> Float[Tensor, "B H n n"]:
        offset = seats[:, None, :] - seats[:, :, None]
        return self.table(self.bucket_of[offset + self.row_tokens - 1]).permute(0, 3, 1, 2)

    def by_distance(self, seats: Int[Tensor, "B n"], groups: tuple[Tensor, Tensor] | None = None) -> Relative:
        """The same for the kernel; ``groups`` of queries and keys."""
        middle = self.row_tokens - 1
        table = self.table(self.bucket_of[middle - self.far : middle + self.far + 1]).T
        seats = seats.int()
        queries, keys = (group.int() for group in groups) if groups else (None, None)
        return Relative(table, seats, seats, queries, keys, middle)


def rotation(
    seats: Int[Tensor, "B n"], head_width: int, dtype: torch.dtype, base: float = 10_000.0
) -> tuple[Float[Tensor, "B 1 n h"], Float[Tensor, "B 1 n h"]]:
    """Cosine and sine of the rotary angles seat * base ** (-2 i / d), d = 2 h the head's width, in at least float32."""
    dtype = torch.promote_types(dtype, torch.float32)
    frequency = base ** (-torch.arange(0, head_width, 2, device=seats.device, dtype=dtype) / head_width)
    angle = seats[:, None, :, None] * frequency
    return angle.cos(), angle.sin()


def groups(
    document: Int[Tensor, "B n"], real: Bool[Tensor, "B n"] | None, *, isolates: bool
) -> tuple[Int[Tensor, "B n"], Int[Tensor, "B n"]] | None:
    """``sight`` as groups of queries and keys: one sees the other where they are equal. None: all see all."""
    if real is None and not isolates:
        return None
    queries = document if isolates else torch.zeros_like(document)
    return queries, queries if real is None else queries.masked_fill(~real, -1)


def sight(
    query_document: Int[Tensor, "B Q"],
    key_document: Int[Tensor, "B K"],
    real: Bool[Tensor, "B K"] | None,
    *,
    isolates: bool,
    dtype: torch.dtype,
) -> Geometry:
    """Who may look at whom: not at padding, nor, where documents are isolated, at the tokens of another one.

    Blind are the queries to whom that leaves nothing: a row of padding alone, and in cross-attention a masked token
    whose document has no visible one.
    """
    if real is None and not isolates:
        return Geometry()
    allowed = torch.ones((), dtype=torch.bool, device=key_document.device) if real is None else real[:, None, None, :]
    if isolates:
        allowed = allowed & (query_document[:, None, :, None] == key_document[:, None, None, :])
    blind = ~allowed.any(-1, keepdim=True)
    hidden = ~(allowed | blind)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)
    queries = query_document.shape[1]
    sees_itself = real is None and query_document is key_document
    return Geometry(bias.expand(-1, -1, queries, -1), None if sees_itself else blind.expand(-1, -1, queries, -1))

"""Attention with a learned bias by distance, its gradient, and dropout, without ever writing the scores (Triton).

``softmax(q k' / sqrt(d) + table[clamp(seat_k - seat_q, -far, far)]) v``: the kernel gathers one number a score from the
seats, so seats may be gapped and in any order, other ones in each row; seats in rising order are fastest. ``plain`` is
its twin in a few lines of torch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from latemask.kernels import HAS_TRITON, INTERPRETED, compiles_for_gpu
from latemask.kernels.rotary import turn

LOG2_E = math.log2(math.e)
MOST_TILES = 64
"""With more tiles of keys than these, far tiles are not told from near ones."""
SCRATCH_BYTES = 2**28
"""For the gradients of scores of so many rows of a batch at once, one at least."""
DIAGONAL_ROWS = 16
"""Queries whose scores a program of ``distances_kernel`` reads."""


class Relative(NamedTuple):
    """Who sits where, and what distance adds to a score."""

    table: Float[Tensor, "H W"]
    """The bias of each distance key - query from -far to far, W = 2 far + 1 (far > 0); beyond, that of the end."""
    query_seats: Int[Tensor, "B Q"]
    """int32, from 0 to ``reach``."""
    key_seats: Int[Tensor, "B K"]
    """int32. No two keys of a row share a seat, but those in no group: of such two, one alone would count in the
    gradient of the table."""
    query_groups: Int[Tensor, "B Q"] | None
    """int32. A query sees the keys of its own group, nothing where there are none; None: all keys."""
    key_groups: Int[Tensor, "B K"] | None
    """int32; below 0: in no group."""
    reach: int
    """No seat is larger."""

    def queries_from(self, start: int) -> Relative:
        """The same for the queries from ``start`` on."""
        groups = None if self.query_groups is None else self.query_groups[:, start:]
        return self._replace(query_seats=self.query_seats[:, start:], query_groups=groups)


def plain(
    q: Float[Tensor, "B H Q d"],
    k: Float[Tensor, "B H K d"],
    v: Float[Tensor, "B H K d"],
    relative: Relative | None = None,
    kept: Bool[Tensor, "B H Q K"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H Q d"]:
    """The same in plain torch; ``kept`` says which weights dropout leaves."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones((), dtype=torch.bool, device=q.device)
    if relative is not None:
        far = relative.table.shape[1] // 2
        distance = relative.key_seats[:, None, :] - relative.query_seats[:, :, None]
        scores = scores + relative.table[:, distance.clamp(-far, far) + far].transpose(0, 1)
        if relative.query_groups is not None and relative.key_groups is not None:
            seen = (relative.query_groups[:, :, None] == relative.key_groups[:, None, :])[:, None]
    weights = torch.where(seen, scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1), 0)
    if kept is not None:
        weights = torch.where(kept, weights / (1 - dropout), 0)
    return weights.to(v.dtype) @ v


def kept_by_dropout(
    noise: Int[Tensor, " P+1"], rows: int, heads: int, queries: int, keys: int, dropout: float
) -> Bool[Tensor, "B H Q K"]:
    """The kernel's dropout as a mask, by the same products in plain integers."""
    noise = noise.long() & _MASK
    pair = torch.arange(rows * heads, device=noise.device)[:, None]
    begin = _mixed(noise[-1] ^ (pair * 0x85EBCA6B & _MASK))
    query = _mixed(begin ^ (torch.arange(queries, device=noise.device) * 0xC2B2AE35 & _MASK))
    x = query[:, :, None] * noise[:keys] & _MASK
    return (x >= _threshold(dropout)).view(rows, heads, queries, keys)


_MASK = 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def _threshold(dropout: float) -> int:
    return int(dropout * 2**32)


HEAD_WIDTHS = (16, 32, 64, 128)
"""That the kernel takes."""


def is_supported(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether the kernel runs there; ``plain`` and torch's own attention run everywhere."""
    if not (device.type == "cuda" or INTERPRETED) or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    return head_width in HEAD_WIDTHS and HAS_TRITON


FEWEST_KEYS, MOST_KEYS = 256, 512
"""Between which the kernel was the faster one also with neither (results/attention_base.json; at 2,048 keys it was the
slower one: attention_long.json)."""


def pays(projected: Tensor, head_width: int, dropout: float, keys: int, *, rotates: bool = False) -> bool:
    """Whether the kernel without a table is faster than torch's own attention of what was ``projected`` to so many
    ``keys``, in half precision: with dropout, where it ``rotates`` queries and keys itself, and in compiled blocks."""
    if projected.dtype == torch.float32 or not is_supported(projected.device, projected.dtype, head_width):
        return False
    return dropout > 0 or rotates or (compiles_for_gpu(projected) and FEWEST_KEYS <= keys <= MOST_KEYS)


def attention(
    q: Float[Tensor, "B H Q d"],
    k: Float[Tensor, "B H K d"],
    v: Float[Tensor, "B H K d"],
    relative: Relative | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H Q d"]:
    """``plain`` by the kernel, [B, Q, H, d] in memory. The same inputs and noise always give the same bits."""
    noise = draw_noise(k.shape[2], q.device) if dropout else None
    return _attention(q, k, v, *_parts(relative), noise, dropout)[0]


def self_attention(
    query_key_value: Float[Tensor, "B n 3*D"],
    heads: int,
    relative: Relative | None = None,
    dropout: float = 0.0,
    rotation: tuple[Float[Tensor, "#B 1 n d/2"], Float[Tensor, "#B 1 n d/2"]] | None = None,
) -> Float[Tensor, "B n D"]:
    """``attention`` of tokens among themselves, projections in and heads joined out, without a copy on either side.

    ``rotation``: cosine and sine of the angles, in float32 here, by which the pairs (i, i + d/2) of queries and keys
    are turned first (rotary positions, Su et al. 2021).
    """
    noise = draw_noise(query_key_value.shape[1], query_key_value.device) if dropout else None
    cosine, sine = rotation or (None, None)
    return _self_attention(query_key_value, heads, *_parts(relative), noise, dropout, cosine, sine)[0]


def _parts(relative: Relative | None) -> tuple[Any, ...]:
    """As the kernels read it: seats and groups row after row, also where they are those of some queries alone."""
    if relative is None:
        return (None,) * 5 + (0,)
    rows = [part if part is None else part.contiguous() for part in relative[1:5]]
    return relative.table, *rows, relative.reach


def draw_noise(keys: int, device: torch.device) -> Int[Tensor, " P+1"]:
    """What dropout is drawn from: a random odd int32 for each key, ``padded``, and one more, from torch's generator."""
    return torch.randint(-(2**31), 2**31, (padded(keys) + 1,), dtype=torch.int32, device=device) | 1


def padded(tokens: int) -> int:
    """Numbers kept for so many tokens: whole tiles, so that kernels read them without asking which are there."""
    return -(-tokens // LARGEST_TILE) * LARGEST_TILE


TILES = {
    "forward": {"bare": (64, 64, 4, 3), "drops": (64, 64, 4, 3), "table": (64, 32, 4, 3)},
    "keys": {"bare": (64, 64, 4, 3), "drops": (64, 64, 4, 3), "table": (32, 64, 4, 3)},
    "queries": {"bare": (64, 32, 4, 3), "drops": (64, 32, 4, 3), "table": (64, 32, 4, 3)},
}
"""Queries and keys of a tile, warps and stages of the pipeline, the fastest of those tried on an H200 at 512 tokens."""
LARGEST_TILE = max(max(tile[:2]) for kinds in TILES.values() for tile in kinds.values())


def _blocks(kernel: str, q: Tensor, table: Tensor | None, dropout: float, looped: int) -> dict[str, int]:
    kind = "table" if table is not None else "drops" if dropout else "bare"
    rows, columns, warps, stages = (32, 32, 4, 1) if q.dtype == torch.float32 else TILES[kernel][kind]
    if q.shape[-1] > 64:  # a third stage would not fit the 99 KB of a smaller card
        stages = min(stages, 2)
    tiles = -(-looped // (rows if kernel == "keys" else columns))
    tiles = 1 << (tiles - 1).bit_length()
    stages = min(stages, tiles)  # of more stages than tiles ptxas makes nothing, or crashes (CUDA 12.8, one key)
    return {"ROWS": rows, "COLUMNS": columns, "TILES": tiles if tiles <= MOST_TILES else 0, "num_warps": warps,
            "num_stages": stages, "enable_fp_fusion": True}  # fmt: skip


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_reach(table: Tensor | None, reach: int) -> tuple[Tensor | None, int]:
    """The table in base 2 for every distance up to ``reach``, and ``far``."""
    if table is None:
        return None, 0
    far = table.shape[1] // 2
    more = max(0, reach - far)
    return F.pad(table.float()[None] * LOG2_E, (more, more), mode="replicate")[0].contiguous(), far


def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, query_seats: Tensor | None, key_seats: Tensor | None,
    query_groups: Tensor | None, key_groups: Tensor | None, reach: int, noise: Tensor | None, dropout: float,
    out: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from latemask.kernels import relative_triton

    kernels: Any = relative_triton

    rows, heads, queries, width = q.shape
    lse, hashes = _numbers(q, dropout)
    blocks = _blocks("forward", q, table, dropout, k.shape[2])
    by_reach, far = _by_reach(table, reach)
    kernels.forward_kernel[(padded(queries) // blocks["ROWS"], heads, rows)](
        q, k, v, by_reach, query_seats, key_seats, query_groups, key_groups, noise, out, lse, hashes,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads, queries, k.shape[2], padded(queries),
        padded(k.shape[2]), max(reach, far), far, LOG2_E / math.sqrt(width), _threshold(dropout), 1 - dropout,
        HAS_TABLE=table is not None, HAS_GROUPS=query_groups is not None, DROPS=dropout > 0, WIDTH=width,
        UPCASTS=INTERPRETED, **blocks,
    )  # fmt: skip
    return lse, hashes


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, query_seats: Tensor | None,
    key_seats: Tensor | None, query_groups: Tensor | None, key_groups: Tensor | None, reach: int, noise: Tensor | None,
    dropout: float, out: Tensor, lse: Tensor, hashes: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor, token_stride: int,
) -> Tensor:  # fmt: skip
    """Writes d_q, d_k, d_v; returns the gradient of the table."""
    from latemask.kernels import relative_triton

    kernels: Any = relative_triton

    rows, heads, queries, width = q.shape
    keys = k.shape[2]
    by_reach, far = _by_reach(table, reach)
    delta = torch.empty_like(lse)
    numbers = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3], heads, queries, keys,
               padded(queries), padded(keys), max(reach, far), far, LOG2_E / math.sqrt(width), _threshold(dropout),
               1 - dropout, 1 / math.sqrt(width), token_stride)  # fmt: skip
    kinds = {"HAS_TABLE": table is not None, "HAS_GROUPS": query_groups is not None, "DROPS": dropout > 0,
             "WIDTH": width, "UPCASTS": INTERPRETED}  # fmt: skip
    blocks = _blocks("queries", q, table, dropout, keys)
    programs = padded(queries) // blocks["ROWS"]
    plane = heads * padded(queries) * padded(keys) if table is not None else 0
    some = max(1, min(rows, SCRATCH_BYTES // (plane * q.element_size()) if plane else rows))
    d_scores = q.new_empty(some * plane)
    d_ends = lse.new_empty(rows, heads, programs, 2)
    d_near = lse.new_empty(rows, -(-queries // DIAGONAL_ROWS), heads, 2 * far + 1)
    key_at = None if key_seats is None else _key_at(key_seats, key_groups, reach, far)
    for first in range(0, rows, some):
        of = partial(_rows, first=first, count=some)
        these = min(some, rows - first)
        kernels.queries_kernel[(programs, heads, these)](
            of(q), of(k), of(v), by_reach, of(query_seats), of(key_seats), of(query_groups), of(key_groups), noise,
            of(d_out), of(lse), of(hashes), of(delta), of(out), of(d_q), d_scores, of(d_ends),
            *numbers, **kinds, **blocks,
        )  # fmt: skip
        if key_at is not None:
            kernels.distances_kernel[(d_near.shape[1], these)](
                d_scores, of(key_at), of(query_seats), of(d_near), heads, queries, padded(queries), padded(keys),
                key_at.shape[1], far, ROWS=DIAGONAL_ROWS, PLACES=1 << (2 * far).bit_length(),
            )  # fmt: skip
    blocks = _blocks("keys", q, table, dropout, queries)
    kernels.keys_kernel[(-(-keys // blocks["COLUMNS"]), heads, rows)](
        q, k, v, by_reach, query_seats, key_seats, query_groups, key_groups, noise, d_out, lse, hashes, delta, d_k, d_v,
        *numbers, **kinds, **blocks,
    )  # fmt: skip
    if key_at is None:
        return lse.new_empty(heads, 1)
    d_table, (everything, above) = d_near.sum((0, 1)), d_ends.sum((0, 2)).unbind(-1)
    d_table[:, 0], d_table[:, -1] = everything - above - d_table.sum(1), above
    return d_table / (1 - dropout)


def _rows(x: Tensor | None, first: int, count: int) -> Tensor | None:
    return x if x is None else x[first : first + count]


def _key_at(key_seats: Tensor, key_groups: Tensor | None, reach: int, far: int) -> Int[Tensor, "B reach+1+2*far"]:
    """Which key has the seat ``place - far``; -1: none, or one that is in no group."""
    rows, keys = key_seats.shape
    places = key_seats.long() + far
    if key_groups is not None:
        places = places.masked_fill(key_groups < 0, 0)  # nothing is far below a seat of 0
    key = torch.arange(keys, dtype=torch.int32, device=key_seats.device).expand(rows, keys)
    return key_seats.new_full((rows, reach + 1 + 2 * far), -1).scatter_(1, places, key)


def _numbers(q: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Room for the normaliser and, with dropout, the hash of every query, [B, H, P] (``padded``)."""
    lse = q.new_empty(*q.shape[:2], padded(q.shape[2]), dtype=torch.float32)
    return lse, lse.new_empty(lse.shape if dropout else (0, 0, 0), dtype=torch.int32)


def _heads_inside(rows: int, tokens: int, heads: int, width: int, like: Tensor) -> Tensor:
    """[B, H, n, d] laid out [B, n, H, d] in memory."""
    return like.new_empty(rows, tokens, heads, width).transpose(1, 2)


@torch.library.custom_op("latemask::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, query_seats: Tensor | None, key_seats: Tensor | None,
    query_groups: Tensor | None, key_groups: Tensor | None, reach: int, noise: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = map(_unit_stride, (q, k, v))
    out = _heads_inside(q.shape[0], q.shape[2], q.shape[1], q.shape[3], q)
    return out, *_forward(q, k, v, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout, out)


@_attention.register_fake
def _(q, k, v, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout):
    rows, heads, queries, width = q.shape
    return _heads_inside(rows, queries, heads, width, q), *_numbers(q, dropout)


@torch.library.custom_op("latemask::attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, query_seats: Tensor | None,
    key_seats: Tensor | None, query_groups: Tensor | None, key_groups: Tensor | None, reach: int, noise: Tensor | None,
    dropout: float, out: Tensor, lse: Tensor, hashes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, d_out = map(_unit_stride, (q, k, v, d_out))
    rows, heads, queries, width = q.shape
    d_q, d_k, d_v = (_heads_inside(rows, n, heads, width, q) for n in (queries, k.shape[2], k.shape[2]))
    d_table = _backward(d_out, q, k, v, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout,
                        out, lse, hashes, d_q, d_k, d_v, heads * width)  # fmt: skip
    return d_q, d_k, d_v, d_table


@_attention_backward.register_fake
def _(d_out, q, k, v, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout, out, lse, hashes):
    rows, heads, queries, width = q.shape
    d_q, d_k, d_v = (_heads_inside(rows, n, heads, width, q) for n in (queries, k.shape[2], k.shape[2]))
    return d_q, d_k, d_v, lse.new_empty(heads, 1 if table is None else table.shape[1])


@torch.library.custom_op("latemask::self_attention", mutates_args=())
def _self_attention(
    query_key_value: Tensor, heads: int, table: Tensor | None, query_seats: Tensor | None, key_seats: Tensor | None,
    query_groups: Tensor | None, key_groups: Tensor | None, reach: int, noise: Tensor | None, dropout: float,
    cosine: Tensor | None, sine: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query_key_value = query_key_value.contiguous()
    turned = _room_for_turned(query_key_value, cosine)
    turn(query_key_value, turned, heads, cosine, sine, 1)
    q, k, v = _split(query_key_value, turned, heads)
    out = q.new_empty(q.shape[0], q.shape[2], heads * q.shape[3])
    lse, hashes = _forward(q, k, v, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout, out)
    return out, lse, hashes, turned


@_self_attention.register_fake
def _(query_key_value, heads, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout, cosine,
      sine):  # fmt: skip
    rows, tokens, width = query_key_value.shape
    turned = _room_for_turned(query_key_value, cosine)
    q, _, _ = _split(query_key_value, turned, heads)
    return query_key_value.new_empty(rows, tokens, width // 3), *_numbers(q, dropout), turned


@torch.library.custom_op("latemask::self_attention_backward", mutates_args=())
def _self_attention_backward(
    d_out: Tensor, query_key_value: Tensor, heads: int, table: Tensor | None, query_seats: Tensor | None,
    key_seats: Tensor | None, query_groups: Tensor | None, key_groups: Tensor | None, reach: int, noise: Tensor | None,
    dropout: float, cosine: Tensor | None, sine: Tensor | None, out: Tensor, lse: Tensor, hashes: Tensor,
    turned: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query_key_value, d_out = query_key_value.contiguous(), d_out.contiguous()
    q, k, v = _split(query_key_value, turned, heads)
    d_all = query_key_value.new_empty(query_key_value.shape)
    d_heads = d_out.unflatten(-1, (heads, -1)).transpose(1, 2)
    d_table = _backward(d_heads, q, k, v, table, query_seats, key_seats, query_groups, key_groups, reach, noise,
                        dropout, out, lse, hashes, *_split(d_all, d_all[..., :0], heads), d_all.shape[-1])  # fmt: skip
    turn(d_all, d_all, heads, cosine, sine, -1)
    return d_all, d_table


@_self_attention_backward.register_fake
def _(
    d_out, query_key_value, heads, table, query_seats, key_seats, query_groups, key_groups, reach, noise, dropout,
    cosine, sine, out, lse, hashes, turned,
):  # fmt: skip
    d_all = query_key_value.new_empty(query_key_value.shape)
    return d_all, lse.new_empty(heads, 1 if table is None else table.shape[1])


def _room_for_turned(query_key_value: Tensor, cosine: Tensor | None) -> Tensor:
    """For queries and keys; for nothing where none are turned."""
    rows, tokens, width = query_key_value.shape
    return query_key_value.new_empty(rows, tokens, 0 if cosine is None else 2 * width // 3)


def _split(query_key_value: Tensor, turned: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads first; queries and keys as they were turned, if they were."""
    q, k, v = query_key_value.chunk(3, -1)
    if turned.shape[-1]:
        q, k = turned.chunk(2, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    return q, k, v


def _keep(ctx, inputs, output):
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor | None)]
    ctx.is_number = [not isinstance(x, Tensor | None) for x in inputs]
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor | None)), *output)


def _kept_inputs(ctx):
    tensors, numbers = iter(ctx.saved_tensors), iter(ctx.numbers)
    inputs = [next(numbers) if is_number else next(tensors) for is_number in ctx.is_number]
    return [*inputs, *tensors]


def _attention_autograd(ctx, d_out, *_):
    inputs = _kept_inputs(ctx)
    d_q, d_k, d_v, d_table = _attention_backward(d_out, *inputs)
    table = inputs[3]
    return d_q, d_k, d_v, None if table is None else d_table.to(table.dtype), *(None,) * 7


def _self_attention_autograd(ctx, d_out, *_):
    inputs = _kept_inputs(ctx)
    d_all, d_table = _self_attention_backward(d_out, *inputs)
    table = inputs[2]
    return d_all, None, None if table is None else d_table.to(table.dtype), *(None,) * 9


_attention.register_autograd(_attention_autograd, setup_context=_keep)
_self_attention.register_autograd(_self_attention_autograd, setup_context=_keep)

"""Triton kernels of relative attention: forward, and backward in two passes, none of which writes the scores.

Scores live in base 2: the scale and the table come multiplied by log2(e). A tile whose distances all lie beyond ``far``
has one bias. These kernels are bound by the instructions that a tile takes (benchmarks/instructions.py counts them): so
whole far tiles do not ask which of their keys exist, a token that a tile lacks is the last one read again, at weight 0,
and what is kept of each query and drawn for each key is padded to whole tiles and read without asking. Dropout is the
product of a hash of (row of the batch, head, query) and of a random odd number a key, made again in the backward pass.

The table's gradient: the queries' pass writes the scores' gradients of near tiles, whole tiles at a time, and sums what
lies ``far`` and more above and what there is in all; ``distances_kernel`` then reads them along their diagonals. A
query sees one key at most at each distance: so the order of additions is always the same. What lies farther below is
what the others leave of the sum of all.
"""

# Triton is a language of its own: its types are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from latemask.kernels import INTERPRETED

NOWHERE = tl.constexpr(1 << 30)
IN_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def _mixed(x):
    """A 32-bit integer whose every bit depends on every bit of ``x``."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _pair():
    """Which head of which row of the batch: heads and rows are axes of the grid, since one axis ends at 65,535. (Taken
    as they are, without this sum and its division, they make the loops of the compiled kernels longer.)"""
    return tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)


@triton.jit
def _product(a, b, onto, UPCASTS: tl.constexpr):
    """``onto`` + a b in float32. Triton's interpreter cannot multiply bfloat16: there the factors come as float32."""
    if UPCASTS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, onto, input_precision="ieee")


@triton.jit
def _left(weights, query_hash, key_noise, threshold):
    """What dropout leaves of ``weights``; the two factors come shaped to broadcast. As one piece of PTX, for else the
    compiler decides about a whole tile ahead, and packs what it decided into bits and unpacks them."""
    threshold = tl.cast(threshold, tl.uint32)
    if IN_PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred stays; .reg .b32 at; mul.lo.u32 at, $2, $3; setp.ge.u32 stays, at, $4; "
            "selp.f32 $0, $1, 0f00000000, stays; }", "=f,f,r,r,r",
            [weights, query_hash, key_noise, threshold], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.where(query_hash * key_noise >= threshold, weights, 0.0)


@triton.jit
def _looked_up(table, places):
    """``table[places]``, each number read by the thread whose score it is for: what ``tl.load`` reads comes in another
    order, and is carried over through shared memory."""
    if IN_PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 at; mad.wide.s32 at, $1, 4, $2; ld.global.nc.f32 $0, [at]; }", "=f,r,l",
            [places, table], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.load(table + places)


@triton.jit
def _near_tiles(seats, count, low, high, far, TILE: tl.constexpr, TILES: tl.constexpr):
    """(start, stop) of the tiles of ``seats`` that are not all ``far`` or more away from ``low..high``.

    All seats before ``start`` are lower, all from ``stop`` on higher: with seats in rising order these are all the far
    tiles, in any other order some of them. A last tile that is not full never lies before ``start``.
    """
    total, full = tl.cdiv(count, TILE), count // TILE
    if TILES == 0:
        start, stop = 0, total
    else:
        tiles = tl.arange(0, TILES)
        places = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(seats + places, mask=places < count, other=0)
        lowest = tl.min(tl.where(places < count, x, NOWHERE), 1)
        highest = tl.max(tl.where(places < count, x, -NOWHERE), 1)
        start = tl.min(tl.where((highest - low > -far) & (tiles < total), tiles, total), 0)
        stop = tl.maximum(tl.max(tl.where((lowest - high < far) & (tiles < total), tiles + 1, 0), 0), start)
    return tl.minimum(start, full), stop


@triton.jit
def _span(seats, exist):
    return tl.min(tl.where(exist, seats, NOWHERE), 0), tl.max(tl.where(exist, seats, -NOWHERE), 0)


@triton.jit
def _forward_tile(
    first, q, k_rows, v_rows, seats, groups, NOISE, table, query_seats, bias, query_groups, query_hash, top, total, out,
    k_n, v_n, keys, scale, threshold,
    IS_FULL: tl.constexpr, NEAR: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr,
    UPCASTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``bias`` is what all scores of the tile have in common; IS_FULL: every column is a key."""
    columns, dims = first + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    existing = columns if IS_FULL else tl.minimum(columns, keys - 1)
    k = tl.load(k_rows + existing[None, :] * k_n + dims[:, None])
    scores = _product(q, k, None, UPCASTS)
    if NEAR:
        key_seats = tl.load(seats + existing)
        missing = tl.where(columns < keys, 0.0, float("-inf"))
        scores = scores * scale + (_looked_up(table, key_seats[None, :] - query_seats[:, None]) + missing[None, :])
        scale = 1.0
    if HAS_GROUPS:
        key_groups = tl.where(columns < keys, tl.load(groups + existing), -3)
        scores = tl.where(key_groups[None, :] == query_groups[:, None], scores, float("-inf"))
    elif not IS_FULL and not NEAR:
        scores = tl.where((columns < keys)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale + bias)
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if HAS_GROUPS else new_top
    weights = tl.exp2(scores * scale + (bias - base)[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    if DROPS:
        noise = tl.load(NOISE + columns).to(tl.uint32, bitcast=True)
        weights = _left(weights, query_hash[:, None], noise[None, :], threshold)
    v = tl.load(v_rows + existing[:, None] * v_n + dims[None, :])
    return new_top, total, _product(weights.to(v.dtype), v, out * shrink[:, None], UPCASTS)


@triton.jit
def forward_kernel(
    Q, K, V, TABLE, QUERY_SEATS, KEY_SEATS, QUERY_GROUPS, KEY_GROUPS, NOISE, OUT, LSE, HASH,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, queries, keys, padded, padded_keys, reach, far, scale, threshold, survivors,
    HAS_TABLE: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr, UPCASTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    pair = _pair()
    row, head = (pair // heads).to(tl.int64), pair % heads
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_query = rows < queries
    q = tl.load(Q + row * q_b + head * q_h + rows[:, None] * q_n + dims[None, :], mask=is_query[:, None], other=0.0)
    seats, groups = KEY_SEATS, KEY_GROUPS
    table, query_seats, query_groups, query_hash = TABLE, rows, rows, rows.to(tl.uint32)
    if HAS_GROUPS:
        groups += row * keys
        query_groups = tl.load(QUERY_GROUPS + row * queries + rows, mask=is_query, other=-2)
    if DROPS:
        begin = _mixed(tl.load(NOISE + padded_keys).to(tl.uint32, bitcast=True) ^ (pair.to(tl.uint32) * 0x85EBCA6B))
        query_hash = _mixed(begin ^ (rows.to(tl.uint32) * 0xC2B2AE35))
        tl.store(HASH + pair * padded + rows, query_hash.to(tl.int32, bitcast=True))
    k_rows, v_rows = K + row * k_b + head * k_h, V + row * v_b + head * v_h
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    start, stop, bias = 0, 0, 0.0
    if HAS_TABLE:
        seats += row * keys
        table = TABLE + head * (2 * reach + 1) + reach
        query_seats = tl.load(QUERY_SEATS + row * queries + rows, mask=is_query, other=0)
        low, high = _span(query_seats, is_query)
        start, stop = _near_tiles(seats, keys, low, high, far, COLUMNS, TILES)
        bias = tl.load(table - far)
        for tile in range(start):
            top, total, out = _forward_tile(
                tile * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, table, query_seats, bias, query_groups,
                query_hash, top, total, out, k_n, v_n, keys, scale, threshold, True, False, HAS_GROUPS, DROPS, WIDTH,
                UPCASTS, COLUMNS,
            )  # fmt: skip
        for tile in range(start, stop):
            top, total, out = _forward_tile(
                tile * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, table, query_seats, 0.0, query_groups,
                query_hash, top, total, out, k_n, v_n, keys, scale, threshold, False, True, HAS_GROUPS, DROPS, WIDTH,
                UPCASTS, COLUMNS,
            )  # fmt: skip
        bias = tl.load(table + far)
    full = keys // COLUMNS
    for tile in range(stop, full):
        top, total, out = _forward_tile(
            tile * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, table, query_seats, bias, query_groups,
            query_hash, top, total, out, k_n, v_n, keys, scale, threshold, True, False, HAS_GROUPS, DROPS, WIDTH,
            UPCASTS, COLUMNS,
        )  # fmt: skip
    if (stop <= full) & (full * COLUMNS < keys):
        top, total, out = _forward_tile(
            full * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, table, query_seats, bias, query_groups,
            query_hash, top, total, out, k_n, v_n, keys, scale, threshold, False, False, HAS_GROUPS, DROPS, WIDTH,
            UPCASTS, COLUMNS,
        )  # fmt: skip
    is_blind = total == 0.0
    out /= tl.where(is_blind, 1.0, total * survivors)[:, None]
    lse = tl.where(is_blind, float("inf"), top + tl.log2(tl.where(is_blind, 1.0, total)))
    tl.store(LSE + pair * padded + rows, tl.where(is_query, lse, float("inf")))
    where = OUT + (row * queries + rows[:, None]) * (heads * WIDTH) + head * WIDTH + dims[None, :]
    tl.store(where, out.to(OUT.dtype.element_ty), mask=is_query[:, None])


@triton.jit
def _keys_tile(
    first, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, table, key_seats, bias, key_groups, noise,
    d_k, d_v,
    q_n, d_n, queries, scale, threshold,
    NEAR: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr, UPCASTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    rows, dims = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    existing = tl.minimum(rows, queries - 1)
    q = tl.load(q_rows + existing[:, None] * q_n + dims[None, :])
    lse = tl.load(lses + rows)
    scores = _product(k, tl.trans(q), None, UPCASTS) * scale
    if NEAR:
        query_seats = tl.load(seats + existing)
        scores += _looked_up(table, key_seats[:, None] - query_seats[None, :])
    if HAS_GROUPS:
        query_groups = tl.load(groups + existing)
        scores = tl.where(key_groups[:, None] == query_groups[None, :], scores, float("-inf"))
    weights = tl.exp2(scores - (lse - bias)[None, :])
    d_out = tl.load(d_rows + existing[:, None] * d_n + dims[None, :])
    d_weights = _product(v, tl.trans(d_out), None, UPCASTS)
    delta = tl.load(deltas + rows)
    dropped = weights
    if DROPS:
        query_hash = tl.load(hashes + rows).to(tl.uint32, bitcast=True)
        dropped = _left(weights, query_hash[None, :], noise[:, None], threshold)
        d_scores = dropped * d_weights - weights * delta[None, :]
    else:
        d_scores = weights * (d_weights - delta[None, :])
    d_v = _product(dropped.to(d_out.dtype), d_out, d_v, UPCASTS)
    return _product(d_scores.to(q.dtype), q, d_k, UPCASTS), d_v


@triton.jit
def keys_kernel(
    Q, K, V, TABLE, QUERY_SEATS, KEY_SEATS, QUERY_GROUPS, KEY_GROUPS, NOISE, D_OUT, LSE, HASH, DELTA, D_K, D_V,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, d_b, d_h, d_n,
    heads, queries, keys, padded, padded_keys, reach, far, scale, threshold, survivors, score_scale, token_stride,
    HAS_TABLE: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr, UPCASTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of COLUMNS keys and values; scores stand transposed, [keys, queries]."""
    pair = _pair()
    row, head = (pair // heads).to(tl.int64), pair % heads
    columns, dims = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    is_key = columns < keys
    k = tl.load(K + row * k_b + head * k_h + columns[:, None] * k_n + dims[None, :], mask=is_key[:, None], other=0.0)
    v = tl.load(V + row * v_b + head * v_h + columns[:, None] * v_n + dims[None, :], mask=is_key[:, None], other=0.0)
    seats, groups = QUERY_SEATS, QUERY_GROUPS
    table, key_seats, key_groups, noise = TABLE, columns, columns, columns.to(tl.uint32)
    if HAS_GROUPS:
        groups += row * queries
        key_groups = tl.load(KEY_GROUPS + row * keys + columns, mask=is_key, other=-3)
    if DROPS:
        noise = tl.load(NOISE + columns).to(tl.uint32, bitcast=True)
    q_rows, d_rows = Q + row * q_b + head * q_h, D_OUT + row * d_b + head * d_h
    lses, hashes, deltas = LSE + pair * padded, HASH + pair * padded, DELTA + pair * padded
    d_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    d_v = tl.zeros([COLUMNS, WIDTH], tl.float32)
    start, stop, bias = 0, 0, 0.0
    if HAS_TABLE:
        seats += row * queries
        table = TABLE + head * (2 * reach + 1) + reach
        key_seats = tl.load(KEY_SEATS + row * keys + columns, mask=is_key, other=0)
        low, high = _span(key_seats, is_key)
        start, stop = _near_tiles(seats, queries, low, high, far, ROWS, TILES)
        bias = tl.load(table + far)
        for tile in range(start):
            d_k, d_v = _keys_tile(
                tile * ROWS, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, table, key_seats, bias,
                key_groups, noise, d_k, d_v, q_n, d_n, queries, scale, threshold, False, HAS_GROUPS, DROPS, WIDTH,
                UPCASTS, ROWS,
            )  # fmt: skip
        for tile in range(start, stop):
            d_k, d_v = _keys_tile(
                tile * ROWS, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, table, key_seats, 0.0,
                key_groups, noise, d_k, d_v, q_n, d_n, queries, scale, threshold, True, HAS_GROUPS, DROPS, WIDTH,
                UPCASTS, ROWS,
            )  # fmt: skip
        bias = tl.load(table - far)
    for tile in range(stop, tl.cdiv(queries, ROWS)):
        d_k, d_v = _keys_tile(
            tile * ROWS, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, table, key_seats, bias,
            key_groups, noise, d_k, d_v, q_n, d_n, queries, scale, threshold, False, HAS_GROUPS, DROPS, WIDTH,
            UPCASTS, ROWS,
        )  # fmt: skip
    where = (row * keys + columns[:, None]) * token_stride + head * WIDTH + dims[None, :]
    tl.store(D_K + where, (d_k * score_scale / survivors).to(D_K.dtype.element_ty), mask=is_key[:, None])
    tl.store(D_V + where, (d_v / survivors).to(D_V.dtype.element_ty), mask=is_key[:, None])


@triton.jit
def _queries_tile(
    first, q, d_out, k_rows, v_rows, seats, groups, NOISE, table, query_seats, shift, query_groups, query_hash, delta,
    d_q, all_scores, above, kept_rows, k_n, v_n, keys, far, scale, threshold,
    IS_FULL: tl.constexpr, NEAR: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr,
    WIDTH: tl.constexpr, UPCASTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """d_q and, with a table, the sums [ROWS] of all gradients of scores and of those ``above`` in near tiles, with this
    tile's; a near tile's gradients are kept. ``shift`` [ROWS] is what bias and normaliser add."""
    columns, dims = first + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    existing = columns if IS_FULL else tl.minimum(columns, keys - 1)
    k = tl.load(k_rows + existing[:, None] * k_n + dims[None, :])
    scores = _product(q, tl.trans(k), None, UPCASTS) * scale + shift[:, None]
    if NEAR:
        distance = tl.load(seats + existing)[None, :] - query_seats[:, None]
        scores += _looked_up(table, distance)
    if HAS_GROUPS:
        key_groups = tl.where(columns < keys, tl.load(groups + existing), -3)
        scores = tl.where(key_groups[None, :] == query_groups[:, None], scores, float("-inf"))
    elif not IS_FULL:
        scores = tl.where((columns < keys)[None, :], scores, float("-inf"))
    weights = tl.exp2(scores)
    v = tl.load(v_rows + existing[:, None] * v_n + dims[None, :])
    d_weights = _product(d_out, tl.trans(v), None, UPCASTS)
    if DROPS:
        noise = tl.load(NOISE + columns).to(tl.uint32, bitcast=True)
        d_weights = _left(d_weights, query_hash[:, None], noise[None, :], threshold)
    d_scores = weights * (d_weights - delta[:, None])
    if HAS_TABLE:
        all_scores += tl.sum(d_scores, 1)
    if NEAR:
        above += tl.sum(tl.where(distance >= far, d_scores, 0.0), 1)
        tl.store(kept_rows[:, None] + columns[None, :], d_scores.to(k.dtype))
    return _product(d_scores.to(k.dtype), k, d_q, UPCASTS), all_scores, above


@triton.jit
def queries_kernel(
    Q, K, V, TABLE, QUERY_SEATS, KEY_SEATS, QUERY_GROUPS, KEY_GROUPS, NOISE, D_OUT, LSE, HASH, DELTA, OUT, D_Q,
    D_SCORES, D_ENDS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, d_b, d_h, d_n,
    heads, queries, keys, padded, padded_keys, reach, far, scale, threshold, survivors, score_scale, token_stride,
    HAS_TABLE: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr, UPCASTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS queries. First each query's DELTA, the sum of out * d out: what its softmax takes from the
    gradient of every score. With a table, D_SCORES [B, H, padded, padded_keys] of near tiles and, in D_ENDS
    [B, H, programs, 2], the sums of all scores' gradients and of those far above."""
    pair = _pair()
    row, head = (pair // heads).to(tl.int64), pair % heads
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_query = rows < queries
    seats, groups = KEY_SEATS, KEY_GROUPS
    table, query_seats, query_groups, query_hash = TABLE, rows, rows, rows.to(tl.uint32)
    if HAS_GROUPS:
        groups += row * keys
        query_groups = tl.load(QUERY_GROUPS + row * queries + rows, mask=is_query, other=-2)
    if DROPS:
        query_hash = tl.load(HASH + pair * padded + rows).to(tl.uint32, bitcast=True)
    q = tl.load(Q + row * q_b + head * q_h + rows[:, None] * q_n + dims[None, :], mask=is_query[:, None], other=0.0)
    d_out = tl.load(D_OUT + row * d_b + head * d_h + rows[:, None] * d_n + dims[None, :],
                    mask=is_query[:, None], other=0.0)  # fmt: skip
    out = tl.load(OUT + (row * queries + rows[:, None]) * (heads * WIDTH) + head * WIDTH + dims[None, :],
                  mask=is_query[:, None], other=0.0)  # fmt: skip
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1) * survivors
    tl.store(DELTA + pair * padded + rows, delta)
    lse = tl.load(LSE + pair * padded + rows)
    k_rows, v_rows = K + row * k_b + head * k_h, V + row * v_b + head * v_h
    kept_rows = D_SCORES + (pair.to(tl.int64) * padded + rows) * padded_keys
    d_q = tl.zeros([ROWS, WIDTH], tl.float32)
    all_scores = tl.zeros([ROWS], tl.float32)
    above = tl.zeros([ROWS], tl.float32)
    start, stop, full, bias = 0, 0, keys // COLUMNS, 0.0
    if HAS_TABLE:
        seats += row * keys
        table = TABLE + head * (2 * reach + 1) + reach
        query_seats = tl.load(QUERY_SEATS + row * queries + rows, mask=is_query, other=0)
        low, high = _span(query_seats, is_query)
        start, stop = _near_tiles(seats, keys, low, high, far, COLUMNS, TILES)
        bias = tl.load(table - far)
        for tile in range(start):
            d_q, all_scores, above = _queries_tile(
                tile * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, table, query_seats, bias - lse,
                query_groups, query_hash, delta, d_q, all_scores, above, kept_rows, k_n, v_n, keys, far, scale,
                threshold, True, False, HAS_TABLE, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS,
            )  # fmt: skip
        for tile in range(start, tl.minimum(stop, full)):
            d_q, all_scores, above = _queries_tile(
                tile * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, table, query_seats, -lse,
                query_groups, query_hash, delta, d_q, all_scores, above, kept_rows, k_n, v_n, keys, far, scale,
                threshold, True, True, HAS_TABLE, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS,
            )  # fmt: skip
        bias = tl.load(table + far)
    before = all_scores
    for tile in range(stop, full):
        d_q, all_scores, above = _queries_tile(
            tile * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, table, query_seats, bias - lse,
            query_groups, query_hash, delta, d_q, all_scores, above, kept_rows, k_n, v_n, keys, far, scale,
            threshold, True, False, HAS_TABLE, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS,
        )  # fmt: skip
    above += all_scores - before
    if full * COLUMNS < keys:
        d_q, all_scores, above = _queries_tile(
            full * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, table, query_seats, -lse, query_groups,
            query_hash, delta, d_q, all_scores, above, kept_rows, k_n, v_n, keys, far, scale, threshold, False,
            HAS_TABLE, HAS_TABLE, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS,
        )  # fmt: skip
    where = (row * queries + rows[:, None]) * token_stride + head * WIDTH + dims[None, :]
    tl.store(D_Q + where, (d_q * score_scale / survivors).to(D_Q.dtype.element_ty), mask=is_query[:, None])
    if HAS_TABLE:
        ends = D_ENDS + (pair * tl.num_programs(0) + tl.program_id(0)) * 2
        tl.store(ends, tl.sum(all_scores, 0))
        tl.store(ends + 1, tl.sum(above, 0))


@triton.jit
def distances_kernel(
    D_SCORES, KEY_AT, QUERY_SEATS, D_NEAR, heads, queries, padded, padded_keys, places, far,
    ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """D_NEAR [B, programs, H, 2 far + 1]: the gradients of ROWS queries' scores by distance, both ends left at 0.
    KEY_AT [B, places] tells which key sits ``far`` to the left of each seat; -1: none."""
    row = tl.program_id(1).to(tl.int64)
    rows, distances = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PLACES)
    is_query = rows < queries
    seats = tl.load(QUERY_SEATS + row * queries + rows, mask=is_query, other=0)
    is_near = (distances > 0) & (distances < 2 * far)
    asks = is_query[:, None] & is_near[None, :]
    key = tl.load(KEY_AT + row * places + seats[:, None] + distances[None, :], mask=asks, other=-1)
    where = rows[:, None] * padded_keys + key
    scores = D_SCORES + row * heads * padded * padded_keys
    gradients = D_NEAR + (row * tl.num_programs(0) + tl.program_id(0)) * heads * (2 * far + 1) + distances
    for _ in range(heads):
        near = tl.load(scores + where, mask=key >= 0, other=0.0).to(tl.float32)
        tl.store(gradients, tl.sum(near, 0), mask=distances <= 2 * far)
        scores += padded * padded_keys
        gradients += 2 * far + 1

"""Triton kernels of relative attention: forward, and backward in two passes, none of which writes the scores.

Scores live in base 2: the scale and the table come multiplied by log2(e). A tile whose distances all lie beyond ``far``
has one bias. These kernels are bound by the instructions that a tile takes (benchmarks/instructions.py counts them): so
whole far tiles do not ask which of their keys exist, a token that a tile lacks is the last one read again, at weight 0,
and what is kept of each query and drawn for each key is padded to whole tiles and read without asking. Dropout is a
hash of (row of the batch, head, query) and of one random number a key, made again in the backward pass.

The table's gradient: far tiles are summed at once; in near ones a program lays the gradients of its scores out by query
and distance, in scratch memory, and sums over its queries before it writes a single row. A query sees one key at most
at each distance: so nothing is added up there, and the order of additions is always the same. What lies farther below
is what the others leave of the sum of all.
"""

# Triton is a language of its own: its types are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

NOWHERE = tl.constexpr(1 << 30)


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
def _kept(query_hash, key_noise, threshold):
    """Which scores dropout keeps; the two come shaped to broadcast."""
    return (query_hash ^ key_noise) * 0x9E3779B1 >= threshold


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
    first, q, k_rows, v_rows, seats, groups, NOISE, biases, bias, query_groups, query_hash, top, total, out,
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
        scores = scores * scale + (tl.load(biases[:, None] + key_seats[None, :]) + missing[None, :])
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
        weights *= tl.where(_kept(query_hash[:, None], noise[None, :], threshold), 1.0, 0.0)
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
    biases, query_groups, query_hash = rows, rows, rows.to(tl.uint32)
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
        biases = table - query_seats
        low, high = _span(query_seats, is_query)
        start, stop = _near_tiles(seats, keys, low, high, far, COLUMNS, TILES)
        bias = tl.load(table - far)
        for tile in range(start):
            top, total, out = _forward_tile(
                tile * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, biases, bias, query_groups, query_hash, top,
                total, out, k_n, v_n, keys, scale, threshold, True, False, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS
            )  # fmt: skip
        for tile in range(start, stop):
            top, total, out = _forward_tile(
                tile * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, biases, 0.0, query_groups, query_hash, top,
                total, out, k_n, v_n, keys, scale, threshold, False, True, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS
            )  # fmt: skip
        bias = tl.load(table + far)
    full = keys // COLUMNS
    for tile in range(stop, full):
        top, total, out = _forward_tile(
            tile * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, biases, bias, query_groups, query_hash, top,
            total, out, k_n, v_n, keys, scale, threshold, True, False, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS
        )  # fmt: skip
    if (stop <= full) & (full * COLUMNS < keys):
        top, total, out = _forward_tile(
            full * COLUMNS, q, k_rows, v_rows, seats, groups, NOISE, biases, bias, query_groups, query_hash, top,
            total, out, k_n, v_n, keys, scale, threshold, False, False, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS
        )  # fmt: skip
    is_blind = total == 0.0
    out /= tl.where(is_blind, 1.0, total * survivors)[:, None]
    lse = tl.where(is_blind, float("inf"), top + tl.log2(tl.where(is_blind, 1.0, total)))
    tl.store(LSE + pair * padded + rows, tl.where(is_query, lse, float("inf")))
    where = OUT + (row * queries + rows[:, None]) * (heads * WIDTH) + head * WIDTH + dims[None, :]
    tl.store(where, out.to(OUT.dtype.element_ty), mask=is_query[:, None])


@triton.jit
def _keys_tile(
    first, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, biases, bias, key_groups, noise, d_k, d_v,
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
        scores += tl.load(biases[:, None] - query_seats[None, :])
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
        dropped = tl.where(_kept(query_hash[None, :], noise[:, None], threshold), weights, 0.0)
        d_scores = dropped * d_weights - weights * delta[None, :]
    else:
        d_scores = weights * (d_weights - delta[None, :])
    d_v = _product(dropped.to(d_out.dtype), d_out, d_v, UPCASTS)
    return _product(d_scores.to(q.dtype), q, d_k, UPCASTS), d_v


@triton.jit
def keys_kernel(
    Q, K, V, TABLE, QUERY_SEATS, KEY_SEATS, QUERY_GROUPS, KEY_GROUPS, NOISE, D_OUT, LSE, HASH, DELTA, D_K, D_V,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, d_b, d_h, d_n,
    heads, queries, keys, padded, reach, far, scale, threshold, survivors, score_scale, token_stride,
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
    biases, key_groups, noise = columns, columns, columns.to(tl.uint32)
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
        biases = table + key_seats
        low, high = _span(key_seats, is_key)
        start, stop = _near_tiles(seats, queries, low, high, far, ROWS, TILES)
        bias = tl.load(table + far)
        for tile in range(start):
            d_k, d_v = _keys_tile(
                tile * ROWS, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, biases, bias, key_groups, noise,
                d_k, d_v, q_n, d_n, queries, scale, threshold, False, HAS_GROUPS, DROPS, WIDTH, UPCASTS, ROWS
            )  # fmt: skip
        for tile in range(start, stop):
            d_k, d_v = _keys_tile(
                tile * ROWS, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, biases, 0.0, key_groups, noise,
                d_k, d_v, q_n, d_n, queries, scale, threshold, True, HAS_GROUPS, DROPS, WIDTH, UPCASTS, ROWS
            )  # fmt: skip
        bias = tl.load(table - far)
    for tile in range(stop, tl.cdiv(queries, ROWS)):
        d_k, d_v = _keys_tile(
            tile * ROWS, k, v, q_rows, d_rows, seats, groups, lses, hashes, deltas, biases, bias, key_groups, noise,
            d_k, d_v, q_n, d_n, queries, scale, threshold, False, HAS_GROUPS, DROPS, WIDTH, UPCASTS, ROWS
        )  # fmt: skip
    where = (row * keys + columns[:, None]) * token_stride + head * WIDTH + dims[None, :]
    tl.store(D_K + where, (d_k * score_scale / survivors).to(D_K.dtype.element_ty), mask=is_key[:, None])
    tl.store(D_V + where, (d_v / survivors).to(D_V.dtype.element_ty), mask=is_key[:, None])


@triton.jit
def _queries_tile(
    first, q, d_out, k_rows, v_rows, seats, groups, NOISE, biases, shift, query_groups, query_hash, delta, d_q,
    k_n, v_n, keys, scale, threshold,
    IS_FULL: tl.constexpr, NEAR: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr,
    UPCASTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tile's gradient of the scores, and d_q with it; ``shift`` [ROWS] is what bias and normaliser add."""
    columns, dims = first + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    existing = columns if IS_FULL else tl.minimum(columns, keys - 1)
    k = tl.load(k_rows + existing[:, None] * k_n + dims[None, :])
    scores = _product(q, tl.trans(k), None, UPCASTS) * scale + shift[:, None]
    if NEAR:
        key_seats = tl.load(seats + existing)
        scores += tl.load(biases[:, None] + key_seats[None, :])
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
        d_weights = tl.where(_kept(query_hash[:, None], noise[None, :], threshold), d_weights, 0.0)
    d_scores = weights * (d_weights - delta[:, None])
    return d_scores, _product(d_scores.to(k.dtype), k, d_q, UPCASTS)


@triton.jit
def _table_gradients(
    d_scores, first, seats, groups, query_seats, query_groups, scratch, all_scores, above, keys, far,
    IS_FULL: tl.constexpr, HAS_GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's scores to their places in ``scratch``, those beyond ``far`` to one that is not read; the sums [ROWS] of
    all scores and of those ``above`` far with this tile's."""
    columns = first + tl.arange(0, COLUMNS)
    is_key = columns < (first + COLUMNS if IS_FULL else keys)
    distance = tl.load(seats + columns, mask=is_key, other=NOWHERE)[None, :] - query_seats[:, None]
    place = tl.minimum((distance + far).to(tl.uint32, bitcast=True), 2 * far + 1)
    if HAS_GROUPS:
        key_groups = tl.load(groups + columns, mask=is_key, other=-3)
        place = tl.where(key_groups[None, :] == query_groups[:, None], place, 2 * far + 1)
    tl.store(scratch[:, None] + place, d_scores)
    return all_scores + tl.sum(d_scores, 1), above + tl.sum(tl.where(distance >= far, d_scores, 0.0), 1)


@triton.jit
def queries_kernel(
    Q, K, V, TABLE, QUERY_SEATS, KEY_SEATS, QUERY_GROUPS, KEY_GROUPS, NOISE, D_OUT, LSE, HASH, DELTA, OUT, D_Q,
    SCRATCH, D_TABLE,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, d_b, d_h, d_n,
    heads, queries, keys, padded, reach, far, scale, threshold, survivors, score_scale, token_stride,
    HAS_TABLE: tl.constexpr, HAS_GROUPS: tl.constexpr, DROPS: tl.constexpr, WIDTH: tl.constexpr, UPCASTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS queries, and of the table from their scores: one row [2 far + 1] a program. First each query's
    DELTA, the sum of out * d out: what its softmax takes from the gradient of every score."""
    pair = _pair()
    row, head = (pair // heads).to(tl.int64), pair % heads
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_query = rows < queries
    seats, groups = KEY_SEATS, KEY_GROUPS
    biases, query_groups, query_hash = rows, rows, rows.to(tl.uint32)
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
    d_q = tl.zeros([ROWS, WIDTH], tl.float32)
    start, stop, full, bias = 0, 0, keys // COLUMNS, 0.0
    all_scores = tl.zeros([ROWS], tl.float32)
    above = tl.zeros([ROWS], tl.float32)
    if HAS_TABLE:
        program = (pair * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        scratch = SCRATCH + program * ROWS * PADDED + tl.arange(0, ROWS) * PADDED
        for first in range(0, PADDED, 64):
            tl.store(scratch[:, None] + first + tl.arange(0, 64)[None, :], tl.zeros([ROWS, 64], tl.float32))
        tl.debug_barrier()
        seats += row * keys
        table = TABLE + head * (2 * reach + 1) + reach
        query_seats = tl.load(QUERY_SEATS + row * queries + rows, mask=is_query, other=0)
        biases = table - query_seats
        low, high = _span(query_seats, is_query)
        start, stop = _near_tiles(seats, keys, low, high, far, COLUMNS, TILES)
        bias = tl.load(table - far)
        for tile in range(start):
            d_scores, d_q = _queries_tile(
                tile * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, biases, bias - lse, query_groups,
                query_hash, delta, d_q, k_n, v_n, keys, scale, threshold, True, False, HAS_GROUPS, DROPS, WIDTH,
                UPCASTS, COLUMNS,
            )  # fmt: skip
            all_scores += tl.sum(d_scores, 1)
        for tile in range(start, tl.minimum(stop, full)):
            d_scores, d_q = _queries_tile(
                tile * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, biases, -lse, query_groups,
                query_hash, delta, d_q, k_n, v_n, keys, scale, threshold, True, True, HAS_GROUPS, DROPS, WIDTH,
                UPCASTS, COLUMNS,
            )  # fmt: skip
            all_scores, above = _table_gradients(
                d_scores, tile * COLUMNS, seats, groups, query_seats, query_groups, scratch, all_scores, above, keys,
                far, True, HAS_GROUPS, COLUMNS,
            )  # fmt: skip
        bias = tl.load(table + far)
    for tile in range(stop, full):
        d_scores, d_q = _queries_tile(
            tile * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, biases, bias - lse, query_groups,
            query_hash, delta, d_q, k_n, v_n, keys, scale, threshold, True, False, HAS_GROUPS, DROPS, WIDTH, UPCASTS,
            COLUMNS,
        )  # fmt: skip
        if HAS_TABLE:
            summed = tl.sum(d_scores, 1)
            all_scores += summed
            above += summed
    if full * COLUMNS < keys:
        d_scores, d_q = _queries_tile(
            full * COLUMNS, q, d_out, k_rows, v_rows, seats, groups, NOISE, biases, -lse, query_groups, query_hash,
            delta, d_q, k_n, v_n, keys, scale, threshold, False, HAS_TABLE, HAS_GROUPS, DROPS, WIDTH, UPCASTS, COLUMNS,
        )  # fmt: skip
        if HAS_TABLE:
            all_scores, above = _table_gradients(
                d_scores, full * COLUMNS, seats, groups, query_seats, query_groups, scratch, all_scores, above, keys,
                far, False, HAS_GROUPS, COLUMNS,
            )  # fmt: skip
    where = (row * queries + rows[:, None]) * token_stride + head * WIDTH + dims[None, :]
    tl.store(D_Q + where, (d_q * score_scale / survivors).to(D_Q.dtype.element_ty), mask=is_query[:, None])
    if HAS_TABLE:
        tl.debug_barrier()
        near = 0.0
        gradients = D_TABLE + program * (2 * far + 1)
        for first in range(0, PADDED, 64):
            places = first + tl.arange(0, 64)
            is_near = (places > 0) & (places < 2 * far)
            summed = tl.where(is_near, tl.sum(tl.load(scratch[:, None] + places[None, :]), 0), 0.0)
            tl.store(gradients + places, summed / survivors, mask=is_near)
            near += tl.sum(summed, 0)
        farther = tl.sum(above, 0)
        tl.store(gradients + 2 * far, farther / survivors)
        tl.store(gradients, (tl.sum(all_scores, 0) - farther - near) / survivors)

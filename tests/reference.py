"""Every objective written a second time, plainly: one row at a time, tokens in their natural order, masks in place.

Nothing comes from ``latemask.model`` but the names of its weights. Tokens are kept as {position: vector}, every block
computes every token it holds, attention is an explicit softmax over explicit scores, and the head picks the predicted
positions at the very end. Slow, and meant to be read beside the papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from latemask.batch import Batch
from latemask.config import Run, Shape

Weights = dict[str, Tensor]
Tokens = dict[int, Tensor]
"""Position -> vector."""


@dataclass
class NaturalRow:
    """One row as text: index = position."""

    ids: list[int]
    seats: list[int]
    document: list[int]
    masked: list[int]
    """Positions of the masked tokens in the order in which they join."""
    filler: list[int]
    """What each of them shows in the encoder."""

    @property
    def visible(self) -> list[int]:
        return [position for position in range(len(self.ids)) if position not in self.masked]


def natural_rows(batch: Batch) -> list[NaturalRow]:
    """The rows of a batch, scattered back to where they came from."""
    rows = []
    for b in range(batch.rows):
        order = batch.positions[b].tolist()
        place = {position: n for n, position in enumerate(order)}
        natural = [place[position] for position in range(len(order))]
        rows.append(
            NaturalRow(
                ids=[int(batch.ids[b, n]) for n in natural],
                seats=[int(batch.seats[b, n]) for n in natural],
                document=[int(batch.document[b, n]) for n in natural],
                masked=order[batch.n_visible :],
                filler=batch.filler[b].tolist(),
            )
        )
    return rows


def losses(run: Run, weights: Weights, batch: Batch) -> Tensor:
    """Nats for each predicted token [B, P]: masked ones in their joining order, or all but the first in order."""
    return torch.stack([_row_losses(run, weights, row) for row in natural_rows(batch)])


def encode(shape: Shape, weights: Weights, ids: list[int]) -> Tensor:
    """Hidden states [n, D] of an unmasked, unpadded text; ``weights`` are an encoder's own."""
    weights = {f"encoder.{name}": value for name, value in weights.items()}
    row = NaturalRow(ids, list(range(len(ids))), [0] * len(ids), [], [])
    tokens = {p: _enter(weights, "encoder.door", shape, weights["encoder.tokens.weight"][i], p)
              for p, i in enumerate(ids)}  # fmt: skip
    tokens = _encoder_blocks(shape, weights, row, tokens, range(shape.depth))
    return torch.stack([_final(weights, "encoder.stack", shape, tokens[p]) for p in range(len(ids))])


def _row_losses(run: Run, weights: Weights, row: NaturalRow) -> Tensor:
    shape, decoder = run.shape, run.decoder
    table = weights["encoder.tokens.weight"]
    unpredicted = len(row.masked) - math.floor(run.masking.predicted_share * len(row.masked) + 0.5)
    predicted = row.masked[unpredicted:]
    mask = weights["mask_vector"] if run.masking.vector == "own" else table[shape.specials.mask]

    def shown(number: int) -> Tensor:
        return mask if row.filler[number] == shape.specials.mask else table[row.filler[number]]

    tokens = {p: _enter(weights, "encoder.door", shape, table[row.ids[p]], row.seats[p]) for p in row.visible}
    for layer in range(shape.depth):
        for start, stop in _joins(run, layer, len(row.masked)):
            tokens = {p: x for p, x in tokens.items() if p not in row.masked[start:]}
            for number in range(start, stop):
                p = row.masked[number]
                tokens[p] = _enter(weights, "encoder.door", shape, shown(number), row.seats[p])
        tokens = _encoder_blocks(shape, weights, row, tokens, [layer])
    encoded = {p: _final(weights, "encoder.stack", shape, x) for p, x in tokens.items()}

    if decoder is None:
        return _head(weights, shape, [encoded[p] for p in predicted], [row.ids[p] for p in predicted])

    if decoder.centred:
        mean = torch.stack(list(encoded.values())).mean(0)
        encoded = {p: x - mean for p, x in encoded.items()}

    def narrowed(x: Tensor) -> Tensor:
        return _linear(weights, "decoder.narrow", x) if decoder.width != shape.width else x

    last = len(row.ids) - 1
    if decoder.rewrites:
        tokens = {p: narrowed(table[row.ids[p]]) for p in range(last)}
    else:
        tokens = dict(encoded)
        for start, stop in _joins(run, "decoder", len(row.masked)):
            tokens = {p: x for p, x in tokens.items() if p not in row.masked[start:]}
            tokens |= dict.fromkeys(row.masked[start:stop], mask)
        tokens = {p: narrowed(x) for p, x in tokens.items()}
    tokens = {p: _enter(weights, "decoder.door", shape, x, p) for p, x in tokens.items()}
    for layer in range(decoder.depth):
        tokens = _decoder_block(run, weights, f"decoder.stack.blocks.{layer}", row, tokens, encoded)
    tokens = {p: _final(weights, "decoder.stack", shape, x) for p, x in tokens.items()}
    if decoder.rewrites:
        return _head(weights, shape, [tokens[p] for p in range(last)], row.ids[1:])
    return _head(weights, shape, [tokens[p] for p in predicted], [row.ids[p] for p in predicted])


def _joins(run: Run, layer: int | str, masked_tokens: int) -> list[tuple[int, int]]:
    """Which masked tokens (by number) join at a layer."""
    masking = run.masking
    joins = [(join.layer, join.start, join.stop) for join in masking.joins]
    if masking.delta is not None:
        joins = [(0, 0, masking.delta), ("decoder", masking.delta, 1)]
    return [
        (math.floor(start * masked_tokens + 0.5), math.floor(stop * masked_tokens + 0.5))
        for where, start, stop in joins
        if where == layer and start < stop
    ]


def _encoder_blocks(shape: Shape, weights: Weights, row: NaturalRow, tokens: Tokens, layers) -> Tokens:
    for layer in layers:
        name = f"encoder.stack.blocks.{layer}"

        def attention(x: Tensor, order: list[int], name: str = name) -> Tensor:
            bias = None
            if shape.positions == "absolute+relative":
                table = weights["encoder.relative_bias.table.weight"]
                buckets = [[bucket(row.seats[k] - row.seats[q], shape.relative_buckets, shape.relative_distance)
                            for k in order] for q in order]  # fmt: skip
                bias = table[torch.tensor(buckets)].permute(2, 0, 1)
            seats = [row.seats[p] for p in order] if shape.positions == "rotary" else None
            allowed = _allowed(row, order, order, isolates=shape.isolate_documents)
            return _attention(weights, f"{name}.self_attention", shape.heads, x, x, allowed, bias, seats)

        tokens = _block(weights, name, shape, tokens, [attention])
    return tokens


def _decoder_block(run: Run, weights: Weights, name: str, row: NaturalRow, tokens: Tokens, memory: Tokens) -> Tokens:
    shape, decoder = run.shape, run.decoder
    assert decoder is not None
    isolates = shape.isolate_documents

    def to_itself(x: Tensor, order: list[int]) -> Tensor:
        allowed = _allowed(row, order, order, isolates=isolates, causal=decoder.rewrites)
        seats = order if decoder.positions == "absolute+rotary" else None
        return _attention(weights, f"{name}.self_attention", decoder.heads, x, x, allowed, None, seats)

    def to_the_encoder(x: Tensor, order: list[int]) -> Tensor:
        kept = sorted(memory)
        allowed = _allowed(row, order, kept, isolates=isolates)
        seen = torch.stack([memory[p] for p in kept])
        return _attention(weights, f"{name}.cross_attention", decoder.heads, x, seen, allowed)

    sublayers = {"self": to_itself, "cross": to_the_encoder}
    return _block(weights, name, shape, tokens, [sublayers[kind] for kind in decoder.sublayers])


def _block(weights: Weights, name: str, shape: Shape, tokens: Tokens, attentions) -> Tokens:
    """Sublayers with a residual and a LayerNorm each, over all tokens in their natural order."""
    order = sorted(tokens)
    x = torch.stack([tokens[p] for p in order])

    def feedforward(x: Tensor, order: list[int]) -> Tensor:
        return _linear(weights, f"{name}.feedforward.2", _gelu(_linear(weights, f"{name}.feedforward.0", x)))

    for number, sublayer in enumerate([*attentions, feedforward]):
        norm = f"{name}.norms.{number}"
        if shape.norm == "pre":
            x = x + sublayer(_layer_norm(weights, norm, shape, x), order)
        else:
            x = _layer_norm(weights, norm, shape, x + sublayer(x, order))
    return dict(zip(order, x, strict=True))


def _attention(
    weights: Weights, name: str, heads: int, x: Tensor, memory: Tensor, allowed: Tensor,
    bias: Tensor | None = None, seats: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """``allowed`` [Q, K]; who may look at nothing gets 0. ``seats`` turn queries and keys (rotary)."""
    if f"{name}.query_key_value.weight" in weights:
        both = _linear(weights, f"{name}.query_key_value", x)
        q, k, v = both.split(both.shape[1] // 3, dim=1)
    else:
        q = _linear(weights, f"{name}.query", x)
        both = _linear(weights, f"{name}.key_value", memory)
        k, v = both.split(both.shape[1] // 2, dim=1)
    d = q.shape[1] // heads
    outputs = []
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        query, key, value = q[:, part], k[:, part], v[:, part]
        if seats is not None:
            query, key = _turned(query, seats), _turned(key, seats)
        scores = torch.einsum("qd,kd->qk", query, key) / math.sqrt(d)
        if bias is not None:
            scores = scores + bias[h]
        exponentials = torch.exp(scores - scores.detach().max()) * allowed
        total = exponentials.sum(1, keepdim=True)
        outputs.append(exponentials / torch.where(total == 0, 1.0, total) @ value)
    return _linear(weights, f"{name}.output", torch.cat(outputs, 1))


def _allowed(row: NaturalRow, queries: list[int], keys: list[int], *, isolates: bool, causal: bool = False) -> Tensor:
    return torch.tensor(
        [[(not isolates or row.document[q] == row.document[k]) and (not causal or k <= q) for k in keys]
         for q in queries]
    )  # fmt: skip


def bucket(offset: int, buckets: int, distance: int) -> int:
    """T5's bucket of key - query, in whole numbers: the far ones are the floor of a logarithm, by comparing powers.

    exact + floor(steps * log(size / exact) / log(distance / exact)), with steps = exact = buckets / 4.
    """
    half, exact = buckets // 2, buckets // 4
    size = abs(offset)
    near = size
    if size >= exact:
        near = exact
        while near < half - 1 and size**exact * exact ** (near + 1 - exact) >= (
            distance ** (near + 1 - exact) * exact**exact
        ):
            near += 1
    return near + (half if offset > 0 else 0)


def _turned(x: Tensor, seats: list[int]) -> Tensor:
    """Rotary: the pair (i, i + d/2) as one complex number, turned by seat * 10000^(-2 i / d)."""
    half = x.shape[1] // 2
    frequency = torch.tensor([10000.0 ** (-2 * i / x.shape[1]) for i in range(half)], dtype=torch.float64)
    angle = torch.tensor(seats, dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], 1)


def _enter(weights: Weights, name: str, shape: Shape, x: Tensor, seat: int) -> Tensor:
    table = weights.get(f"{name}.positions.weight")
    return _layer_norm(weights, f"{name}.norm", shape, x if table is None else x + table[seat])


def _final(weights: Weights, name: str, shape: Shape, x: Tensor) -> Tensor:
    return _layer_norm(weights, f"{name}.final_norm", shape, x) if shape.norm == "pre" else x


def _head(weights: Weights, shape: Shape, hidden: list[Tensor], targets: list[int]) -> Tensor:
    """-log of the target's share of exp(logits), over the T real ids only."""
    x = _layer_norm(weights, "head.norm", shape, _gelu(_linear(weights, "head.dense", torch.stack(hidden))))
    if "head.widen.weight" in weights:
        x = _linear(weights, "head.widen", x)
    logits = x @ weights["encoder.tokens.weight"][: shape.vocabulary].T + weights["head.bias"]
    return torch.stack([scores.exp().sum().log() - scores[target]
                        for scores, target in zip(logits, targets, strict=True)])  # fmt: skip


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _layer_norm(weights: Weights, name: str, shape: Shape, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + shape.norm_epsilon) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

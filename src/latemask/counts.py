"""What a Run multiplies and keeps, counted from its numbers alone: FLOPs per token, parameters, bytes. No torch here.

Only matrix products are counted, forward and backward (three times the forward), attention in full even where it is
causal; embeddings, norms and recomputation inside attention kernels count nothing. For MLM this is

    6 N_lin + 12 L N D + (P/N) 6 (T D + D D),   N_lin = L (4 D D + 2 D F)   FLOPs per token,

with T padded to a multiple of 64 and P predicted positions. Two counts are kept apart. **plain** is the objective as
everybody runs it: every block on all of its tokens; MFU is stated on it. **executed** is what this package multiplies:
the last block before the head only at the predicted positions, a cross-only decoder on these alone. Both see the
encoder's row grow as the joins say. Where the masking rate changes in the run, they are means over its batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from latemask.config import Run, Shape, Sublayer


class Products(NamedTuple):
    """Multiplications with addition in the forward pass of one row."""

    linear: int
    attention: int


class BlockTokens(NamedTuple):
    """Tokens that one block works on: ``queries`` are computed, ``keys`` are looked at, ``memory`` across."""

    queries: int
    keys: int
    memory: int = 0


@dataclass(frozen=True)
class Flops:
    """FLOPs per token of the row (visible or masked), forward and backward, by part."""

    linear: float
    """The encoder's projections and feed-forward networks."""
    attention: float
    """The encoder's scores and weighted sums."""
    decoder: float
    """All of the decoder's products."""
    head: float
    """Dense layer and token table, at the predicted positions."""

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.decoder + self.head


class FlopsPerToken(NamedTuple):
    """Totals of the two counts; MFU is stated on ``plain``."""

    plain: float
    executed: float


def flops_per_token(run: Run, batches: range | None = None) -> FlopsPerToken:
    """FLOPs per token of the row, forward and backward: the mean over the run, or over these ``batches`` of it."""
    return FlopsPerToken(*(flops(run, executed=executed, batches=batches).total for executed in (False, True)))


def flops(run: Run, *, executed: bool, batches: range | None = None) -> Flops:
    """The count by part: as executed here, or of the plain objective; the mean as in ``flops_per_token``."""
    stages = run.stages
    if len(stages) == 1:
        return _flops_at_one_rate(stages[0].run, executed=executed)
    batches = batches or range(run.updates)
    counts = [min(stage.stop_batch, batches.stop) - max(stage.first_batch, batches.start) for stage in stages]
    counts[-1] = batches.stop - max(stages[-1].first_batch, batches.start)
    weighed = [(count, _flops_at_one_rate(stage.run, executed=executed))
               for count, stage in zip(counts, stages, strict=True) if count > 0]  # fmt: skip
    return Flops(*(sum(count * getattr(one, part.name) for count, one in weighed) / len(batches)
                   for part in dataclasses.fields(Flops)))  # fmt: skip


def _flops_at_one_rate(run: Run, *, executed: bool) -> Flops:
    shape, decoder, predicted = run.shape, run.decoder, run.predicted_tokens
    encoder = [_products(("self",), shape.width, shape.feedforward, 0, tokens)
               for tokens in encoder_tokens(run, executed=executed)]  # fmt: skip
    decoding, width = 0, shape.width
    if decoder is not None:
        width = decoder.width
        blocks = decoder_tokens(run, executed=executed)
        decoding = sum(sum(_products(decoder.sublayers, width, decoder.feedforward, shape.width, tokens))
                       for tokens in blocks)  # fmt: skip
        if width != shape.width:
            decoding += blocks[0].keys * shape.width * width
    head = predicted * (width * width + shape.width * shape.padded_vocabulary)
    if width != shape.width:
        head += predicted * width * shape.width
    linear, attention = (sum(part) for part in zip(*encoder, strict=True))
    return Flops(*(6 * products / shape.row_tokens for products in (linear, attention, decoding, head)))


def encoder_tokens(run: Run, *, executed: bool) -> list[BlockTokens]:
    """Tokens inside each encoder block; without a decoder the last one need answer only the predicted ones.

    At the rate that the run begins with, as in ``decoder_tokens``.
    """
    blocks = [BlockTokens(n, n) for n in run.plan.lengths(run.visible_tokens, run.masked_tokens)]
    if executed and run.decoder is None:
        blocks[-1] = blocks[-1]._replace(queries=run.predicted_tokens)
    return blocks


def decoder_tokens(run: Run, *, executed: bool) -> list[BlockTokens]:
    """Tokens inside each decoder block."""
    if run.decoder is None:
        return []
    memory = run.plan.lengths(run.visible_tokens, run.masked_tokens)[-1] if "cross" in run.decoder.sublayers else 0
    if run.rewrites:
        return [BlockTokens(run.predicted_tokens, run.predicted_tokens, memory)] * run.decoder.depth
    tokens = run.predicted_tokens if executed and run.decoder.sublayers == ("cross",) else run.shape.row_tokens
    blocks = [BlockTokens(tokens, tokens, memory)] * run.decoder.depth
    if executed:
        blocks[-1] = blocks[-1]._replace(queries=run.predicted_tokens)
    return blocks


def _products(
    sublayers: Sequence[Sublayer], width: int, inner: int, memory_width: int, tokens: BlockTokens
) -> Products:
    queries, keys, memory = tokens
    linear, attention = 2 * queries * width * inner, 0
    if "self" in sublayers:
        linear += 2 * (queries + keys) * width * width
        attention += 2 * queries * keys * width
    if "cross" in sublayers:
        linear += 2 * queries * width * width + 2 * memory * memory_width * width
        attention += 2 * queries * memory * width
    return Products(linear, attention)


@dataclass(frozen=True)
class Parameters:
    """Numbers that are trained: the encoder that is kept; mask vector, decoder and head, which are not."""

    kept: int
    thrown_away: int

    @property
    def total(self) -> int:
        return self.kept + self.thrown_away


def parameters(run: Run) -> Parameters:
    """Exact counts, equal to those of ``Pretrainer(run)``."""
    shape, decoder, width = run.shape, run.decoder, run.shape.width
    positions = 0 if shape.positions == "rotary" else shape.row_tokens
    kept = shape.padded_vocabulary * width + (positions + 2) * width
    kept += _stack_parameters(shape, ("self",), shape.depth, width, shape.feedforward)
    kept += shape.relative_buckets * shape.heads if shape.has_relative_bias else 0
    thrown = width if run.masking.vector == "own" else 0
    if decoder is not None:
        thrown += (shape.row_tokens + 2) * decoder.width
        thrown += _stack_parameters(shape, decoder.sublayers, decoder.depth, decoder.width, decoder.feedforward)
        if decoder.width != width:
            thrown += (width + 1) * decoder.width + (decoder.width + 1) * width
    head = width if decoder is None else decoder.width
    return Parameters(kept, thrown + (head + 3) * head + shape.vocabulary)


def _stack_parameters(shape: Shape, sublayers: Sequence[Sublayer], depth: int, width: int, inner: int) -> int:
    norm = 2 * width if shape.norm == "pre" else 0
    return depth * _block_parameters(shape, sublayers, width, inner) + norm


def _block_parameters(shape: Shape, sublayers: Sequence[Sublayer], width: int, inner: int) -> int:
    block = 2 * width * inner + inner + width + 2 * width * (len(sublayers) + 1)
    if "self" in sublayers:
        block += 4 * (width + 1) * width
    if "cross" in sublayers:
        block += 2 * (width + 1) * width + 2 * (shape.width + 1) * width
    return block


@dataclass(frozen=True)
class Memory:
    """Estimated bytes on one card. What the allocator, kernels and a relative bias per row add is not in it."""

    state: float
    """fp32 weights, gradients and Adam's two moments, and under bf16 a second copy of the weights; of a sharded model
    the card's share of these, and what is whole on it."""
    activations: float
    """What the forward pass keeps for the backward pass, and the logits and their gradient, for the micro-batch."""
    row: float
    """Activations of one row."""

    @property
    def total(self) -> float:
        return self.state + self.activations


def memory(run: Run, micro_rows: int, *, bytes_per_number: int = 2, cards: int = 1) -> Memory:
    """The estimate for ``micro_rows`` rows on one of ``cards``; ``bytes_per_number`` of activations: 2 under bf16
    autocast, 4 in fp32.

    Each linear layer keeps its input, attention its queries, keys, values and output, GELU and LayerNorm their inputs;
    with rotary positions queries and keys are kept turned as well, beside the one projection of all three.
    In fp32 dropout keeps a byte mask, and at the head's peak three numbers stand for each logit: the log-probability,
    its gradient and the logit's. Under bf16 the kernels keep no mask and one number for each logit.
    Where the masking rate changes, the stage that needs most counts.
    """
    row = max(_row_bytes(stage.run, bytes_per_number) for stage in run.stages)
    copy = bytes_per_number if bytes_per_number < 4 else 0
    state = parameters(run).total * (16 + copy)
    if run.training.data_parallel == "shard" and cards > 1:
        state = _sharded_bytes(run, micro_rows, bytes_per_number, copy, cards)
    return Memory(state, row * micro_rows, row)


def _sharded_bytes(run: Run, micro_rows: int, size: int, copy: int, cards: int) -> float:
    """A share of weights and moments; gradients, whole where those of several micro-batches add up; and what is
    gathered: two blocks at a time, and all that is in no block."""
    shape, decoder, total = run.shape, run.decoder, parameters(run).total
    blocks = [_block_parameters(shape, ("self",), shape.width, shape.feedforward)] * shape.depth
    if decoder is not None:
        blocks += [_block_parameters(shape, decoder.sublayers, decoder.width, decoder.feedforward)] * decoder.depth
    adds_up = micro_rows * cards < run.training.batch_rows
    gathered = (4 + copy) * (total - sum(blocks)) + size * 2 * max(blocks)
    return 12 * total / cards + (4 * total if adds_up else 4 * total / cards) + gathered


def _row_bytes(run: Run, size: int) -> int:
    shape, decoder = run.shape, run.decoder
    row = sum(_block_bytes(("self",), shape.width, shape.feedforward, 0, size, shape.dropout > 0,
                           shape.positions == "rotary", tokens)
              for tokens in encoder_tokens(run, executed=True))  # fmt: skip
    width = shape.width
    if decoder is not None:
        width = decoder.width
        row += sum(_block_bytes(decoder.sublayers, width, decoder.feedforward, shape.width, size, decoder.dropout > 0,
                                decoder.positions == "absolute+rotary", tokens)
                   for tokens in decoder_tokens(run, executed=True))  # fmt: skip
    return row + run.predicted_tokens * (4 * size * width + (12 if size == 4 else size) * shape.padded_vocabulary)


def _block_bytes(
    sublayers: Sequence[Sublayer],
    width: int,
    inner: int,
    memory_width: int,
    size: int,
    drops: bool,
    rotates: bool,
    tokens: BlockTokens,
) -> int:
    queries, keys, memory = tokens
    after = (size + (drops and size == 4)) * queries * width
    kept = queries * size * (width + 2 * inner) + after
    if "self" in sublayers:
        kept += size * width * (3 * keys + 2 * queries) + after
        if rotates:
            kept += size * width * (2 * keys if queries == keys else keys)
    if "cross" in sublayers:
        kept += size * (3 * queries * width + memory * (memory_width + 2 * width)) + after
    return kept

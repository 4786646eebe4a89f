"""The same text twice, as it is and masked: the hidden states of every layer, and which vectors are real or [MASK].

A run is fed as in its own pretraining: its joins, fillers, seats and rate, on the held-out rows of its data. Any other
model that ``latemask.load_encoder`` takes gets rows ``<s> text </s>`` of its own tokenizer, [MASK] in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from latemask.batch import Batch
from latemask.config import Masking, Run, Specials
from latemask.console import progress, warn
from latemask.errors import Refusal
from latemask.feed.batches import VALIDATION_SEED, Rows, ValidationBatches
from latemask.feed.masking import MASK, noise
from latemask.hf.loading import TransformersEncoder
from latemask.hf.source import Source
from latemask.hf.vectors import framed, padded
from latemask.joins import count
from latemask.model.encoder import Encoder
from latemask.model.pretrainer import Pretrainer
from latemask.study.sample import Sample
from latemask.text.blocks import Reading, blocks
from latemask.text.corpus import read_block
from latemask.text.files import find
from latemask.text.store import SUMMARY, TokenStore, open_store
from latemask.text.tokenizer import Tokenizer, load_tokenizer


class Layer(NamedTuple):
    """Hidden states before the first block (layer 0) or after a block; vectors in neither set are not counted."""

    x: Float[Tensor, "B n D"]
    is_real: Bool[Tensor, "B n"]
    is_mask: Bool[Tensor, "B n"]


class Pass(NamedTuple):
    """L + 1 layers of the same rows: as they are, and masked (None: this encoder never sees [MASK])."""

    clean: list[Layer]
    masked: list[Layer] | None


@dataclass
class Subject:
    """A model and its passes over a sample."""

    width: int
    depth: int
    without_masks: str | None
    """Why there are no masked sets; None where there are."""
    passes: Callable[[], Iterator[Pass]]
    """Reads the sample, with a progress line."""

    @property
    def sees_masks(self) -> bool:
        return self.without_masks is None


def open_subject(sample: Sample) -> Subject:
    """Load the model of a sample. Raises ``Refusal`` where model or data cannot be read, or hold too little."""
    sample.check()
    source, store = sample.source, sample.store
    source.check_masked()
    device = _device(sample.device)
    if store is not None:
        return _of_run(source, store, sample, device)
    return _of_encoder(source, source.tokenizer(), source.run, sample, device)


def _device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    device = torch.device(name or ("cuda" if has_gpu else "cpu"))
    cards = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 1)
    if (device.index or 0) >= cards:
        raise Refusal("--device", f"{name}, with {cards} of this kind here", "one that is here, such as cpu")
    return device


def _of_run(source: Source, store: TokenStore, sample: Sample, device: torch.device) -> Subject:
    model = source.pretrained().to(device)
    run = model.run
    masking = dataclasses.replace(run.masking, rate=sample.masking_rate)
    row_tokens = run.shape.row_tokens
    batches = ValidationBatches(_rows(run, masking, store), masking, -(-sample.tokens // row_tokens))
    without_masks = NOT_FED if sample.sees_masks == "no" else _why_no_mask(run, masking)
    warn_of_little(sample, len(batches) * row_tokens)
    counts_specials = sample.specials == "in"

    def passes() -> Iterator[Pass]:
        with progress("hidden states", len(batches) * row_tokens, "tokens") as advance:
            for start in range(0, len(batches), sample.micro_rows):
                batch = batches.batch(start, min(start + sample.micro_rows, len(batches))).to(device)
                with torch.inference_mode():
                    clean = clean_layers(model.encoder, batch, counts_specials)
                    yield Pass(clean, None if without_masks else masked_layers(model, batch, counts_specials))
                advance(batch.rows * row_tokens)

    shape = run.shape
    return Subject(shape.width, shape.depth, without_masks, passes)


NOT_FED = "not fed [MASK], as --sees-masks no says"
NEVER = "no block of this encoder sees [MASK]"
IN_PART = (
    "in pretraining [MASK] was not in this encoder as it would be here (from the first block on, for every masked "
    "token, as the token table's row); --sees-masks yes feeds it all the same"
)


def _rows(run: Run, masking: Masking, store: TokenStore) -> Rows:
    """The held-out rows, each with enough tokens to mask. Raises ``Refusal`` in terms of a study's own flags."""
    row_tokens = run.shape.row_tokens
    masked = masking.masked_tokens(row_tokens)
    try:
        return Rows(store.valid, run.shape, masked, f"{store.folder} (validation)")
    except Refusal as refusal:
        has_a_row = len(store.valid.tokens) >= row_tokens - 1
        do = "Lower --rate" if has_a_row else "Prepare more text, or name a file of text"
        raise Refusal(refusal.where, refusal.found, refusal.wanted, do) from None


def _why_no_mask(run: Run, masking: Masking) -> str | None:
    """Why no [MASK] stands in the encoder's rows; None where one does."""
    if run.mask_in_encoder == "never":
        return NEVER
    row_tokens = run.shape.row_tokens
    masked = masking.masked_tokens(row_tokens)
    if not masked:
        return f"no token of a row of {row_tokens} is masked at a rate of {masking.rate:g}"
    if all(start == stop for start, stop in (arrival.tokens(masked) for arrival in run.plan.in_encoder)):
        return f"none of the {masked} masked tokens of a row joins the encoder at a rate of {masking.rate:g}"
    return None


def warn_of_little(sample: Sample, held: int) -> None:
    """One warning where the text holds fewer tokens than the sample asks for."""
    if held < sample.tokens:
        place = f"{'the held-out part of ' * (Path(sample.data) / SUMMARY).is_file()}{sample.data}"
        warn(f"--tokens {sample.tokens:,}: {place} holds {held:,} tokens to read, all of which are read")


def masked_layers(model: Pretrainer, batch: Batch, counts_specials: bool) -> list[Layer]:
    """The encoder's rows while masked tokens join, all tokens computed up to the end. Where the plan lets none join,
    only real tokens."""
    encoder, visible, specials = model.encoder, batch.n_visible, model.run.shape.specials
    shown = torch.cat([batch.ids[:, :visible], batch.filler], 1)
    is_mask = shown == specials.mask
    is_real = ~is_mask & (_is_ordinary(shown, specials) | counts_specials)
    joins = {arrival.layer: arrival.tokens(batch.n_masked) for arrival in model.plan.in_encoder}
    row = encoder.enter(encoder.tokens(shown[:, :visible]), batch.seats[:, :visible], batch.document[:, :visible])
    layers = []
    for layer in range(model.plan.depth + 1):
        if layer in joins:
            start, stop = (visible + place for place in joins[layer])
            vectors = torch.where(is_mask[:, start:stop, None], model.mask(), encoder.tokens(shown[:, start:stop]))
            row = row.joined_at(
                start, encoder.enter(vectors, batch.seats[:, start:stop], batch.document[:, start:stop])
            )
        here = row.x.shape[1]
        layers.append(Layer(row.x, is_real[:, :here], is_mask[:, :here]))
        if layer < model.plan.depth:
            row = encoder.run(row, layer, layer + 1)
    return layers


def clean_layers(encoder: Encoder, batch: Batch, counts_specials: bool) -> list[Layer]:
    """The rows of a batch in their natural order, nothing masked."""
    ids = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
    document = torch.empty_like(ids).scatter(1, batch.positions, batch.document)
    row = encoder.enter(encoder.tokens(ids), torch.arange(ids.shape[1], device=ids.device).expand_as(ids), document)
    is_real = _is_ordinary(ids, encoder.shape.specials) | counts_specials
    layers = [Layer(row.x, is_real, torch.zeros_like(is_real))]
    for layer in range(encoder.shape.depth):
        row = encoder.run(row, layer, layer + 1)
        layers.append(layers[0]._replace(x=row.x))
    return layers


def _is_ordinary(ids: Int[Tensor, "B n"], specials: Specials) -> Bool[Tensor, "B n"]:
    return ~torch.isin(ids, torch.tensor(specials.ids, device=ids.device))


def _of_encoder(source: Source, tokenizer: Tokenizer, run: Run | None, sample: Sample, device: torch.device) -> Subject:
    encoder = source.encoder()
    row_tokens = min(sample.row_tokens, encoder.shape.row_tokens)
    rate = sample.masking_rate
    if isinstance(encoder, TransformersEncoder):
        pretrained = encoder.mask_in_encoder
    else:
        pretrained = None if run is None else run.mask_in_encoder
    without_masks = None
    if sample.sees_masks == "no":
        without_masks = NOT_FED
    elif sample.sees_masks == "as-trained" and pretrained in ("never", "in part"):
        without_masks = NEVER if pretrained == "never" else IN_PART
    encoder.to(device)
    rows, read = [], 0
    for row in text_rows(_texts(sample.data, tokenizer), tokenizer, row_tokens):
        if read >= sample.tokens and len(rows) % sample.micro_rows == 0:
            break
        rows.append(row)
        read += len(row)
    if not rows:
        raise Refusal(sample.data, "no text", "text to feed to the encoder")
    warn_of_little(sample, read)

    def passes() -> Iterator[Pass]:
        with progress("hidden states", read, "tokens") as advance:
            for number in range(0, len(rows), sample.micro_rows):
                ids, real = padded(rows[number : number + sample.micro_rows], tokenizer.specials.pad, device)
                with torch.inference_mode():
                    yield in_place(encoder, ids, real, tokenizer.specials, None if without_masks else rate, number,
                                   sample.specials == "in")  # fmt: skip
                advance(int(real.sum()))

    shape = encoder.shape
    return Subject(shape.width, shape.depth, without_masks, passes)


def in_place(
    encoder: Encoder | TransformersEncoder,
    ids: Int[Tensor, "B N"],
    real: Bool[Tensor, "B N"],
    specials: Specials,
    rate: float | None,
    first_row: int,
    counts_specials: bool,
) -> Pass:
    """One pass over rows in their natural order; ``rate`` None: no masked one. Masks are keyed by the row's number."""
    is_ordinary = real & _is_ordinary(ids, specials)
    is_real = is_ordinary | (real & counts_specials)
    nobody = torch.zeros_like(real)
    clean = [Layer(x, is_real, nobody) for x in encoder.states(ids, real)]
    if rate is None:
        return Pass(clean, None)
    is_mask = chosen(is_ordinary, rate, first_row)
    states = encoder.states(ids.masked_fill(is_mask, specials.mask), real)
    return Pass(clean, [Layer(x, is_real & ~is_mask, is_mask) for x in states])


def chosen(may_be: Bool[Tensor, "B N"], rate: float, first_row: int) -> Bool[Tensor, "B N"]:
    """round(rate n), at least 1, of the n tokens of each row that may be masked."""
    rows, row_tokens = may_be.shape
    allowed = may_be.cpu().numpy()
    lottery = noise(VALIDATION_SEED, MASK, first_row + np.arange(rows)[:, None], np.arange(row_tokens))
    rank = np.where(allowed, lottery, np.iinfo(np.int64).max).argsort(1, kind="stable").argsort(1)
    wanted = [max(1, count(rate, int(ordinary))) for ordinary in allowed.sum(1)]
    return torch.from_numpy((rank < np.array(wanted)[:, None]) & allowed).to(may_be.device)


def text_rows(texts: Iterator[str], tokenizer: Tokenizer, row_tokens: int) -> Iterator[list[int]]:
    """Rows ``<s> ids </s>`` of at most ``row_tokens``; a longer text gives several."""
    for text in texts:
        ids = tokenizer.encode_batch([text])[0].tolist()
        for start in range(0, len(ids), row_tokens - 2):
            yield framed(ids[start:], tokenizer.specials, row_tokens)


def _texts(data: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Documents of a file, or the held-out ones of a prepared folder, as its own tokenizer writes them."""
    if not (Path(data) / SUMMARY).is_file():
        reading = Reading()
        for file in find([data]):
            for block in blocks(file, reading):
                yield from (document.text for document in read_block(block, reading)[0])
        return
    store = open_store(data)
    own = load_tokenizer(store.folder)
    for start, stop in zip(store.valid.starts[:-1], store.valid.starts[1:], strict=True):
        yield own.decode(store.valid.tokens[start : stop - 1])

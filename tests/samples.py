"""Small runs, token streams and batches that the tests of the feed and the model share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tokenizers
import torch

from latemask.batch import Batch
from latemask.config import Run, Shape, Specials
from latemask.feed.batches import Rows, TrainingBatches
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import SYSTEMS, recipe

SYSTEM_NAMES = [system.__name__ for system in SYSTEMS]
FILLING = [name for name in SYSTEM_NAMES if name != "decoder_causal_cross"]
POSITIONS = ["absolute", "absolute+relative", "rotary"]
EXACT = {"rtol": 0, "atol": 1e-10}


def words_tokenizer(count: int = 5) -> tokenizers.Tokenizer:
    """The five special tokens and ``count`` words."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *(f"w{number}" for number in range(count))]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    return tokenizers.Tokenizer(model)


@dataclass
class Stream:
    """A prepared split in memory (``latemask.feed.batches.Stream``)."""

    tokens: np.ndarray
    starts: np.ndarray
    sources: np.ndarray | None = None
    unknown_tokens: int = 0

    def read(self, begins: np.ndarray, length: int) -> np.ndarray:
        return self.tokens[begins[:, None] + np.arange(length)]


def stream_of(lengths: list[int], shape: Shape, seed: int = 0, sources: list[int] | None = None) -> Stream:
    """Documents of these lengths (the ``</s>`` at the end included), filled with random ordinary tokens."""
    random = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ordinary = np.setdiff1d(np.arange(shape.vocabulary), shape.specials.ids)
    tokens = random.choice(ordinary, starts[-1]).astype(np.uint16)
    tokens[starts[1:] - 1] = shape.specials.eos
    return Stream(tokens, starts, None if sources is None else np.array(sources))


def prose(shape: Shape, documents: int = 60, seed: int = 0) -> Stream:
    """Documents of 2 to 40 tokens."""
    return stream_of(np.random.default_rng(seed).integers(2, 41, documents).tolist(), shape, seed)


def small(system: str, **shape: object) -> Run:
    """The tiny recipe of a system, a quarter as wide, on rows of 36 tokens; ``shape`` changes fields of the shape."""
    run = recipe(f"{system}_tiny")
    specials = Specials(bos=3, pad=0, eos=7, unk=1, mask=5)
    fields = {"width": 32, "feedforward": 48, "row_tokens": 36, "vocabulary": 70, "dropout": 0.0, "specials": specials}
    decoder = run.decoder and replace(run.decoder, width=run.decoder.width // 4, feedforward=40)
    return replace(run, shape=replace(run.shape, **(fields | shape)), decoder=decoder)


def batch_of(run: Run, rows: int = 3, index: int = 0) -> Batch:
    """A training batch of a run on made-up prose."""
    feed = Rows(prose(run.shape), run.shape, run.most_masked_tokens)
    return TrainingBatches(feed, run.masking, rows, 1, run.updates).batch_at(index)


def pretrainer_of(run: Run, seed: int = 0) -> Pretrainer:
    """In float64, every parameter (also biases and LayerNorms) drawn at random, so that none can hide."""
    model = Pretrainer(run).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + ("norm" in name and name.endswith("weight")))
    return model


def with_masking(run: Run, **changes: object) -> Run:
    return replace(run, masking=replace(run.masking, **changes))


def with_shape(run: Run, **changes: object) -> Run:
    return replace(run, shape=replace(run.shape, **changes))


def losses_and_gradients(model: Pretrainer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    losses = model(batch)
    losses.mean().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def with_a_hidden_document(run: Run) -> Batch:
    """Rows of short documents, in some of which the last document is masked whole."""
    rows = Rows(stream_of([5, 3, 9, 2, 6, 4, 8] * 30, run.shape), run.shape, run.masked_tokens)
    batch = TrainingBatches(rows, run.masking, 16, 2, run.updates).batch_at(0)
    last = batch.document.max(1, keepdim=True).values
    hidden = (batch.document[:, : batch.n_visible] != last).all(1)
    assert hidden.any()
    assert not hidden.all()
    return batch.map(lambda tensor: tensor[hidden])


def ragged(lengths: list[int], left: bool = False) -> tuple[Tensor, Tensor]:
    """Random ids and which of them are real."""
    torch.manual_seed(0)
    places = torch.arange(max(lengths)).expand(len(lengths), -1)
    real = places < torch.tensor(lengths)[:, None]
    real = real.flip(1) if left else real
    return torch.where(real, torch.randint(10, 60, real.shape), 0), real


def in_place(batch: Batch, mask: int) -> Tensor:
    """Ids in their natural order, [MASK] where a token is masked."""
    shown = torch.cat([batch.ids[:, : batch.n_visible], torch.full_like(batch.filler, mask)], 1)
    return torch.empty_like(batch.ids).scatter(1, batch.positions, shown)

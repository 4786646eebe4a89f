"""Run folders with random weights and tokenizers that are small but whole, for tests that read them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, trainers

from latemask.config import Run
from latemask.text.tokenizer import SPECIAL_TOKENS, Tokenizer, untrained
from latemask.training import checkpoint
from samples import pretrainer_of

TEXT = "the cat and the dog saw the bird; then the bird saw the cat. Paris is the capital of France. " * 3


@functools.cache
def byte_level() -> Tokenizer:
    library = untrained(cased=True)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    )
    return Tokenizer(library)


@functools.cache
def character_level() -> Tokenizer:
    """Each character is a token, a space too."""
    vocabulary = {name: number for number, name in enumerate([*SPECIAL_TOKENS, *sorted(set(TEXT))])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    library.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(library)


def write_run(folder: Path, run: Run, tokenizer: Tokenizer, updates: int = 3, **training: object) -> Path:
    """A run folder with one step of random weights; the run takes vocabulary and special ids of the tokenizer."""
    shape = replace(run.shape, vocabulary=tokenizer.vocabulary, specials=tokenizer.specials)
    run = replace(run, shape=shape, training=replace(run.training, **training))
    model, state = pretrainer_of(run).float(), checkpoint.State(updates=updates)
    return checkpoint.write(folder, run, state, model.state_dict(), {}, tokenizer.library.to_str().encode())


@contextmanager
def verified_here() -> Iterator[None]:
    """What is exported answers in this process and not in a fresh one, which takes seconds to import transformers."""
    from latemask.hf import fresh, verification

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_ask", fresh.answer)
        yield

"""The text that a model's loss is measured on: the held-out split of prepared data, or files, as ids. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latemask.errors import Refusal
from latemask.text.blocks import Reading, blocks
from latemask.text.corpus import read_block
from latemask.text.files import find
from latemask.text.store import SUMMARY, open_store
from latemask.text.tokenizer import Tokenizer, load_tokenizer


@dataclass
class MemoryStream:
    """A split that was read from text files (``feed.batches.Stream``)."""

    tokens: np.ndarray
    starts: np.ndarray
    sources: np.ndarray | None
    unknown_tokens: int

    def read(self, begins: np.ndarray, length: int) -> np.ndarray:
        """``length`` tokens from each of ``begins`` on."""
        return self.tokens[begins[:, None] + np.arange(length)]


def held_out(data: Path, tokenizer: Tokenizer, most_tokens: int) -> tuple[Any, tuple[str, ...]]:
    """The held-out split of a prepared folder, or text files up to about ``most_tokens`` tokens, and source names.

    Raises ``Refusal`` where the folder was prepared with another tokenizer than the model's.
    """
    if (data / SUMMARY).is_file():
        store = open_store(data)
        if not same_ids(tokenizer, load_tokenizer(data), store.valid.tokens[:4096].tolist()):
            raise Refusal(data, "text prepared with another tokenizer than the model's", "the same tokenizer",
                          "Give the text itself: .txt, .jsonl or .parquet")  # fmt: skip
        return store.valid, store.source_names
    reading, names = Reading(), {}
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    sources: list[int] = []
    for file in find([data]):
        for block in blocks(file, reading):
            documents, _ = read_block(block, reading)
            texts = [document.text for document in documents]
            flat, counts = tokenizer.encode_stream(texts, end=True)
            ids.append(flat.astype(np.int64))
            lengths += counts.tolist()
            sources += [names.setdefault(document.source, len(names)) for document in documents]
            if sum(map(len, ids)) >= most_tokens:
                break
        if sum(map(len, ids)) >= most_tokens:
            break
    if not ids:
        raise Refusal(data, "no text", "documents")
    tokens = np.concatenate(ids)
    named = any(names)
    stream = MemoryStream(tokens, np.concatenate([[0], np.cumsum(lengths)]), np.array(sources) if named else None,
                          int((tokens == tokenizer.specials.unk).sum()))  # fmt: skip
    return stream, tuple(name or "(none)" for name in names) if named else ()


def same_ids(one: Tokenizer, two: Tokenizer, sample: Sequence[int]) -> bool:
    """Whether two tokenizers are one: the same fingerprint, or (an export names its special tokens otherwise) the same
    vocabulary, special ids and ids of a sample of text."""
    if one.fingerprint == two.fingerprint:
        return True
    if one.specials != two.specials or one.library.get_vocab() != two.library.get_vocab():
        return False
    special = set(one.specials.ids)
    text = two.decode([number for number in sample if number not in special])
    return bool(np.array_equal(one.encode_batch([text])[0], two.encode_batch([text])[0]))

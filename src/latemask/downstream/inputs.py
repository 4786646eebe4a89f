"""Texts become rows of ids: ``<s> a </s>``, ``<s> a </s> </s> b </s>``, or what the model's own tokenizer puts around.

A pair that is too long is cut longest first, one token at a time from the end of the longer text. Nothing in a text
becomes a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latemask.errors import Refusal
from latemask.text.tokenizer import Tokenizer, refuse_surrogates


@dataclass(frozen=True)
class Frame:
    """Ids around one text or a pair."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    after_single: tuple[int, ...]
    second_type: int = 0
    """Token type that the tokenizer gives the second text (BERT: 1)."""

    @property
    def pair_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        """The frame that the tokenizer's own post-processor makes; RoBERTa's where it has none."""
        bos, eos = tokenizer.specials.bos, tokenizer.specials.eos
        if tokenizer.library.post_processor is None:
            return cls((bos,), (eos, eos), (eos,), (eos,))
        pair, single = tokenizer.library.encode("a", "a"), tokenizer.library.encode("a")
        before, rest = _until(pair.ids, pair.sequence_ids, 0)
        between, rest = _until(*rest, 1)
        after = [number for number, owner in zip(*rest, strict=True) if owner is None]
        single_before, single_rest = _until(single.ids, single.sequence_ids, 0)
        after_single = [number for number, owner in zip(*single_rest, strict=True) if owner is None]
        if single_before != before or not before:
            raise Refusal(
                "tokenizer", f"ids {single_before} before a text, {before} before a pair", "the same special token"
            )
        second = max(kind for kind, owner in zip(pair.type_ids, pair.sequence_ids, strict=True) if owner == 1)
        return cls(tuple(before), tuple(between), tuple(after), tuple(after_single), second)


def _until(
    ids: list[int], owners: list[int | None], owner: int
) -> tuple[list[int], tuple[list[int], list[int | None]]]:
    """Ids before the first token of text ``owner`` that belong to no text, and the rest from there on."""
    stop = owners.index(owner)
    skipped = [number for number, held in zip(ids[:stop], owners[:stop], strict=True) if held is None]
    return skipped, (ids[stop:], owners[stop:])


class Inputs:
    """Turns texts into framed rows of at most ``most_tokens``."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int):
        self.tokenizer, self.most_tokens = tokenizer, most_tokens
        self.frame = Frame.of(tokenizer)
        self.cut = 0
        """Texts cut so far because they were too long (of a pair one or both; of SQuAD's questions alone)."""
        self.whole_lengths: list[int] = []
        """Tokens of each row so far had nothing been cut (not of SQuAD's)."""

    def rows(self, texts: Sequence[tuple[str, ...]]) -> list[np.ndarray]:
        """One row of ids [tokens] int32 for each text or pair."""
        columns = [self.tokenizer.encode_batch(list(column)) for column in zip(*texts, strict=True)]
        frame = self.frame
        if len(columns) == 1:
            room = self.most_tokens - len(frame.before) - len(frame.after_single)
            for ids in columns[0]:
                self._count(len(ids) + self.most_tokens - room)
            return [_joined(frame.before, ids[:room], frame.after_single) for ids in columns[0]]
        room = self.most_tokens - frame.pair_tokens
        rows = []
        for first, second in zip(*columns, strict=True):
            kept_first, kept_second = longest_first(len(first), len(second), room)
            self._count(len(first) + len(second) + frame.pair_tokens)
            rows.append(_joined(frame.before, first[:kept_first], frame.between, second[:kept_second], frame.after))
        return rows

    def _count(self, tokens: int) -> None:
        """Of a row, had nothing been cut."""
        self.whole_lengths.append(tokens)
        self.cut += tokens > self.most_tokens

    def word_rows(self, sentences: Sequence[Sequence[str]]) -> tuple[list[np.ndarray], list[list[int]]]:
        """Rows of sentences given as words, and where in its row each word's first token stands (-1: cut off).

        Every word but the first is tokenized with a space before it, as in running text.
        """
        spaced = [f" {word}" if place else word for words in sentences for place, word in enumerate(words)]
        pieces = iter(self.tokenizer.encode_batch(spaced))
        frame = self.frame
        room = self.most_tokens - len(frame.after_single)
        rows, firsts = [], []
        for words in sentences:
            ids: list[int] = list(frame.before)
            places = []
            for _ in words:
                tokens = next(pieces).tolist() or [self.tokenizer.specials.unk]
                fits = len(ids) < room
                places.append(len(ids) if fits else -1)
                ids += tokens
            self._count(len(ids) + len(frame.after_single))
            rows.append(_joined(ids[:room], frame.after_single))
            firsts.append(places)
        return rows, firsts

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The ``tokenizers`` library's encodings: ids as ``rows`` has them without the frame, offsets in characters of
        the text, word numbers. Raises ``Refusal`` for half a character."""
        library = self.tokenizer._encoder.library  # to which special tokens in a text are text
        for text in texts:
            refuse_surrogates(text)
        return library.encode_batch(list(texts), add_special_tokens=False)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens two texts keep of ``room`` when the longer one is cut, token by token (the second at a draw)."""
    if first + second <= room:
        return first, second
    half = room - room // 2
    kept = max(room - second, min(first, half))
    return kept, room - kept


def _joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])

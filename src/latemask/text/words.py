"""A word's ids never change, so each word is encoded once and looked up afterwards.

``Encoder`` encodes raw text with a ``tokenizers`` model such that nothing in the text becomes a special token, and
looks words up where the model's own rules make white space a border no token crosses (byte-level BPE, BERT's WordPiece,
word level). Anything else (Unigram, other pre-tokenizers) is encoded as a whole, in pieces of 65,536 characters.

The library's matching of special tokens is switched off by encoding with a twin whose special tokens have names that no
text contains: a literal ``<mask>`` or ``[SEP]`` is then ordinary text for every kind of model, also where the literal
stands in the model's own vocabulary (word level, Unigram), which ``encode_special_tokens`` does not cover.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from latemask.errors import Refusal
from latemask.text.tokenizer import is_of_library

SLICE_CHARACTERS = 1 << 20
PIECE_CHARACTERS = 1 << 16
"""Longest text given to the library at once; also the longest word. Longer words are encoded in pieces."""
MEMO_WORDS = 1 << 20
MEMO_CHARACTERS = 1 << 24
"""The memo is emptied beyond either; it then holds about 200 MB."""


def _words(space: str) -> re.Pattern[str]:
    """Runs of white space but their last space, which goes to the next word; ASCII words apart from the punctuation
    behind them, and that punctuation where white space follows."""
    longest = PIECE_CHARACTERS - 1
    return re.compile(
        rf" ?[A-Za-z]+(?=[{space}.,;:!?\"()-])|[.,;:!?\"()-]+(?=[{space}])"
        rf"| ?[^{space}]{{1,{longest}}}|[{space}]+(?![^{space}])|[{space}]+"
    )


ANY_SPACE = _words(r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000")
"""Unicode's White_Space, as in byte-level pre-tokens; Python's ``\\s`` has more."""
SURE_SPACE = _words(r"\t\n\r ")
"""What remains a border when BERT's normalizer has removed control characters."""

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CAPPED_SPLIT = re.sub(r"(\\s|\\p\{[LN]\}|\[\^[^]]*\])\+", r"\1{1,64}", GPT2_SPLIT)
"""GPT-2's pre-tokens, none longer than 64 characters, so that a line without spaces costs no more than another."""


def pieces(text: str, limit: int) -> Iterator[str]:
    """``text`` in pieces of at most ``limit`` characters, cut in front of a space and a word where there is one."""
    start = 0
    while len(text) - start > limit:
        cut = text.rfind(" ", start + 1, start + limit)
        while cut > start and text[cut + 1].isspace():
            cut = text.rfind(" ", start + 1, cut)
        cut = cut if cut > start else start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]


class Encoder:
    """Ids of raw text, without special tokens.

    ``special_names`` are text to it like any other: their ids never come out (``RuntimeError`` if a model manages to),
    but for that of ``unknown_name``, which stands for what the model does not know. ``dtype``: of the ids, uint16 or
    uint32.
    """

    def __init__(
        self,
        tokenizer: dict[str, Any],
        special_names: Collection[str],
        unknown_name: str,
        dtype: type[np.unsignedinteger],
    ):
        names = {*special_names, *(added["content"] for added in _added(tokenizer) if added["special"])}
        try:
            self.library = Tokenizer.from_str(json.dumps(_twin(tokenizer, names)))
        except BaseException as error:
            if not is_of_library(error):
                raise
            found, wanted = f"a tokenizer.json that contradicts itself ({error})", "an id of its own for each token"
            raise Refusal("tokenizer", found, wanted) from error
        never = [self.library.token_to_id(_other_name(name)) for name in sorted(names - {unknown_name})]
        self.special_ids = np.array(never, dtype)
        self.dtype = dtype
        self.words = word_pattern(tokenizer, names)
        self._memo = _Memo(dtype)

    def encode(self, texts: Sequence[str], end_id: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """All ids one after the other [tokens], and how many each text has [texts] int64.

        ``end_id`` follows each text where given, and counts.
        """
        lengths = np.zeros(len(texts), np.int64)
        found = []
        for owners, parts in _batches(texts, SLICE_CHARACTERS if self.words else PIECE_CHARACTERS):
            ids, counts = self._look_up(parts, self.words) if self.words else self._by_library(parts)
            np.add.at(lengths, owners, counts)
            found.append(ids)
        ids = np.concatenate(found) if found else np.empty(0, self.dtype)
        if end_id is None:
            return ids, lengths
        return np.insert(ids, np.cumsum(lengths), end_id), lengths + 1

    def _look_up(self, texts: list[str], pattern: re.Pattern[str]) -> tuple[np.ndarray, np.ndarray]:
        words = [pattern.findall(text) for text in texts]
        counts = np.fromiter(map(len, words), np.int64, len(words))
        ids, ends = self._memo.ids(itertools.chain.from_iterable(words), int(counts.sum()), self._by_library)
        return ids, np.diff(ends[np.cumsum(counts)], prepend=0)

    def _by_library(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [encoding.ids for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False)]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), self.dtype, int(counts.sum()))
        if np.isin(flat, self.special_ids).any():
            raise Refusal("tokenizer", "ordinary text that becomes a special token", "a special token no text becomes",
                          "Two entries of its tokenizer.json share an id, or a piece is named as one")  # fmt: skip
        return flat, counts


def _batches(texts: Sequence[str], limit: int) -> Iterator[tuple[list[int], list[str]]]:
    """Pieces of ``texts`` and the number of the text each comes from, up to about ``limit`` characters at a time."""
    owners: list[int] = []
    parts: list[str] = []
    characters = 0
    for owner, text in enumerate(texts):
        for piece in pieces(text, limit):
            owners.append(owner)
            parts.append(piece)
            characters += len(piece)
            if characters >= SLICE_CHARACTERS:
                yield owners, parts
                owners, parts, characters = [], [], 0
    if parts:
        yield owners, parts


class _Memo(dict[str, int]):
    """Number of each word met; the ids of word i are ``flat[starts[i] : starts[i + 1]]``."""

    def __init__(self, dtype: type[np.unsignedinteger]):
        self.dtype = dtype
        self._empty()

    def _empty(self) -> None:
        self.clear()
        self.new: list[str] = []
        self.characters = 0
        self.flat = array("H" if self.dtype is np.uint16 else "I")
        self.starts = array("q", [0])

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number

    def ids(
        self, words: Iterable[str], count: int, encode: Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of ``count`` words, one after the other, and where each word ends, with a 0 in front [count + 1]."""
        numbers = np.fromiter(map(self.__getitem__, words), np.int64, count)
        if self.new:
            try:
                flat, lengths = encode(self.new)
            except BaseException:
                self._empty()  # of its numbers some have no ids
                raise
            self.flat.frombytes(flat.tobytes())
            self.starts.frombytes((self.starts[-1] + np.cumsum(lengths)).tobytes())
            self.characters += sum(map(len, self.new))
            self.new = []
        starts = np.frombuffer(self.starts, np.int64)
        begins = starts[numbers]
        lengths = starts[numbers + 1] - begins
        ends = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.frombuffer(self.flat, self.dtype)[np.arange(ends[-1]) + np.repeat(begins - ends[:-1], lengths)]
        del starts  # an array that is seen through numpy cannot grow
        if len(self) > MEMO_WORDS or self.characters > MEMO_CHARACTERS:
            self._empty()
        return ids, ends


def _added(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    return tokenizer.get("added_tokens") or []


def _other_name(name: str) -> str:
    """What a special token is called in the twin: U+10FFFF is no character, and never one of a text."""
    return f"\U0010ffff latemask {name} \U0010ffff"


def _twin(tokenizer: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The same model with other names for the tokens ``names``; no dropout, truncation, padding, post-processor."""
    twin = copy.deepcopy(tokenizer)
    twin.update(truncation=None, padding=None, post_processor=None)
    renamed = {name: _other_name(name) for name in names}
    for added in _added(twin):
        added["content"] = renamed.get(added["content"], added["content"])
    model = twin["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(token, token): number for token, number in vocabulary.items()}
    else:  # Unigram: pairs of token and score
        model["vocab"] = [[renamed.get(token, token), score] for token, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in map(list, pairs) if not {*pair, "".join(pair)} & renamed.keys()]
        model["dropout"] = None
    return twin


def word_pattern(tokenizer: dict[str, Any], special_names: Collection[str]) -> re.Pattern[str] | None:
    """What finds words whose ids, one after the other, are those of the text by the tokenizer's own rules.

    None where its rules promise no such thing.
    """
    if any(added["content"] not in special_names for added in _added(tokenizer)):
        return None  # matched in raw text, perhaps across white space
    if tokenizer["model"]["type"] not in ("BPE", "WordPiece", "WordLevel"):
        return None
    normalizers = {step["type"] for step in _sequence(tokenizer.get("normalizer"), "normalizers")}
    steps = _sequence(tokenizer.get("pre_tokenizer"), "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds in (["BertPreTokenizer"], ["Whitespace"]):
        known = normalizers <= {"NFC", "NFD", "Lowercase", "StripAccents", "BertNormalizer"}
        return SURE_SPACE if known else None
    if not normalizers <= {"NFC", "NFD", "Lowercase"}:
        return None  # a character that vanishes would join two runs of white space
    if kinds == ["ByteLevel"]:
        apart = steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]
    elif kinds == ["Split", "ByteLevel"]:
        split, to_bytes = steps
        known = split["pattern"].get("Regex") in (GPT2_SPLIT, CAPPED_SPLIT) and split["behavior"] == "Isolated"
        apart = known and not (split["invert"] or to_bytes["use_regex"] or to_bytes["add_prefix_space"])
    else:
        apart = False
    return ANY_SPACE if apart else None


def _sequence(step: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [one for item in step[inside] for one in _sequence(item, inside)] if step["type"] == "Sequence" else [step]

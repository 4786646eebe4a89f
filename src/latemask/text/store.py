"""Prepared text on disk: one stream of token ids per split, and where each document begins; row length is the run's.

A store is a folder::

    store.json        what is inside and where it came from, for a person and for the numbers that no file below holds
    tokenizer.json    the tokenizer that made the ids
    train.tokens      ids, each document followed by </s>, no <s>: uint16 up to 65,536 ids, else uint32
    train.documents   offset of each document's first token, and the end: int64 [documents + 1]
    train.sources     index of each document's source: uint16 [documents]; absent where the text names none
    valid.*           the same for the held-out documents

Each binary file begins with 128 bytes: magic, version, kind of number, tokenizer's fingerprint, count; little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from latemask.config import Specials
from latemask.errors import Refusal
from latemask.text.tokenizer import FILE, load_tokenizer
from latemask.writing import ESCAPED

MAGIC = b"latemask"
VERSION = 1
HEADER = struct.Struct("<8sI4s32sQ72x")
"""Magic, version, kind of number (numpy's ``<u2``), fingerprint, count; 128 bytes."""
SUMMARY = "store.json"
SPLITS = ("train", "valid")
SplitName = Literal["train", "valid"]
MOST_SOURCES = 1 << 16


class ArrayWriter:
    """Appends numbers to a file under a header whose count is written at ``close``."""

    def __init__(self, path: Path, kind: str, fingerprint: str):
        self.kind, self.fingerprint, self.count = np.dtype(kind), bytes.fromhex(fingerprint), 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(bytes(HEADER.size))

    def write(self, numbers: np.ndarray) -> None:
        """Append ``numbers``, which must fit the kind."""
        self.count += len(numbers)
        numbers.astype(self.kind, copy=False).tofile(self._file)

    def close(self) -> None:
        """Write the header, and sync to disk."""
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, self.kind.str.encode(), self.fingerprint, self.count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_array(path: Path, kind: str, fingerprint: str) -> np.ndarray:
    """The numbers of a file, memory-mapped and read-only.

    Raises ``Refusal`` for another kind of file, version, kind of number, tokenizer, or a size that is not the count's.
    """
    if not path.is_file():
        raise Refusal(path, "no such file", "a file of a prepared store", "Prepare the text again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise Refusal(
            path, f"{size:,} bytes that do not begin with a store's header", "a file made by latemask prepare"
        )
    _, version, found_kind, found_fingerprint, count = HEADER.unpack(head)
    if version != VERSION:
        raise Refusal(path, f"store version {version}", f"version {VERSION}", "Prepare the text again")
    if found_kind.rstrip(b"\0") != kind.encode():
        raise Refusal(path, f"numbers of kind {found_kind.rstrip(bytes(1)).decode(errors='replace')}", f"kind {kind}")
    if found_fingerprint.hex() != fingerprint:
        raise Refusal(path, f"ids of tokenizer {found_fingerprint.hex()[:12]}", f"ids of {fingerprint[:12]}",
                      "Prepare the text again with this tokenizer")  # fmt: skip
    wanted = HEADER.size + count * np.dtype(kind).itemsize
    if size != wanted:
        raise Refusal(path, f"{size:,} bytes", f"{wanted:,} bytes for {count:,} numbers", "Copy or prepare it again")
    if not count:
        return np.empty(0, kind)
    return np.memmap(path, np.dtype(kind), "r", HEADER.size, (count,))


class SplitWriter:
    """Appends documents to one split."""

    def __init__(self, folder: Path, name: SplitName, token_kind: str, fingerprint: str, unknown_id: int):
        self.unknown_id, self.unknown_tokens = unknown_id, 0
        self.tokens = ArrayWriter(folder / f"{name}.tokens", token_kind, fingerprint)
        self.starts = ArrayWriter(folder / f"{name}.documents", "<i8", fingerprint)
        self.sources = ArrayWriter(folder / f"{name}.sources", "<u2", fingerprint)
        self.starts.write(np.zeros(1, np.int64))

    def write(self, tokens: np.ndarray, lengths: np.ndarray, sources: np.ndarray) -> None:
        """Ids of documents one after the other [tokens], how many each has and its source [documents]."""
        if len(lengths):
            self.starts.write(self.tokens.count + np.cumsum(lengths))
            self.sources.write(sources)
            self.tokens.write(tokens)
            self.unknown_tokens += int((tokens == self.unknown_id).sum())

    def close(self) -> None:
        """Complete the files."""
        for array in (self.tokens, self.starts, self.sources):
            array.close()

    @property
    def summary(self) -> dict[str, int]:
        """For ``store.json``."""
        return {"documents": self.sources.count, "tokens": self.tokens.count, "unknown_tokens": self.unknown_tokens}


@dataclass(frozen=True)
class Split:
    """One split, read from disk as it is used."""

    tokens: np.ndarray
    """Token ids [tokens] uint16 or uint32, each document followed by ``</s>``."""
    starts: np.ndarray
    """Offset of each document's first token, and the end [documents + 1] int64."""
    sources: np.ndarray | None
    """Index into ``source_names`` of each document [documents] uint16; None where the text names no sources."""
    unknown_tokens: int
    """How many ``<unk>`` there are in ``tokens``."""

    def rows(self, row_tokens: int) -> int:
        """Whole rows of ``row_tokens``: ``<s>`` and ``row_tokens - 1`` tokens of the stream."""
        return len(self.tokens) // (row_tokens - 1)

    def dropped(self, row_tokens: int) -> int:
        """Tokens behind the last whole row."""
        return len(self.tokens) % (row_tokens - 1)


@dataclass(frozen=True)
class TokenStore:
    """A prepared folder, opened with ``open_store``."""

    folder: Path
    tokenizer_fingerprint: str
    vocabulary: int
    """Number of token ids: the largest + 1."""
    specials: Specials
    source_names: tuple[str, ...]
    summary: dict[str, Any]
    """All of ``store.json``."""

    @cached_property
    def train(self) -> Split:
        """The training documents."""
        return self._split("train")

    @cached_property
    def valid(self) -> Split:
        """The held-out documents; perhaps none."""
        return self._split("valid")

    def _split(self, name: SplitName) -> Split:
        def read(suffix: str, kind: str) -> np.ndarray:
            return read_array(self.folder / f"{name}.{suffix}", kind, self.tokenizer_fingerprint)

        counts = self.summary["splits"][name]
        tokens = read("tokens", token_kind(self.vocabulary))
        starts = read("documents", "<i8")
        sources = read("sources", "<u2") if self.source_names else None
        documents = counts["documents"]
        found = (len(tokens), len(starts) - 1, int(starts[-1]), documents if sources is None else len(sources))
        if found != (counts["tokens"], documents, counts["tokens"], documents):
            raise Refusal(self.folder / f"{name}.*", f"files for {found[0]:,} tokens of {found[1]:,} documents",
                          f"{counts['tokens']:,} of {documents:,} ({SUMMARY})", "Prepare the text again")  # fmt: skip
        if starts[0] != 0 or not (starts[1:] > starts[:-1]).all():
            raise Refusal(self.folder / f"{name}.documents", "offsets that do not rise from 0", "rising offsets",
                          "Copy or prepare it again")  # fmt: skip
        return Split(tokens, starts, sources, counts["unknown_tokens"])


def token_kind(vocabulary: int) -> str:
    """Two bytes a token where they suffice, else four."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def open_store(folder: str | os.PathLike[str]) -> TokenStore:
    """Open what ``latemask prepare`` made, and check it.

    Raises ``Refusal`` for anything else: no or an unreadable ``store.json``, another version, files cut or mixed, or a
    ``tokenizer.json`` that is not the one that made the ids.
    """
    folder = Path(folder)
    path = folder / SUMMARY
    if not path.is_file():
        raise Refusal(folder, f"no {SUMMARY}", "a folder made by latemask prepare",
                      "Make one: latemask prepare FILES --tokenizer tok/ --out data/en")  # fmt: skip
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary["version"] != VERSION:
            raise Refusal(path, f"store version {summary['version']}", f"version {VERSION}", "Prepare the text again")
        store = TokenStore(folder, summary["tokenizer_fingerprint"], summary["vocabulary"],
                           Specials(**summary["specials"]), tuple(summary["source_names"]), summary)  # fmt: skip
        for split in (store.train, store.valid):  # reads and checks their files
            if split.unknown_tokens < 0:
                raise ValueError(f"{split.unknown_tokens} unknown tokens")
        tokenizer = load_tokenizer(folder)
        if (tokenizer.fingerprint, tokenizer.specials) != (store.tokenizer_fingerprint, store.specials):
            found = f"tokenizer {tokenizer.fingerprint[:12]}, special ids {tokenizer.specials.ids}"
            wanted = f"{store.tokenizer_fingerprint[:12]}, {store.specials.ids}, that made the ids"
            raise Refusal(folder / FILE, found, wanted, "Prepare the text again")
    except Refusal:
        raise
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Refusal(
            path, f"a broken summary ({error!r})", f"the {SUMMARY} of a store", "Prepare the text again"
        ) from error
    return store


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write ``store.json`` and sync it."""
    with open(folder / SUMMARY, "w", encoding="utf-8", errors=ESCAPED) as file:
        json.dump(summary, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())

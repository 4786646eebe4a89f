"""Prepared text on disk: one stream of token ids per split, and where each document begins; row length is the run's.

A store is a folder::

    store.json        what is inside and where it came from, for a person and for the numbers that no file below holds
    tokenizer.json    the tokenizer that made the ids
    train.tokens      ids, each document followed by </s>, no <s>: uint16 up to 65,536 ids, else uint32
    train.documents   offset of each document's first token, and the end: int64 [documents + 1]
    train.sources     index of each document's source: uint16 [documents]; absent where the text names none
    valid.*           the same for the held-out documents

Each binary file is an ``array``; every byte of the folder is under a checksum, which is compared before it is used:
tokens page by page as rows are read, all else when the store is opened.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from latemask.config import Run, Specials, replace
from latemask.errors import Refusal, kind_of, unreadable
from latemask.fields import typed
from latemask.text.array import VERSION, ArrayFile, ArrayWriter
from latemask.text.tokenizer import FILE, Tokenizer, load_tokenizer
from latemask.writing import json_checksum, write_json

SUMMARY = "store.json"
SPLITS = ("train", "valid")
SplitName = Literal["train", "valid"]
MOST_SOURCES = 1 << 16
FIELDS = {"tokenizer_fingerprint": str, "vocabulary": int, "source_names": tuple[str, ...]}
"""Of ``store.json``, with their types; beside version, checksum, special ids and splits."""


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
    file: ArrayFile
    """Where ``tokens`` is."""

    def read(self, begins: np.ndarray, length: int) -> np.ndarray:
        """``length`` tokens from each of ``begins`` [B] on: [B, length], compared with their checksums. Raises
        ``Refusal`` where they differ."""
        return self.file.read(begins, length)


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

    @property
    def fingerprint(self) -> str:
        """Of tokenizer and training text: what a run that goes on must find again."""
        return f"{self.tokenizer_fingerprint}:{len(self.train.tokens)}:{len(self.train.starts) - 1}"

    def fitted(self, run: Run) -> Run:
        """``run`` with the vocabulary and special ids of this text."""
        return replace(run, {"shape.vocabulary": self.vocabulary, "shape.specials": self.specials})

    @cached_property
    def train(self) -> Split:
        """The training documents."""
        return self._split("train")

    @cached_property
    def valid(self) -> Split:
        """The held-out documents; perhaps none."""
        return self._split("valid")

    def _split(self, name: SplitName) -> Split:
        counts = self.summary["splits"][name]
        file, *others = self.files(name)
        for other in others:
            other.check()
        tokens, starts = file.numbers, others[0].numbers
        sources = others[1].numbers if self.source_names else None
        documents = counts["documents"]
        found = (len(tokens), len(starts) - 1, int(starts[-1]), documents if sources is None else len(sources))
        if found != (counts["tokens"], documents, counts["tokens"], documents):
            raise Refusal(self.folder / f"{name}.*", f"files for {found[0]:,} tokens of {found[1]:,} documents",
                          f"{counts['tokens']:,} of {documents:,} ({SUMMARY})", "Prepare the text again")  # fmt: skip
        if starts[0] != 0 or not (starts[1:] > starts[:-1]).all():
            raise Refusal(self.folder / f"{name}.documents", "offsets that do not rise from 0", "rising offsets",
                          "Copy or prepare it again")  # fmt: skip
        return Split(tokens, starts, sources, counts["unknown_tokens"], file)

    def files(self, name: SplitName) -> list[ArrayFile]:
        """Of a split: tokens, documents and, where the text names any, sources."""
        kinds = {"tokens": token_kind(self.vocabulary), "documents": "<i8", "sources": "<u2"}
        if not self.source_names:
            del kinds["sources"]
        return [ArrayFile(self.folder / f"{name}.{suffix}", kind, self.tokenizer_fingerprint)
                for suffix, kind in kinds.items()]  # fmt: skip

    def check(self, advance: Callable[[float], None] = lambda _: None) -> None:
        """Compare every byte with its checksum; ``advance`` hears of bytes done. Raises ``Refusal`` naming each place
        that differs."""
        files = [file for name in SPLITS for file in self.files(name)]
        broken = [place for file in files for place in file.broken(advance)]
        if broken:
            more = f" and {len(broken) - 8} more" if len(broken) > 8 else ""
            raise Refusal(self.folder, f"{', '.join(broken[:8])}{more} that differ from their checksum",
                          "the bytes that were written", "Copy it again, or prepare the text again")  # fmt: skip

    @property
    def bytes_on_disk(self) -> int:
        """Of the binary files."""
        return sum(file.path.stat().st_size for name in SPLITS for file in self.files(name))


def token_kind(vocabulary: int) -> str:
    """Two bytes a token where they suffice, else four."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def open_store(folder: str | os.PathLike[str]) -> TokenStore:
    """Open what ``latemask prepare`` made, and check all of it but the tokens, which are checked as they are read.

    Raises ``Refusal`` for anything else: no or an unreadable ``store.json``, another version, files cut, changed or
    mixed, or a ``tokenizer.json`` that is not the one that made the ids.
    """
    folder = Path(folder)
    path = folder / SUMMARY
    if not path.is_file():
        raise Refusal(folder, f"no {SUMMARY}", "a folder made by latemask prepare",
                      "Make one: latemask prepare FILES --tokenizer tok/ --out data/en")  # fmt: skip
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise Refusal(path, kind_of(summary), "a JSON object", "Prepare the text again")
        if summary["version"] != VERSION:
            raise Refusal(path, f"store version {summary['version']}{OLD.get(summary['version'], '')}",
                          f"version {VERSION}", f"Prepare the text again: {_command(folder, summary)}")  # fmt: skip
        if summary.pop("checksum", None) != json_checksum(summary):
            raise Refusal(path, "a file that differs from its checksum", f"the {SUMMARY} that was written",
                          "Copy it again, or prepare the text again")  # fmt: skip
        known = {name: typed(hint, summary[name], f"{path}: {name}") for name, hint in FIELDS.items()}
        specials = typed(Specials, vars(Specials()) | summary["specials"], f"{path}: specials")
        store = TokenStore(folder, **known, specials=specials, summary=summary)
        for split in (store.train, store.valid):  # reads and checks their files
            if split.unknown_tokens < 0:
                raise ValueError(f"{split.unknown_tokens} unknown tokens")
        tokenizer = load_tokenizer(folder)
    except Refusal:
        raise
    except OSError as error:
        raise Refusal(error.filename or folder, error.strerror or str(error), "a readable store") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            path, f"a broken summary ({unreadable(error)})", f"the {SUMMARY} of a store", "Prepare the text again"
        ) from error
    _check_tokenizer(tokenizer, store)
    return store


OLD = {1: ", whose files have no checksums"}
"""What older versions lack."""


def _check_tokenizer(tokenizer: Tokenizer, store: TokenStore) -> None:
    if (tokenizer.fingerprint, tokenizer.specials) != (store.tokenizer_fingerprint, store.specials):
        found = f"tokenizer {tokenizer.fingerprint[:12]}, special ids {tokenizer.specials.ids}"
        wanted = f"{store.tokenizer_fingerprint[:12]}, {store.specials.ids}, that made the ids"
        raise Refusal(store.folder / FILE, found, wanted, "Prepare the text again")


def _command(folder: Path, summary: dict[str, Any]) -> str:
    """What makes the store anew, as far as its summary tells."""
    files = [one["path"] for one in summary.get("files", [])]
    named = " ".join(map(shlex.quote, files)) if 0 < len(files) <= 4 else "FILES"
    quoted = shlex.quote(str(folder))
    return f"latemask prepare {named} --tokenizer {quoted} --out {quoted} --overwrite"


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write ``store.json``, with a checksum of its own."""
    write_json(folder / SUMMARY, summary | {"checksum": json_checksum(summary)})

"""What a person names (files, folders, patterns, ``-``) becomes an ordered list of files, each read as plain bytes.

The format follows the name (``.txt``, ``.jsonl``, ``.parquet``, before an optional ``.gz``, ``.zst``, ``.xz``); the
compression follows the first bytes, so that it also works for standard input and for a misnamed file.
"""

from __future__ import annotations

import glob
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, Literal

from latemask.console import warn_once
from latemask.errors import Refusal

if TYPE_CHECKING:
    from latemask.text.blocks import Reading

Format = Literal["text", "jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\x00"}
"""Suffix and first bytes. None of these is valid UTF-8 or begins a parquet file."""
ENDINGS = f"{', '.join(SUFFIXES)}, each plain or with {', '.join(COMPRESSED)}"
OF_FASTA = 'Of FASTA make .jsonl, one {"text": "MKVLA..."} a line, a line for each sequence, without its header'
OF_TABLES = 'Of a .csv or .tsv make .jsonl, one {"text": "..."} a line, or .parquet'
INSTEAD = {".csv": OF_TABLES, ".tsv": OF_TABLES, ".fasta": OF_FASTA, ".fa": OF_FASTA, ".faa": OF_FASTA}
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class File:
    """One input: its path (``-`` is standard input) and what it holds."""

    path: str
    format: Format

    @property
    def bytes_on_disk(self) -> int | None:
        """None for standard input and pipes."""
        path = Path(self.path)
        return path.stat().st_size if self.path != STANDARD_INPUT and path.is_file() else None


def find(inputs: Sequence[str | os.PathLike[str]], reading: Reading | None = None) -> list[File]:
    """The files that ``inputs`` name, in order; inside a folder or a pattern, by name.

    A folder gives all files below it with a known ending; the others in it are warned of. The format of ``reading`` is
    that of standard input and of files whose name does not tell. A file named twice is read once, with a warning. Each
    warning comes once a process: who checks data before it reads them asks twice. Raises ``Refusal`` for a name that
    gives no file.
    """
    found: dict[str, File] = {}
    has_flags = reading is not None and reading.has_flags
    for name in (os.fspath(item) for item in inputs):
        for path in _paths(name, has_flags):
            known = _format(path)
            kind = known or (reading.format if reading else None)
            if kind is None:
                do = _instead([path]) or "Say it with --format text, jsonl or parquet" * has_flags
                raise Refusal(path if path != STANDARD_INPUT else "standard input", "a format that no name tells",
                              f"a name ending in {ENDINGS}", do)  # fmt: skip
            key = path if path == STANDARD_INPUT else os.path.realpath(path)
            if key in found:
                warn_once(f"{path}: named twice, read once")
            found.setdefault(key, File(path, kind))
    if not found:
        raise Refusal("files", "none", "at least one file, folder or pattern, or - for standard input")
    return list(found.values())


def _paths(name: str, has_flags: bool) -> list[str]:
    path = Path(name)
    if name == STANDARD_INPUT:
        return [name]
    if path.is_dir():
        paths, others = [], []
        for folder, folders, names in os.walk(path, onerror=_refuse_unreadable):
            folders[:] = [below for below in folders if not below.startswith(".")]
            for item in (os.path.join(folder, item) for item in names if not item.startswith(".")):
                if os.path.isfile(item):
                    (paths if _format(item) else others).append(item)
        paths.sort()
        some = ", ".join(os.path.relpath(item, path) for item in sorted(others)[:3])
        left = f"{len(others):,} files whose names tell no format ({some}{', ...' if len(others) > 3 else ''})"
        if not paths:
            found = f"a folder without such a file{f', but {left}' if others else ''}"
            raise Refusal(name, found, f"files ending in {ENDINGS}", _instead(others))
        if others:
            do = f"{'give them by name with --format, or ' * has_flags}name them {', '.join(SUFFIXES)}"
            warn_once(f"{name}: left out {left}; {'. '.join(filter(None, [do, _instead(others)]))}")
        return paths
    if path.exists():
        return [name]
    paths = sorted(item for item in glob.glob(name, recursive=True) if not Path(item).is_dir())
    if not paths:
        raise Refusal(name, "no such file, and no file that it matches as a pattern", "a file, a folder or a pattern")
    return paths


def _refuse_unreadable(error: OSError) -> None:
    raise Refusal(error.filename, error.strerror or "an unreadable folder", "a readable folder") from None


def _suffix(path: str) -> str:
    """The last one, in lower case, before that of a compression."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _format(path: str) -> Format | None:
    return SUFFIXES.get(_suffix(path))


def _instead(paths: Sequence[str]) -> str:
    """What to make of those that are no text although they may be read as such."""
    return ". ".join(sorted({INSTEAD[suffix] for suffix in map(_suffix, paths) if suffix in INSTEAD}))


class Plain:
    """The decompressed bytes of one open file."""

    def __init__(self, file: File, raw: IO[bytes]):
        self.name = "standard input" if file.path == STANDARD_INPUT else file.path
        self._raw = raw
        head = raw.peek(8) if isinstance(raw, io.BufferedReader) else b""
        compression = next((suffix for suffix, magic in COMPRESSED.items() if head.startswith(magic)), None)
        named = PurePath(file.path).suffix.lower()
        if named in COMPRESSED and head and compression != named:
            found, right = "other data" if compression is None else f"{compression} data", compression or ""
            do = f"Name it {PurePath(file.path).stem}{right}" + ("" if right else " if it is plain; else copy it again")
            raise Refusal(self.name, found, f"{named} data", do)
        self.compressed = compression is not None
        self._stream, self._errors = _decompressor(compression, raw) if compression else (raw, (OSError,))

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; empty at the end. Raises ``Refusal`` where the compressed data is broken or cut."""
        try:
            return self._stream.read(size)
        except self._errors as error:
            raise Refusal(self.name, f"unreadable data ({error})", "a whole, undamaged file",
                          "Copy or download it again") from error  # fmt: skip

    def position(self) -> int:
        """Bytes of the file on disk that have been read."""
        try:
            return self._raw.tell()
        except OSError:
            return 0


def _decompressor(suffix: str, raw: IO[bytes]) -> tuple[Any, tuple[type[Exception], ...]]:
    """The stream of decompressed bytes, and what it raises for damaged or cut data."""
    if suffix == ".gz":
        import gzip
        import zlib

        return gzip.GzipFile(fileobj=raw, mode="rb"), (OSError, EOFError, zlib.error)
    if suffix == ".xz":
        import lzma

        return lzma.LZMAFile(raw), (OSError, EOFError, lzma.LZMAError)
    import pyarrow  # the zstandard package takes a cut file for a whole one

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), (OSError, ValueError)


@contextmanager
def open_plain(file: File) -> Iterator[Plain]:
    """The bytes of ``file``, decompressed. Raises ``Refusal`` where it cannot be opened."""
    if file.path == STANDARD_INPUT:
        if sys.stdin is None:
            raise Refusal("standard input", "a closed one", "text to read")
        yield Plain(file, sys.stdin.buffer)
        return
    try:
        raw = open(file.path, "rb")  # noqa: SIM115
    except OSError as error:
        raise Refusal(file.path, error.strerror or str(error), "a readable file") from error
    with raw:
        yield Plain(file, raw)


@contextmanager
def open_seekable(file: File) -> Iterator[IO[bytes]]:
    """``file`` for random access: itself, or its decompressed bytes in an unnamed temporary file."""
    with open_plain(file) as plain:
        if not plain.compressed and file.bytes_on_disk is not None:
            yield plain._raw
            return
        with tempfile.TemporaryFile() as copy:
            while data := plain.read(1 << 20):
                copy.write(data)
            copy.seek(0)
            yield copy

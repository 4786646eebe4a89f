"""A file becomes blocks that end where a document ends: nothing is held but one block of about 1 MB.

A block grows to the longest document where one document needs it, and no further: a longer text is parted there, a
longer JSON line passed over and counted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import IO, ClassVar, Literal

from latemask.errors import Refusal
from latemask.text.files import OF_FASTA, File, Format, Plain, open_plain, open_seekable

BLOCK_BYTES = 1 << 20
"""Usual size of a block."""
ESTIMATED_FILES, ESTIMATED_BLOCKS = 4, 8
"""How much of each kind of file is read to estimate how much text there is."""
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)[ \t\v\f]*(?>\r\n|\r|\n)")

_FASTA = re.compile(rb">[^\r\n]*(?>\r\n|\r|\n)[A-Za-z][A-Za-z*-]{19,}(?:[\r\n]|\Z)")
"""A header line, and one of 20 or more letters of a sequence."""


@dataclass(frozen=True)
class Reading:
    """How files are read: the same for ``latemask tokenizer`` and ``latemask prepare``."""

    has_flags: ClassVar[bool] = False
    """Whether the command has a flag for each field, so that errors may advise it."""
    text_field: str = "text"
    """Field of .jsonl, column of .parquet that holds the text."""
    source_field: str = "source"
    """Field or column that names a document's source, where there is one; losses are then also reported by source."""
    documents: Literal["blank-line", "line", "file"] = "blank-line"
    """What parts the documents of a .txt file: blank lines, every line end, or nothing (one file, one document)."""
    format: Format | None = None
    """Format of standard input and of files whose name does not tell."""
    invalid: Literal["refuse", "replace", "skip"] = "refuse"
    """What happens to invalid UTF-8, broken JSON and records without a text: stop, mend what can be, or leave out."""
    longest_document_mb: int = 32
    """Longest document in MB (2**20 bytes); memory per worker grows with it. A .txt document is parted there, a longer
    .jsonl line or .parquet value follows --invalid."""

    def __post_init__(self) -> None:
        if self.longest_document_mb < 1:
            raise Refusal("--longest-document-mb", str(self.longest_document_mb), "at least 1")
        for name, allowed in (
            ("documents", ("blank-line", "line", "file")),
            ("invalid", ("refuse", "replace", "skip")),
        ):
            if getattr(self, name) not in allowed:
                raise Refusal(f"--{name}", repr(getattr(self, name)), " or ".join(allowed))


@dataclass(frozen=True)
class ReadingFlags(Reading):
    """A ``Reading`` of a command that has its flags."""

    has_flags: ClassVar[bool] = True

    @classmethod
    def of(cls, reading: Reading | None) -> ReadingFlags:
        """The fields of ``reading`` alone, which may be a command's options."""
        return cls(**{item.name: getattr(reading or cls(), item.name) for item in fields(cls)})

    def given(self) -> list[str]:
        """These flags as a command line has them, where they are not their defaults."""
        given = [(item.name, getattr(self, item.name)) for item in fields(ReadingFlags)
                 if getattr(self, item.name) != item.default]  # fmt: skip
        return [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]


@dataclass(frozen=True)
class Block:
    """A piece of a file that ends where a document ends; picklable, so that another process can read it."""

    name: str
    format: Format
    data: bytes
    """Raw bytes of a text or .jsonl file; an Arrow stream with ``text`` and perhaps ``source`` for parquet."""
    offset: int
    """Byte of the plain (decompressed) file where ``data`` begins."""
    line: int
    """Number of the first line (or row), from 1."""
    position: int
    """Bytes of the file on disk read so far."""
    byte_order_mark: bool = False
    parted: bool = False
    overlong_bytes: int = 0
    """Length of a .jsonl line that was passed over because it exceeds the longest document."""


def blocks(file: File, reading: Reading) -> Iterator[Block]:
    """Cut ``file`` into blocks of about 1 MB between documents.

    Raises ``Refusal`` for what cannot be opened, damaged compression, UTF-16, FASTA as text, and a parquet file without
    the column.
    """
    if file.format == "parquet":
        with open_seekable(file) as stream:
            yield from _parquet_blocks(file, stream, reading)
    else:
        with open_plain(file) as plain:
            yield from _byte_blocks(file, plain, reading)


def _byte_blocks(file: File, plain: Plain, reading: Reading) -> Iterator[Block]:
    limit = reading.longest_document_mb << 20
    parts = "line" if file.format == "jsonl" else reading.documents
    data, ended, offset, line, marked = b"", False, 0, 1, False
    while True:
        wanted, cut = BLOCK_BYTES, 0
        while not cut:
            data, ended = _filled(plain, data, wanted)
            if offset == 0 and not marked:
                _check_encoding(plain.name, data)
                marked = data.startswith(b"\xef\xbb\xbf")
                data, offset = data[3 * marked :], 3 * marked
                if file.format == "text" and _FASTA.match(data):
                    raise Refusal(plain.name, "FASTA: header lines and sequences", "text", OF_FASTA)
            cut = len(data) if ended else _last_end(data, parts)
            if len(data) >= limit or ended:
                break
            wanted = min(2 * wanted, limit)
        if not data:
            return
        overlong = 0
        if not cut and file.format == "jsonl":
            while not cut and not ended:
                overlong += len(data) - data.endswith(b"\r")
                data, ended = _filled(plain, data[-1:] if data.endswith(b"\r") else b"", BLOCK_BYTES)
                cut = min((end + 1 for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0), default=0)
            cut = cut + (data[cut - 1 : cut + 1] == b"\r\n") if cut else len(data)
            overlong += cut
        parted = not cut
        cut = cut or _last_space(data)
        done = data[:cut]
        yield Block(plain.name, file.format, b"" if overlong else done, offset, line, plain.position(),
                    marked and offset == 3, parted, overlong)  # fmt: skip
        offset, line, data = offset + (overlong or cut), line + line_ends(done), data[cut:]


def _filled(plain: Plain, data: bytes, wanted: int) -> tuple[bytes, bool]:
    """``data`` lengthened to ``wanted`` bytes, and whether the file ended before."""
    pieces, size = [data], len(data)
    while size < wanted:
        more = plain.read(wanted - size)
        if not more:
            return b"".join(pieces), True
        pieces.append(more)
        size += len(more)
    return b"".join(pieces), False


def _last_end(data: bytes, parts: str) -> int:
    """Offset behind the last end of a document; 0: none. A ``\\r`` at the very end may be half of a line end."""
    stop = len(data) - data.endswith(b"\r")
    if parts == "line":
        return max(data.rfind(b"\n", 0, stop), data.rfind(b"\r", 0, stop)) + 1
    end = 0
    if parts == "blank-line":
        for match in _BLANK_LINE.finditer(data, 0, stop):
            end = match.end()
    return end


def _last_space(data: bytes) -> int:
    """Offset behind the last white space, or else in front of the last whole character."""
    cut = max(data.rfind(space) for space in (b" ", b"\n", b"\t", b"\r")) + 1
    if cut:
        return cut
    cut = len(data) - 1
    while cut > max(len(data) - 4, 1) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def line_ends(data: bytes) -> int:
    """How many lines end in ``data``, by any of the three kinds of line end."""
    return data.count(b"\n") + (data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else 0)


def _check_encoding(name: str, data: bytes) -> None:
    head = data[:4096]
    found = ""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        found = "UTF-32"
    elif head.startswith((b"\xff\xfe", b"\xfe\xff")):
        found = "UTF-16"
    elif len(head) >= 8:
        even, odd = (head[start::2].count(0) / len(head[start::2]) for start in (0, 1))
        if max(even, odd) > 0.4 and min(even, odd) < 0.1:
            found = "UTF-16 without a byte-order mark"
    if found:
        raise Refusal(name, found, "UTF-8", f"Convert it: iconv -f {found.split()[0]} -t UTF-8")


def _parquet_blocks(file: File, stream: IO[bytes], reading: Reading) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(stream, buffer_size=BLOCK_BYTES, pre_buffer=False)
        columns = table.schema_arrow.names
        if reading.text_field not in columns:
            raise Refusal(file.path, f"the columns {', '.join(columns)}", f"a column {reading.text_field}",
                          "Name the column with --text-field" if reading.has_flags else "")  # fmt: skip
        kind = table.schema_arrow.field(reading.text_field).type
        if isinstance(kind, pa.DictionaryType):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)
                or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):  # fmt: skip
            raise Refusal(f"{file.path}: column {reading.text_field}", f"values of type {kind}", "strings")
        wanted = [reading.text_field] + [reading.source_field] * (reading.source_field in columns)
        total = max(table.metadata.num_rows, 1)
        held = sum(table.metadata.row_group(i).total_byte_size for i in range(table.metadata.num_row_groups))
        rows = max(1, min(65_536, BLOCK_BYTES * total // max(held, 1)))
        line = 1
        for batch in table.iter_batches(batch_size=rows, columns=wanted, use_threads=False):
            values = {"text": batch.column(reading.text_field).cast(kind).cast(pa.large_binary())}
            if len(wanted) > 1:
                values["source"] = batch.column(reading.source_field).cast(pa.string())
            sent = pa.RecordBatch.from_pydict(values)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, sent.schema) as writer:
                writer.write_batch(sent)
            position = (file.bytes_on_disk or 0) * (line - 1 + len(sent)) // total
            yield Block(file.path, "parquet", sink.getvalue().to_pybytes(), 0, line, position)
            line += len(sent)
    except (pa.ArrowException, OSError) as error:
        raise Refusal(file.path, f"unreadable parquet ({error})", "a whole parquet file") from error


def estimated_text_bytes(files: Sequence[File], reading: Reading) -> list[int | None]:
    """About how many bytes of plain text each file holds, judged by the beginnings of a few of each kind.

    None where that cannot be known (standard input, pipes).
    """
    expansion: dict[str, list[float]] = {}
    sizes = [file.bytes_on_disk for file in files]
    kinds = [PurePath(file.path).suffix for file in files]
    for file, size, kind in zip(files, sizes, kinds, strict=True):
        known = expansion.setdefault(kind, [])
        if size and len(known) < ESTIMATED_FILES:
            plain = position = 0
            for block in itertools.islice(blocks(file, reading), ESTIMATED_BLOCKS):
                plain, position = plain + len(block.data) + block.overlong_bytes, block.position
            known.append(plain / max(position, 1))
    return [
        size if size is None else round(size * sum(expansion[kind]) / max(len(expansion[kind]), 1))
        for size, kind in zip(sizes, kinds, strict=True)
    ]

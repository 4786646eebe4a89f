"""Files become clean documents, block by block: nothing is held but one block, and every fault has a file and a line.

One treatment for all formats, in tokenizer training and in preparation alike:

* line ends: ``\\r\\n`` and ``\\r`` become ``\\n``, in text files and inside JSON and parquet values;
* byte-order marks (U+FEFF) and NUL (U+0000) carry no text: removed wherever they stand, and counted;
* invalid UTF-8, lone surrogates and records without a text (broken JSON, a missing, null or other-typed field, longer
  than the longest document) follow ``--invalid``: ``refuse`` stops at the first, naming the place; ``replace`` puts
  U+FFFD for what is no character and leaves records without a text out; ``skip`` leaves out every such document;
* UTF-16, UTF-32 and FASTA in a text file are refused by name;
* documents of white space alone are counted as empty;
* a text file's document longer than the longest document is parted at white space into successive documents.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from latemask.console import warn
from latemask.errors import Refusal, kind_of, unreadable
from latemask.text.blocks import Block, Reading, blocks, line_ends
from latemask.text.files import File

PLACES = 5
"""How many left-out documents are remembered by place."""

_PARTED = {"blank-line": re.compile(r"\n(?:[ \t\v\f]*\n)+"), "line": re.compile(r"\n"), "file": re.compile(r"(?!)")}
_PARTED_BYTES = {mode: re.compile(pattern.pattern.encode()) for mode, pattern in _PARTED.items()}
SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """A clean, non-empty text, the same as UTF-8, and its source's name (empty where none is given)."""

    text: str
    utf8: bytes
    source: str


@dataclass
class Counts:
    """What reading met. ``documents`` = ``handed_on`` + ``empty`` + ``left_out``."""

    documents: int = 0
    empty: int = 0
    left_out: int = 0
    left_out_bytes: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the documents handed on."""
    byte_order_marks: int = 0
    nuls: int = 0
    replaced_bytes: int = 0
    """Invalid UTF-8 that became U+FFFD."""
    replaced_surrogates: int = 0
    carriage_returns: int = 0
    parted: int = 0
    """Cuts through a document longer than the longest document."""
    places: list[str] = field(default_factory=list)
    """Where the first left-out documents stand, and why they were left out."""

    @property
    def handed_on(self) -> int:
        """Documents with text."""
        return self.documents - self.empty - self.left_out

    @property
    def repaired_bytes(self) -> int:
        """Bytes removed or replaced: byte-order marks, NUL, invalid UTF-8, lone surrogates (3 bytes each)."""
        return 3 * self.byte_order_marks + self.nuls + self.replaced_bytes + 3 * self.replaced_surrogates

    def add(self, other: Counts) -> None:
        """Add every count of ``other``."""
        for item in fields(Counts):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        del self.places[PLACES:]


def read_block(block: Block, reading: Reading) -> tuple[list[Document], Counts]:
    """The documents of ``block``, clean, and what was met. Raises ``Refusal`` as ``reading.invalid`` says."""
    reader = _Reader(block, reading)
    reader.counts.byte_order_marks += block.byte_order_mark
    reader.counts.parted += block.parted
    {"text": reader.text, "jsonl": reader.jsonl, "parquet": reader.parquet}[block.format]()
    return reader.documents, reader.counts


def read_documents(files: Iterable[File], reading: Reading) -> Iterator[Document]:
    """The documents of ``files``, clean, in order. Raises ``Refusal`` as ``read_block``."""
    for file in files:
        for block in blocks(file, reading):
            yield from read_block(block, reading)[0]


class _Reader:
    """Reads one block."""

    def __init__(self, block: Block, reading: Reading):
        self.block, self.reading = block, reading
        self.documents: list[Document] = []
        self.counts = Counts()

    def text(self) -> None:
        data, parted = self.block.data, _PARTED[self.reading.documents]
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            if self.reading.invalid == "refuse":
                line = self.block.line + line_ends(data[: error.start])
                raise self.refusal(line, self.invalid_byte(error, self.block.offset), "UTF-8") from error
            if self.reading.invalid == "skip":
                self.text_by_document()
                return
            text = self.replaced(data)
        for part in parted.split(self.normal(text)):
            if part := part.strip("\n"):
                self.counts.documents += 1
                self.take(part, "", 0)

    def text_by_document(self) -> None:
        """As ``text``, document by document, leaving out those with invalid UTF-8."""
        data = self.block.data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        start, line = 0, self.block.line
        ends = [match.span() for match in _PARTED_BYTES[self.reading.documents].finditer(data)]
        for stop, following in [*ends, (len(data), len(data))]:
            if raw := data[start:stop].strip(b"\n"):
                self.counts.documents += 1
                text = self.decoded(line, raw, 0)
                if text is not None:
                    self.take(self.normal(text), "", line)
            start, line = following, line + data.count(b"\n", start, following)

    def jsonl(self) -> None:
        size, offset = self.block.overlong_bytes, self.block.offset
        if size:
            self.counts.documents += 1
            self.leave_out(self.block.line, f"a line of {size:,} bytes", self.longest(), size)
        for line, raw in enumerate(self.block.data.splitlines(keepends=True), self.block.line):
            if raw.strip():
                self.counts.documents += 1
                self.json_record(line, raw, offset)
            offset += len(raw)

    def json_record(self, line: int, raw: bytes, offset: int) -> None:
        text, name = self.decoded(line, raw, offset), self.reading.text_field
        if text is None:
            return
        try:
            record = json.loads(self.normal(text, line_ends=False))
        except (ValueError, RecursionError) as error:
            self.leave_out(line, unreadable(error), "one JSON object a line", len(raw))
            return
        value = record.get(name) if isinstance(record, dict) else None
        if isinstance(value, str):
            source = record.get(self.reading.source_field)
            self.take(self.normal(value), source if isinstance(source, str) else "", line)
            return
        do = ""
        if not isinstance(record, dict):
            found = f"JSON that is {kind_of(record)}"
        elif name in record:
            found = f"{name} = {json.dumps(value)[:40]}"
        else:
            found, do = f"the fields {', '.join(record)}", self.other_field(record)
        self.leave_out(line, found, f"an object with a string in the field {name}", len(raw), do)

    def other_field(self, record: dict[str, Any]) -> str:
        """What to do where the first record of a file lacks the field: name the one with the longest text."""
        texts = {name: len(value) for name, value in record.items() if isinstance(value, str) and value.strip()}
        if not (texts and self.reading.has_flags and self.block.line == self.counts.documents == 1):
            return ""
        return f"Give --text-field {shlex.quote(max(texts, key=texts.__getitem__))}, where every file has it"

    def parquet(self) -> None:
        import pyarrow as pa

        batch = pa.ipc.open_stream(self.block.data).read_all().to_pydict()
        sources = batch.get("source") or [None] * len(batch["text"])
        for row, (raw, source) in enumerate(zip(batch["text"], sources, strict=True), self.block.line):
            self.counts.documents += 1
            if raw is None:
                self.leave_out(row, f"{self.reading.text_field} = null", "a string", 0)
            elif len(raw) > self.reading.longest_document_mb << 20:
                self.leave_out(row, f"a value of {len(raw):,} bytes", self.longest(), len(raw))
            elif (text := self.decoded(row, raw, 0)) is not None:
                self.take(self.normal(text), source or "", row)

    def take(self, text: str, source: str, line: int) -> None:
        """Hand a normal text on, unless it is empty or holds lone surrogates."""
        if not text or text.isspace():
            self.counts.empty += 1
            return
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:
            if self.reading.invalid != "replace":
                self.leave_out(line, "a lone surrogate", "whole characters", len(text.encode(errors="replace")))
                return
            text, count = SURROGATE.subn("\ufffd", text)
            self.counts.replaced_surrogates += count
            utf8 = text.encode()
        self.counts.text_bytes += len(utf8)
        self.documents.append(Document(text, utf8, source.encode(errors="replace").decode()))

    def normal(self, text: str, line_ends: bool = True) -> str:
        """``text`` without byte-order marks and NUL, its line ends ``\\n``."""
        if "\ufeff" in text:
            self.counts.byte_order_marks += text.count("\ufeff")
            text = text.replace("\ufeff", "")
        if "\0" in text:
            self.counts.nuls += text.count("\0")
            text = text.replace("\0", "")
        if line_ends and "\r" in text:
            self.counts.carriage_returns += text.count("\r")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text

    def decoded(self, line: int, raw: bytes, offset: int) -> str | None:
        """``raw`` as text; None where it was left out."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if self.reading.invalid == "replace":
                return self.replaced(raw)
            self.leave_out(line, self.invalid_byte(error, offset), "UTF-8", len(raw))
            return None

    def replaced(self, raw: bytes) -> str:
        self.counts.replaced_bytes += len(raw) - len(raw.decode(errors="ignore").encode())
        return raw.decode(errors="replace")

    def leave_out(self, line: int, found: str, wanted: str, size: int, do: str = "") -> None:
        """Count a document that cannot be used, or stop there, saying what to ``do``."""
        if self.reading.invalid == "refuse":
            raise self.refusal(line, found, wanted, do)
        self.counts.left_out += 1
        self.counts.left_out_bytes += size
        if len(self.counts.places) < PLACES:
            self.counts.places.append(f"{self.place(line)}: {found}")

    def refusal(self, line: int, found: str, wanted: str, do: str = "") -> Refusal:
        go_on = ", or go on with --invalid replace or --invalid skip" if self.reading.has_flags else ""
        return Refusal(self.place(line), found, wanted, do or f"Mend the file{go_on}")

    def place(self, line: int) -> str:
        return f"{self.block.name}:{'row ' if self.block.format == 'parquet' else ''}{line}"

    def longest(self) -> str:
        flag = " (--longest-document-mb)" if self.reading.has_flags else ""
        return f"at most {self.reading.longest_document_mb} MB{flag}"

    @staticmethod
    def invalid_byte(error: UnicodeDecodeError, offset: int = 0) -> str:
        return f"byte 0x{error.object[error.start]:02x} at byte {offset + error.start:,}, which is not UTF-8"


def refuse_without_text(counts: dict[str, Counts]) -> None:
    """Warn of each file without a document; raise ``Refusal`` where no file has one."""
    for path in without_text(counts):
        warn(f"{path}: {_nothing([counts[path]])}")


def without_text(counts: dict[str, Counts], flag: str = "") -> list[str]:
    """The files without a document. Raises ``Refusal`` where no file has one, naming the ``flag`` that gave them."""
    without = [path for path, met in counts.items() if not met.handed_on]
    if len(without) == len(counts):
        files, nothing = ", ".join(without[:5]) + (" ..." if len(without) > 5 else ""), _nothing(counts.values())
        raise Refusal(flag or files, f"{nothing} in {files}" if flag else nothing, "some text")
    return without


def _nothing(met: Collection[Counts]) -> str:
    empty, left_out = sum(one.empty for one in met), sum(one.left_out for one in met)
    first = next((f", the first: {one.places[0]}" for one in met if one.places), "")
    return f"no text ({empty:,} documents of white space, {left_out:,} left out as invalid{first})"

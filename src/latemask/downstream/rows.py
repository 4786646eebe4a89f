"""Tables of the user's, row by row: every physical row is either read or refused with its line and the reason.

``.tsv``: one row a line, quotes are text (GLUE's files). ``.csv``: RFC 4180, quoted fields may hold line ends.
``.jsonl``: one object a line. UTF-8; a byte-order mark and CRLF line ends are taken off.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latemask.errors import Refusal, kind_of, unreadable
from latemask.text.corpus import SURROGATE


@dataclass
class Table:
    """The named columns of a file: ``len(lines) + len(refused)`` is its number of physical rows without a header."""

    path: Path
    columns: dict[str, list[Any]]
    """Each named column, one value for each row that was read."""
    lines: list[int] = field(default_factory=list)
    """Line number of each row that was read."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """(line number, reason) of each row that was not."""

    @property
    def physical_rows(self) -> int:
        return len(self.lines) + len(self.refused)


def read_table(
    path: Path, columns: Sequence[str], header: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> Table:
    """The ``columns`` of a .tsv, .csv or .jsonl file; ``header`` names the columns of a .tsv without a first line.
    ``optional`` columns hold None where a file or row lacks them.

    Raises ``Refusal`` where there is no such file, column or readable row, two columns of that name, or another form.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Refusal(path, error.strerror or "an unreadable file", "a .tsv, .csv or .jsonl file") from None
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Refusal(path, "UTF-16, by its byte-order mark", "UTF-8", "Convert it: iconv -f UTF-16 -t UTF-8")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    match path.suffix.lower():
        case ".tsv":
            rows = _tab_separated(raw, path, header)
        case ".csv":
            rows = _comma_separated(raw, path)
        case ".jsonl":
            rows = _json_lines(raw)
        case suffix:
            raise Refusal(path, f"a file named {suffix or 'without an ending'}", ".tsv, .csv or .jsonl")
    if header is None:
        _refuse_other_separators(raw, path, columns)
    optional = [name for name in optional if name not in columns]
    table = Table(path, {name: [] for name in (*columns, *optional)})
    seen: dict[str, None] = {}
    for line, row in rows:
        if isinstance(row, list):  # the header
            found = ", ".join(name if name.isprintable() and name == name.strip() else repr(name) for name in row)
            for name in (*columns, *optional):
                if row.count(name) > 1 or (name not in row and name in columns):
                    raise Refusal(f"{path}:{line}", f"columns {found}", f"one column {name!r}")
        elif isinstance(row, str):
            table.refused.append((line, row))
        elif missing := [name for name in columns if row.get(name) is None]:
            seen |= dict.fromkeys(row)
            table.refused.append((line, f"no {missing[0]!r}"))
        elif torn := [name for name in columns if _has_half_characters(row[name])]:
            table.refused.append((line, f"a lone surrogate in {torn[0]!r}"))
        else:
            table.lines.append(line)
            for name in columns:
                table.columns[name].append(row[name])
            for name in optional:
                table.columns[name].append(row.get(name))
    if not table.lines:
        found = f"no row with {', '.join(columns)}; {len(table.refused)} refused"
        if table.refused:
            found += f", the first ({path.name}:{table.refused[0][0]}) for: {table.refused[0][1]}"
        raise Refusal(path, found + (f"; columns found: {', '.join(seen)}" if seen else ""), "at least one row")
    return table


SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
OF_SUFFIX = {".csv": ",", ".tsv": "\t"}


def _refuse_other_separators(raw: bytes, path: Path, columns: Sequence[str]) -> None:
    """Raise ``Refusal`` where the first line is one column by the file's own separator, and by another one names some
    of ``columns``."""
    own = OF_SUFFIX.get(path.suffix.lower())
    first = raw.partition(b"\n")[0].decode(errors="replace")
    if own is None or own in first:
        return
    for separator, called in SEPARATORS.items():
        names = [name.strip().strip('"') for name in first.split(separator)]
        if len(names) > 1 and not set(names).isdisjoint(columns):
            wanted = " or ".join(f"{SEPARATORS[known]} in {suffix}" for suffix, known in OF_SUFFIX.items())
            raise Refusal(f"{path}:1", f"columns parted by {called}", wanted, "Write it so, or make .jsonl of it")


def _has_half_characters(value: Any) -> bool:
    """Whether a text, or one in a list, holds a lone surrogate, which JSON's escapes can write: no UTF-8 has it."""
    if isinstance(value, list):
        return any(map(_has_half_characters, value))
    return isinstance(value, str) and not value.isascii() and bool(SURROGATE.search(value))


Row = tuple[int, list[str] | dict[str, Any] | str]
"""Line number, and the header's names, a row's values by name, or why the row is refused."""


def _tab_separated(raw: bytes, path: Path, header: Sequence[str] | None) -> Iterator[Row]:
    names = list(header) if header else None
    for line, text in _lines(raw):
        if isinstance(text, UnicodeDecodeError):
            if names is None:
                raise Refusal(f"{path}:{line}", f"names of columns that are not UTF-8 (byte {text.start})", "UTF-8")
            yield line, f"not UTF-8 (byte {text.start} of the line)"
            continue
        fields = text.split("\t")
        if names is None:
            names = fields
            yield line, names
        elif not text:
            yield line, "an empty line"
        elif len(fields) != len(names):
            yield line, f"{len(fields)} columns instead of {len(names)}"
        else:
            yield line, dict(zip(names, fields, strict=True))


def _json_lines(raw: bytes) -> Iterator[Row]:
    for line, text in _lines(raw):
        if isinstance(text, UnicodeDecodeError):
            yield line, f"not UTF-8 (byte {text.start} of the line)"
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: a number of too many digits, too
            yield line, unreadable(error) if text.strip() else "an empty line"
            continue
        yield line, row if isinstance(row, dict) else f"{kind_of(row)}, not an object"


def _comma_separated(raw: bytes, path: Path) -> Iterator[Row]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Refusal(f"{path}:{line}", "bytes that are not UTF-8", "UTF-8") from None
    names: list[str] | None = None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise Refusal(f"{path}:{line}", f"a row that begins here and breaks the form ({error})",
                          "quotes closed and doubled, as CSV has them") from None  # fmt: skip
        if names is None:
            names = fields
            yield line, names
        elif not fields:
            yield line, "an empty line"
        elif len(fields) != len(names):
            yield line, f"{len(fields)} columns instead of {len(names)}"
        else:
            yield line, dict(zip(names, fields, strict=True))


def _lines(raw: bytes) -> Iterator[tuple[int, str | UnicodeDecodeError]]:
    """Physical lines: parted by LF alone (other line separators are text), an LF at the end begins no new one."""
    pieces = raw.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    for number, piece in enumerate(pieces, 1):
        try:
            yield number, piece.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            yield number, error

"""A table and a drawing: plain data that can be written as HTML and as Markdown."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote

Value = str | int | float | None

MOST_COLUMNS = 8
"""A crossed table with more columns than this is turned, where that makes it narrower."""


@dataclass(frozen=True)
class Table:
    """Rows under columns; ``note`` says how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """As GitHub's Markdown; columns of numbers stand to the right."""
        head = [tuple(map(marked_down, self.columns)), tuple("---:" if right else "---" for right in self._numeric)]
        body = [tuple(marked_down(shown(value)) for value in row) for row in self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in ([*head, *body] if self.rows else [])]
        parts = (f"## {marked_down(self.title)}", "\n".join(lines), marked_down(self.note))
        return "\n\n".join(part for part in parts if part) + "\n"

    def html(self, section: str) -> str:
        """As a section of this id with a ``<table>``."""

        def row(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(
                f'<{tag}{" class=number" if right else ""}>{_breakable(cell)}</{tag}>'
                for cell, right in zip(cells, self._numeric, strict=True)
            ) + "</tr>"  # fmt: skip

        rows = "\n".join(row("td", list(map(shown, cells))) for cells in self.rows)
        head = f"<thead>{row('th', self.columns)}</thead>"
        table = f"<div class=wide><table>{head}<tbody>\n{rows}\n</tbody></table></div>" if self.rows else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<section id={section}><h2>{html.escape(self.title)}</h2>{table}{note}</section>"

    @cached_property
    def _numeric(self) -> list[bool]:
        return [all(not isinstance(row[place], str) for row in self.rows) for place in range(len(self.columns))]


@dataclass(frozen=True)
class Drawing:
    """A figure: ``name`` goes into file names, ``svg`` is an ``<svg>`` element."""

    name: str
    title: str
    svg: str
    note: str = ""

    def html(self) -> str:
        """As a ``<figure>``; the drawing's ids get its name in front, for there are other drawings on a page."""
        inside = re.sub(r"<[^>]*>", lambda tag: _apart(tag[0], self.name), self.svg)
        labelled = inside.replace("<svg", f'<svg role="img" aria-label="{html.escape(self.title)}"', 1)
        note = f" {html.escape(self.note)}" if self.note else ""
        return f"<figure>{labelled}<figcaption><b>{html.escape(self.title)}.</b>{note}</figcaption></figure>"

    def markdown(self, file: str) -> str:
        """As a link to the ``file`` that holds the drawing."""
        note = f"\n\n{marked_down(self.note)}" if self.note else ""
        return f"![{marked_down(self.title)}]({quote(file)}){note}\n"


def crossed(
    title: str,
    corner: tuple[str, str],
    down: Sequence[str],
    across: Sequence[str],
    cell: Callable[[int, int], Value],
    note: str = "",
) -> Table:
    """The table of ``cell(row, column)``; ``corner`` says what runs down and what runs across. Turned where it would be
    wide and is less so the other way."""
    if len(across) > max(len(down), MOST_COLUMNS):
        return crossed(title, (corner[1], corner[0]), across, down, lambda row, column: cell(column, row), note)
    rows = tuple((name, *(cell(row, column) for column in range(len(across)))) for row, name in enumerate(down))
    return Table(title, (corner[0], *across), rows, note)


def shown(value: Value) -> str:
    """A cell's text: whole numbers with thousands separators, others with four digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def marked_down(text: str) -> str:
    """``text`` as Markdown that shows it as it is, on one line."""
    escaped = re.sub(r"([\\`*|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _breakable(text: str) -> str:
    """``text`` as HTML that may go on in a new line where a part of a long name ends, never inside a number."""
    return "<wbr>".join(map(html.escape, re.split(r"(?<=[_=])(?=\w)|(?<=[,.+])(?=[a-z])|(?<=/)(?=\w\w)", text)))


def anchor(title: str) -> str:
    """A title as an id or a part of a file's name; of other scripts than Latin nothing remains."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def distinct(names: Sequence[str]) -> list[str]:
    """``names``, those that come again with a number."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        found.append(next(one for one in numbered if one not in {*names, *found}) if name in found else name)
    return found


def _apart(tag: str, name: str) -> str:
    tag = re.sub(r'\b(id="|xlink:href="#|href="#)', lambda found: found[1] + name + "-", tag)
    tag = tag.replace("url(#", f"url(#{name}-")
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag)

"""Tables from journals: runs side by side, the settings that differ, validation by source. Plain data, never torch."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from latemask.errors import Refusal
from latemask.training import journal

Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under columns; ``note`` says how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """As GitHub's Markdown; columns of numbers stand to the right."""
        head = [self.columns, tuple("---:" if right else "---" for right in self._numeric)]
        cells = [*head, *(tuple(map(shown, row)) for row in self.rows)] if self.rows else []
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        return "\n\n".join(part for part in (f"## {self.title}", "\n".join(lines), self.note) if part) + "\n"

    def html(self) -> str:
        """As a section with a ``<table>``."""

        def row(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(
                f'<{tag}{" class=number" if right else ""}>{html.escape(cell)}</{tag}>'
                for cell, right in zip(cells, self._numeric, strict=True)
            ) + "</tr>"  # fmt: skip

        rows = "\n".join(row("td", list(map(shown, cells))) for cells in self.rows)
        head = f"<thead>{row('th', self.columns)}</thead>"
        table = f"<div class=wide><table>{head}<tbody>\n{rows}\n</tbody></table></div>" if self.rows else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<section><h2>{html.escape(self.title)}</h2>{table}{note}</section>"

    @property
    def _numeric(self) -> list[bool]:
        return [all(not isinstance(row[place], str) for row in self.rows) for place in range(len(self.columns))]


def shown(value: Value) -> str:
    """A cell's text: whole numbers with thousands separators, others with four digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class RunJournal:
    """The journal of one run folder."""

    name: str
    lines: list[dict[str, Any]]

    def last(self, kind: str) -> dict[str, Any]:
        """The last line of a kind; empty where there is none."""
        return next((line for line in reversed(self.lines) if line["kind"] == kind), {})

    @cached_property
    def start(self) -> dict[str, Any]:
        """Settings and facts of the run's beginning."""
        return next(line for line in self.lines if line["kind"] == "start")

    @cached_property
    def settings(self) -> dict[str, Value]:
        """Every field of the run by its dotted name, as text."""
        return {name: _setting(value) for name, value in _dotted(self.start["run"])}

    @property
    def training(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "train"]


def read_journals(folders: Sequence[Path | str]) -> list[RunJournal]:
    """The journals of run folders, named after them. Raises ``Refusal`` for a folder without one."""
    paths = [Path(folder) for folder in folders]
    ends = [path.resolve().name for path in paths]
    found = []
    for path, end in zip(paths, ends, strict=True):
        file = path / "journal.jsonl"
        if not file.is_file():
            raise Refusal(path, "no journal.jsonl", "a run folder of `latemask pretrain`")
        run = RunJournal(end if ends.count(end) == 1 else str(path), journal.read(file))
        if not any(line["kind"] == "start" for line in run.lines):
            raise Refusal(file, "no line of kind start", "the journal of a run")
        found.append(run)
    return found


def runs_table(runs: Sequence[RunJournal]) -> Table:
    """One row a run: what it was, where it stands, how fast it went."""
    columns = ("run", "recipe", "masked", "steps", "million tokens", "seconds", "validation loss", "validated at",
               "tokens/s", "MFU", "MFLOP/token", "million parameters kept", "card")  # fmt: skip
    rows = []
    for run in runs:
        facts, last, valid = run.start, run.last("train"), run.last("validation")
        speeds = [line["tokens_per_second"] for line in run.training]
        utilisations = [line["mfu"] for line in run.training if line["mfu"] is not None]
        rows.append((
            run.name, facts["run"]["recipe"], f"{facts['run']['masking']['rate']:.0%}", last.get("step", 0),
            last.get("tokens", 0) / 1e6, float(last.get("seconds", 0.0)), valid.get("loss"),
            f"{valid['rate']:.0%}" if valid else None, float(statistics.median(speeds)) if speeds else None,
            statistics.median(utilisations) if utilisations else None, facts["plain_flops_per_token"] / 1e6,
            facts["encoder_parameters"] / 1e6,
            f"{facts['world']} x {facts['card']}" if facts["world"] > 1 else facts["card"],
        ))  # fmt: skip
    note = "Loss: nats per masked token on held-out text. Speed and MFU: medians over the journal's lines."
    if len({run.last("validation").get("rate") for run in runs}) > 1:
        note += " These runs were validated at different masking rates, so their losses do not compare."
    return Table("Runs", columns, tuple(rows), note)


def settings_table(runs: Sequence[RunJournal]) -> Table:
    """The fields that are not the same in all runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [(name, *(run.settings.get(name) for run in runs)) for name in names]
    differing = tuple(row for row in rows if len(set(row[1:])) > 1)
    note = "" if differing else "None: these runs have the same settings."
    return Table("Settings that differ", ("field", *(run.name for run in runs)), differing, note)


def sources_table(runs: Sequence[RunJournal]) -> Table:
    """Last validation loss by source of the text."""
    losses = [run.last("validation").get("by_source", {}) for run in runs]
    names = sorted({name for by_source in losses for name in by_source})
    rows = tuple((name, *(by_source.get(name) for by_source in losses)) for name in names)
    note = "Nats per masked token at the last validation." if rows else "The text names no sources."
    return Table("Validation by source", ("source", *(run.name for run in runs)), rows, note)


def events_table(runs: Sequence[RunJournal]) -> Table:
    """Resumes, skipped updates and ends."""
    rows = []
    for run in runs:
        kinds = [line["kind"] for line in run.lines]
        ended = run.last("end")
        rows.append((run.name, kinds.count("resume"), kinds.count("skip"), kinds.count("save"),
                     ended.get("reason", "not ended")))  # fmt: skip
    return Table("What happened", ("run", "resumes", "skipped updates", "saves", "end"), tuple(rows))


def tables(runs: Sequence[RunJournal]) -> list[Table]:
    """All of a report's tables."""
    return [runs_table(runs), settings_table(runs), sources_table(runs), events_table(runs)]


def _dotted(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += _dotted(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def _setting(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

"""``latemask report``: runs side by side on one self-contained HTML page, and the same as Markdown with its figures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from latemask import console
from latemask.errors import Refusal
from latemask.report.tables import RunJournal, Table, read_journals, tables
from latemask.writing import write_whole

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #111; }
.number { text-align: right; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; max-width: 100%; }
figure svg { max-width: 100%; height: auto; }
p { color: #444; }
@media print { body { margin: 0; max-width: none; font-size: 10px; } .wide { overflow: visible; }
               section, figure { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class ReportOptions:
    """Put runs side by side: one HTML page that needs nothing else, and the same as Markdown beside it."""

    runs: tuple[str, ...]
    """Run folders."""
    out: Path = Path("report.html")
    """The page; the Markdown and its figures get the same name with other endings."""
    title: str = "Pretraining runs"
    """Heading of the page."""


def run_report(options: ReportOptions) -> None:
    """What ``latemask report`` does: read journals, write page, Markdown and figures."""
    if not options.runs:
        raise Refusal("report", "no run folder", "one or more, such as runs/*")
    runs = read_journals(options.runs)
    for path in write_report(runs, options.out, options.title):
        console.say(f"wrote {path}")


def write_report(runs: Sequence[RunJournal], out: Path, title: str) -> list[Path]:
    """Write ``out`` (HTML), ``out`` as .md, and a figure for each axis as .svg; returns the paths."""
    out = out if out.suffix else out.with_suffix(".html")
    found, figures = tables(runs), loss_figures(runs)
    written = [write_whole(out, html_page(title, found, list(figures.values())))]
    links = []
    for name, figure in figures.items():
        path = write_whole(out.with_suffix(f".{name}.svg"), figure)
        links.append(f"![loss against {name}]({path.name})")
        written.append(path)
    text = "\n".join([f"# {title}", "", found[0].markdown(), *links, "", *(table.markdown() for table in found[1:])])
    return [*written, write_whole(out.with_suffix(".md"), text)]


def loss_figures(runs: Sequence[RunJournal]) -> dict[str, str]:
    """Loss against steps, seconds and FLOPs, as ``<svg>`` elements."""
    from latemask.report import plots

    journals = {run.name: run.lines for run in runs}
    return {against: plots.svg(plots.losses(journals, against)) for against in get_args(plots.Against)}


def html_page(title: str, found: Sequence[Table], figures: Sequence[str]) -> str:
    """The whole page; figures stand behind the first table."""
    drawn = "\n".join(f"<figure>{figure}</figure>" for figure in figures)
    parts = [found[0].html(), f"<section class=figures>{drawn}</section>", *(table.html() for table in found[1:])]
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
            + "\n".join(parts) + "\n</body></html>\n")  # fmt: skip

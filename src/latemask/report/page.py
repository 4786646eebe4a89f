"""``latemask report``: runs side by side on one self-contained HTML page, and the same as Markdown with its figures."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from latemask import console
from latemask.errors import Refusal
from latemask.report.folders import RunFolder, left_out_of, read_folders
from latemask.report.price import Cost
from latemask.report.tables import Drawing, Table, anchor, distinct, marked_down
from latemask.writing import write_whole

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 80rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; overflow-wrap: anywhere; }
nav { columns: 15rem; font-size: .9rem; } nav a { display: block; color: #0055aa; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid #ddd; overflow-wrap: break-word; }
th { border-bottom: 2px solid #111; vertical-align: bottom; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff; padding-left: 0; }
.number { text-align: right; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5rem; margin-top: 2rem; }
figure { margin: 0; max-width: 100%; width: 34rem; }
figure svg { max-width: 100%; height: auto; }
p, figcaption { color: #444; max-width: 60rem; } figcaption { font-size: .85rem; }
@page { size: A4 landscape; margin: 12mm; }
@media print { body { margin: 0; padding: 0; max-width: none; font-size: 10px; } nav { display: none; }
               .wide { overflow: visible; } figure { width: 8.6cm; } figure, tr { break-inside: avoid; }
               thead { display: table-header-group; } h2 { break-after: avoid; }
               th, td { overflow-wrap: anywhere; padding: .15rem .3rem; font-size: 8px; }
               th:first-child, td:first-child { position: static; } }
"""

Part = Table | Drawing


@dataclass(frozen=True)
class ReportOptions:
    """Put runs side by side: one HTML page that needs nothing else, and the same as Markdown beside it.

    Shows what there is: journals, and the JSON of rank, theory, finetune and evaluate in the run folders. What is
    damaged is left out, which the page says first, and the exit status (1).
    """

    runs: tuple[str, ...]
    """Run folders; a folder of run folders, such as a sweep's; folders or JSON files of results of other models."""
    out: Path = Path("report.html")
    """The page; the Markdown and its figures get the same name with other endings."""
    title: str | None = None
    """Heading of the page; by default Pretraining runs, of a sweep's runs its recipe and fields."""
    cost: Cost = "seconds"
    """What quality stands beside: FLOPs where runs shared their cards or had different ones."""


def run_report(options: ReportOptions) -> int:
    """What ``latemask report`` does: read folders, write page, Markdown and figures. Returns 0, or 1 where something
    damaged was left out."""
    if not options.runs:
        raise Refusal("report", "no run folder", "one or more, such as runs/*")
    out = options.out if options.out.suffix else options.out.with_suffix(".html")
    if out.suffix not in (".html", ".htm") or out.is_dir() or options.out.is_dir():
        raise Refusal("--out", str(options.out), "the name of an .html file")
    folders = read_folders(options.runs)
    for path in write_report(folders, out, options.title or title_of(folders), options.cost):
        console.say(f"wrote {path}")
    return 1 if left_out_of(folders) else 0


def title_of(folders: Sequence[RunFolder]) -> str:
    """What a page of these is called where nobody says."""
    runs = [run for run in folders if run.lines]
    swept = {(run.fields.get("recipe"), run.varied) for run in runs}
    if len(runs) > 1 and len(swept) == 1:
        [(recipe, fields)] = swept
        if fields:
            return f"Sweep of {recipe} over {' and '.join(fields)}"
    return "Pretraining runs"


def write_report(folders: Sequence[RunFolder], out: Path, title: str, cost: Cost = "seconds") -> list[Path]:
    """Write ``out`` (HTML), ``out`` as .md, and each figure as .svg; returns the paths."""
    from latemask.report.runs import no_more_than_frequencies

    lead = no_more_than_frequencies([folder for folder in folders if folder.lines])
    found = list(parts(folders, cost))
    files = iter(distinct([part.name for part in found if isinstance(part, Drawing)]))
    found = [replace(part, name=next(files)) if isinstance(part, Drawing) else part for part in found]
    written = [write_whole(out, html_page(title, found, lead))]
    text = [f"# {marked_down(title)}", "", *([f"{marked_down(lead)}\n"] if lead else [])]
    for part in found:
        if isinstance(part, Table):
            text.append(part.markdown())
        else:
            path = write_whole(out.with_suffix(f".{part.name}.svg"), part.svg)
            written.append(path)
            text.append(part.markdown(path.name))
    return [*written, write_whole(out.with_suffix(".md"), "\n".join(text))]


def parts(folders: Sequence[RunFolder], cost: Cost = "seconds") -> Iterator[Part]:
    """Everything that the folders hold, in the order of the page; quality beside what ``cost`` says."""
    from latemask.report import (
        costs,
        curves,
        downstream,
        evaluations,
        front,
        one_seed,
        rank,
        rank_by_layer,
        runs,
        seeds,
        systems,
        theory,
        time_to_quality,
        trend,
        tuning,
    )
    from latemask.report.material import Material

    material = Material.of(folders, cost)
    folders, journals = material.folders, material.runs
    if left_out := left_out_of(folders):
        rows = tuple((problem.where, problem.found, problem.wanted) for problem in left_out)
        yield Table("Left out", ("file", "found", "wanted"), rows, "Damaged: nothing of these is on this page.")
    yield from filter(None, [systems.repeats_table(material.systems, folders)])
    tables: list[Table | None] = []
    if journals:
        yield runs.runs_table(journals)
        yield from curves.loss_drawings(journals)
        if len(journals) > 1:
            yield runs.settings_table(journals)
        tables = [runs.sources_table(journals), runs.events_table(journals)]
    yield from filter(None, tables)
    found = trend.sweeps(journals)
    for fields, members in found:
        where = f" in {members[0].path.parent.name}" if len(found) > 1 else ""
        yield trend.trend_table(material, fields, members, where)
        yield from trend.trend_drawings(material, fields, members, where)
    yield from tuning.tuning_tables(material, [run.name for _, members in found for run in members])
    yield from seeds.seeds_tables(material)
    yield from filter(None, [one_seed.one_seed_table(material)])
    yield from filter(None, [front.cost_table(material)])
    yield from front.front_drawings(material)
    yield from filter(None, [time_to_quality.time_table(material)])
    yield from filter(None, [downstream.glue_table(material.entries)])
    yield from curves.checkpoint_drawings(material.entries)
    yield from filter(None, [downstream.tasks_table(material.entries), evaluations.finetuned_table(folders),
                             evaluations.pairs_table(folders), evaluations.masked_loss_table(folders),
                             evaluations.similarity_table(folders)])  # fmt: skip
    yield from filter(None, [rank.rank_table(material.ranks), rank.masked_table(material.ranks)])
    yield from rank_by_layer.rank_drawings(material.ranks_over_seeds)
    yield from rank_by_layer.layer_tables(material.ranks_over_seeds)
    yield from theory.theory_parts(material.theories)
    yield from filter(None, [costs.costs_table(journals)])


def html_page(title: str, found: Sequence[Part], lead: str = "") -> str:
    """The whole page, in the order of ``found``; drawings that follow each other stand side by side. ``lead``: a first
    paragraph."""
    titles = [part.title for part in found if isinstance(part, Table)]
    sections = dict(zip(distinct(list(map(anchor, titles))), titles, strict=True))
    ids = iter(sections)
    body, row = [f"<p>{html.escape(lead)}</p>"] if lead else [], []
    for part in found:
        if isinstance(part, Drawing):
            row.append(part.html())
            continue
        if row:
            body.append(_side_by_side(row))
            row = []
        body.append(part.html(next(ids)))
    body += [_side_by_side(row)] if row else []
    links = "".join(f"<a href=#{section}>{html.escape(name)}</a>" for section, name in sections.items())
    nav = f"<nav>{links}</nav>" if len(sections) > 2 else ""
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
            + nav + "\n".join(body) + "\n</body></html>\n")  # fmt: skip


def _side_by_side(drawn: Sequence[str]) -> str:
    return "<section class=figures>" + "\n".join(drawn) + "</section>"

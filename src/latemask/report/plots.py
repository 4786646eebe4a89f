"""Figures from plain numbers: journals, studies and tables as JSON has them. Never torch.

A series is told apart thrice, by colour (Okabe and Ito's, which colour-blind people can tell apart), by dash and by
marker, so that a figure also reads in grey print. Text stays text in the SVG.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from latemask.report.flops import plain_flops
from latemask.writing import write_whole

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C8C00")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "latemask",
}
SIZE_INCHES = (5.4, 3.4)
MOST_INSIDE, LONGEST_INSIDE, LONGEST = 4, 24, 56
"""A legend with more names than this, or longer ones, stands below; the middle of a name longer still is left out."""
INCHES_PER_CHARACTER, INCHES_PER_LINE = 0.075, 0.18

Point = tuple[float, float]
Against = Literal["step", "seconds", "flops"]
AXIS = {"step": "steps", "seconds": "seconds of training", "flops": "FLOPs (plain objective)"}


def lines(
    series: Mapping[str, Sequence[Point]], across: str, up: str, title: str = "", *, log_x: bool = False
) -> Figure:
    """One line for each named series of (x, y) points, in the order given."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
        drawn = [_draw(axes, number, points) for number, points in enumerate(series.values())]
        axes.set(xlabel=across, ylabel=up, title=title)
        if log_x:
            axes.set_xscale("log")
        if len(series) > 1:
            _legend(figure, axes, drawn, list(series))
    return figure


def _draw(axes: Axes, number: int, points: Sequence[Point]) -> Line2D:
    """A series in looks of its own: of 64 in a row no two are alike."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    again = number // len(COLOURS)
    [line] = axes.plot(
        xs,
        ys,
        color=COLOURS[number % len(COLOURS)],
        linestyle=DASHES[(number + again) % len(DASHES)],
        marker=MARKERS[(number + again) % len(MARKERS)],
        markevery=max(1, len(points) // 12),
    )
    return line


def _legend(figure: Figure, axes: Axes, drawn: Sequence[Line2D], names: Sequence[str]) -> None:
    """Names as they are ("$" and "_" mean nothing); many or long ones in columns below the axes."""
    short = [_shortened(name) for name in names]
    longest = max(map(len, short))
    blank = ["."] * len(names)
    if len(names) <= MOST_INSIDE and longest <= LONGEST_INSIDE:
        legend = axes.legend(drawn, blank)
    else:
        columns = max(1, int(SIZE_INCHES[0] / ((longest + 6) * INCHES_PER_CHARACTER)))
        figure.set_figheight(SIZE_INCHES[1] + INCHES_PER_LINE * -(-len(names) // columns))
        legend = figure.legend(drawn, blank, loc="outside lower left", ncols=columns, fontsize=8)
    for text, name in zip(legend.get_texts(), short, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[1 - LONGEST // 2 :]}"


def losses(journals: Mapping[str, Sequence[Mapping[str, Any]]], against: Against = "step") -> Figure:
    """Validation loss of each run (where it validated once or never: training loss, and its name says so), from the
    lines of its journal."""
    series, kinds = {}, set()
    for name, journal in journals.items():
        kind = _kind_of_loss(journal)
        kinds.add(kind)
        series[name if kind == "validation" else f"{name} (training)"] = loss_points(journal, against)
    up = "loss" if len(kinds) > 1 else f"{kinds.pop()} loss" if kinds else "loss"
    if up == "train loss":
        series, up = dict(zip(journals, series.values(), strict=True)), "training loss"
    figure = lines(series, AXIS[against], f"{up}, nats per masked token")
    if against == "flops":
        figure.axes[0].set_xlim(left=0)
    return figure


def level(figure: Figure, height: float, label: str) -> None:
    """A level for comparison, thin and dashed; its name stands at the right of the axes, where no curve is."""
    with plt.rc_context(STYLE):
        axes = figure.axes[0]
        axes.axhline(height, color="#555555", linewidth=0.8, linestyle=(0, (6, 4)))
        axes.annotate(label, (1, height), xytext=(4, 0), textcoords="offset points", color="#555555", va="center",
                      xycoords=("axes fraction", "data"), fontsize=8, annotation_clip=False)  # fmt: skip


def _kind_of_loss(journal: Sequence[Mapping[str, Any]]) -> str:
    kinds = [line["kind"] for line in journal]
    return "validation" if kinds.count("validation") > 1 or "train" not in kinds else "train"


def loss_points(journal: Sequence[Mapping[str, Any]], against: Against) -> list[Point]:
    """(step, seconds or FLOPs; loss) of a journal; a loss that is not finite is left out. Points stand at the
    tokens of their step, and where a line does not say its seconds, at those of the training line before."""
    kind, tokens, seconds = _kind_of_loss(journal), 0.0, 0.0
    tokens_per_step, flops, points = None, plain_flops({}), []
    for line in journal:
        if line["kind"] == "start":
            flops = plain_flops(line)
            tokens_per_step = _tokens_per_step(line.get("run", {}))
        if line["kind"] == "train":
            tokens, seconds = line["tokens"], line["seconds"]
        if line["kind"] == kind and line["loss"] is not None:
            done = line["step"] * tokens_per_step if tokens_per_step else tokens
            across = {"step": line["step"], "seconds": line.get("seconds", seconds), "flops": flops(done)}
            points.append((across[against], line["loss"]))
    return points


def _tokens_per_step(run: Mapping[str, Any]) -> int | None:
    rows, row_tokens = run.get("training", {}).get("batch_rows"), run.get("shape", {}).get("row_tokens")
    return None if rows is None or row_tokens is None else rows * row_tokens


RANK_NAMES = {
    "masked_input": "input with [MASK]",
    "masked_input_real": "its real tokens",
    "clean_input": "input without [MASK]",
}


def rank_by_layer(studies: Sequence[Mapping[str, Any]]) -> Figure:
    """MAE-LM Figure 1(a): effective rank at each layer, from the JSON of ``latemask rank``."""
    series = {
        _named(study, label, studies): _ranks(study, key)
        for study in studies
        for key, label in RANK_NAMES.items()
        if _ranks(study, key)
    }
    return _by_layer(series, studies)


def mask_rank_by_layer(studies: Sequence[Mapping[str, Any]]) -> Figure:
    """MAE-LM Figure 1(b): effective rank of the [MASK] representations at each layer."""
    return _by_layer({_named(study, "[MASK]", studies): _ranks(study, "masks") for study in studies
                      if _ranks(study, "masks")}, studies)  # fmt: skip


def ranks_of_set(studies: Sequence[Mapping[str, Any]], key: str) -> Figure:
    """Effective rank at each layer of one set of vectors (a key of ``RANK_NAMES``): a line for each study that has it;
    the studies have a ``name``."""
    return _by_layer({study["name"]: _ranks(study, key) for study in studies if _ranks(study, key)}, studies)


def outside_energy_by_layer(theories: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of the [MASK] representations' energy outside the leading directions of the real ones, from the JSON of
    ``latemask theory``; for the real ones themselves it is 1 - tau by construction."""
    series = {
        _named(theory, "[MASK]", theories): [(layer["layer"], layer["masks_outside"]) for layer in theory["layers"]
                                             if layer["masks_outside"] is not None]
        for theory in theories
    }  # fmt: skip
    figure = lines(series, "layer", "share of energy outside")
    with plt.rc_context(STYLE):
        axes = figure.axes[0]
        level = 1 - theories[0]["tau"]
        axes.axhline(level, color="#555555", linewidth=0.8)
        axes.annotate("real tokens", (0, level), xytext=(2, 3), textcoords="offset points", color="#555555")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def trend(
    points: Mapping[str, Sequence[Point]], varied: str, measured: str, categories: Sequence[str] | None = None
) -> Figure:
    """How a measure changes with one field, such as MAE-LM Figure 4's delta; ``categories``: what x = 0, 1, ... stand
    for, where the field's values are no numbers."""
    figure = lines({name: sorted(pairs) for name, pairs in points.items()}, varied, measured)
    if categories is not None:
        with plt.rc_context(STYLE):
            axes = figure.axes[0]
            axes.set_xticks(range(len(categories)), categories, rotation=20, ha="right", parse_math=False)
    return figure


def _by_layer(series: Mapping[str, Sequence[Point]], studies: Sequence[Mapping[str, Any]]) -> Figure:
    figure = lines(series, "layer", f"effective rank (tau {studies[0]['tau']:g})")
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _ranks(study: Mapping[str, Any], key: str) -> list[Point]:
    return [(layer["layer"], layer[key]["rank"]) for layer in study["layers"] if layer[key]]


def _named(study: Mapping[str, Any], label: str, studies: Sequence[Mapping[str, Any]]) -> str:
    return label if len(studies) == 1 else f"{study.get('name') or Path(study['model']).name}: {label}"


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element, the same bytes for the same numbers; it names no place on the network."""
    buffer = io.StringIO()
    with plt.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's fonts draw the text, not this one
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as the kind that the name ends in (svg, png, pdf), whole or not at all."""
    kind = path.suffix.lstrip(".") or "svg"
    if kind == "svg":
        return write_whole(path, svg(figure))
    buffer = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200)
    plt.close(figure)
    return write_whole(path, buffer.getvalue())

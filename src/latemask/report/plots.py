"""Figures from plain numbers: journals, studies and tables as JSON has them. Never torch.

A series is told apart thrice, by colour (Okabe and Ito's, which colour-blind people can tell apart), by dash and by
marker, so that a figure also reads in grey print. Text stays text in the SVG.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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

Point = tuple[float, float]
Against = Literal["step", "seconds", "flops"]
AXIS = {"step": "steps", "seconds": "seconds of training", "flops": "FLOPs (plain objective)"}


def lines(
    series: Mapping[str, Sequence[Point]], across: str, up: str, title: str = "", *, log_x: bool = False
) -> Figure:
    """One line for each named series of (x, y) points, in the order given."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
        for number, (name, points) in enumerate(series.items()):
            _draw(axes, number, name, points)
        axes.set(xlabel=across, ylabel=up, title=title)
        if log_x:
            axes.set_xscale("log")
        if len(series) > 1:
            axes.legend()
    return figure


def _draw(axes: Axes, number: int, name: str, points: Sequence[Point]) -> None:
    xs, ys = zip(*points, strict=True) if points else ((), ())
    axes.plot(
        xs,
        ys,
        label=name,
        color=COLOURS[number % len(COLOURS)],
        linestyle=DASHES[number % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markevery=max(1, len(points) // 12),
    )


def losses(journals: Mapping[str, Sequence[Mapping[str, Any]]], against: Against = "step") -> Figure:
    """Validation loss of each run (training loss where it validated once or never), from the lines of its journal."""
    series = {name: loss_points(journal, against) for name, journal in journals.items()}
    figure = lines(series, AXIS[against], "loss, nats per masked token")
    if against == "flops":
        figure.axes[0].set_xlim(left=0)
    return figure


def loss_points(journal: Sequence[Mapping[str, Any]], against: Against) -> list[Point]:
    """(step, seconds or FLOPs; loss) of a journal. Validations stand at the tokens and seconds of the training line of
    their step, or the last one before."""
    flops_per_token, tokens, seconds = 0.0, 0.0, 0.0
    found: dict[str, list[Point]] = {"train": [], "validation": []}
    for line in journal:
        if line["kind"] == "start":
            flops_per_token = line.get("plain_flops_per_token", line.get("flops_per_token", 0.0))
        if line["kind"] == "train":
            tokens, seconds = line["tokens"], line["seconds"]
        if line["kind"] in found:
            across = {"step": line["step"], "seconds": seconds, "flops": tokens * flops_per_token}[against]
            found[line["kind"]].append((across, line["loss"]))
    return found["validation"] if len(found["validation"]) > 1 or not found["train"] else found["train"]


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


def trend(points: Mapping[str, Sequence[Point]], varied: str, measured: str) -> Figure:
    """How a measure changes with one field, such as MAE-LM Figure 4's delta."""
    return lines({name: sorted(pairs) for name, pairs in points.items()}, varied, measured)


def _by_layer(series: Mapping[str, Sequence[Point]], studies: Sequence[Mapping[str, Any]]) -> Figure:
    figure = lines(series, "layer", f"effective rank (tau {studies[0]['tau']:g})")
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].set_ylim(bottom=0)
    return figure


def _ranks(study: Mapping[str, Any], key: str) -> list[Point]:
    return [(layer["layer"], layer[key]["rank"]) for layer in study["layers"] if layer[key]]


def _named(study: Mapping[str, Any], label: str, studies: Sequence[Mapping[str, Any]]) -> str:
    return label if len(studies) == 1 else f"{Path(study['model']).name}: {label}"


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element, the same bytes for the same numbers."""
    buffer = io.StringIO()
    with plt.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


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

"""Figures from plain numbers: journals, studies and tables as JSON has them. Never torch.

A series is told apart by colour, dash and marker (``looks``). Text stays text in the SVG.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from latemask.report import labels
from latemask.report.flops import last_start, plain_flops
from latemask.report.looks import MOST_RUNS, Look
from latemask.training.journal import PER_MASKED, PER_TOKEN
from latemask.writing import write_whole

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
LONGEST_UP = 44
"""Characters of a line that names the vertical axis."""
INCHES_PER_CHARACTER, INCHES_PER_LINE = 0.075, 0.18

Point = tuple[float, float]
Against = Literal["step", "seconds", "flops"]

AXIS = {"step": "steps", "seconds": "seconds of training", "flops": "FLOPs (plain objective)"}


def lines(
    series: Mapping[str, Sequence[Point]],
    across: str,
    up: str,
    title: str = "",
    *,
    log_x: bool = False,
    looks: Mapping[str, Look] | None = None,
    hollow: Mapping[str, Collection[float]] | None = None,
) -> Figure:
    """One line for each named series of (x, y) points, in the order given.

    ``looks``: by name; by default each has its place. ``hollow``: the x of each where the marker is an empty one.
    """
    looks = looks or {name: Look(number) for number, name in enumerate(series)}
    told = [name for name in series if looks[name].is_told_apart]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
        drawn = {
            name: _draw(axes, looks[name], points, (hollow or {}).get(name, ())) for name, points in series.items()
        }
        axes.set(xlabel=across, ylabel=textwrap.fill(up, LONGEST_UP), title=title)
        if log_x:
            axes.set_xscale("log")
        entries = {name: drawn[name] for name in told}
        if rest := [name for name in series if name not in told]:
            entries[f"{len(rest)} more, thin and grey"] = drawn[rest[0]]
        if len(series) > 1:
            _legend(figure, axes, list(entries.values()), list(entries))
    return figure


def _draw(axes: Axes, look: Look, points: Sequence[Point], hollow: Collection[float]) -> Line2D:
    xs, ys = zip(*points, strict=True) if points else ((), ())
    [line] = axes.plot(xs, ys, **look.style, markevery=max(1, len(points) // 12))
    if empty := [point for point in points if point[0] in hollow]:
        marker = look.style.get("marker", "o")
        axes.plot(*zip(*empty, strict=True), linestyle="none", marker=marker, markersize=5, color=line.get_color(),
                  markerfacecolor="white", zorder=line.get_zorder() + 1)  # fmt: skip
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


def losses(
    journals: Mapping[str, Sequence[Mapping[str, Any]]],
    against: Against = "step",
    looks: Mapping[str, Look] | None = None,
    rewriting: Collection[str] = (),
) -> Figure:
    """Validation loss of each run (where it validated once or never: training loss, and its name says so), from the
    lines of its journal. ``rewriting``: names of those whose loss is a mean over whole rows."""
    kinds = {name: kind_of_loss(journal) for name, journal in journals.items()}
    are_mixed, units = len(set(kinds.values())) > 1, {name in rewriting for name in journals}
    names = {
        name: name
        + (" (training)" if are_mixed and kind == "train" else "")
        + (" (per token of the row)" if len(units) > 1 and name in rewriting else "")
        for name, kind in kinds.items()
    }
    up = "loss" if are_mixed or not kinds else "training loss" if "train" in kinds.values() else "validation loss"
    unit = PER_MASKED if True not in units else PER_TOKEN if False not in units else "nats"
    series = {names[name]: loss_points(journal, against) for name, journal in journals.items()}
    shown = {names[name]: look for name, look in looks.items()} if looks else None
    figure = lines(series, AXIS[against], f"{up}, {unit}", looks=shown)
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


def kind_of_loss(journal: Sequence[Mapping[str, Any]]) -> str:
    """Of which lines a run's curve is drawn: validation, or train where it validated once or never."""
    kinds = [line["kind"] for line in journal]
    return "validation" if kinds.count("validation") > 1 or "train" not in kinds else "train"


def loss_points(journal: Sequence[Mapping[str, Any]], against: Against) -> list[Point]:
    """(step, seconds or FLOPs; loss) of a journal; a loss that is not finite is left out. Points stand at the
    tokens of their step, and where a line does not say its seconds, at those of the training line before."""
    kind, tokens, seconds = kind_of_loss(journal), 0.0, 0.0
    start = last_start(journal)
    tokens_per_step, flops, points = _tokens_per_step(start.get("run", {})), plain_flops(start), []
    for line in journal:
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
    return _by_layer([(_named(study, label, studies), study, key) for study in studies
                      for key, label in RANK_NAMES.items()])  # fmt: skip


def mask_rank_by_layer(studies: Sequence[Mapping[str, Any]]) -> Figure:
    """MAE-LM Figure 1(b): effective rank of the [MASK] representations at each layer."""
    return _by_layer([(_named(study, "[MASK]", studies), study, "masks") for study in studies])


def ranks_of_set(studies: Sequence[Mapping[str, Any]], key: str) -> Figure:
    """Effective rank at each layer of one set of vectors: a line for each study that has it, and a band where its
    layers say the ``lowest`` and ``highest``; the studies have a ``name``, and may have a ``look``."""
    return _by_layer([(study["name"], study, key) for study in studies], [study.get("look") for study in studies])


def outside_energy_by_layer(theories: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of the [MASK] representations' energy outside the leading directions of the real ones, from the JSON of
    ``latemask theory`` of one tau; for the real ones themselves it is 1 - tau by construction."""
    named = {_named(theory, "[MASK]", theories): theory for theory in theories}
    series = {name: [(layer["layer"], layer["masks_outside"]) for layer in theory["layers"]
                     if layer["masks_outside"] is not None] for name, theory in named.items()}  # fmt: skip
    hollow = {name: [layer["layer"] for layer in theory["layers"] if layer["few_vectors"]]
              for name, theory in named.items()}  # fmt: skip
    looks = _looks(list(named), [theory.get("look") for theory in theories])
    figure = lines(series, _layers(hollow), "share of energy outside", looks=looks, hollow=hollow)
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


def front(
    points: Mapping[str, Point], on_front: Sequence[str], across: str, up: str, looks: Mapping[str, Look]
) -> Figure:
    """Named (cost, quality) points, and the steps that join those ``on_front``, cheapest first. The legend names all
    where their looks tell all apart, else those on the front."""
    if not all(look.is_told_apart for look in looks.values()):
        looks = {name: Look(on_front.index(name)) if name in on_front else Look(MOST_RUNS) for name in points}
    with plt.rc_context(STYLE):
        figure, axes = _stairs([points[name] for name in on_front])
        drawn = {}
        for name, (x, y) in points.items():
            style = {"marker": "o", **looks[name].style, "linestyle": "none", "markersize": 6}
            [drawn[name]] = axes.plot([x], [y], **style)
        named = [name for name in points if looks[name].is_told_apart]
        entries = {name: drawn[name] for name in named}
        if rest := [name for name in points if name not in named]:
            entries[f"{len(rest)} more, grey"] = drawn[rest[0]]
        _finished(figure, axes, across, up, list(entries.values()), list(entries))
    return figure


class Family(NamedTuple):
    """Points of one title and look: by name, in the order in which a line joins them, what stands beside each."""

    title: str
    look: Look
    labels: Mapping[str, str]


def families(
    points: Mapping[str, Point], on_front: Sequence[str], across: str, up: str, members: Sequence[Family]
) -> Figure:
    """The same of families, which the legend names; those ``on_front`` edged in black."""
    with plt.rc_context(STYLE):
        figure, axes = _stairs([points[name] for name in on_front])
        drawn = []
        for family in members:
            style = {**family.look.style, "linestyle": "-", "linewidth": 0.6, "markersize": 6}
            drawn += axes.plot(*zip(*(points[name] for name in family.labels), strict=True), **style)
            for name in family.labels:
                if name in on_front:
                    edge = {"linestyle": "none", "markeredgecolor": "black", "markeredgewidth": 1.2}
                    axes.plot(*points[name], **style | edge)
        _finished(figure, axes, across, up, drawn, [family.title for family in members])
        texts = [(points[name], label) for family in members for name, label in family.labels.items()]
        labels.beside(figure, axes, texts)
    return figure


def _stairs(points: Sequence[Point]) -> tuple[Figure, Axes]:
    """A new figure with the steps that join the points of a front, cheapest first."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES, layout="constrained")
    axes.plot(*zip(*points, strict=True), drawstyle="steps-post", color="#555555", linewidth=0.8)
    return figure, axes


def _finished(figure: Figure, axes: Axes, across: str, up: str, drawn: Sequence[Line2D], names: Sequence[str]) -> None:
    axes.set(xlabel=across, ylabel=textwrap.fill(up, LONGEST_UP))
    axes.margins(0.1)
    _legend(figure, axes, drawn, names)


def _by_layer(found: Sequence[tuple[str, Mapping[str, Any], str]], looks: Sequence[Look | None] = ()) -> Figure:
    """(name, study, set) each a line, where the study has the set."""
    series = {name: [(layer["layer"], layer[key]["rank"]) for layer in study["layers"] if layer[key]]
              for name, study, key in found}  # fmt: skip
    hollow = {name: [layer["layer"] for layer in study["layers"] if layer[key] and layer[key]["few_vectors"]]
              for name, study, key in found}  # fmt: skip
    chosen = _looks(list(series), looks)
    series = {name: points for name, points in series.items() if points}
    up = f"effective rank (tau {found[0][1]['tau']:g})"
    figure = lines(series, _layers(hollow), up, looks=chosen, hollow=hollow)
    drawn = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    for (_, study, key), line in zip([one for one in found if one[0] in series], drawn, strict=True):
        spread = [layer for layer in study["layers"] if layer[key] and "lowest" in layer[key]]
        low, high = ([layer[key][end] for layer in spread] for end in ("lowest", "highest"))
        band = {"color": line.get_color(), "alpha": 0.15, "linewidth": 0}
        if spread:
            figure.axes[0].fill_between([layer["layer"] for layer in spread], low, high, **band)
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].set_ylim(0, 1.05 * figure.axes[0].dataLim.y1 if series else None)
    return figure


def _looks(names: Sequence[str], looks: Sequence[Look | None]) -> dict[str, Look] | None:
    """By name; None where not every one is given."""
    known = [look for look in looks if look is not None]
    return dict(zip(names, known, strict=True)) if len(known) == len(names) else None


def _layers(hollow: Mapping[str, Collection[float]]) -> str:
    return "layer (hollow: few vectors)" if any(hollow.values()) else "layer"


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

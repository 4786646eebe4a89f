"""Labels beside the points of a figure, off each other, the points and, as far as there is room, the lines.

Around each point are a few places for its label, near ones first. The labels take theirs by turns, each the one that
covers least given where the others stand, until none moves. A label that had to go far is joined to its point.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import cbook
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

FONT_SIZE, GAP, MARKER = 7, 1.0, 4.0
"""In points: of the text, around it, and half of what a marker covers."""
DIRECTIONS = ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1))
DISTANCES = (MARKER, 10.0, 16.0, 24.0)
"""Between the middle of a point and a label, in points; all but the first are joined."""
FORBIDDEN, LINE, FAR = 100.0, 2.0, 0.5
"""What covering a label, a point or the edge costs (a square point), a line, and standing off (a point)."""
MOST_TURNS = 20
STEP = 2.0
"""Points between the samples of a line."""

Point = tuple[float, float]
Boxes = np.ndarray
"""Left, bottom, right and top [..., 4], in points."""


def beside(figure: Figure, axes: Axes, labelled: Sequence[tuple[Point, str]]) -> None:
    """Write each text beside its point, in the coordinates of the data; nothing that changes the layout may come
    after."""
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    at = scale * axes.transData.transform([point for point, _ in labelled])
    texts = [_write(axes, text, point) for point, text in labelled]
    sizes = [scale * np.array(text.get_window_extent().size) + 2 * GAP for text in texts]
    ways = list(itertools.product(DISTANCES, DIRECTIONS))
    offsets = [np.array([np.multiply(way, size / 2 + far) for far, way in ways]) for size in sizes]
    places = [_around(point + moved, size / 2) for point, moved, size in zip(at, offsets, sizes, strict=True)]
    lines = np.concatenate([_samples(scale * _drawn(line)) for line in axes.lines])
    window = scale * np.array(axes.get_window_extent().extents)
    fixed = [_cost(boxes, _around(at, MARKER), lines, window) for boxes in places]
    ways_to = [point + moved[:, None] * np.linspace(0, 1, 9)[:, None] for point, moved in zip(at, offsets, strict=True)]
    chosen = [0] * len(texts)
    for _ in range(MOST_TURNS):
        before = list(chosen)
        for number, boxes in enumerate(places):
            others = np.array([places[one][chosen[one]] for one in range(len(texts)) if one != number]).reshape(-1, 4)
            crossed = [_inside(to, others).sum() for to in ways_to[number]]
            chosen[number] = int(np.argmin(fixed[number] + FORBIDDEN * (_overlap(boxes, others) + crossed)))
        if chosen == before:
            break
    for (point, text), written, moved, place in zip(labelled, texts, offsets, chosen, strict=True):
        written.remove()
        joined = {"arrowstyle": "-", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3} if place >= len(DIRECTIONS) else None
        _write(axes, text, point, moved[place], joined)


def _write(axes: Axes, text: str, point: Point, moved: Any = (0, 0), joined: Any = None) -> Annotation:
    return axes.annotate(text, point, moved, textcoords="offset points", fontsize=FONT_SIZE, ha="center", va="center",
                         in_layout=False, arrowprops=joined)  # fmt: skip


def _around(middles: np.ndarray, half: float | np.ndarray) -> Boxes:
    return np.concatenate([middles - half, middles + half], axis=-1)


def _overlap(boxes: Boxes, others: Boxes) -> np.ndarray:
    """The area of each of the boxes [N, 4] that the others [M, 4] cover: [N]."""
    one, other = boxes[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    return sides.clip(0).prod(-1).sum(-1)


def _inside(points: np.ndarray, boxes: Boxes) -> np.ndarray:
    """Which of the points [N, 2] lie in each of the boxes [M, 4]: [M, N]."""
    return np.all((points >= boxes[:, None, :2]) & (points <= boxes[:, None, 2:]), axis=-1)


def _cost(boxes: Boxes, points: Boxes, lines: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Of each place, whatever the other labels do; of equals the first counts."""
    outside = (boxes[:, 2:] - boxes[:, :2]).prod(-1) - _overlap(boxes, window[None])
    on_lines, far = STEP * _inside(lines, boxes).sum(-1), np.repeat(DISTANCES, len(DIRECTIONS))
    return FORBIDDEN * (outside + _overlap(boxes, points)) + LINE * on_lines + FAR * far


def _drawn(line: Line2D) -> np.ndarray:
    """The corners of a line as it is drawn [N, 2], in pixels."""
    xs, ys = (np.asarray(values, float) for values in line.get_data())
    stepped = cbook.STEP_LOOKUP_MAP[line.get_drawstyle()](xs, ys)
    return line.get_transform().transform(np.column_stack(stepped))


def _samples(corners: np.ndarray) -> np.ndarray:
    found = [corners[:1]]
    for start, end in itertools.pairwise(corners):
        count = int(np.hypot(*(end - start)) / STEP) + 1
        found.append(start + (end - start) * np.linspace(0, 1, count + 1)[1:, None])
    return np.concatenate(found)

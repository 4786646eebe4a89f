"""docs/idea.svg, drawn from the recipes themselves: which tokens each block works on, and where the masks join."""

from __future__ import annotations

from pathlib import Path

from latemask.config import Run, replace
from latemask.counts import decoder_tokens
from latemask.recipes import recipe

TOKENS, CELL, STEP, ROW, PANEL, LEFT, TOP = 12, 12, 15, 30, 212, 74, 62
BLUE, ORANGE, PALE, INK, GREY = "#0072B2", "#E69F00", "#F2F2F2", "#222222", "#777777"
PANELS = (
    ("MLM", "mlm_tiny", "[MASK] from the first block on"),
    ("3ML", "three_ml_tiny", "[MASK] joins before a late block"),
    ("3ML_self", "three_ml_self_tiny", "[MASK] joins at the decoder"),
    ("MAE-LM", "mae_lm_tiny", "[MASK] joins at the decoder"),
)


def drawing() -> str:
    """The SVG."""
    runs = [replace(recipe(name), {"shape.row_tokens": TOKENS}) for _, name, _ in PANELS]
    rows = 1 + max(run.shape.depth + (run.decoder.depth if run.decoder else 0) for run in runs)
    width, height = LEFT + PANEL * len(PANELS), TOP + ROW * rows + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
        "<title>Where [MASK] joins in MLM, 3ML, 3ML_self and MAE-LM</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
    ]
    base = TOP + ROW * rows
    for block in range(runs[0].shape.depth):
        parts.append(text(LEFT - 12, base - ROW * block - 7, f"block {block}", anchor="end", colour=GREY))
    parts.append(text(LEFT - 12, base - ROW * runs[0].shape.depth - 7, "decoder", anchor="end", colour=GREY))
    for number, ((title, _, caption), run) in enumerate(zip(PANELS, runs, strict=True)):
        parts += panel(run, title, caption, LEFT + PANEL * number, base)
    parts += legend(LEFT, base + 34)
    return "\n".join([*parts, "</svg>"]) + "\n"


def write() -> None:
    """docs/idea.svg."""
    Path(__file__).with_name("idea.svg").write_text(drawing(), encoding="utf-8")


def panel(run: Run, title: str, caption: str, left: int, base: int) -> list[str]:
    """One method: a row of cells for each block, the first block at the bottom."""
    visible, masked = run.visible_tokens, run.masked_tokens
    parts = [text(left, 26, title, size=15, weight="bold"), text(left, 43, caption, colour=GREY),
             text(left, 57, f"{run.masking.rate:.0%} masked", colour=GREY)]  # fmt: skip
    lengths = run.plan.lengths(visible, masked)
    decoder = [blocks.keys for blocks in decoder_tokens(run, executed=False)]
    for block, tokens in enumerate([*lengths, *decoder]):
        y = base - ROW * block - CELL - 4
        if block >= len(lengths):
            parts.append(f'<rect x="{left - 5}" y="{y - 5}" width="{STEP * TOKENS + 7}" height="{CELL + 10}" rx="4" '
                         f'fill="none" stroke="{GREY}" stroke-dasharray="3 2"/>')  # fmt: skip
        before = visible if block == 0 else [*lengths, *decoder][block - 1]
        parts += [cell(left + STEP * place, y, place, visible, tokens) for place in range(TOKENS)]
        if tokens > before:
            parts.append(text(left + STEP * (visible + masked / 2) - 1, y + ROW - 6, "▲ join", anchor="middle", size=9))
    top = base - ROW * (len(lengths) + len(decoder)) + 2
    middle = left + STEP * (visible + masked / 2) - 1
    return [*parts, text(middle, top - 6, "predict", anchor="middle", weight="bold")]


def cell(x: int, y: int, place: int, visible: int, tokens: int) -> str:
    """A token: blue where it is real, orange where it is [MASK], an empty seat where it has not joined."""
    colour = PALE if place >= tokens else BLUE if place < visible else ORANGE
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="2" fill="{colour}"/>'


def legend(x: int, y: int) -> list[str]:
    """What the colours mean."""
    parts = []
    for colour, meaning, room in (
        (BLUE, "real token", 96),
        (ORANGE, "[MASK]", 82),
        (PALE, "not there: costs nothing", 172),
    ):
        parts.append(f'<rect x="{x}" y="{y - CELL + 2}" width="{CELL}" height="{CELL}" rx="2" fill="{colour}"/>')
        parts.append(text(x + CELL + 6, y, meaning))
        x += room
    parts.append(f'<rect x="{x}" y="{y - CELL + 2}" width="{CELL}" height="{CELL}" rx="2" fill="none" stroke="{GREY}" '
                 f'stroke-dasharray="3 2"/>')  # fmt: skip
    return [*parts, text(x + CELL + 6, y, "thrown away after pretraining")]


def text(
    x: float, y: float, content: str, *, anchor: str = "start", size: int = 11, weight: str = "normal",
    colour: str = INK,
) -> str:  # fmt: skip
    return (f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="{colour}">{content}</text>')  # fmt: skip

"""Cost against size: time per token of a training step for rows of many lengths and many masking rates.

    python benchmarks/sizes.py --seconds 240 --out results/sizes.json

Each entry (plain MLM, MAE-LM, 3ML_self at base size, absolute positions, no dropout, compiled blocks) is built, warmed
up, timed and freed after the one before, always on about as many tokens a step. Beside its time stands its FLOPs count,
both relative to plain MLM on rows of 512 at its own rate, which is timed first and once more at the end (``drift``).
Entries that no longer fit into the time are listed as left out. The JSON, and the figure beside it (``.svg``), are
written anew after each entry.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from asked import asked, counts, read
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from refusals import program

from latemask import console
from latemask.bench import Entry, built
from latemask.cards import card_of_device
from latemask.config import replace
from latemask.console import percent
from latemask.errors import Refusal
from latemask.goals import Timed
from latemask.machine import machine_of
from latemask.recipes import recipe
from latemask.report import looks, plots
from latemask.training.distributed import pick_device
from latemask.writing import write_json

SYSTEMS = ("mlm", "mae_lm", "three_ml_self")
System = Literal["mlm", "mae_lm", "three_ml_self"]
NAMES = {"mlm": "plain MLM", "mae_lm": "MAE-LM", "three_ml_self": "3ML_self"}
GPU_TOKENS, CPU_TOKENS = 65_536, 1_024


@dataclass(frozen=True)
class Options:
    """Time training steps over row lengths and masking rates."""

    out: Path = Path("results/sizes.json")
    """The JSON; the figure stands beside it."""
    seconds: float = 240
    """Time for all of it; what does not fit is listed as left out."""
    size: Literal["tiny", "small", "base", "large"] = "base"
    """Of the recipes."""
    systems: tuple[System, ...] = SYSTEMS
    """Which are timed; plain MLM always at one point, as what the others are relative to."""
    row_tokens: tuple[int, ...] = (128, 512, 1024, 2048)
    """Row lengths N, each at the recipe's own masking rate."""
    rates: tuple[float, ...] = (0.15, 0.3, 0.5, 0.8)
    """Masking rates, each on rows of `at_row_tokens`."""
    at_row_tokens: int = 512
    """Row length of the rates, and of what all is relative to."""
    tokens: int | None = None
    """Tokens of a step, as many rows as come nearest; None: 65,536 on a GPU, 1,024 on a CPU."""
    rounds: int = 3
    """Rounds of timed steps of an entry."""
    steps: int = 8
    """Timed steps of a round."""

    def __post_init__(self) -> None:
        counts(self, "rounds", "steps", "tokens")


@dataclass(frozen=True)
class Point:
    """One entry: a system on rows of ``row_tokens``, of which the share ``rate`` is masked."""

    system: System
    row_tokens: int
    rate: float


def own_rate(system: System, size: str) -> float:
    """The recipe's own masking rate."""
    return recipe(f"{system}_{size}").masking.rate


def points_of(options: Options) -> list[Point]:
    """What is timed, once each, in order: the base, the row lengths, the rates."""
    base = Point("mlm", options.at_row_tokens, own_rate("mlm", options.size))
    lengths = [Point(system, row_tokens, own_rate(system, options.size))
               for row_tokens in options.row_tokens for system in options.systems]  # fmt: skip
    rates = [Point(system, options.at_row_tokens, rate) for rate in options.rates for system in options.systems]
    return list(dict.fromkeys([base, *lengths, *rates]))


def entry_of(point: Point, options: Options, tokens: int, compiles: bool) -> Entry:
    """The point as what ``latemask bench`` times. Raises ``Refusal`` for a length or rate that no row can have."""
    run = replace(
        recipe(f"{point.system}_{options.size}"),
        {"shape.positions": "absolute", "shape.dropout": 0.0, "shape.row_tokens": point.row_tokens,
         "masking.rate": point.rate},
    )  # fmt: skip
    rows = max(1, round(tokens / point.row_tokens))
    name = f"{NAMES[point.system]}, N = {point.row_tokens}, {point.rate:.0%} masked"
    return Entry(name, run, rows, is_plain=point.system == "mlm", compiled="blocks" if compiles else "no")


def timed(entry: Entry, options: Options, device: torch.device) -> Timed | None:
    """Build, warm up, time and free it; None where it does not fit the device."""
    stepper = built(entry, device)
    if stepper is None:
        return None
    stepper.time(options.steps)
    stepper.rounds.clear()  # to warm up, clocks of the card included
    for _ in range(options.rounds):
        stepper.time(options.steps)
    card = card_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return stepper.result(card.peak if card else None)


def beside(one: Timed, base: Timed) -> dict[str, float]:
    """Time and executed FLOPs per token relative to the base's, and the first over the second: 1 where time follows
    FLOPs."""
    assert one.executed_flops is not None
    assert base.executed_flops is not None
    time_ratio = base.tokens_per_second / one.tokens_per_second
    flops_ratio = one.executed_flops / base.executed_flops
    return {"time_ratio": time_ratio, "flops_ratio": flops_ratio, "time_over_flops": time_ratio / flops_ratio}


def figure(entries: Sequence[dict[str, Any]], options: Options) -> Figure:
    """Left over row lengths, right over rates: time per token as lines with markers, FLOPs as thin dotted lines."""
    panels = (("row_tokens", "tokens in a row"), ("rate", "share masked"))
    with plt.rc_context(plots.STYLE):
        drawing, both = plt.subplots(1, 2, figsize=(7.6, 3.4), layout="constrained", sharey=True)
        for axes, (across, label) in zip(both, panels, strict=True):
            for number, system in enumerate(SYSTEMS):
                shown = [one for one in entries if one["system"] == system and _is_on(one, across, options)]
                shown.sort(key=lambda one: one[across])
                xs, look = [one[across] for one in shown], {"color": looks.COLOURS[number]}
                dashes, marker = looks.PLAIN_DASHES[number], looks.MARKERS[number]
                axes.plot(xs, [one["time_ratio"] for one in shown], dashes + marker, label=NAMES[system], **look)
                axes.plot(xs, [one["flops_ratio"] for one in shown], ":", linewidth=1, **look)
            axes.plot([], [], ":", color="#555555", linewidth=1, label="its FLOPs")
            axes.set_xlabel(label)
        both[0].set_xscale("log", base=2)
        both[0].set_xticks(sorted(set(options.row_tokens)))
        both[0].xaxis.set_major_formatter(ScalarFormatter())
        both[0].xaxis.set_minor_locator(NullLocator())
        both[0].set_ylabel(f"time per token beside plain MLM, N = {options.at_row_tokens}")
        both[0].set_ylim(bottom=0)
        both[0].legend()
    return drawing


def _is_on(one: dict[str, Any], across: str, options: Options) -> bool:
    if across == "rate":
        return one["row_tokens"] == options.at_row_tokens
    return one["row_tokens"] in options.row_tokens and one["rate"] == own_rate(one["system"], options.size)


def measure(options: Options) -> dict[str, Any]:
    """Time what fits into the seconds; write after each entry. Raises ``Refusal`` where the base does not fit."""
    begun, device = time.monotonic(), pick_device()
    on_gpu = device.type == "cuda"
    tokens = options.tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)
    points = points_of(options)
    entries = [entry_of(point, options, tokens, compiles=on_gpu) for point in points]
    settings = asked(options) | {"tokens": tokens}
    found: dict[str, Any] = {"kind": "benchmark", "what": "cost against size", "entries": [], "drift": None,
                             "left_out": [], "settings": settings, **machine_of(device)}  # fmt: skip
    base: Timed | None = None
    longest = 0.0
    for point, entry in zip(points, entries, strict=True):
        since = time.monotonic()
        if base is not None and since - begun + longest > options.seconds:
            found["left_out"].append({"name": entry.name, "why": "no time left"})
            continue
        one = timed(entry, options, device)
        if base is not None:  # whose start holds that of the device
            longest = max(longest, time.monotonic() - since)
        else:
            if one is None:
                raise Refusal("--tokens", f"{tokens}, which do not fit the card", "fewer")
            base = one
        if one is None:
            found["left_out"].append({"name": entry.name, "why": "does not fit the card"})
        else:
            found["entries"].append(dataclasses.asdict(point) | dataclasses.asdict(one) | beside(one, base))
            console.say(f"{one.name}: {one.milliseconds:.1f} ms, {time.monotonic() - begun:.0f} s so far")
        keep(found, options)
    assert base is not None
    if not found["left_out"] and time.monotonic() - begun + longest <= options.seconds:
        again = timed(entries[0], options, device)
        found["drift"] = again and base.tokens_per_second / again.tokens_per_second
    keep(found, options)
    return found


def keep(found: dict[str, Any], options: Options) -> None:
    """Write the JSON and the figure."""
    write_json(options.out, found)
    plots.save(figure(found["entries"], options), options.out.with_suffix(".svg"))


def main() -> None:
    found = measure(read(Options))
    console.table(f"Time and FLOPs per token beside plain MLM: {found['card']}",
                  ("entry", "rows", "ms", "spread", "tokens/s", "time", "FLOPs", "time / FLOPs"),
                  [(one["name"], one["rows"], one["milliseconds"], percent(one["spread"]), one["tokens_per_second"],
                    one["time_ratio"], one["flops_ratio"], one["time_over_flops"])
                   for one in found["entries"]])  # fmt: skip
    for one in found["left_out"]:
        console.say(f"left out: {one['name']} ({one['why']})")
    if found["drift"]:
        console.say(f"the base at the end took {found['drift']:.3f} of its time at the beginning")


if __name__ == "__main__":
    program(main)

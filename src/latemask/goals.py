"""What was timed of a benchmark's entries and what is wanted of them, and the tables that show both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from latemask import console
from latemask.console import percent

Size = Literal["tiny", "base", "large"]
NOISY = 0.1
"""Of a step, between rounds: more than any of the goals' ratios bears."""


@dataclass(frozen=True)
class Timed:
    """What was measured of an entry. FLOPs are per token, forward and backward; MFU is over the card's bf16 peak."""

    name: str
    rows: int
    milliseconds: float
    """Median of a step."""
    spread: float | None
    """Largest minus smallest round's median, over the median; None of one round."""
    tokens_per_second: float
    plain_flops: float | None
    executed_flops: float | None
    plain_mfu: float | None
    executed_mfu: float | None
    memory_bytes: int | None
    """Peak of the entry alone: weights, optimizer, activations."""
    first_step_seconds: float
    """Building and the first step, compilation included."""


@dataclass(frozen=True)
class Goal:
    """A line of the comparison: what is wanted and what was found; ``flops`` is the same ratio counted in FLOPs."""

    what: str
    goal: str
    found: float | None
    flops: float | None = None


def goals_of(size: Size, timed: dict[str, Timed]) -> list[Goal]:
    """The goals of a size beside what was found; None where an entry did not run."""

    def over(name: str, base: str) -> tuple[float | None, float | None]:
        """Time per token, and executed FLOPs over the base's plain ones."""
        a, b = timed.get(name), timed.get(base)
        if a is None or b is None:
            return None, None
        flops = a.executed_flops / b.plain_flops if a.executed_flops and b.plain_flops else None
        return b.tokens_per_second / a.tokens_per_second, flops

    def faster(name: str, bases: list[str]) -> float | None:
        speeds = [timed[base].tokens_per_second for base in bases if base in timed]
        return timed[name].tokens_per_second / max(speeds) if name in timed and speeds else None

    shipped = [name for name in timed if name.startswith("roberta, ") and name != "roberta, head on masked"]
    mfu, float8_mfu = (timed[name].plain_mfu if name in timed else None for name in ("mlm", "mlm, fp8"))
    if size == "large":
        return [
            Goal("MLM, dropout 0: MFU", ">= .53", mfu),
            Goal("MLM, dropout 0, FP8: MFU of the bf16 peak", ">= .60", float8_mfu),
            Goal("3ML .5: time over plain MLM", "", *over("3ml .5", "plain mlm")),
            Goal("3ML_self .5, 2 layers: time over plain MLM", "<= .58", *over("3ml_self .5, 2 layers", "plain mlm")),
            Goal("3ML_self .5, 4 layers: time over plain MLM", "<= .66", *over("3ml_self .5, 4 layers", "plain mlm")),
        ]
    return [
        Goal("MLM, dropout .1: tokens/s over RoBERTa at its best", ">= 1.8", faster("mlm, dropout", shipped)),
        Goal("the same, RoBERTa's head on masked positions", "", faster("mlm, dropout", ["roberta, head on masked"])),
        Goal("MLM, dropout 0: MFU", ">= .50", mfu),
        Goal("MLM, dropout 0, FP8: MFU of the bf16 peak", ">= .55", float8_mfu),
        Goal("MAE-LM, 4 self-attention layers: time over plain MLM", "<= 1.05", *over("mae_lm", "plain mlm")),
        Goal("MAE-LM, cross-only decoder: time over plain MLM", "<= .90", *over("mae_lm cross-only", "plain mlm")),
        Goal("3ML .5: time over plain MLM", "", *over("3ml .5", "plain mlm")),
        Goal("3ML_self .5, 2 layers: time over plain MLM", "<= .68", *over("3ml_self .5, 2 layers", "plain mlm")),
        Goal("relative bias, its gradient and dropout: time over without bias", "<= 1.2",
             over("mae_lm, dropout, relative bias", "mae_lm, dropout")[0]),
        Goal("rotary positions: time over absolute ones", "", over("mlm, dropout, rotary", "mlm, dropout")[0]),
        Goal("dropout .1: time over dropout 0", "<= 1.04", over("mlm, dropout", "mlm")[0]),
    ]  # fmt: skip


def show(size: Size, machine: dict[str, Any], found: dict[str, Timed], goals: list[Goal]) -> None:
    """The table of steps, and that of the goals that these entries tell of."""
    title = f"{size}, {machine['card']}, torch {machine['versions']['torch']}"
    console.table(f"Training steps: {title}",
                  ("entry", "rows", "ms", "spread", "tokens/s", "MFU plain", "MFU executed", "GB"),
                  [(t.name, t.rows, t.milliseconds, percent(t.spread), t.tokens_per_second, t.plain_mfu, t.executed_mfu,
                    None if t.memory_bytes is None else t.memory_bytes / 1e9) for t in found.values()])  # fmt: skip
    told = [(g.what, g.goal, g.found, g.flops, g.found / g.flops if g.found and g.flops else None)
            for g in goals if g.found is not None]  # fmt: skip
    if told:
        console.table(
            "Goals are for one H100 at base and large", ("what", "goal", "found", "FLOPs ratio", "time / FLOPs"), told
        )
    if noisy := [timed for timed in found.values() if timed.spread is not None and timed.spread > NOISY]:
        worst = max(noisy, key=lambda timed: timed.spread or 0.0)
        console.warn(f"{len(noisy)} of {len(found)} entries differ by more than {NOISY:.0%} between rounds "
                     f"({worst.name} by {percent(worst.spread)}): ratios of these say little. Stop what runs beside, "
                     "or give more --rounds")  # fmt: skip

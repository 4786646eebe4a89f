"""What each method costs, as ``latemask cost`` computes it: results/costs.json and the README's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latemask.recipes import recipe
from latemask.study.cost import cost
from latemask.writing import write_json

SYSTEMS = ("mlm", "three_ml", "three_ml_self", "three_ml_cross", "mae_lm")
SIZES = ("base", "large")
CARD, MFU = "H100", 0.4
RESULTS = Path(__file__).parents[1] / "results" / "costs.json"


def costs() -> list[dict[str, Any]]:
    """What each system costs at each size."""
    found = []
    for system in SYSTEMS:
        for size in SIZES:
            run = recipe(f"{system}_{size}")
            one = cost(run, kind=CARD, cards=1, mfu=MFU)
            found.append(
                {
                    "recipe": run.recipe,
                    "masked": run.masking.rate,
                    "tokens_per_block": run.plan.lengths(run.visible_tokens, run.masked_tokens),
                    "parameters_kept": one.parameters.kept,
                    "parameters_thrown_away": one.parameters.thrown_away,
                    "plain_flops_per_token": one.plain.total,
                    "executed_flops_per_token": one.executed.total,
                    "plain_ratio_to_mlm": one.plain_ratio,
                    "executed_ratio_to_mlm": one.executed_ratio,
                    "gpu_hours": one.gpu_hours,
                }
            )
    return found


def write() -> None:
    """results/costs.json."""
    write_json(RESULTS, {"card": CARD, "mfu": MFU, "costs": costs()})


def markdown(found: list[dict[str, Any]]) -> str:
    """The README's table."""
    lines = [
        "| method | recipe | masked | tokens x blocks of the encoder | million parameters kept + thrown away | "
        f"FLOPs beside MLM: plain (as run here) | {CARD}-hours |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    names = dict(zip(SYSTEMS, ("MLM", "3ML", "3ML_self", "3ML_cross", "MAE-LM"), strict=True))
    for one in found:
        name = names[one["recipe"].rpartition("_")[0]]
        lengths = one["tokens_per_block"]
        blocks = ", ".join(f"{length} x {lengths.count(length)}" for length in dict.fromkeys(lengths))
        lines.append(
            f"| {name} | `{one['recipe']}` | {one['masked']:.0%} | {blocks} | {one['parameters_kept'] / 1e6:.0f} + "
            f"{one['parameters_thrown_away'] / 1e6:.0f} | {one['plain_ratio_to_mlm']:.0%} "
            f"({one['executed_ratio_to_mlm']:.0%}) | {one['gpu_hours']:,.0f} |"
        )
    return "\n".join(lines) + "\n"

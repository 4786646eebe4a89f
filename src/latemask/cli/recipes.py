"""``latemask recipes``: every recipe with what it does to a row and what that costs, and what each system is."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal

from latemask import console, recipes
from latemask.config import Run
from latemask.study.cost import cost


@dataclass(frozen=True)
class RecipesOptions:
    """List every recipe: joins, decoder, tokens in the encoder's blocks, FLOPs beside MLM's."""

    size: Literal["all", "tiny", "small", "base", "large", "base_plus", "large_plus"] = "all"
    """One size only."""


def run_recipes(options: RecipesOptions) -> None:
    """Print the tables of ``latemask recipes``."""
    names = [name for name in recipes.names() if options.size == "all" or name.endswith("_" + options.size)]
    columns = ("recipe", "masked", "joins", "decoder", "tokens per block", "FLOPs beside MLM", "H100-hours")
    console.table("Recipes", columns, [_row(recipes.recipe(name)) for name in names])
    console.say("masked: at the run's beginning, and where it changes at its end.")
    console.say("joins: before which block the masked tokens join, :start:stop where not all of them do.")
    console.say("FLOPs: executed per token, beside MLM of that shape at 15 %; computed (latemask cost RECIPE).")
    console.say(
        "H100-hours: the whole run at 40 % of the peak, on the plain objective. Paper's numbers: docs/recipes.md.\n"
    )
    console.table("What they are", ("system", ""), [(system.__name__, _summary(system)) for system in recipes.SYSTEMS])


def _row(run: Run) -> tuple[str, ...]:
    of, tokens = cost(run), 0.0
    for first, stop, stage in run.stages:
        lengths = run.plan.lengths(stage.visible_tokens, stage.masked_tokens)
        tokens += sum(lengths) / len(lengths) * (stop - first) / run.updates
    joins = run.masking.effective_joins
    decoder = "none"
    if run.decoder is not None:
        decoder = f"{run.decoder.depth} x {run.decoder.width} {' + '.join(run.decoder.sublayers)}"
    return (
        run.recipe,
        " to ".join(
            f"{rate:.0%}" for rate in (run.masking.rate, *(step.rate for step in run.masking.later_rates[-1:]))
        ),
        " ".join(str(join.layer) if (join.start, join.stop) == (0, 1) else str(join) for join in joins) or "none",
        decoder,
        f"{tokens:.0f} of {run.shape.row_tokens}",
        f"{of.executed_ratio:.0%}",
        f"{of.gpu_hours:,.2g}" if of.gpu_hours < 10 else f"{of.gpu_hours:,.0f}",
    )


def _summary(system: object) -> str:
    """The first paragraph of a recipe's docstring."""
    return " ".join((inspect.getdoc(system) or "").split("\n\n")[0].split())

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
    columns = ("recipe", "masked", "joins", "decoder", "tokens per block", "FLOPs beside MLM")
    console.table("Recipes", columns, [_row(recipes.recipe(name)) for name in names])
    console.say("joins: before which block the masked tokens join, :start:stop where not all of them do.")
    console.say("FLOPs: executed per token, beside MLM of that shape at 15 %; computed (latemask cost RECIPE).\n")
    console.table("What they are", ("system", ""), [(system.__name__, _summary(system)) for system in recipes.SYSTEMS])


def _row(run: Run) -> tuple[str, ...]:
    lengths = run.plan.lengths(run.visible_tokens, run.masked_tokens)
    joins = run.masking.effective_joins
    decoder = "none"
    if run.decoder is not None:
        decoder = f"{run.decoder.depth} x {run.decoder.width} {' + '.join(run.decoder.sublayers)}"
    return (
        run.recipe,
        f"{run.masking.rate:.0%}",
        " ".join(str(join.layer) if (join.start, join.stop) == (0, 1) else str(join) for join in joins) or "none",
        decoder,
        f"{sum(lengths) / len(lengths):.0f} of {run.shape.row_tokens}",
        f"{cost(run).executed_ratio:.0%}",
    )


def _summary(system: object) -> str:
    """The first paragraph of a recipe's docstring."""
    return " ".join((inspect.getdoc(system) or "").split("\n\n")[0].split())

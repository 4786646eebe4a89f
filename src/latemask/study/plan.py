"""``latemask plan``: from text and GPU-hours to a recipe, a size, steps and a batch. Computed from rules, not measured.

The rules are those that ``PlanOptions`` says, for they are its help too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from latemask import console
from latemask.cards import card
from latemask.config import Run, replace
from latemask.counts import flops_per_token, parameters
from latemask.errors import Refusal
from latemask.recipes import SIZES, Size, mae_lm, mlm, three_ml
from latemask.study.cost import cost, gpu_hours, training_tokens

MOST_EPOCHS = 40
TOKENS_PER_PARAMETER = 40
FEWEST_STEPS = 20_000
FEWEST_ROWS = 64
LOWEST_RATE, LOWEST_RATE_WITH_DECODER = 4e-4, 2e-4
SHORT_WARMUP = 0.3
MOST_TOKENS, MOST_GPU_HOURS = 1e15, 1e9
"""More than all the text and all the cards that there are."""


@dataclass
class PlanOptions:
    """The recipe, size, steps and batch for your text and GPUs; computed from these rules, nothing is run.

    1. Tokens that the budget pays for: GPU-hours x peak x MFU / plain FLOPs per token.
    2. At most 40 passes over the text, as BERT made. Budget for more is left over.
    3. The largest size that gets 40 tokens for each parameter of its blocks: what 24hBERT gives a large model
    (23,000 steps of 4,096 rows of 128 tokens). Where not even `small` does, `tiny` is taken.
    4. MAE-LM: published with a higher GLUE than MLM at equal steps (86.1 against 85.2, base), and as reaching its MNLI
    in about 40 % of the time. But 3ML, its masks joining at three quarters of the encoder, where MAE-LM's batch would
    be halved: base size in 250 M tokens 3ML had a lower loss than MLM and no lower GLUE for 72 % of its seconds, over
    three seeds, where MAE-LM was two points below in seven tasks for 119 to 123 % (results/evidence/objectives);
    between that and a whole batch nothing was measured. 3ML always gets rotary positions, as it was measured.
    5. The recipe's batch, halved while it would leave fewer than 20,000 steps, but not below 64 rows; the learning rate
    falls with the square root of the batch, as Adam's noise asks, but not below 4e-4, with a decoder 2e-4: what MLM,
    3ML and MAE-LM learned at in as few tokens (results/evidence; with 2,000 updates of warm-up a decoder bore 4e-4).
    6. A run whose batch was halved gets rotary positions and no dropout, and warms up over 0.3 of itself, for with the
    recipe's own MAE-LM stayed at the loss of word frequencies (results/real-text), and without dropout and in 64 rows
    MLM and MAE-LM learned more (results/evidence/objectives). Longer ones keep the papers', but for 3ML's positions.
    """

    tokens: float
    """Tokens of your text, as `latemask prepare` counts them; 1 GB of English is about 0.25e9."""
    gpu_hours: float
    """Hours of all cards together."""
    kind: str = "H100"
    """Kind of card: H100 PCIe, H100, H200, B200, A100, L40S, A10, L4, RTX 5090, RTX 4090, RTX 3090 or MI300X."""
    mfu: float = 0.4
    """Share of the peak that is reached, counted on the plain objective."""

    def __post_init__(self) -> None:
        for name, number, least, most in (
            ("--tokens", self.tokens, 1, MOST_TOKENS),
            ("--gpu-hours", self.gpu_hours, 0, MOST_GPU_HOURS),
        ):
            if not least <= number <= most or number == 0:
                raise Refusal(name, f"{number:g}", f"{'1' if least else 'more than 0'} to {most:g}")


@dataclass(frozen=True)
class Reach:
    """What a budget does for one run."""

    run: Run
    """The recipe with its ``changes``."""
    changes: dict[str, Any]
    """Dotted name -> value: steps, batch, learning rate, 3ML's positions and, of a short run, warm-up, positions and
    dropout."""
    tokens: float
    """Seen in training, visible and masked."""
    epochs: float
    tokens_per_parameter: float
    """Over the parameters of the encoder's blocks."""
    hours: float
    """GPU-hours used."""
    is_short: bool
    """Whether the recipe's batch was halved."""

    @property
    def is_enough(self) -> bool:
        return self.tokens_per_parameter >= TOKENS_PER_PARAMETER


def reach(recipe: Run, options: PlanOptions) -> Reach:
    """Rules 1, 2, 5 and 6 for a recipe, and rule 4's positions of 3ML. Raises ``Refusal`` for an unknown card or an MFU
    outside 0..1."""
    kind, row_tokens = card(options.kind), recipe.shape.row_tokens
    flops = flops_per_token(recipe).plain
    paid_for = options.gpu_hours / gpu_hours(flops, kind, options.mfu)
    seen = min(paid_for, MOST_EPOCHS * options.tokens)
    rows = recipe.training.batch_rows
    while seen < FEWEST_STEPS * rows * row_tokens and rows // 2 >= FEWEST_ROWS:
        rows //= 2
    steps = max(1, int(seen / (rows * row_tokens)))
    own = recipe.training
    lowest = min(own.learning_rate, LOWEST_RATE if recipe.decoder is None else LOWEST_RATE_WITH_DECODER)
    learning_rate = max(own.learning_rate * (rows / own.batch_rows) ** 0.5, lowest)
    changes = {"training.steps": steps, "training.batch_rows": rows,
               "training.learning_rate": float(f"{learning_rate:.2g}")}  # fmt: skip
    is_short = rows < own.batch_rows
    if is_short:
        changes |= {"training.warmup_share": SHORT_WARMUP, "shape.positions": "rotary", "shape.dropout": 0.0}
        if recipe.decoder is not None and "self" in recipe.decoder.sublayers:
            changes["decoder.positions"] = "absolute+rotary"
    elif recipe.shape.positions == "absolute":
        changes["shape.positions"] = "rotary"
    run = replace(recipe, changes)
    tokens = training_tokens(run)
    shape = recipe.shape
    blocks = parameters(recipe).kept - (shape.padded_vocabulary + shape.row_tokens) * shape.width
    hours = gpu_hours(flops * tokens, kind, options.mfu)
    return Reach(run, changes, tokens, tokens / options.tokens, tokens / blocks, hours, is_short)


def best(size: Size, options: PlanOptions) -> Reach:
    """Rule 4: the system for a size."""
    late = reach(mae_lm(size), options)
    return reach(three_ml(size), options) if late.is_short else late


def plan(options: PlanOptions) -> Reach:
    """Rule 3: the recommended run."""
    return _largest([best(size, options) for size in SIZES])


def _largest(reached: Sequence[Reach]) -> Reach:
    """Of those of ``SIZES`` the last that has enough, else the first."""
    return next((one for one in reversed(reached) if one.is_enough), reached[0])


def run_plan(options: PlanOptions) -> None:
    """Print the recommendation, the sizes that were weighed, and the other systems at the chosen size."""
    weighed = [best(size, options) for size in SIZES]
    chosen = _largest(weighed)
    systems = (system(SIZES[weighed.index(chosen)]) for system in (mlm, three_ml, mae_lm))
    others = [reach(recipe, options) for recipe in systems if recipe.recipe != chosen.run.recipe]
    rows = [
        (one.run.recipe, "<- recommended" if one.run == chosen.run else "", one.tokens, one.epochs,
         one.tokens_per_parameter, one.hours)
        for one in [*weighed, *others]
    ]  # fmt: skip
    hours = f"{card(options.kind).name}-hour{'' if options.gpu_hours == 1 else 's'}"
    budget = f"{console.number(options.gpu_hours)} {hours} at an MFU of {options.mfu:g}"
    columns = ("recipe", "", "tokens seen", "epochs", "tokens per parameter", "GPU-hours")
    console.table(f"{console.number(options.tokens)} tokens of text, {budget}", columns, rows)
    if not chosen.is_enough:
        console.say(
            f"Fewer than {TOKENS_PER_PARAMETER} tokens per parameter at every size: more text or hours would help"
        )
    if chosen.hours < 0.95 * options.gpu_hours:
        console.say(f"The text is what limits: {MOST_EPOCHS} passes over it take "
                    f"{console.number(chosen.hours)} of your hours")  # fmt: skip
    fits = cost(chosen.run, kind=options.kind, cards=1, mfu=options.mfu).rows_that_fit
    console.say(f"Rows at once on one card: about {fits:,} (estimate); the batch is gathered from as many as it takes")
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.changes.items())
    console.say(f"latemask pretrain {chosen.run.recipe} --data data/en --out runs/{chosen.run.recipe} {flags}")
    console.say("Computed from rules (`latemask plan --help` says them), not measured.")

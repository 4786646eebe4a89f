"""``latemask cost``: what a recipe costs, any of its fields changed; computed, nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from latemask import console
from latemask.cli.options import parse_recipe
from latemask.config import Run, replace
from latemask.report.published import compute_share
from latemask.study.cost import Cost, cost
from latemask.text.store import open_store


@dataclass(frozen=True)
class CostOptions:
    """Parameters, FLOPs per token, ratio to MLM, memory and GPU-hours: `latemask cost RECIPE`, with the flags of
    `latemask pretrain RECIPE` for every field of the recipe. Computed; nothing is run."""

    data: str | None = None
    """What `latemask prepare` wrote: the cost with its vocabulary. With few ids the head costs little."""
    vocabulary: int | None = None
    """Token ids, where it differs from the recipe's and the data's."""
    cards: int = 8
    """GPUs."""
    kind: str = "H100"
    """Their kind: H100 PCIe, H100, H200, B200, A100, L40S, A10, L4, RTX 5090, RTX 4090, RTX 3090 or MI300X."""
    mfu: float = 0.4
    """Share of the peak that is reached, counted on the plain objective."""
    micro_rows: int | None = None
    """Rows of a forward pass on one card, for the memory estimate."""


def run_cost(arguments: Sequence[str]) -> None:
    """Print the tables of ``latemask cost``. Raises ``Refusal`` for a recipe, a field or a card that does not exist,
    and for data that is not prepared."""
    options, run = parse_recipe(CostOptions, arguments, command="cost", wanted="latemask cost RECIPE")
    if options.data is not None:
        run = open_store(options.data).fitted(run)
    if options.vocabulary is not None:
        run = replace(run, {"shape.vocabulary": options.vocabulary})
    show(cost(run, kind=options.kind, cards=options.cards, mfu=options.mfu, micro_rows=options.micro_rows))


def show(of: Cost) -> None:
    """Print a Cost."""
    run, kind = of.run, of.card.name
    stages = [stage.run for stage in run.stages]
    micro_rows = round(of.memory.activations / of.memory.row)
    console.table(
        f"{run.recipe}, vocabulary {run.shape.vocabulary:,}, on {of.cards} x {kind}",
        ("what", "value"),
        [
            ("parameters kept", f"{of.parameters.kept:,}"),
            ("parameters thrown away", f"{of.parameters.thrown_away:,}"),
            ("parameters in all", f"{of.parameters.total:,}"),
            (
                "tokens of a row: visible + masked",
                _each(f"{one.visible_tokens} + {one.masked_tokens}" for one in stages),
            ),
            ("of these predicted", _each(f"{one.predicted_tokens}" for one in stages)),
            ("tokens in each encoder block", _each(", ".join(_runs(one)) for one in stages)),
            (f"memory of one card, {micro_rows} rows at once (estimate)", f"{of.memory.total / 1e9:,.1f} GB"),
            (f"rows at once that fit one {kind} (estimate)", f"{of.rows_that_fit:,}"),
            ("tokens of the full run", f"{of.tokens:,}"),
            (f"{kind}-hours of the full run at an MFU of {of.mfu:g}", of.gpu_hours),
            ("hours of the full run", of.gpu_hours / of.cards),
        ],
    )
    parts = ("linear", "attention", "decoder", "head", "total")
    rows = [(part, *(f"{getattr(count, part) / 1e6:,.1f}" for count in (of.plain, of.executed))) for part in parts]
    rows.append(("share of MLM at 15 %, computed", f"{of.plain_ratio:.1%}", f"{of.executed_ratio:.1%}"))
    published = compute_share(run)
    if published is not None:
        rows.append(("share of RoBERTa's budget, published", f"{published:.0%}", ""))
    console.table("MFLOP per token, forward and backward", ("part", "plain", "executed"), rows)
    console.say("Computed, not measured. MFU counts the plain objective.")


def _each(texts: Iterable[str]) -> str:
    """Of each stage of the run, where the masking rate changes."""
    return ", then ".join(texts)


def _runs(run: Run) -> Iterator[str]:
    """Row lengths, equal neighbours together: 435 x 9, 512 x 3."""
    lengths = run.plan.lengths(run.visible_tokens, run.masked_tokens)
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or lengths[stop] != lengths[start]:
            yield f"{lengths[start]} x {stop - start}"
            start = stop

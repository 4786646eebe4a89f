"""``latemask rank``: measure, print the table, write the JSON and the figures beside it."""

from __future__ import annotations

from dataclasses import dataclass

from latemask.cli.output import output
from latemask.console import say
from latemask.measurement import refuse_another, say_next
from latemask.out_of_memory import lower, out_of_memory_is_refused
from latemask.study.energy import check_tau
from latemask.study.sample import Sample
from latemask.writing import write_json


@dataclass
class RankOptions(Sample):
    """Effective rank of the representations, layer by layer, with and without [MASK] in the input (MAE-LM Figure 1,
    Table 3)."""

    tau: float = 0.9
    """Share of the energy that the counted directions carry."""
    out: str | None = None
    """JSON file; the figures lie beside it. By default rank.json in the run's folder. Of a model fine-tuned from a
    run name one there, such as runs/x/rank-TASK.json: the report puts it beside the run's own."""
    overwrite: bool = False
    """Replace the result of another measurement that is there."""


def run_rank(options: RankOptions) -> None:
    """Raises ``Refusal`` for a model or data that cannot be read, or where the result's place is not given or
    holds the result of another measurement."""
    check_tau(options.tau)
    options.check()
    out = output(options.source, options.out, "rank")
    refuse_another(out, {"kind": "rank", "tau": options.tau, **options.measured}, options.overwrite)
    from latemask.report import plots
    from latemask.study.rank_study import rank_study, show

    with out_of_memory_is_refused("rank", lower(("--micro-rows", options.micro_rows, 1))):
        study = rank_study(options, options.tau)
    write_json(out, study)
    show(study)
    figures = {"by-layer": plots.rank_by_layer([study])}
    if study["sees_masks"]:
        figures["of-masks"] = plots.mask_rank_by_layer([study])
    written = [plots.save(figure, out.with_name(f"{out.stem}-{name}.svg")) for name, figure in figures.items()]
    say(f"written: {', '.join(map(str, [out, *written]))}")
    say_next(out)

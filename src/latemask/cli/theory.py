"""``latemask theory``: measure, print the tables, write the JSON and the figure beside it."""

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
class TheoryOptions(Sample):
    """What MAE-LM section 2.2 and appendix A claim, measured on an encoder, and their bounds on one attention layer."""

    tau: float = 0.9
    """Share of the real tokens' energy that the leading directions carry."""
    out: str | None = None
    """JSON file; the figure lies beside it. By default theory.json in the run's folder. Of a model fine-tuned from a
    run name one there, such as runs/x/theory-TASK.json: the report puts it beside the run's own."""
    overwrite: bool = False
    """Replace the result of another measurement that is there."""


def run_theory(options: TheoryOptions) -> None:
    """Raises ``Refusal`` for a model or data that cannot be read, or where the result's place is not given or
    holds the result of another measurement."""
    check_tau(options.tau)
    options.check()
    out = output(options.source, options.out, "theory")
    refuse_another(out, {"kind": "theory", "tau": options.tau, **options.measured}, options.overwrite)
    from latemask.report import plots
    from latemask.study.theory import show, theory

    with out_of_memory_is_refused("theory", lower(("--micro-rows", options.micro_rows, 1))):
        study = theory(options, options.tau)
    write_json(out, study)
    show(study)
    written = [out]
    if study["sees_masks"]:
        figure = plots.outside_energy_by_layer([study])
        written.append(plots.save(figure, out.with_name(f"{out.stem}-outside.svg")))
    say(f"written: {', '.join(map(str, written))}")
    say_next(out)

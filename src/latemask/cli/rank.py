"""``latemask rank``: measure, print the table, write the JSON and the figures beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from latemask.console import say
from latemask.errors import Refusal
from latemask.hf.loading import Source
from latemask.report import plots
from latemask.study.passes import Sample
from latemask.study.rank_study import rank_study, show
from latemask.training import checkpoint
from latemask.writing import write_json


@dataclass
class RankOptions(Sample):
    """Effective rank of the representations, layer by layer, with and without [MASK] in the input (MAE-LM Figure 1,
    Table 3)."""

    tau: float = 0.9
    """Share of the energy that the counted directions carry."""
    out: str | None = None
    """JSON file; the figures lie beside it. By default rank.json in the run's folder."""


def run_rank(options: RankOptions) -> None:
    """Raises ``Refusal`` for a model or data that cannot be read, or where the result's place is not given."""
    out = output(options.model, options.out, "rank")
    study = rank_study(options, options.tau)
    write_json(out, study)
    show(study)
    figures = {"by-layer": plots.rank_by_layer([study])}
    if study["sees_masks"]:
        figures["of-masks"] = plots.mask_rank_by_layer([study])
    written = [plots.save(figure, out.with_name(f"{out.stem}-{name}.svg")) for name, figure in figures.items()]
    say(f"written: {', '.join(map(str, [out, *written]))}")


def output(model: str, out: str | None, kind: str) -> Path:
    """Where a study's JSON goes: ``out``, or ``<kind>.json`` in the run's folder (``<kind>-step-<n>.json`` where a step
    was asked for). Raises ``Refusal`` where that is a folder, or nothing is given and the model is no run."""
    if out is not None:
        if Path(out).is_dir():
            raise Refusal("--out", f"the folder {out}", "the name of a .json file")
        return Path(out)
    step = Source.of(model).step
    if step is None:
        raise Refusal("--out", f"nothing for {model}, which is no run", "a file name", f"Say --out {kind}.json")
    asked_for_step = checkpoint.step_number(Path(model)) is not None
    return step.parent / (f"{kind}-{step.name}.json" if asked_for_step else f"{kind}.json")

"""Where a study of a model puts its JSON: where it is told, else into the run's folder, where the report finds it."""

from __future__ import annotations

from pathlib import Path

from latemask.errors import Refusal
from latemask.hf.places import of_no_run
from latemask.hf.source import Source
from latemask.report.owners import FINETUNED
from latemask.training import checkpoint


def output(source: Source, out: str | None, kind: str) -> Path:
    """Where a study's JSON goes: ``out``, or ``<kind>.json`` in the run's folder (``<kind>-step-<n>.json`` where a step
    was asked for). Raises ``Refusal`` where nothing is given and the model is no run; of a model fine-tuned from one it
    says where the report would find the file."""
    if out is not None:
        return Path(out)
    if source.step is None:
        found = f"nothing, and at {source.name} {of_no_run(source.name)}"
        raise Refusal("--out", found, "a file name", _advice(Path(source.name), kind))
    asked_for_step = checkpoint.step_number(Path(source.name)) is not None
    return source.step.parent / (f"{kind}-{source.step.name}.json" if asked_for_step else f"{kind}.json")


def _advice(model: Path, kind: str) -> str:
    """Where to put a study of a model that is no run."""
    if tuned := FINETUNED.fullmatch(model.name):
        place = model.parent.parent if model.parent.name == "downstream" else model.parent
        file = place / f"{kind}-{tuned['task']}.json"
        return f"Say --out {file}, which the report shows beside the run's own"
    return f"Say --out {kind}.json"

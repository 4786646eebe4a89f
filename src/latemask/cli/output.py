"""Where a study of a model puts its JSON: where it is told, else into the run's folder, where the report finds it."""

from __future__ import annotations

from pathlib import Path

from latemask.errors import Refusal
from latemask.hf.loading import Source
from latemask.training import checkpoint


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

"""Whose a result is: the run's in whose folder it lies where it says that it measured that run, else a guest's.

A result of a checkpoint says its step and its seconds of pretraining: where the journal of the folder says when that
step was saved, these decide, whatever the run is called by now. Else names do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latemask.report.folders import RunFolder

FINETUNED = re.compile(r"(?P<task>[A-Za-z0-9]+)-e\d+-lr.*\.model")
"""Folder of a model that ``latemask finetune --save`` wrote."""
INSIDE = re.compile(rf"step-\d+|downstream|saved.*|{FINETUNED.pattern}")
"""Folders in a run's folder."""
SAME_SECONDS = 1e-3


def model_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a result of any kind says of its model: ``folder``, and of a run's checkpoint ``run``, ``step`` and
    ``pretraining_seconds``."""
    model = result["model"]
    return model if isinstance(model, Mapping) else {**result, "folder": model}


def is_own(folder: RunFolder, result: Mapping[str, Any]) -> bool:
    """Whether a result in a run's ``folder`` is the run's. In a folder without a journal there is no run: False."""
    if not folder.lines:
        return False
    model, names = model_of(result), {folder.path.name, *(Path(copy).name for copy in folder.copies)}
    step, seconds = model.get("step"), model.get("pretraining_seconds")
    at = folder.saved_at.get(step)
    if seconds is not None and at is not None:
        return math.isclose(at, seconds, abs_tol=SAME_SECONDS)
    if model.get("run"):
        return model["run"] in names
    place = _outermost(Path(str(model.get("folder", ""))))
    return not names.isdisjoint((place.name, place.parent.name))  # the second: an export in it


def called(model: Mapping[str, Any]) -> str:
    """A guest's name: its run's, or that of the run folder or model that its path names."""
    return str(model.get("run") or _outermost(Path(str(model.get("folder", "")))).name)


def _outermost(path: Path) -> Path:
    """Without the folders that lie in a run's."""
    while INSIDE.fullmatch(path.name):
        path = path.parent
    return path

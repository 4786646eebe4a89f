"""The file of a measurement: the same measurement again replaces it, another one only where that is asked for."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latemask.errors import Refusal
from latemask.fields import dotted
from latemask.training.resuming import told
from latemask.writing import check_file

PLACES = ("data", "model", "folder")
"""Fields that hold a path, which may be written in several ways."""


def refuse_another(out: Path, wanted: Mapping[str, Any], overwrite: bool) -> None:
    """Raise ``Refusal`` where ``out`` can be no file and, unless ``overwrite``, where it holds anything but a result of
    the measurement ``wanted``: its ``kind`` and all that it depends on, as the result's JSON says them."""
    check_file(out)
    if overwrite or not out.exists():
        return
    held, do = None, "Take another --out, or --overwrite to replace it"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        held = json.loads(out.read_text(encoding="utf-8"))
    if not isinstance(held, dict) or held.get("kind") != wanted["kind"]:
        raise Refusal(out, f"no result of kind {wanted['kind']}", "a new file, or such a result", do)
    before, now = dotted(held), dotted(json.loads(json.dumps(wanted)))
    if differing := [(name, before.get(name), value) for name, value in now.items()
                     if _plain(name, before.get(name)) != _plain(name, value)]:  # fmt: skip
        asked, was = told(differing)
        raise Refusal(out, f"a result with {was}", f"one with {asked}", do)


def _plain(name: str, value: Any) -> Any:
    is_path = name.rpartition(".")[2] in PLACES and isinstance(value, str)
    return os.path.realpath(value) if is_path else value

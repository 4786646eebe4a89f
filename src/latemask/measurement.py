"""The file of a measurement: the same measurement again replaces it, another one only where that is asked for, and a
report shows it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latemask.console import say
from latemask.errors import Refusal
from latemask.fields import dotted
from latemask.training.journal import JOURNAL
from latemask.training.resuming import told
from latemask.writing import check_file

OTHERS = {"identity.model": "another model", "identity.data": "other data"}
"""What differs where the fields of these names do."""


def refuse_another(out: Path, wanted: Mapping[str, Any], overwrite: bool) -> None:
    """Raise ``Refusal`` where ``out`` can be no file and, unless ``overwrite``, where it holds anything but a result of
    the measurement ``wanted``: its ``kind`` and all that it follows from, as the result's JSON says them. A path is no
    such thing: the same may lie elsewhere, and another come to the same place."""
    check_file(out)
    if overwrite or not out.exists():
        return
    held, do = None, "Take another --out, or --overwrite to replace it"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        held = json.loads(out.read_text(encoding="utf-8"))
    if not isinstance(held, dict) or held.get("kind") != wanted["kind"]:
        raise Refusal(out, f"no result of kind {wanted['kind']}", "a new file, or such a result", do)
    if missing := [name for name in wanted if name not in held]:
        found = f"a result of an older version, which does not say its {', '.join(missing)}"
        raise Refusal(out, found, "one that says what was measured", do)
    before, now = dotted(held), dotted(json.loads(json.dumps(wanted)))
    if differing := [(name, was, value) for name, value in now.items() if (was := before.get(name)) != value]:
        asked, was = told([one for one in differing if one[0] not in OTHERS])
        found, here = "a result", "one"
        if others := [OTHERS[name] for name, *_ in differing if name in OTHERS]:
            found, here = f"a result of {' and '.join(others)}", "one of this model and these data"
        if asked:
            found, here = f"{found} with {was}", f"{here} with {asked}"
        raise Refusal(out, found, here, do)


def say_next(result: Path) -> None:
    """Print the command that puts a result, a file or a folder of them, on a page: the run's in whose folder, or its
    ``downstream``, it lies, else its own."""
    folder = result.parent
    near = (folder, folder.parent) if folder.name == "downstream" else (folder,)
    shown = next((place for place in near if (place / JOURNAL).is_file()), result)
    say(f"Next: latemask report {shlex.quote(str(shown))} --out report.html")

"""Which systems are trials of one objective, and by which number these differ.

An objective is what is trained: recipe, shape, decoder, what joins where. Settings are how: all of ``training``, how
many tokens are masked, how long a row is, dropout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from latemask.report.folders import RunFolder
from latemask.report.material import Worth
from latemask.report.runs import TEXT_TOKENS, are_numbers, differing, texts_differ
from latemask.report.systems import SEEDS, WATCHING, peer_of, title_of, titled

SETTINGS = ("masking.rate", "masking.later_rates", "shape.row_tokens", "shape.dropout", "decoder.dropout")
"""Beside all of ``training``."""


def by_objective(found: Sequence[Worth]) -> list[tuple[str, list[Worth]]]:
    """The systems of each objective, with a title that tells it apart from the others."""
    groups: dict[str, list[Worth]] = {}
    for worth in found:
        run = worth.runs[0]
        groups.setdefault(json.dumps([peer_of(run), objective_of(run)], sort_keys=True), []).append(worth)
    firsts = [group[0].runs[0] for group in groups.values()]
    titles = [titled(first, [one for one in firsts if title_of(one) == title_of(first)], objective_of)
              for first in firsts]  # fmt: skip
    return list(zip(titles, groups.values(), strict=True))


def objective_of(run: RunFolder) -> dict[str, Any]:
    """The fields that say what is trained."""
    return {name: value for name, value in run.fields.items() if not _is_setting(name)}


def settings_that_differ(runs: Sequence[RunFolder]) -> list[str]:
    """The fields in which trials of one objective differ, and the text where it is not the same."""
    return [*(name for name in differing(runs) if name not in (*SEEDS, *WATCHING)),
            *([TEXT_TOKENS] if texts_differ(runs) else [])]  # fmt: skip


def number_that_varies(groups: Sequence[Sequence[Worth]]) -> str | None:
    """The one setting in which the trials of each objective differ, those that differ at all: a number in all of them;
    None where there is no such setting."""
    each = [[worth.runs[0] for worth in group] for group in groups]
    found = {tuple(names) for runs in each if (names := settings_that_differ(runs))}
    if len(found) != 1 or len(names := next(iter(found))) != 1:
        return None
    return names[0] if are_numbers([run for runs in each for run in runs], names[0]) else None


def other_settings(found: Sequence[Worth], field: str) -> list[str]:
    """The settings beside ``field`` that are not the same in all these systems."""
    return [name for name in settings_that_differ([worth.runs[0] for worth in found])
            if name != field and (_is_setting(name) or name == TEXT_TOKENS)]  # fmt: skip


def _is_setting(name: str) -> bool:
    return name in SETTINGS or name.startswith("training.")

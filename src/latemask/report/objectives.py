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
from latemask.report.runs import TEXT_TOKENS, differing, texts_differ
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
    return {name: value for name, value in run.fields.items()
            if name not in SETTINGS and not name.startswith("training.")}  # fmt: skip


def settings_that_differ(runs: Sequence[RunFolder]) -> list[str]:
    """The fields in which trials of one objective differ, and the text where it is not the same."""
    return [*(name for name in differing(runs) if name not in (*SEEDS, *WATCHING)),
            *([TEXT_TOKENS] if texts_differ(runs) else [])]  # fmt: skip


def varied(groups: Sequence[Sequence[Worth]]) -> str | None:
    """The one setting in which the trials of each objective differ, the same in all and a number; None where there is
    no such setting, or no objective with several trials."""
    fields = {tuple(settings_that_differ([worth.runs[0] for worth in group]))
              for group in groups if len(group) > 1}  # fmt: skip
    if len(fields) != 1 or len(names := next(iter(fields))) != 1:
        return None
    values = [worth.runs[0].fields.get(names[0]) for group in groups for worth in group]
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return names[0] if are_numbers else None

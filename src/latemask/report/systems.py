"""Runs that differ in nothing but their seeds are one system, whatever their folders are called.

Runs of the same settings and the same seed are told apart by what no journal knows: each stays a system of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from latemask.report.folders import RunFolder
from latemask.report.looks import DASHES, MOST_RUNS
from latemask.report.runs import setting

SEEDS = ("training.seed", "training.data_seed")
WATCHING = ("training.log_every", "training.save_every", "training.keep", "training.validate_every")
"""Fields that say how a run is watched: what is trained does not depend on them."""
MLM_JOINS, MLM_RATE = ["0:0.0:1.0"], 0.15


@dataclass(frozen=True)
class System:
    """The ``runs`` of one system, in the order of their seeds."""

    name: str
    runs: tuple[RunFolder, ...]

    @property
    def by_seed(self) -> dict[str, RunFolder]:
        return {seed_of(run): run for run in self.runs}

    @property
    def is_peer(self) -> bool:
        return bool(_peer(self.runs[0]))

    @property
    def is_mlm(self) -> bool:
        """Whether all masks are in the encoder from its first layer on and nothing decodes."""
        fields = self.runs[0].fields
        return fields.get("decoder", 0) is None and fields.get("masking.joins") == MLM_JOINS


def systems(folders: Sequence[RunFolder]) -> list[System]:
    """The systems of all runs that have a journal, in the order of their first runs.

    One with a single run is called as the run; others by their recipe, with the settings that tell systems of one
    recipe apart.
    """
    groups: dict[str, list[RunFolder]] = {}
    for run in folders:
        if run.lines:
            groups.setdefault(json.dumps([_peer(run), _trained(run)], sort_keys=True), []).append(run)
    parted = [part for members in groups.values() for part in _by_seeds(members)]
    return [System(_name(members, parted), tuple(sorted(members, key=_order))) for members in parted]


def reference(found: Sequence[System]) -> System:
    """What the others are set beside: transformers' own model, else MLM (at 15 % before other rates), else the
    first."""
    mlm = [system for system in found if system.is_mlm]
    usual = [system for system in mlm if system.runs[0].fields.get("masking.rate") == MLM_RATE]
    return next(iter([*(system for system in found if system.is_peer), *usual, *mlm, *found]))


def alike(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """The same folders, the seeds of a system of one colour and marker, told apart by dash; as they are where no system
    has several seeds, one is all there is, or there are more than can be told apart."""
    found = systems(folders)
    most_seeds = max((len(system.runs) for system in found), default=0)
    others = [folder.name for folder in folders if not folder.lines]
    if len(found) < 2 or len(found) + len(others) > MOST_RUNS or not 1 < most_seeds <= len(DASHES):
        return list(folders)
    places = {run.name: (number, line) for number, system in enumerate(found) for line, run in enumerate(system.runs)}
    places |= {name: (len(found) + number, 0) for number, name in enumerate(others)}
    return [replace(folder, number=places[folder.name][0], line=places[folder.name][1]) for folder in folders]


def seed_of(run: RunFolder) -> str:
    """The run's seed, with that of its data where it is another."""
    return "/".join(str(run.fields[name]) for name in SEEDS if run.fields.get(name) is not None)


def _by_seeds(members: list[RunFolder]) -> list[list[RunFolder]]:
    has_repeats = len({seed_of(run) for run in members}) < len(members)
    return [[run] for run in members] if has_repeats else [members]


def _order(run: RunFolder) -> list[Any]:
    return [run.fields.get(name) or 0 for name in SEEDS]


def _peer(run: RunFolder) -> str:
    """What was trained, where it was no model of ours."""
    return next((str(line["peer"]) for line in run.lines if line.get("peer")), "")


def _trained(run: RunFolder) -> dict[str, Any]:
    return {name: value for name, value in run.fields.items() if name not in (*SEEDS, *WATCHING)}


def _name(members: Sequence[RunFolder], groups: Sequence[Sequence[RunFolder]]) -> str:
    first = members[0]
    if len(members) == 1:
        return first.name
    title = _title(first)
    namesakes = [group[0] for group in groups if len(group) > 1 and _title(group[0]) == title]
    fields = dict.fromkeys(name for run in namesakes for name in _trained(run))
    differ = [name for name in fields if len({repr(run.fields.get(name)) for run in namesakes}) > 1]
    name = ", ".join([title, *(f"{name} {setting(first, name)}" for name in differ)])
    is_taken = any(run.name == name for group in groups for run in group)
    return f"{name} ({len(members)} seeds)" if is_taken else name


def _title(run: RunFolder) -> str:
    return _peer(run) or str(run.fields.get("recipe"))

"""Runs that differ in nothing but their seeds are one system, whatever their folders are called.

One run a seed counts: of several the first that came to its end. The others are repeats, told apart by what no journal
knows: each is a system of its own, beside the seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latemask.report.folders import RunFolder
from latemask.report.looks import DASHES, MOST_RUNS
from latemask.report.runs import setting
from latemask.report.tables import Table
from latemask.training.resuming import FITTING

SEEDS = ("training.seed", "training.data_seed")
WATCHING = ("training.log_every", "training.save_every", "training.keep", "training.validate_every", "training.graphs",
            *FITTING)  # fmt: skip
"""Fields that say how a run is watched, launched or fitted to its card: what is trained does not depend on them."""
TEXT = ("rows", "refused_rows", "dropped_tokens")
"""What a journal's first line says of the text that was trained on."""
MLM_JOINS, MLM_RATE = ["0:0.0:1.0"], 0.15


@dataclass(frozen=True)
class System:
    """The ``runs`` of one system, in the order of their seeds."""

    name: str
    runs: tuple[RunFolder, ...]
    repeated: tuple[tuple[RunFolder, RunFolder], ...] = ()
    """Runs that repeat one of ``runs``, each with the one that counts."""

    @property
    def by_seed(self) -> dict[str, RunFolder]:
        return {seed_of(run): run for run in self.runs}

    @property
    def is_peer(self) -> bool:
        return bool(peer_of(self.runs[0]))

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
            groups.setdefault(json.dumps([peer_of(run), _text(run), _trained(run)], sort_keys=True), []).append(run)
    counted = [_by_seed(members) for members in groups.values()]
    whole = [list(by_seed.values()) for by_seed in counted]
    taken = {folder.name for folder in folders}
    found: list[System] = []
    for members, by_seed, runs in zip(groups.values(), counted, whole, strict=True):
        again = [run for run in members if run not in runs]
        repeated = tuple((run, by_seed[seed_of(run)]) for run in again)
        found.append(System(_name(runs, whole, taken), tuple(sorted(runs, key=_order)), repeated))
        found += [System(run.name, (run,)) for run in again]
    return found


def repeats_table(found: Sequence[System], folders: Sequence[RunFolder]) -> Table | None:
    """Runs that are there more than once: copies, and repeats of one seed; None without."""
    rows = [(copy, f"a copy of {folder.name}: the same settings, seed and journal")
            for folder in folders for copy in folder.copies]  # fmt: skip
    rows += [(run.name, f"repeats {first.name}: the same settings and seed, a run of its own")
             for system in found for run, first in system.repeated]  # fmt: skip
    note = (
        "A copy is the same run, which counts once, with the results of both folders. Of repeats the first that came "
        "to its end counts among the seeds of its system; the others stand beside it, each alone."
    )
    return Table("Runs that are there twice", ("run", "what it is"), tuple(rows), note) if rows else None


def reference(found: Sequence[System]) -> System:
    """What the others are set beside: transformers' own model, else MLM (at 15 % before other rates), else the
    first."""
    mlm = [system for system in found if system.is_mlm]
    usual = [system for system in mlm if system.runs[0].fields.get("masking.rate") == MLM_RATE]
    return next(iter([*(system for system in found if system.is_peer), *usual, *mlm, *found]))


def alike(folders: Sequence[RunFolder], found: Sequence[System]) -> list[RunFolder]:
    """The same folders, the seeds of a system of one colour and marker, told apart by dash; as they are where no system
    has several seeds, one is all there is, or there are more than can be told apart."""
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


def _by_seed(members: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """The run that counts for each seed."""
    found: dict[str, RunFolder] = {}
    for run in sorted(members, key=lambda run: not run.has_ended):
        found.setdefault(seed_of(run), run)
    return found


def _order(run: RunFolder) -> list[Any]:
    return [run.fields.get(name) or 0 for name in SEEDS]


def peer_of(run: RunFolder) -> str:
    """What was trained, where it was no model of ours."""
    return next((str(line["peer"]) for line in run.lines if line.get("peer")), "")


def _text(run: RunFolder) -> list[Any]:
    """What the journal says of the text: how much there is."""
    return [run.start.get(name) for name in TEXT]


def _trained(run: RunFolder) -> dict[str, Any]:
    return {name: value for name, value in run.fields.items() if name not in (*SEEDS, *WATCHING)}


def _name(members: Sequence[RunFolder], groups: Sequence[Sequence[RunFolder]], taken: Collection[str]) -> str:
    first = members[0]
    if len(members) == 1:
        return first.name
    firsts = [group[0] for group in groups if len(group) > 1 and title_of(group[0]) == title_of(first)]
    name = titled(first, firsts, _trained)
    return f"{name} ({len(members)} seeds)" if name in taken else name


def title_of(run: RunFolder) -> str:
    """What was trained, by the peer's or the recipe's name."""
    return peer_of(run) or str(run.fields.get("recipe"))


def titled(run: RunFolder, namesakes: Sequence[RunFolder], fields_of: Callable[[RunFolder], Mapping[str, Any]]) -> str:
    """Its title, with those of ``fields_of`` in which it differs from runs of the same title."""
    fields = dict.fromkeys(name for one in namesakes for name in fields_of(one))
    differ = [name for name in fields if len({repr(one.fields.get(name)) for one in namesakes}) > 1]
    return ", ".join([title_of(run), *(f"{name} {setting(run, name)}" for name in differ)])

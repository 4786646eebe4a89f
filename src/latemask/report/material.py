"""What a page is made of, each thing found once: folders, systems, scores, curves, measures and studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from latemask.report.downstream import Entry, entries
from latemask.report.folders import RunFolder
from latemask.report.measures import Curves, Measure, Named, curves, kind_of, measures, named_apart
from latemask.report.price import PRICES, Cost, Price
from latemask.report.rank import last_ranks
from latemask.report.studies import over_seeds, studies
from latemask.report.systems import System, alike, systems


@dataclass(frozen=True)
class Worth:
    """A system, its ``runs`` that came to their end (all of them where none did), and what these are worth: every
    measure of each that is compared."""

    system: System
    runs: list[RunFolder]
    scores: Mapping[str, list[Measure]]

    @property
    def has_ended(self) -> bool:
        return self.runs[0].has_ended

    @property
    def has_learned(self) -> bool:
        """Whether all of its runs got beyond word frequencies, as far as their journals say."""
        return not any(run.learned for run in self.runs)


@dataclass(frozen=True)
class Material:
    """Folders with the looks they have on the page, the systems of their runs, and what quality stands beside."""

    folders: Sequence[RunFolder]
    systems: Sequence[System]
    by: Cost = "seconds"

    @classmethod
    def of(cls, folders: Sequence[RunFolder], by: Cost = "seconds") -> Material:
        found = systems(folders)
        shown = {folder.name: folder for folder in alike(folders, found)}
        looking = [replace(system, runs=tuple(shown[run.name] for run in system.runs)) for system in found]
        return cls(list(shown.values()), looking, by)

    @property
    def price(self) -> Price:
        return PRICES[self.by]

    @cached_property
    def runs(self) -> list[RunFolder]:
        """The folders that have a journal."""
        return [folder for folder in self.folders if folder.lines]

    @cached_property
    def entries(self) -> list[Entry]:
        return entries(self.folders)

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """Studies of ranks."""
        return studies(self.folders, "rank")

    @cached_property
    def ranks_over_seeds(self) -> list[dict[str, Any]]:
        """The same with the seeds of a system as one."""
        return over_seeds(self.ranks, self.systems)

    @cached_property
    def theories(self) -> list[dict[str, Any]]:
        return studies(self.folders, "theory")

    @cached_property
    def measures(self) -> Mapping[str, Mapping[str, Measure]]:
        """By run, the measures under names that compare with those of all other runs."""
        return {run: dict(named) for run, named in self._named.items()}

    @cached_property
    def compared(self) -> Mapping[str, Mapping[str, Measure]]:
        """The same without the tasks whose average stands for them: in all runs that have the task."""
        alone = {name for found in self.measures.values() for name, measure in found.items() if not measure.is_part}
        return {run: {name: measure for name, measure in found.items() if name in alone}
                for run, found in self.measures.items()}  # fmt: skip

    @cached_property
    def worth(self) -> list[Worth]:
        """What each system is worth."""
        found = []
        for system in self.systems:
            runs, scores = [run for run in system.runs if run.has_ended] or list(system.runs), {}
            for run in runs:
                for name, measure in self.compared[run.name].items():
                    scores.setdefault(name, []).append(measure)
            found.append(Worth(system, runs, scores))
        return found

    @cached_property
    def last_ranks(self) -> Mapping[str, Mapping[str, Measure]]:
        """The same of ranks of the last layer."""
        named = named_apart({run.name: last_ranks(run, self.ranks) for run in self.runs})
        return {run: dict(ranks) for run, ranks in named.items()}

    @cached_property
    def curves(self) -> Mapping[str, Curves]:
        """By run, the curves that lead to its measures, under their names, against what quality is bought with."""
        found: dict[str, Curves] = {}
        for run in self.runs:
            measured = zip(self._measured[run.name], self._named[run.name], strict=True)
            names = {kind_of(plain, measure): name for (plain, measure), (name, _) in measured}
            known = curves(run, self._entries_of(run), self.by)
            found[run.name] = {names[kind]: points for kind, points in known.items() if kind in names}
        return found

    @cached_property
    def _measured(self) -> dict[str, list[Named]]:
        return {run.name: measures(run, self._entries_of(run)) for run in self.runs}

    @cached_property
    def _named(self) -> dict[str, list[Named]]:
        return named_apart(self._measured)

    def _entries_of(self, run: RunFolder) -> list[Entry]:
        return [entry for entry in self.entries if entry.folder.name == run.name]

    def apart(self, names: Sequence[str]) -> str:
        """What a reader must know where some of these names of measures say what they were measured on; else ""."""
        plain = {name for measured in self._measured.values() for name, _ in measured}
        said = "What a name says of rates, rows, ids or data differs among the runs: such measures do not compare."
        return "" if plain.issuperset(names) else f" {said}"

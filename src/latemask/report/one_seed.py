"""What a system has of one run alone, beside the seeds of the reference: does it lie where another seed would?

Where a measure has one run, the reference's own seeds are all that is known of noise. Of n of them with mean m and
deviation s another one lies, with 95 %, within m ± t s √(1 + 1/n) (Student's t of n - 1 degrees of freedom).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from latemask.report.comparable import are_equal_tokens
from latemask.report.folders import RunFolder
from latemask.report.material import Material
from latemask.report.measures import Measure, cautions
from latemask.report.seeds import COVERAGE, SAME, quantile
from latemask.report.systems import System, reference
from latemask.report.tables import Table, Value

FEWEST = 3
"""Seeds of the reference."""


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where with 95 % another value lies; None of fewer than ``FEWEST``, and of equal ones, whose spread says
    nothing."""
    if len(values) < FEWEST or max(values) - min(values) <= SAME * abs(max(values, key=abs)):
        return None
    mean, half = statistics.fmean(values), quantile(len(values)) * statistics.stdev(values)
    half *= math.sqrt(1 + 1 / len(values))
    return mean - half, mean + half


def one_seed_table(material: Material) -> Table | None:
    """A row each run with a measure that no other run of its system has, a column each such measure that ``FEWEST``
    seeds of the reference have or more; None without."""
    if not material.systems:
        return None
    base = reference(material.systems)
    seeds = [run for run in base.runs if run.has_ended]
    known = [_measures(material, run) for run in seeds]
    its = [pair for system in material.systems if system is not base for pair in _lone(material, system)]
    shared = [name for name in dict.fromkeys(name for found in known for name in found)
              if any(name in lone for _, lone in its)]  # fmt: skip
    each = {name: [found[name] for found in known if name in found] for name in shared}
    within = {name: found for name in shared if (found := interval([one.value for one in each[name]]))}
    if not within:
        return None
    cells = (_interval(each[name], *bounds) for name, bounds in within.items())
    rows: list[tuple[Value, ...]] = [(f"another seed of {base.name}", *cells)]
    shown = [(run, lone) for run, lone in its if lone.keys() & within.keys()]
    for run, lone in shown:
        rows.append((run.name, *(_beside(lone.get(name), *bounds) for name, bounds in within.items())))
    said = _note(base.name, [*seeds, *(run for run, _ in shown)], within, rows)
    return Table(f"Beside the seeds of {base.name}", ("system", *within), tuple(rows), said)


def _lone(material: Material, system: System) -> Iterator[tuple[RunFolder, Mapping[str, Measure]]]:
    """The runs that have ended, each with the measures that it alone of its system has."""
    each = [(run, _measures(material, run)) for run in system.runs if run.has_ended]
    often = Counter(name for _, found in each for name in found)
    for run, found in each:
        yield run, {name: one for name, one in found.items() if often[name] == 1}


def _measures(material: Material, run: RunFolder) -> Mapping[str, Measure]:
    return {**material.measures[run.name], **material.last_ranks[run.name]}


def _interval(of: Sequence[Measure], low: float, high: float) -> str:
    first, last = (of[0]._replace(value=value, mark="").text for value in (low, high))
    return f"{first} to {last} ({len(of)})"


def _beside(one: Measure | None, low: float, high: float) -> Value:
    if one is None or low <= one.value <= high:
        return None if one is None else one.text
    is_higher = one.value > high
    if one.is_neutral:
        return f"{one.text}: {'higher' if is_higher else 'lower'}"
    return f"{one.text}: {'worse' if is_higher == one.is_loss else 'better'}"


def _note(base: str, runs: Sequence[RunFolder], names: Mapping[str, object], rows: Sequence[tuple[Value, ...]]) -> str:
    said = (
        f"First where with {COVERAGE:.0%} another seed of {base} lies (Student's t; in brackets, of how many), then "
        "what one run alone of its system has; better or worse: beyond that. Their own noise is taken to be the "
        "reference's; of twenty measures one lies outside by chance. What two seeds of a system or more have is set "
        "beside the reference pair by pair."
    )
    if not are_equal_tokens(runs):
        said += " Not at equal tokens."
    return said + cautions(runs, list(names), " ".join(str(cell) for row in rows for cell in row))

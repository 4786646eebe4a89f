"""Systems of one run beside the seeds of the reference: do they lie where another seed of the reference would?

Where a system has one run, the reference's own seeds are all that is known of noise. Of n of them with mean m and
deviation s another one lies, with 95 %, within m ± t s √(1 + 1/n) (Student's t of n - 1 degrees of freedom).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from latemask.report.comparable import are_equal_tokens
from latemask.report.folders import RunFolder
from latemask.report.material import Material
from latemask.report.measures import Measure, cautions
from latemask.report.seeds import COVERAGE, SAME, quantile
from latemask.report.systems import reference
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
    """A row each system of one run, a column each measure that it shares with ``FEWEST`` seeds of the reference or
    more; None without."""
    base = reference(material.systems) if material.systems else None
    others = [system.runs[0] for system in material.systems if system is not base and len(system.runs) == 1]
    others = [run for run in others if run.has_ended]
    if base is None or not others:
        return None
    seeds = [run for run in base.runs if run.has_ended]
    known = [_measures(material, run) for run in seeds]
    its = {run.name: _measures(material, run) for run in others}
    shared = [name for name in dict.fromkeys(name for found in known for name in found)
              if any(name in found for found in its.values())]  # fmt: skip
    each = {name: [found[name] for found in known if name in found] for name in shared}
    within = {name: found for name in shared if (found := interval([one.value for one in each[name]]))}
    if not within:
        return None
    cells = (_interval(each[name], *bounds) for name, bounds in within.items())
    rows: list[tuple[Value, ...]] = [(f"another seed of {base.name}", *cells)]
    for run in others:
        rows.append((run.name, *(_beside(its[run.name].get(name), *bounds) for name, bounds in within.items())))
    said = _note(base.name, [*seeds, *others], within, rows)
    return Table(f"Beside the seeds of {base.name}", ("system", *within), tuple(rows), said)


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
        "systems of one run; better or worse: beyond that. Their own noise is taken to be the reference's; of twenty "
        "measures one lies outside by chance. Two seeds of a system or more are set beside the reference pair by pair."
    )
    if not are_equal_tokens(runs):
        said += " Not at equal tokens."
    return said + cautions(runs, list(names), " ".join(str(cell) for row in rows for cell in row))

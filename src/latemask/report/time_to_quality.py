"""Time to quality: after how many seconds, or FLOPs, each system is as good as the reference at its end."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from latemask.report.downstream import without_seconds
from latemask.report.material import Material
from latemask.report.measures import cautions
from latemask.report.plots import Point
from latemask.report.systems import System, reference, seed_of
from latemask.report.tables import Table, crossed


def time_table(material: Material) -> Table | None:
    """The cost, and its share of the reference's, for each measure with a curve; None where nothing is to be
    compared."""
    curves = material.curves
    found = [system for system in material.systems if any(curves[run.name] for run in system.runs)]
    if len(found) < 2:
        return None
    whole = [system for system in found if not all(run.learned for run in system.runs)]
    if not whole:
        return None
    base = reference(whole)
    others = [run for system in found if system is not base for run in system.runs]
    names = [name for name in dict.fromkeys(name for run in base.runs if not run.learned
                               for name in curves[run.name])
             if any(name in curves[run.name] for run in others)]  # fmt: skip

    def cell(row: int, column: int) -> str | None:
        return _reached(material, names[row], found[column], base)

    note = (
        f"{material.price.spent} of pretraining until a system is as good as {base.name} at its end (of the same "
        f"seed, where it has it), and their share of {base.name}'s; on straight lines between checkpoints (≤: as good "
        "at its first). A learning rate that has not come down yet makes checkpoints on the way look worse than the "
        "end of a run of their length; a lucky checkpoint makes them look better, which the reference's own share "
        "tells."
    )
    runs = [run for system in found for run in system.runs]
    if dead := ", ".join(run.name for run in runs if run.learned):
        note += f" Set and reach nothing: {dead}, which learned no more than word frequencies."
    unpriced = [run for run in material.runs if run.cost(material.by) is None]
    worth = [material.measures[run.name] for run in runs]
    note += material.apart(list(dict.fromkeys(name for run in runs for name in curves[run.name])))
    marks = " ".join(found[name].mark for found in worth for name in names if name in found)
    note += cautions([*runs, *unpriced], names, marks, material.by)
    if material.by == "seconds":
        note += "".join(f" {sentence}" for sentence in without_seconds(material.entries))
    across = [system.name for system in found]
    return crossed(material.price.quality, ("measure", "system"), names, across, cell, note) if names else None


def _reached(material: Material, name: str, system: System, base: System) -> str | None:
    times = []
    targets = {seed: run for seed, run in base.by_seed.items() if not run.learned}
    for run in system.runs:
        its = targets.get(seed_of(run), next(iter(targets.values())))
        curve, target = (material.curves[one.name].get(name) for one in (run, its))
        if curve is not None and target is not None:
            is_loss = material.measures[run.name][name].is_loss
            spent = None if run.learned else time_to(curve, target[-1][1], is_loss)
            times.append(None if spent is None else (spent, spent / target[-1][0], spent == curve[0][0]))
    done = [each for each in times if each is not None]
    if not done:
        return "not reached" if times else None
    some = "" if len(done) == len(times) else f", {len(done)} of {len(times)} runs"
    spent, share, is_first = (statistics.fmean(column) for column in zip(*done, strict=True))
    return f"{'≤ ' if is_first else ''}{material.price.text(spent)} ({share:.0%}{some})"


def time_to(points: Sequence[Point], level: float, is_loss: bool) -> float | None:
    """When a curve is first as good as ``level``, on the straight lines between its points; None where it never is."""
    sign = -1 if is_loss else 1
    if sign * (points[0][1] - level) >= 0:
        return points[0][0]
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        if sign * (next_y - level) >= 0:
            return x + (next_x - x) * (level - y) / (next_y - y)
    return None

"""What the runs cost: computed from their settings, measured by their journals, and published where a paper says."""

from __future__ import annotations

from collections.abc import Sequence

from latemask.config import Run, typed
from latemask.errors import Refusal
from latemask.report.comparable import without_flops
from latemask.report.folders import RunFolder
from latemask.report.published import compute_share
from latemask.report.tables import Table, Value
from latemask.study.cost import cost


def costs_table(runs: Sequence[RunFolder]) -> Table | None:
    """Parameters, FLOPs per token beside MLM's, and card-hours so far; of runs whose settings this version cannot read
    only what was measured, and the note says what is missing. None without runs."""
    rows: list[tuple[Value, ...]] = []
    missing = []
    for run in runs:
        hours, spent = (run.card_seconds / 3600, run.cost("flops")) if run.reached["tokens"] else (None, None)
        try:
            of = cost(typed(Run, run.start.get("run"), "run"))
        except Refusal as refusal:
            missing.append(f"{run.name} ({refusal.where}: found {refusal.found}; wanted {refusal.wanted})")
            rows.append((run.name, *[None] * 7, hours, spent))
            continue
        published = compute_share(of.run)
        rows.append((
            run.name, of.parameters.kept / 1e6, of.parameters.thrown_away / 1e6, of.plain.total / 1e6,
            of.executed.total / 1e6, f"{of.plain_ratio:.1%}", f"{of.executed_ratio:.1%}",
            None if published is None else f"{published:.0%} (published)", hours, spent,
        ))  # fmt: skip
    columns = ("run", "million parameters kept", "thrown away", "MFLOP/token, plain", "as run here",
               "share of MLM's, plain (computed)", "as run here (computed)", "share of RoBERTa's (published)",
               "card-hours so far (measured)", "PFLOP so far, plain")  # fmt: skip
    note = "Computed beside MLM of the same shape at 15 %, forward and backward. Plain: as everybody runs it."
    if any(row[7] for row in rows):
        note += " Published: 3ML's abstract (78 % base, 68 % large); how that was counted is not known."
    else:
        columns, rows = columns[:7] + columns[8:], [row[:7] + row[8:] for row in rows]
    if lacking := without_flops([run for run in runs if run.reached["tokens"]]):
        note += f" {lacking[0]}"
    if missing:
        note += (" Nothing is computed for runs whose settings this version cannot read in their journal: "
                 f"{'; '.join(missing)}.")  # fmt: skip
    return Table("Costs", columns, tuple(rows), note) if rows else None

"""Tables from journals: runs side by side, the settings that differ, validation by source, what happened."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from latemask.report.comparable import units, why_losses_do_not
from latemask.report.folders import RunFolder
from latemask.report.tables import Table, Value, crossed
from latemask.training.plateau import NAME

TEXT_TOKENS = "tokens of text"
"""Beside the fields of a run: what its journal says of the text."""


def runs_table(runs: Sequence[RunFolder]) -> Table:
    """One row a run: what it was, where it stands, how fast it went."""
    columns = ("run", "recipe", "masked", "steps", "million tokens", "seconds", "validation loss", "at step",
               "at rate", "tokens/s", "MFU", "card")  # fmt: skip
    note = f"Loss: {units(runs)} on held-out text. Speed and MFU: medians over the journal's lines."
    if why := why_losses_do_not(runs):
        note += f" {why}"
    rows = list(map(_row, runs))
    if any(run.rewrites for run in runs):
        columns = (*columns, "loss per")
        rows = [(*row, "token of the row" if run.rewrites else "masked token")
                for row, run in zip(rows, runs, strict=True)]  # fmt: skip
    if any(run.unigram_loss is not None for run in runs):
        columns = (*columns, NAME)
        rows = [(*row, run.unigram_loss) for row, run in zip(rows, runs, strict=True)]
        note += f" {NAME.capitalize()}: the loss of knowing nothing but how often each token occurs."
    if any(run.learned for run in runs):
        columns = (*columns, "learned")
        rows = [(*row, run.learned) for row, run in zip(rows, runs, strict=True)]
        note += f" Learned: whose loss stood still at that of {NAME}, or above it, after the warm-up; empty: more."
    return Table("Runs", columns, tuple(rows), note)


def no_more_than_frequencies(runs: Sequence[RunFolder]) -> str:
    """Which runs learned no more than word frequencies, as a sentence; "" where none did."""
    dead = [run for run in runs if run.learned]
    if not dead:
        return ""
    levels = sorted({f"{run.unigram_loss:.4f}" for run in dead})
    every = "This run" if len(runs) == 1 else f"All {len(runs)} runs"
    who = every if len(dead) == len(runs) else ", ".join(run.name for run in dead)
    whose, them = ("its method", "it") if len(dead) == 1 else ("their methods", "them")
    return (f"{who} learned no more than word frequencies, which alone reach a loss of {' or '.join(levels)}: what "
            f"stands below about {them} says nothing of {whose}.")  # fmt: skip


def _row(run: RunFolder) -> tuple[Value, ...]:
    reached, valid = run.reached, run.validation
    return (
        run.name, run.fields.get("recipe"), _share(run.fields.get("masking.rate")), reached["step"],
        reached["tokens"] / 1e6, float(reached["seconds"]), valid.get("loss"), valid.get("step"),
        _share(valid.get("rate")), median(run, "tokens_per_second"), median(run, "mfu"), run.cards,
    )  # fmt: skip


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.4g}%"


def median(run: RunFolder, name: str) -> float | None:
    """Of a number over the journal's lines of training; None where none has it."""
    values = [line[name] for line in run.training if line.get(name) is not None]
    return float(statistics.median(values)) if values else None


def differing(runs: Sequence[RunFolder]) -> list[str]:
    """The fields that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.fields)
    return [name for name in names if len({repr(run.fields.get(name)) for run in runs}) > 1]


def are_numbers(runs: Sequence[RunFolder], field: str) -> bool:
    """Whether a field is a number in all runs."""
    values = (run.fields.get(field) for run in runs)
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def texts_differ(runs: Sequence[RunFolder]) -> bool:
    """Whether they trained on texts that are not equally long, as far as their journals say."""
    return len({run.text_tokens for run in runs} - {None}) > 1


def settings_table(runs: Sequence[RunFolder]) -> Table:
    """The fields that are not the same in all runs, and the text where it is not."""
    fields = [*differing(runs), *([TEXT_TOKENS] if texts_differ(runs) else [])]
    note = "" if fields else "None: these runs have the same settings."
    return crossed("Settings that differ", ("field", "run"), fields, [run.name for run in runs] if fields else [],
                   lambda row, column: setting(runs[column], fields[row]), note)  # fmt: skip


def setting(run: RunFolder, name: str) -> str | None:
    """A field's value as text; None where the run has no such field."""
    if name == TEXT_TOKENS:
        return None if run.text_tokens is None else f"{run.text_tokens:,}"
    if name not in run.fields:
        return None
    value = run.fields[name]
    return " ".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: object) -> str:
    return "none" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)


def sources_table(runs: Sequence[RunFolder]) -> Table | None:
    """Last validation loss by source of the text; None where the text names none."""
    losses = [run.validation.get("by_source") or {} for run in runs]
    names = sorted({name for by_source in losses for name in by_source})
    unit = units(runs)
    note = f"{unit[0].upper()}{unit[1:]}, at the last validation. {why_losses_do_not(runs)}".rstrip()
    return crossed("Validation by source", ("source", "run"), names, [run.name_by_loss for run in runs],
                   lambda row, column: losses[column].get(names[row]), note) if names else None  # fmt: skip


def events_table(runs: Sequence[RunFolder]) -> Table:
    """Resumes, skipped updates and ends."""
    rows = []
    for run in runs:
        kinds = [line["kind"] for line in run.lines]
        rows.append((run.name, *(kinds.count(kind) for kind in ("resume", "skip", "save")), run.ending))
    return Table("What happened", ("run", "resumes", "skipped updates", "saves", "end"), tuple(rows))

"""The report on trials of settings: a table an objective, a row a trial, the best first and marked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latemask.report import plots
from latemask.report.folders import read_folders
from latemask.report.material import Material
from latemask.report.page import ReportOptions, run_report
from latemask.report.tables import Table
from latemask.report.tuning import tuning_tables
from reported import pairs, put, write_curve, write_lines

TRIED = {"128x512": (128, 512, 4e-4, 0.15), "64x512": (64, 512, 4e-4, 0.15), "32x512": (32, 512, 2e-4, 0.15),
         "32x512,masked=.3": (32, 512, 2e-4, 0.3), "128x128": (128, 128, 2e-4, 0.15)}  # fmt: skip
"""As `benchmarks/evidence.py tuning` has them: rows an update, tokens a row, peak rate, masked."""
LOSSES = {"128x512": 3.6, "64x512": 3.4, "32x512": 3.2, "32x512,masked=.3": 3.3, "128x128": 3.0}
SECONDS = {"128x512": 80, "64x512": 90, "32x512": 120, "32x512,masked=.3": 110, "128x128": 60}


def trial(place: Path, system: str, label: str, seed: int | None = None, **also: Any) -> Path:
    rows, row_tokens, rate, masked = TRIED[label]
    fields = {"training.batch_rows": rows, "shape.row_tokens": row_tokens, "training.learning_rate": rate,
              "masking.rate": masked, "training.validation_rate": 0.15,
              "training.steps": 2**20 // rows // row_tokens}  # fmt: skip
    fields |= also | ({} if seed is None else {"training.seed": seed})
    folder = place / ",".join([system, label, *([] if seed is None else [f"seed={seed}"])])
    run = write_curve(folder, f"{system}_tiny", LOSSES[label] + (seed or 0) / 100, SECONDS[label], fields)
    return put(run, pairs(folder.name, 0.9 - LOSSES[label] / 10))


def as_peer(run: Path) -> None:
    start, *lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    write_lines(run, [start | {"peer": "transformers RobertaForMaskedLM"}, *lines])


def tables_of(place: Path) -> dict[str, Table]:
    return {table.title: table for table in tuning_tables(Material.of(read_folders([place])), ())}


def column(table: Table, name: str) -> list[Any]:
    [place] = [number for number, column in enumerate(table.columns) if column.startswith(name)]
    return [row[place] for row in table.rows]


def test_a_table_an_objective_with_the_settings_that_differ_and_the_best_first(tmp_path):
    for system, label in itertools.product(("mlm", "mae_lm"), TRIED):
        trial(tmp_path, system, label)
    for label in TRIED:
        as_peer(trial(tmp_path / "peers", "mlm", label).rename(tmp_path / f"roberta,{label}"))
    (tmp_path / "peers").rmdir()
    tables = tables_of(tmp_path)
    assert set(tables) == {
        f"Settings of {name}" for name in ("mlm_tiny", "mae_lm_tiny", "transformers RobertaForMaskedLM")
    }
    table = tables["Settings of mae_lm_tiny"]
    assert table.columns == (
        "trial", "shape.row_tokens", "masking.rate", "training.steps", "training.batch_rows", "training.learning_rate",
        "million tokens", "seconds", "validation loss", "validation loss at 80 s", "Minimal pairs",
        "tokens/s")  # fmt: skip
    assert [name.removeprefix("mae_lm,") for name in column(table, "trial")] == [
        "32x512", "32x512,masked=.3", "64x512", "128x512", "128x128"]  # fmt: skip
    assert table.rows[0][1:6] == ("512", "0.15", "64", "32", "0.0002")
    losses = table.rows[0][8], table.rows[1][8]
    assert losses == tuple(f"{LOSSES[label] + (10 - LOSSES[label]) * np.exp(-4) - 0.1:.3f}{best}"
                           for label, best in (("32x512", " ★"), ("32x512,masked=.3", "")))  # fmt: skip
    assert str(table.rows[-1][8]).endswith("(rows of 128 tokens)"), "lower, but of other rows"
    assert column(table, "Minimal pairs")[-1] == "60.0 ★", "which are the same for all"
    assert [str(cell).endswith("★") for cell in column(table, "Minimal pairs")] == [False] * 4 + [True]
    assert "does not compare" in table.note


def test_losses_at_equal_seconds_are_on_the_curves_where_the_quickest_ended(tmp_path):
    runs = {label: trial(tmp_path, "mlm", label) for label in ("128x512", "64x512", "128x128")}
    [table] = tables_of(tmp_path).values()
    for name, loss in zip(column(table, "trial"), column(table, "validation loss at 80 s"), strict=True):
        label = name.removeprefix("mlm,")
        if label == "128x128":
            assert loss is None, "it had ended long before"
            continue
        [folder] = read_folders([runs[label]])
        curve = plots.loss_points(folder.lines, "seconds")
        assert loss.split()[0] == f"{np.interp(80, *zip(*curve, strict=True)):.3f}"


def test_seeds_are_one_trial_and_what_did_not_end_is_last_and_never_the_best(tmp_path):
    for label, seed in itertools.product(("64x512", "32x512"), (1, 2)):
        trial(tmp_path, "mlm", label, seed)
    good = trial(tmp_path, "mlm", "128x512", 1)
    lines = [json.loads(line) for line in (good / "journal.jsonl").read_text().replace("3.6", "0.6").splitlines()]
    write_lines(good, [*lines[:-1], {"kind": "skip", "step": 9, "skips_in_a_row": 20}])
    [table] = tables_of(tmp_path).values()
    assert column(table, "seeds") == [2, 2, 1]
    assert column(table, "trial")[-1] == "mlm,128x512,seed=1"
    assert column(table, "end") == ["steps", "steps", "diverged"]
    first, second, last = (row[table.columns.index("validation loss")] for row in table.rows)
    assert "±" in first
    assert first.endswith("★")
    assert "★" not in second + last


def test_a_trial_that_learned_no_more_than_word_frequencies_is_never_the_best(tmp_path):
    for label, is_dead in (("64x512", False), ("32x512", True)):
        run = trial(tmp_path, "mlm", label)
        start, *lines, end = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        write_lines(run, [start | {"unigram_loss": 3.2}, *lines, end | {"word_frequencies_only": is_dead}])
    [table] = tables_of(tmp_path).values()
    rows = {row[0]: " ".join(map(str, row)) for row in table.rows}
    assert rows["mlm,64x512"].count("★") == 3, "its losses and minimal pairs, which are worse"
    assert "★" not in rows["mlm,32x512"]
    assert "No ★ for trials" in table.note


def test_no_table_of_one_trial_nor_of_what_a_sweep_shows_nor_of_other_objectives(tmp_path):
    for system in ("mlm", "mae_lm"):
        trial(tmp_path / "one", system, "64x512")
    trial(tmp_path / "one", "mlm_80_10_10", "32x512")
    assert not tables_of(tmp_path / "one")
    for rate in (1e-4, 2e-4):
        write_curve(tmp_path / "sweep" / f"{rate}", "mlm_tiny", 3.0, 100, {"training.learning_rate": rate})
    material = Material.of(read_folders([tmp_path / "sweep"]))
    assert len(tuning_tables(material, ())) == 1
    run_report(ReportOptions((str(tmp_path / "sweep"),), tmp_path / "r.html"))
    text = (tmp_path / "r.md").read_text()
    assert "## Sweep over training.learning" in text
    assert "## Settings of" not in text


def test_objectives_of_one_recipe_are_told_apart(tmp_path):
    for layer, label in itertools.product((1, 2), ("64x512", "32x512")):
        trial(tmp_path / str(layer), "three_ml", label, **{"masking.joins": [f"{layer}:0.0:1.0"]}).rename(
            tmp_path / f"{layer}-{label}"
        )
        (tmp_path / str(layer)).rmdir()
    assert set(tables_of(tmp_path)) == {f"Settings of three_ml_tiny, masking.joins {layer}:0.0:1.0" for layer in (1, 2)}


@pytest.mark.parametrize("losses", [0, 1])
def test_of_fewer_than_two_numbers_that_compare_none_is_the_best(losses, tmp_path):
    trial(tmp_path, "mlm", "128x128")
    if losses:
        trial(tmp_path, "mlm", "64x512")
    else:
        run = trial(tmp_path, "mlm", "64x512")
        lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        write_lines(run, [line for line in lines if line["kind"] != "validation"])
    [table] = tables_of(tmp_path).values()
    assert not any("★" in str(row[table.columns.index("validation loss")]) for row in table.rows)

"""What the report counts: a run once, wherever it is copied to; a result for the run that it measured; no difference of
numbers that were not measured alike."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from latemask.report.comparable import why_losses_do_not
from latemask.report.curves import checkpoint_drawings
from latemask.report.downstream import glue_table
from latemask.report.evaluations import finetuned_table, masked_loss_table, pairs_table
from latemask.report.folders import read_folders
from latemask.report.front import cost_table, front_drawings
from latemask.report.material import Material
from latemask.report.owners import is_own
from latemask.report.page import ReportOptions, parts, run_report
from latemask.report.rank import rank_table
from latemask.report.runs import settings_table
from latemask.report.seeds import seeds_tables
from latemask.report.tables import Table
from latemask.report.time_to_quality import time_table
from latemask.report.trend import sweeps, trend_drawings, trend_table
from latemask.report.tuning import tuning_tables
from reported import finetuned, masked_loss, pairs, point, put, study, write_curve, write_journal, write_lines


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


def material_of(*places: Path) -> Material:
    return Material.of(read_folders(places))


def rows_of(table: Table | None) -> dict[Any, tuple]:
    assert table is not None
    return {row[0]: row[1:] for row in table.rows}


# A run counts once


def two_systems(place: Path) -> None:
    for seed, (name, loss) in itertools.product((1, 2), (("mlm_tiny", 3.0), ("mae_lm_tiny", 2.5))):
        write_curve(place / f"{name}-{seed}", name, loss + 0.01 * seed * loss, 100, {"training.seed": seed})


def test_a_copied_folder_is_the_same_run_with_the_results_of_both(tmp_path, capsys):
    two_systems(tmp_path / "runs")
    run = put(tmp_path / "runs" / "mlm_tiny-1", point("rte", 0.6, run="mlm_tiny-1"))
    before = [(table.title, table.rows) for table in seeds_tables(material_of(tmp_path / "runs"))]
    copy = shutil.copytree(run, tmp_path / "runs" / "mlm_tiny-1-copy")
    tuned = point("sst2", 0.9, run="mlm_tiny-1-copy")
    tuned["model"]["weights"] = "mlm_tiny-1-1000"
    put(copy, tuned, study("runs/mlm_tiny-1-copy"))
    capsys.readouterr()
    assert run_report(ReportOptions((str(tmp_path / "runs"),), tmp_path / "r.html")) == 0
    assert capsys.readouterr().err == "warning: counted once: mlm_tiny-1-copy is a copy of mlm_tiny-1\n"
    assert "| mlm_tiny-1-copy | a copy of mlm_tiny-1: the same settings, seed" in (tmp_path / "r.md").read_text()
    material = material_of(tmp_path / "runs")
    assert [run.name for run in material.runs] == ["mae_lm_tiny-1", "mae_lm_tiny-2", "mlm_tiny-1", "mlm_tiny-2"]
    assert [(table.title, table.rows) for table in seeds_tables(material)] == before
    assert {"RTE", "SST-2"} <= material.measures["mlm_tiny-1"].keys(), "the copy's results too"
    assert len(rows_of(glue_table(material.entries))) == 1 + 2, "RTE and SST-2 of one model, and two published rows"
    assert material.last_ranks["mlm_tiny-1"]


def test_a_copy_made_while_the_run_went_on_is_that_run(tmp_path):
    run = write_curve(tmp_path / "a", "mlm_tiny", 3.0, 100)
    write_lines(tmp_path / "before", lines_of(run)[:9])
    for order in itertools.permutations([run, tmp_path / "before"]):
        [one] = read_folders(order)
        assert (one.name, one.copies, len(one.lines)) == ("a", ("before",), len(lines_of(run)))


def test_a_copy_of_which_a_line_is_damaged_is_that_run(tmp_path):
    run = write_curve(tmp_path / "a", "mlm_tiny", 3.0, 100)
    copy = Path(shutil.copytree(run, tmp_path / "b")) / "journal.jsonl"
    copy.write_text(copy.read_text().replace('{"kind": "train"', '{{"kind": "train"', 1))
    for order in itertools.permutations([run, copy.parent]):
        [one] = read_folders(order)
        assert (one.name, one.copies, len(one.lines)) == ("a", ("b",), len(lines_of(run)))
        assert [problem.where for problem in one.left_out] == [f"{copy}:3"]


def test_runs_that_have_only_begun_and_those_that_went_on_apart_are_no_copies(tmp_path):
    run = lines_of(write_curve(tmp_path / "a", "mlm_tiny", 3.0, 100))
    other = lines_of(write_curve(tmp_path / "b", "mlm_tiny", 3.0, 110))
    write_lines(tmp_path / "b", run[:9] + other[9:20])
    write_lines(tmp_path / "begun", run[:2])
    assert [folder.copies for folder in read_folders([tmp_path])] == [()] * 3


def test_runs_of_other_settings_or_numbers_are_no_copies(tmp_path):
    begun = [write_lines(tmp_path / name, lines_of(write_journal(tmp_path / name, recipe))[:1])
             for name, recipe in (("a", "mlm_tiny"), ("b", "mae_lm_tiny"))]  # fmt: skip
    put(tmp_path / "c", point("rte", 0.6)), put(tmp_path / "d", point("rte", 0.6))
    runs = read_folders([*begun, tmp_path / "c", tmp_path / "d"])
    assert [run.copies for run in runs] == [()] * 4


def test_of_repeats_of_a_seed_the_first_that_ended_counts_and_the_others_stand_beside(tmp_path):
    two_systems(tmp_path)
    whole = [table.rows for table in seeds_tables(material_of(tmp_path))]
    stopped = write_curve(tmp_path / "a-stopped", "mlm_tiny", 9.0, 70, {"training.seed": 2})
    write_lines(stopped, lines_of(stopped)[:-1])
    write_curve(tmp_path / "z-again", "mlm_tiny", 3.5, 90, {"training.seed": 1})
    material = material_of(tmp_path)
    names = {system.name: [run.name for run in system.runs] for system in material.systems}
    assert names == {
        "mlm_tiny": ["mlm_tiny-1", "mlm_tiny-2"],
        "a-stopped": ["a-stopped"],
        "z-again": ["z-again"],
        "mae_lm_tiny": ["mae_lm_tiny-1", "mae_lm_tiny-2"],
    }
    assert [table.rows for table in seeds_tables(material)] == whole
    [said] = [part for part in parts(material.folders) if part.title == "Runs that are there twice"]
    assert rows_of(said) == {
        "a-stopped": ("repeats mlm_tiny-2: the same settings and seed, a run of its own",),
        "z-again": ("repeats mlm_tiny-1: the same settings and seed, a run of its own",),
    }


def test_runs_on_other_text_are_another_system(tmp_path):
    for name, rows in (("a", 100), ("b", 100), ("c", 90)):
        start, *lines = lines_of(write_journal(tmp_path / name, fields={"training.seed": ord(name)}))
        write_lines(tmp_path / name, [start | {"rows": rows, "refused_rows": 0, "dropped_tokens": 5}, *lines])
    material = material_of(tmp_path)
    assert [[run.name for run in system.runs] for system in material.systems] == [["a", "b"], ["c"]]
    differing = {row[0]: row[1:] for row in settings_table(material.runs).rows}
    assert differing["tokens of text"] == ("12,705", "12,705", "11,435"), "a row of 128 is <s> and 127 of them"
    [trials] = tuning_tables(material, ())
    place = trials.columns.index("tokens of text")
    assert {row[0]: row[place] for row in trials.rows} == {"mlm_tiny": "12,705", "c": "11,435"}


# A result counts for the run that it measured


def foreign(result: dict[str, Any], folder: str = "models/roberta-base") -> dict[str, Any]:
    """The same result of a model that is no run's."""
    if result["kind"] == "rank":
        return {**result, "model": folder, "run": None, "step": None, "pretraining_seconds": None}
    return {**result, "model": {"folder": folder, "weights": "r", "tokenizer": "t"}}


def of_run(result: dict[str, Any], run: str, step: int, seconds: float) -> dict[str, Any]:
    origin = {"run": run, "step": step, "pretraining_seconds": seconds}
    if result["kind"] == "rank":
        return {**result, "model": f"elsewhere/{run}", **origin}
    return {**result, "model": {**result["model"], "folder": f"elsewhere/{run}", **origin}}


EVERY = [point("rte", 0.9, run="mlm"), pairs("mlm", 0.9), masked_loss("mlm", 1.0), study("runs/mlm", top=40)]


@pytest.mark.parametrize("result", EVERY, ids=lambda result: result.get("suite", result["kind"]))
def test_a_result_is_the_run_s_where_it_says_so_by_its_checkpoint_or_else_by_name(result, tmp_path):
    run = write_journal(tmp_path / "mlm")
    lines = lines_of(run)
    [unsaved] = read_folders([run])
    [saved] = read_folders([write_lines(run, [*lines, {"kind": "save", "step": 30, "seconds": 3.0}])])
    assert is_own(unsaved, result)
    assert not is_own(unsaved, of_run(result, "other", 30, 3.0)), "nothing proves that it is the same run"
    assert is_own(saved, of_run(result, "former", 30, 3.0)), "renamed since"
    assert not is_own(saved, of_run(result, "mlm", 30, 3.5)), "another run of that name"
    for inside in ("mlm", "mlm/step-0000030", "mlm/downstream/mnli-e3-lr2e-05-b32.model", "mlm/export"):
        assert is_own(saved, foreign(result, inside))
    for elsewhere in ("models/roberta-base", "mlm/of/others/bert", "roberta-base"):
        assert not is_own(saved, foreign(result, elsewhere))


def test_a_guest_s_results_stand_under_its_own_name_and_in_no_comparison(tmp_path):
    two_systems(tmp_path)
    plain = material_of(tmp_path)
    named = "mlm_tiny-1"
    guests = [foreign(one) for one in EVERY] + [of_run(one, "other", 40, 4.0) for one in EVERY]
    guests += [of_run(point("rte", 0.8), "other", 50, 5.0), finetuned("other", 0.5)]
    for number, guest in enumerate(guests):
        folder = tmp_path / named / ("" if guest["kind"] == "rank" else "downstream")
        folder.mkdir(exist_ok=True)
        (folder / f"by-path-{number}.json").write_text(json.dumps(guest))
    material = material_of(tmp_path)
    assert material.measures == plain.measures
    assert not any(material.last_ranks.values())
    assert not checkpoint_drawings(material.entries), "of the guest's checkpoints"
    assert [table.rows for table in seeds_tables(material)] == [table.rows for table in seeds_tables(plain)]
    assert set(rows_of(rank_table(material.ranks))) == {"roberta-base", "other"}
    tuned = {row for row in rows_of(glue_table(material.entries)) if "published" not in row}
    assert tuned == {"roberta-base", "other, step 40", "other, step 50"}
    assert set(pairs_table(material.folders).columns) == {"field", "other", "roberta-base"}
    assert set(rows_of(masked_loss_table(material.folders))) == {"roberta-base", "other"}
    assert set(rows_of(finetuned_table(material.folders))) == {"other"}


def test_ranks_of_a_run_beside_it_are_its_own_and_those_of_a_namesake_are_not(tmp_path):
    """Wherever the file lies: the rank of one run in another's folder, and that of an earlier run of the same name."""
    for name in ("a", "b"):
        run = write_journal(tmp_path / name, fields={"training.seed": ord(name)})
        write_lines(run, [*lines_of(run), {"kind": "save", "step": 30, "seconds": 3.0 + ord(name)}])
    put(tmp_path / "a", of_run(study("x", top=50), "b", 30, 3.0 + ord("b")), of_run(study("x", top=70), "a", 30, 2.0))
    material = material_of(tmp_path)
    ranks = {run: [one.value for one in measured.values()] for run, measured in material.last_ranks.items()}
    assert ranks == {"a": [], "b": [50]}
    assert {row[0]: row[1] for row in rank_table(material.ranks).rows} == {"b": "50 (52)", "elsewhere/a": "70 (72)"}
    assert {one["name"] for one in material.ranks_over_seeds} == {"mlm_tiny", "elsewhere/a"}


# Only what was measured alike is compared

OTHERWISE: list[tuple[dict[str, Any], str]] = [
    ({"row_tokens": 512}, "rows of 512 tokens"),
    ({"tokenizer": "xyz", "fingerprint": "9b3c"}, "tokenizer xyz"),
    ({"rows": 200}, "200 rows"),
    ({"rate": 0.5}, "50%"),
    ({"fingerprint": "9b3c"}, "text 9b3c"),
]


@pytest.mark.parametrize(("change", "said"), OTHERWISE, ids=lambda value: value if isinstance(value, str) else "")
def test_masked_losses_are_compared_where_they_were_measured_alike_and_else_it_is_said_why_not(change, said, tmp_path):
    two_systems(tmp_path)
    on = {"options": {"data": "held.txt"}}
    for run in tmp_path.iterdir():
        put(run, masked_loss(run.name, 2.0 + len(run.name) / 10 + int(run.name[-1]) / 50) | on)
    material = material_of(tmp_path)
    [table] = seeds_tables(material)
    assert "masked loss, held.txt, 15%" in rows_of(table)
    assert "do not compare" not in table.note + masked_loss_table(material.folders).note
    for seed in (1, 2):
        [file] = (tmp_path / f"mae_lm_tiny-{seed}").glob("downstream/*.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    material = material_of(tmp_path)
    [table] = seeds_tables(material)
    assert not [name for name in rows_of(table) if "masked" in name]
    assert said in table.note.split("do not compare: ")[1]
    assert said in masked_loss_table(material.folders).note
    assert "do not compare" in masked_loss_table(material.folders).note
    costs = cost_table(material)
    losses = [column for column in costs.columns if "masked loss" in column]
    assert len(losses) == 2, "a column each"
    assert all(sum(row[costs.columns.index(name)] is not None for row in costs.rows) == 1 for name in losses)
    assert ("do not compare" in costs.note) == (said != "50%"), "a rate stands in every name"


BY_PATH = {"fingerprint"}
"""What a result of before says nothing of."""


@pytest.mark.parametrize(("change", "left_out", "compare"), [
    ({"options": {"data": "moved/held.txt"}}, set(), True),
    ({"tokenizer": "xyz", "fingerprint": "9b3c"}, set(), False),
    ({"options": {"data": "./held.txt"}}, BY_PATH, True),
    ({"options": {"data": "moved/held.txt"}}, BY_PATH, False),
])  # fmt: skip
def test_texts_are_told_apart_by_what_was_scored_and_by_their_paths_where_a_result_does_not_say_it(
    change, left_out, compare, tmp_path
):
    on = {"options": {"data": "held.txt"}}
    for name, result in (("a", masked_loss("a", 2.0) | on), ("b", masked_loss("b", 3.0) | on | change)):
        put(write_journal(tmp_path / name), {key: value for key, value in result.items() if key not in left_out})
    note = masked_loss_table(read_folders([tmp_path / "a", tmp_path / "b"])).note
    assert ("Not measured alike" in note) != compare
    if "tokenizer" in change:
        assert "(tokenizer abc and tokenizer xyz)" in note, "that other ids were scored follows from it"


def test_tokenizers_that_made_the_same_rows_are_one(tmp_path):
    """An export declares its special tokens otherwise than its run: another fingerprint, the same ids."""
    export = {"tokenizer": "xyz", "model": {"folder": "out/b"}}
    put(write_journal(tmp_path / "a"), masked_loss("a", 2.0), masked_loss("a", 2.5, text="77aa"))
    put(write_journal(tmp_path / "b"), masked_loss("b", 3.0, text="77aa") | export,
        masked_loss("b", 3.5, text="cc") | export)  # fmt: skip
    put(write_journal(tmp_path / "c"), masked_loss("c", 4.0, text="dd") | {"tokenizer": "other"})
    folders = read_folders([tmp_path / name for name in "ab"])
    table = masked_loss_table(folders)
    assert {row[-1] for row in table.rows} == {"abc"}
    assert "tokenizer abc" not in table.note, "what differs is the text"
    found = material_of(tmp_path).measures
    shared = {name for name in found["a"].keys() & found["b"].keys() if name.startswith("masked")}
    assert shared == {"masked loss, , 15%, tokenizer abc, text 77aa"}
    assert "tokenizer other" in masked_loss_table(read_folders([tmp_path / name for name in "abc"])).note


def test_one_run_s_masked_losses_of_two_row_lengths_are_two_measures(tmp_path):
    put(write_journal(tmp_path / "a"), masked_loss("a", 3.0), masked_loss("a", 2.0) | {"row_tokens": 512})
    measures = material_of(tmp_path / "a").measures["a"]
    assert {name: measure.value for name, measure in measures.items() if "masked" in name} == {
        "masked loss, , 15%, rows of 128 tokens": 3.0, "masked loss, , 15%, rows of 512 tokens": 2.0}  # fmt: skip


def test_scores_on_other_data_and_ranks_of_other_text_are_not_compared(tmp_path):
    two_systems(tmp_path)
    for run in tmp_path.iterdir():
        is_mlm = run.name.startswith("mlm")
        data = {"data": {"dev": {"fingerprint": "one" if is_mlm else "two"}}}
        put(run, point("rte", 0.6, run=run.name) | data, study(f"runs/{run.name}") | {"data": f"text-{is_mlm}"})
    [table] = seeds_tables(material_of(tmp_path))
    assert not [name for name in rows_of(table) if "RTE" in name or "rank" in name]
    for name in ("RTE, data ", "rank_.9 of the last layer, pretrained, on text-True (mlm_tiny)"):
        assert name in table.note.split("do not compare: ")[1]


def test_validation_losses_that_do_not_compare_share_no_front_no_time_and_no_line(tmp_path):
    for number, row_tokens in enumerate((128, 128, 128, 64)):
        write_curve(tmp_path / f"{number}", "mlm_tiny", 3.0 - number / 10, 100 + number, {
            "shape.row_tokens": row_tokens, "training.batch_rows": number + 1})  # fmt: skip
    material = material_of(tmp_path)
    costs = rows_of(cost_table(material))
    assert [cell.endswith("◆") for name, cell in ((name, row[4] or row[5]) for name, row in costs.items())] == [
        True, True, True, False]  # fmt: skip
    assert "rows of 64 tokens" in " ".join(cost_table(material).columns)
    assert [drawing.name for drawing in front_drawings(material)] == ["front-validation-loss-rows-of-128-tokens"]
    assert rows_of(time_table(material)).keys() == {"validation loss, rows of 128 tokens"}
    rates = tmp_path / "rates"
    for rate in (0.15, 0.5):
        run = write_journal(rates / str(rate), rate=rate, fields={"masking.rate": rate})
        put(run, pairs(run.name, rate))
    material = material_of(rates)
    [(fields, members)] = sweeps(material.runs)
    table = trend_table(material, fields, members)
    assert table.columns == ("masking.rate", "steps", "validation loss", "Minimal pairs", "end")
    assert "Not measured alike (15% masked and 50% masked): these losses do not compare." in table.note
    assert [drawing.title for drawing in trend_drawings(material, fields, members)] == [
        "Minimal pairs against masking.rate"
    ]


@pytest.mark.parametrize("at_first", [{"subset": True}, {"fingerprint": "other"}, {"degenerate": True}])
def test_a_curve_joins_what_was_measured_as_the_newest_was(at_first, tmp_path):
    run = write_curve(tmp_path / "a", "mlm_tiny", 3.0, 100)
    earlier = [point("rte", step / 1000, run="a", step=step, **at_first) for step in (250, 500)]
    put(run, *earlier, *(point("rte", step / 1000, run="a", step=step) for step in (750, 1000)))
    seconds = [at for at, _ in material_of(tmp_path).curves["a"]["RTE"]]
    assert seconds == ([25, 50, 75, 100] if "degenerate" in at_first else [75, 100])
    assert run_report(ReportOptions((str(run),), tmp_path / "r.html")) == 0


def test_losses_on_other_text_do_not_compare(tmp_path):
    for name, alone in (("a", 7.0), ("b", 7.0), ("c", 6.5)):
        start, *lines = lines_of(write_journal(tmp_path / name, batch_rows=ord(name)))
        write_lines(tmp_path / name, [start | {"unigram_loss": alone}, *lines])
    start, *lines = lines_of(write_journal(tmp_path / "short", fields={"shape.row_tokens": 64}))
    write_lines(tmp_path / "short", [start | {"unigram_loss": 7.01}, *lines])
    rows = ["validation loss, rows of 128 tokens", "validation loss, rows of 64 tokens"]
    short = material_of(tmp_path / "a", tmp_path / "short").measures
    assert list(itertools.chain(*short.values())) == rows, "where rows are shorter other tokens are masked"
    peer = write_journal(tmp_path / "peer", batch_rows=7)  # its journal does not say
    assert len(set(itertools.chain(*material_of(tmp_path / "a", tmp_path / "b", peer).measures.values()))) == 1
    assert len(set(itertools.chain(*material_of(tmp_path / "a", tmp_path / "c").measures.values()))) == 2


def test_losses_on_one_text_compare_whatever_was_trained_on(tmp_path):
    for name, alone, text in (
        ("a", 7.0, "0a"),
        ("less", 7.1, "0a"),
        ("other", 7.0, "0b"),
        ("older", 7.1 + 3e-15, None),
    ):
        start, *lines = lines_of(write_journal(tmp_path / name, batch_rows=ord(name[0])))
        write_lines(tmp_path / name, [start | {"unigram_loss": alone, "validation_text": text}, *lines])

    def names(*runs: str) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*material_of(*(tmp_path / run for run in runs)).measures.values())))

    assert names("a", "less") == ["validation loss"]
    assert names("a", "other") == ["validation loss, held-out rows 0a", "validation loss, held-out rows 0b"]
    assert names("less", "older") == ["validation loss"], (
        "an older journal says word frequencies alone, which another machine sums differently in the last place"
    )
    assert len(names("a", "older")) == 2
    for order in itertools.permutations(("a", "less", "older")):
        assert names(*order) == ["validation loss"], "of which a newer one tells the text"
        assert len(names(*order, "other")) == 2
    start, *lines = lines_of(write_journal(tmp_path / "unheld"))
    write_lines(tmp_path / "unheld", [start, *(line for line in lines if line["kind"] != "validation")])
    assert names("a", "less", "unheld")[0] == "validation loss"


def test_a_note_tells_a_text_that_differs_beside_a_rate_that_does_or_of_a_rate_alone_the_remedy(tmp_path):
    for name, text, rate in (("a", "0a", 0.15), ("b", "0b", 0.15), ("c", "0c", 0.4)):
        start, *lines = lines_of(write_journal(tmp_path / name))
        lines = [line | {"rate": rate} if line["kind"] == "validation" else line for line in lines]
        write_lines(tmp_path / name, [start | {"unigram_loss": 7.0, "validation_text": text}, *lines])

    def why(*runs: str) -> str:
        return why_losses_do_not(read_folders([tmp_path / run for run in runs]))

    assert why("a", "b", "c") == ("Not measured alike (15% masked and 40% masked; held-out rows 0a and held-out rows "
                                  "0b and held-out rows 0c): these losses do not compare.")  # fmt: skip
    assert why("a", "c") == ("Not measured alike (15% masked and 40% masked): these losses do not compare. With one "
                             "`--training.validation-rate` for all, when they are trained, they do.")  # fmt: skip


def test_a_loss_is_of_the_text_that_was_held_out_when_it_was_measured(tmp_path):
    start, *lines = lines_of(write_journal(tmp_path / "a"))
    start |= {"unigram_loss": 7.0, "validation_text": "0a"}
    for name, text in (("off", None), ("fewer", "0b")):
        resume = start | {"kind": "resume", "step": lines[-1]["step"], "validation_text": text}
        write_lines(tmp_path / name, [start, *lines, resume])
    assert [run.text for run in read_folders([tmp_path / "off", tmp_path / "fewer"])] == ["0a", "0a"]
    again = {"kind": "validation", "step": lines[-1]["step"] + 1, "loss": 1.0}
    [gone_on] = read_folders([write_lines(tmp_path / "fewer", [start, *lines, resume, again])])
    assert gone_on.text == "0b"

"""The report: what run folders hold, side by side, on one page that needs nothing else."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latemask.downstream.tasks import GLUE
from latemask.errors import Refusal
from latemask.report import plots
from latemask.report.costs import costs_table
from latemask.report.curves import checkpoint_drawings, loss_drawings
from latemask.report.downstream import entries, glue_table, tasks_table
from latemask.report.evaluations import finetuned_table, masked_loss_table, pairs_table, similarity_table
from latemask.report.folders import RunFolder, left_out_of, read_folders, readable
from latemask.report.material import Material
from latemask.report.page import ReportOptions, html_page, parts, run_report
from latemask.report.published import TABLE_1
from latemask.report.rank import masked_table, rank_table
from latemask.report.rank_by_layer import rank_drawings
from latemask.report.runs import events_table, runs_table, settings_table, sources_table
from latemask.report.tables import Drawing, Table, crossed, distinct, shown
from latemask.report.theory import theory_parts
from latemask.report.trend import sweeps, trend_drawings, trend_table
from reported import (
    everything,
    finetuned,
    masked_loss,
    pairs,
    point,
    put,
    similarity,
    study,
    theory,
    write_curve,
    write_journal,
    write_lines,
)


def row_of(table: Table | None, name: str) -> dict[str, object]:
    assert table is not None
    [row] = [row for row in table.rows if row[0] == name]
    return dict(zip(table.columns, row, strict=True))


# Journals


def test_runs_stand_side_by_side_with_the_settings_that_differ(tmp_path):
    one = write_journal(tmp_path / "one", steps=30)
    two = write_journal(tmp_path / "two", "mae_lm_tiny", steps=40)
    runs = read_folders([one, two])
    table = runs_table(runs)
    row = row_of(table, "one")
    assert (row["run"], row["recipe"], row["masked"], row["steps"]) == ("one", "mlm_tiny", "15%", 30)
    assert (row["million tokens"], row["seconds"], row["validation loss"]) == (0.003, 3.0, 5.25)
    assert (row["tokens/s"], row["MFU"], row["at step"], row["at rate"]) == (1000, 0.3, 30, "15%")
    assert "do not compare" not in table.note
    differing = {row[0]: row[1:] for row in settings_table(runs).rows}
    assert differing["training.steps"] == ("30", "40")
    assert differing["masking.joins"] == ("0:0.0:1.0", "decoder:0.0:1.0")
    assert differing["decoder.depth"] == (None, "1")
    assert "masking.rate" not in differing
    sources = sources_table(runs)
    assert sources is not None
    assert sources.rows == (("law", 5.0, 5.0), ("prose", 5.5, 5.5))
    assert events_table(runs).rows[0] == ("one", 0, 1, 0, "steps")


def test_a_run_stopped_before_its_first_line_of_training_stands_where_it_stopped(tmp_path):
    lines = read_folders([write_journal(tmp_path / "whole")])[0].lines
    begun = [line for line in lines if line["kind"] in ("start", "validation") and line["step"] == 0]
    end = {"kind": "end", "step": 7, "reason": "signal", "seconds": 12.5, "tokens": 700}
    [run] = read_folders([write_lines(tmp_path / "stopped", [*begun, end])])
    row = row_of(runs_table([run]), "stopped")
    assert (row["steps"], row["million tokens"], row["seconds"]) == (7, 0.0007, 12.5)
    assert (row["validation loss"], row["at step"]) == (None, None), "that of step 0 is no result"
    assert "validation loss" not in trend_table(Material.of([run]), ("training.seed",), [run]).columns
    [fresh] = read_folders([write_lines(tmp_path / "fresh", begun)])
    assert (fresh.validation["loss"], fresh.validation["step"]) == (8.3, 0), "but it is one of a run that has not begun"


def test_settings_are_those_of_the_last_resume(tmp_path):
    lines = read_folders([write_journal(tmp_path / "a", steps=30)])[0].lines
    changed = json.loads(json.dumps(lines[0]))
    changed["run"]["training"]["steps"] = 60
    resume = {**changed, "kind": "resume", "step": 30, "card": "H100"}
    old = {name: value for name, value in resume.items() if name != "run"}  # as earlier versions wrote it
    [run] = read_folders([write_lines(tmp_path / "b", [*lines, resume, {**old, "step": 40}])])
    assert run.fields["training.steps"] == 60
    assert row_of(runs_table([run]), "b")["card"] == "H100"


def test_what_a_refused_start_left_behind_is_passed_over_in_silence(tmp_path, capsys):
    good = write_journal(tmp_path / "good")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").write_text("process 1 on nowhere")
    assert [run.name for run in read_folders([good, tmp_path / "locked"])] == ["good"]
    assert capsys.readouterr().err == ""
    with pytest.raises(Refusal, match="locked"):
        read_folders([tmp_path / "locked"])


@pytest.mark.parametrize("line", [{"kind": "end", "step": 3}, {"kind": "end", "reason": "steps"}, {"kind": "skip"},
                                  {"kind": "train", "step": 1, "tokens": 1, "seconds": "1", "loss": 1.0},
                                  {"kind": "validation", "step": 1}, {"kind": "train", "step": 1},
                                  {"kind": "validation", "step": 40, "loss": float("nan")}])  # fmt: skip
def test_a_line_made_by_hand_is_left_out_and_named_by_its_number(line, tmp_path, capsys):
    folder = write_journal(tmp_path / "a")
    [whole] = read_folders([folder])
    before = (folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(before + json.dumps(line) + "\n")
    [run] = read_folders([folder])
    assert run.lines == whole.lines
    [problem] = run.left_out
    assert re.search(rf"journal.jsonl: found line 9, of kind {line['kind']}", str(problem))
    assert capsys.readouterr().err == f"warning: left out: {problem}\n"


DAMAGED = {
    "rank.json": "{",
    "downstream/point.json": json.dumps(point("rte", 0.5))[:-20],
    "theory.json": json.dumps({"kind": "theory", "tau": "high"}),
    "journal.jsonl": '{"kind": "train", "st',
    "downstream/nan.json": json.dumps(point("rte", float("nan"))),
    "downstream/infinite.json": json.dumps(masked_loss("bad", float("inf"))),
}


@pytest.mark.parametrize("damaged", DAMAGED)
def test_what_is_damaged_is_left_out_and_said_on_page_and_terminal_and_by_the_exit_status(damaged, tmp_path, capsys):
    good, bad = (put(write_journal(tmp_path / name), pairs(name, 0.7), point("rte", 0.6)) for name in ("good", "bad"))
    arguments = ReportOptions((str(good), str(bad)), tmp_path / "r.html")
    assert run_report(arguments) == 0
    before = (tmp_path / "r.md").read_text()
    capsys.readouterr()
    with (bad / damaged).open("a") as file:
        file.write(DAMAGED[damaged])
    assert run_report(arguments) == 1
    place = str(bad / damaged)
    said = capsys.readouterr().err
    assert said.startswith(f"warning: left out: {place}")
    assert said.count("\n") == 1
    assert place in Page((tmp_path / "r.html").read_text()).text
    after = (tmp_path / "r.md").read_text()
    top = after.index("## Runs")
    assert place in after[:top]
    assert after[top:] == before[before.index("## Runs") :], "everything else is there as it was"


def test_damaged_lines_of_a_journal_are_counted_in_one_line(tmp_path, capsys):
    write_journal(tmp_path / "good")
    part = write_journal(tmp_path / "part")
    [_, whole] = read_folders([tmp_path / "good", part])
    with (part / "journal.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 40}\n{{}\n\n{"kind": "st')
    noise = tmp_path / "noise" / "journal.jsonl"
    noise.parent.mkdir()
    noise.write_bytes(random.Random(0).randbytes(100_000))
    [_, damaged, random_bytes] = read_folders([tmp_path / "good", part, noise.parent])
    assert (damaged.lines, random_bytes.lines) == (whole.lines, [])
    of_part, of_noise = capsys.readouterr().err.splitlines()
    assert "found 3 damaged lines, the first: line 9, of kind train, without tokens; wanted" in of_part
    count = sum(map(bool, noise.read_bytes().split(b"\n")))
    assert of_noise.startswith(f"warning: left out: {noise}:1: found {count} damaged lines, the first: ")


def test_a_damaged_file_of_a_sweep_is_said_once_and_its_runs_are_read(tmp_path):
    for number in range(2):
        write_journal(tmp_path / f"run-{number}")
    (tmp_path / "sweep.json").write_text('{"kind": "sweep", "vary": {"mask')
    folders = read_folders([tmp_path])
    assert [folder.varied for folder in folders] == [(), ()]
    assert [problem.where for problem in left_out_of(folders)] == [str(tmp_path / "sweep.json")]


def test_json_that_is_no_result_is_left_out_beside_runs(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    [run] = read_folders([write_journal(tmp_path / "a"), tmp_path / "other.json"])
    assert run.name == "a"
    assert f"warning: left out: {tmp_path / 'other.json'}: found no result" in capsys.readouterr().err


def test_a_journal_whose_start_is_damaged_says_so_and_the_results_beside_it_stand(tmp_path):
    folder = put(write_journal(tmp_path / "a"), point("rte", 0.6))
    text = (folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(text[5:])
    [run] = read_folders([folder])
    assert (run.lines, len(run.results)) == ([], 1)
    assert [problem.where for problem in run.left_out] == [f"{folder / 'journal.jsonl'}:1"]


SAID_ONCE = [True, False, False]
"""Of the three figures of losses."""


def test_losses_at_different_rates_are_said_not_to_compare(tmp_path):
    runs = read_folders([write_journal(tmp_path / "a"), write_journal(tmp_path / "b", rate=0.5)])
    assert "do not compare" in runs_table(runs).note
    assert ["do not compare" in drawing.note for drawing in loss_drawings(runs)] == SAID_ONCE


@pytest.mark.parametrize("field", [{"shape.row_tokens": 64}, {"shape.vocabulary": 9000}])
def test_losses_of_other_rows_or_ids_are_said_not_to_compare(field, tmp_path):
    alike = read_folders([write_journal(tmp_path / "a"), write_journal(tmp_path / "b", batch_rows=7)])
    assert "do not compare" not in runs_table(alike).note
    runs = [*alike[:1], *read_folders([write_journal(tmp_path / "c", fields=field)])]
    assert "do not compare" in runs_table(runs).note
    assert ["do not compare" in drawing.note for drawing in loss_drawings(runs)] == SAID_ONCE


def test_losses_over_whole_rows_stand_apart_under_their_own_name(tmp_path):
    plain = write_journal(tmp_path / "plain")
    row = with_frequencies(write_journal(tmp_path / "bart", "decoder_causal_cross_tiny"), 7.0)
    runs = read_folders([with_frequencies(plain, 6.0), row])
    table = runs_table(runs)
    assert [row_of(table, name)["loss per"] for name in ("plain", "bart")] == ["masked token", "token of the row"]
    assert "nats per token of the row where the decoder rewrites" in table.note
    assert sources_table(runs).columns == ("source", "plain", "bart (per token of the row)")
    drawings = loss_drawings(runs)
    assert ["does not compare" in drawing.note for drawing in drawings] == SAID_ONCE
    for drawing in drawings:
        for text in ("plain", "bart (per token of the row)", "validation loss, nats", "word frequencies alone",
                     "word frequencies alone (per token of the row)"):  # fmt: skip
            assert f">{text}<" in drawing.svg
    measured = trend_table(Material.of(runs), ("training.seed",), runs)
    assert [row[measured.columns.index("validation loss per token of the row")] for row in measured.rows] == [
        None, "5.2500"]  # fmt: skip
    alone = runs[1:]
    assert "Loss: nats per token of the row on" in runs_table(alone).note
    assert sources_table(alone).note.startswith("Nats per token of the row,")
    assert "validation loss, nats per token of the row" in loss_drawings(alone)[0].svg
    assert "loss per" not in runs_table(runs[:1]).columns


def test_a_run_without_validation_shows_its_training_loss_under_that_name(tmp_path):
    write_journal(tmp_path / "a"), write_journal(tmp_path / "b")
    lines = [line for line in read_folders([tmp_path / "b"])[0].lines if line["kind"] != "validation"]
    runs = read_folders([tmp_path / "a", write_lines(tmp_path / "b", lines)])
    assert row_of(runs_table(runs), "b")["validation loss"] is None
    figure = plots.losses({run.name: run.lines for run in runs})
    assert figure.axes[0].get_ylabel().startswith("loss,")
    plots.plt.close(figure)
    drawn = loss_drawings(runs)[0].svg
    assert "b (training)" in drawn
    assert "a (training)" not in drawn
    alone = loss_drawings(runs[1:])[0].svg
    assert "training loss, nats per masked token" in alone
    run_report(ReportOptions((str(tmp_path / "b"),), tmp_path / "b.html"))


def with_frequencies(folder: Path, unigram_loss: float, stood_still: bool = False) -> Path:
    """The same run, with a journal that says the loss of word frequencies, and whether the run stood still there."""
    start, *lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    lines = [line | {"word_frequencies_only": stood_still} if line["kind"] == "end" else line for line in lines]
    if stood_still:
        lines.insert(-1, {"kind": "plateau", "step": lines[-1]["step"], "loss": 5.25, "unigram_loss": unigram_loss})
    return write_lines(folder, [start | {"unigram_loss": unigram_loss}, *lines])


def test_runs_no_better_than_word_frequencies_are_marked_and_their_level_is_drawn(tmp_path, monkeypatch):
    old = write_journal(tmp_path / "old")
    assert "learned" not in runs_table(read_folders([old])).columns
    drawn = []
    monkeypatch.setattr(plots, "svg", lambda figure: drawn.append(figure) or "<svg></svg>")
    loss_drawings(read_folders([old]))
    assert [len(figure.axes[0].texts) for figure in drawn] == [0, 0, 0]
    dead = with_frequencies(write_journal(tmp_path / "dead"), 5.27, stood_still=True)
    warming_up = with_frequencies(write_journal(tmp_path / "warming-up"), 5.27)
    got_away = with_frequencies(write_journal(tmp_path / "got-away"), 5.31, stood_still=True)
    other = with_frequencies(write_journal(tmp_path / "other"), 7.0)
    worse = with_frequencies(write_journal(tmp_path / "worse"), 4.7, stood_still=True)
    marks = runs_table(read_folders([dead, warming_up, got_away, old, other, worse]))
    wanted = {"dead": "word frequencies only", "warming-up": "", "got-away": "", "old": "", "other": "",
              "worse": "less than word frequencies"}  # fmt: skip
    assert {name: row_of(marks, name)["learned"] for name in wanted} == wanted
    runs = read_folders([dead, got_away, old, other])
    table = runs_table(runs)
    assert row_of(table, "dead")["validation loss"] == 5.25
    loss_drawings(runs)
    for figure in drawn[3:]:
        axes = figure.axes[0]
        levels = [line for line in axes.lines if line.get_color() == "#555555"]
        assert [line.get_ydata() for line in levels] == [[5.27, 5.27], [7.0, 7.0]], "5.31 lies too near to be apart"
        assert all(line.is_dashed() and line.get_linewidth() < 1 for line in levels)
        assert [text.get_text() for text in axes.texts] == ["word frequencies alone"] * 2
    for figure in drawn:
        plots.plt.close(figure)


def test_of_a_run_stopped_before_its_second_validation_nothing_is_said(tmp_path):
    start, first, *_ = read_folders([with_frequencies(write_journal(tmp_path / "a"), 7.0)])[0].lines
    [run] = read_folders([write_lines(tmp_path / "b", [start, first])])
    [gone_on] = read_folders([write_lines(tmp_path / "c", [start, {**start, "kind": "resume", "unigram_loss": None}])])
    assert gone_on.unigram_loss == 7.0
    assert (run.validation["loss"], run.unigram_loss) == (8.3, 7.0)
    assert "learned" not in runs_table([run]).columns


def test_losses_that_are_not_finite_and_lines_cut_short_are_left_out(tmp_path):
    folder = write_journal(tmp_path / "a")
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"kind": "validation", "step": 40, "loss": null, "rate": 0.15}\n{"kind": "train", "st')
    [run] = read_folders([folder])
    assert run.validation["step"] == 30
    assert run.ending == "not ended"
    assert [x for x, _ in plots.loss_points(run.lines, "step")] == [0, 30]
    assert [problem.where for problem in run.left_out] == [f"{folder / 'journal.jsonl'}:10"]
    (folder / "journal.jsonl").write_text('{"kind": "start", "run": {}}\n{"kind": "train", "step": 1}\n')
    [run] = read_folders([folder])
    assert "line 2, of kind train, without tokens" in str(run.left_out[0])
    write_lines(folder, [{"kind": "start", "run": {}}])
    run_report(ReportOptions((str(folder),), tmp_path / "b.html"))


def test_points_stand_at_the_tokens_of_their_own_step(tmp_path):
    [run] = read_folders([write_journal(tmp_path / "a", batch_rows=4, fields={"shape.row_tokens": 100})])
    assert run.flops_at(30) == 30 * 400 * 6e6
    assert plots.loss_points(run.lines, "flops") == [(0, 8.3), (30 * 400 * 6e6, 5.25)]
    assert plots.loss_points(run.lines, "seconds") == [(0, 8.3), (3.0, 5.25)]


def test_a_run_of_a_sweep_beside_other_runs_is_called_after_the_sweep_too(tmp_path):
    swept = tmp_path / "runs" / "rates"
    for name in ("training.learning_rate=0.001", "training.learning_rate=0.01"):
        write_journal(swept / name)
    (swept / "sweep.json").write_text(json.dumps({"kind": "sweep", "vary": {"training.learning_rate": ["0.001"]}}))
    alone = write_journal(tmp_path / "runs" / "mae")
    named = [run.name for run in read_folders([swept])]
    assert named == ["training.learning_rate=0.001", "training.learning_rate=0.01"]
    assert [run.name for run in read_folders([alone, swept])] == ["mae", *(f"rates/{name}" for name in named)]


def test_a_page_of_a_sweep_is_called_so_and_one_with_other_runs_or_a_title_is_not(tmp_path):
    swept = tmp_path / "rates"
    for name in ("training.learning_rate=0.001", "training.learning_rate=0.01"):
        write_journal(swept / name, "mae_lm_tiny")
    (swept / "sweep.json").write_text(json.dumps({"kind": "sweep", "vary": {"training.learning_rate": ["0.001"]}}))
    alone = write_journal(tmp_path / "mae", "mae_lm_tiny")

    def heading(*folders: Path, **options: str) -> str:
        run_report(ReportOptions(tuple(map(str, folders)), tmp_path / "r.html", **options))
        return (tmp_path / "r.md").read_text().splitlines()[0].replace("\\", "")

    assert heading(swept) == "# Sweep of mae_lm_tiny over training.learning_rate"
    assert heading(swept, title="Rates") == "# Rates"
    assert heading(swept, alone) == heading(alone) == heading(swept / name) == "# Pretraining runs"


def test_of_fifty_runs_sixteen_are_told_apart_the_rest_are_grey_and_tables_stay_narrow(tmp_path):
    for number in range(50):
        write_curve(tmp_path / "runs" / f"run-{number}", "mlm_tiny", 2.0, 60, {"training.seed": number}, steps=20)
    runs = read_folders([tmp_path / "runs"])
    assert [run.name for run in runs] == [f"run-{number}" for number in range(50)]
    table = settings_table(runs)
    assert table.columns == ("run", "training.seed")
    assert table.rows[49] == ("run-49", "49")
    figure = plots.losses({run.name: run.lines for run in runs}, looks={run.name: run.look for run in runs})
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines]
    assert len(looks) == 50
    assert len(set(looks[:16])) == 16
    assert set(looks[16:]) == {("#B0B0B0", "-", "None")}
    assert all(line.get_linewidth() < 1 for line in figure.axes[0].lines[16:])
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*(run.name for run in runs[:16]), "34 more, thin and grey"]
    plots.plt.close(figure)
    put(tmp_path / "runs" / "run-40", study("runs/run-40"))
    runs = read_folders([tmp_path / "runs"])
    assert runs[40].look.is_told_apart, "of which more than a loss is drawn"
    assert sorted(run.number for run in runs) == list(range(50))


@pytest.mark.parametrize("name", ["$x^{$", "_hidden", "a$b$c", "東京", "<b>&amp;", "x" * 300, "a%b\\n"])
def test_names_are_drawn_as_they_are(name):
    drawn = plots.svg(plots.lines({name: [(0, 1), (1, 2)], "other": [(0, 2)]}, "x", "y"))
    shown_names = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    escaped = name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert (escaped if len(name) < 50 else "x" * 28 + "…" + "x" * 27) in shown_names


# Folders


def test_folders_of_one_name_are_told_apart_and_one_folder_is_read_once(tmp_path):
    one, two = write_journal(tmp_path / "a" / "x"), write_journal(tmp_path / "b" / "x")
    assert [run.name for run in read_folders([one, two, f"{one}/"])] == ["a/x", "b/x"]
    deeper, other = write_journal(tmp_path / "c" / "a" / "x"), write_journal(tmp_path / "c" / "y")
    names = [run.name for run in read_folders([one, two, deeper, other])]
    assert names == [f"{tmp_path.name}/a/x", "b/x", "c/a/x", "y"], "no more of a path than it takes"


def test_a_folder_of_runs_that_holds_a_result_of_its_own_is_both(tmp_path):
    runs = put(tmp_path / "runs", point("rte", 0.6, run="c"))
    for name in ("b", "a"):
        write_journal(runs / name)
    assert [(run.name, bool(run.lines), len(run.results)) for run in read_folders([runs])] == [
        ("a", True, 0), ("b", True, 0), ("runs", False, 1)]  # fmt: skip


def test_refusals(tmp_path, capsys):
    with pytest.raises(Refusal, match="journal"):
        read_folders([tmp_path])
    with pytest.raises(Refusal, match="no such folder"):
        read_folders([tmp_path / "typo"])
    with pytest.raises(Refusal, match="no run folder"):
        run_report(ReportOptions(()))
    good = write_journal(tmp_path / "good")
    with pytest.raises(Refusal, match=r"\.html"):
        run_report(ReportOptions((str(good),), tmp_path / "report.md"))
    write_lines(tmp_path / "begun", [])
    write_lines(tmp_path / "odd", [{"kind": "train", "step": 1, "tokens": 1, "seconds": 1, "loss": 1}])
    for folder, found in (("begun", "an empty one"), ("odd", "kind start")):
        with pytest.raises(Refusal, match=found):
            read_folders([tmp_path / folder])
        assert [run.name for run in read_folders([tmp_path / folder, good])] == ["good"]
        assert folder in capsys.readouterr().err
    write_lines(tmp_path / "number", [{"kind": "start", "step": 0, "run": 5}])
    with pytest.raises(Refusal, match="whose run is 5"):
        read_folders([tmp_path / "number"])
    (tmp_path / "odd" / "rank.json").write_text("{")
    with pytest.raises(Refusal, match=r"rank\.json"):
        read_folders([tmp_path / "odd"])
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(Refusal, match="no result"):
        read_folders([tmp_path / "other.json"])


def test_what_is_left_out_is_named_as_it_was_given(tmp_path, monkeypatch, capsys):
    write_journal(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "rank.json").write_text("{")
    (tmp_path / "runs" / "sweep.json").write_text("{")
    (tmp_path / "other.json").write_text("[1]")
    for here, places in ((tmp_path, ("runs", "other.json")), (tmp_path / "runs" / "a", (".", "../../other.json"))):
        monkeypatch.chdir(here)
        read_folders(places)
        said = capsys.readouterr().err
        assert said.count("left out: ") == 3
        assert str(tmp_path) not in said


def test_a_report_beside_its_runs_is_the_same_again_where_a_pattern_names_it_too(tmp_path):
    write_journal(tmp_path / "a", "mlm_tiny")
    write_journal(tmp_path / "b", "mae_lm_tiny")
    for _ in range(2):
        names = sorted(str(path) for path in tmp_path.iterdir())
        assert run_report(ReportOptions(tuple(names), tmp_path / "report.html")) == 0
        pages = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert {Path(name).suffix for name in pages} == {".html", ".md", ".svg"}
    assert len(names) > 4
    assert "Left out" not in pages["report.md"].decode()
    with pytest.raises(Refusal, match="no run folder"):
        run_report(ReportOptions((str(tmp_path / "report.md"),), tmp_path / "other.html"))


def test_names_that_no_page_can_hold_are_made_readable():
    assert readable("a\nb\x1b") == "a\ufffdb\ufffd"
    readable("bad \udcff byte").encode("utf-8")


def test_results_without_a_journal_and_single_files_count(tmp_path):
    put(tmp_path / "bert", point("rte", 0.7, step=None))
    (tmp_path / "some.json").write_text(json.dumps(study("models/some")))
    folders = read_folders([tmp_path / "bert", tmp_path / "some.json"])
    assert [folder.name for folder in folders] == ["bert", "some"]
    run_report(ReportOptions((str(tmp_path / "bert"), str(tmp_path / "some.json")), tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert "<h2>Runs</h2>" not in page
    assert "<h2>GLUE and SQuAD 2.0</h2>" in page


def exported(result, parent, weights=""):
    """``result`` as one of the export of a run, which no name of a run tells."""
    model = {"folder": f"{parent}/export"} | ({"weights": weights} if weights else {})
    return {**result, "model": model}


def test_models_of_one_name_are_told_apart_and_a_guest_of_a_run_keeps_its_own(tmp_path):
    shared = put(tmp_path / "export", exported(point("rte", 0.7), "a", "1"), exported(point("rte", 0.6), "b", "2"),
                 exported(pairs("x", 0.8), "a"), exported(pairs("x", 0.7), "b"))  # fmt: skip
    folders = read_folders([shared])
    for table in (glue_table(entries(folders)), tasks_table(entries(folders))):
        assert table is not None
        assert [row[0] for row in table.rows][:2] == ["a/export", "b/export"]
        assert [str(row[1 if table.columns[1] == "RTE" else 3])[:4] for row in table.rows][:2] == ["70.0", "60.0"]
    table = pairs_table(folders)
    assert table is not None
    assert table.columns[1:] == ("a/export", "b/export")
    again = put(tmp_path / "again", exported(point("rte", 0.7), "a", "1"), exported(point("rte", 0.6), "a", "2"))
    table = glue_table(entries(read_folders([again])))
    assert table is not None
    assert [row[0] for row in table.rows][:2] == ["a/export (1)", "a/export (2)"]
    run = put(write_journal(tmp_path / "x"), point("rte", 0.7), exported(point("rte", 0.6), "a", "1"))
    table = glue_table(entries(read_folders([run])))
    assert table is not None
    assert {str(row[0]): str(row[1])[:4] for row in table.rows[:2]} == {"x": "70.0", "export": "60.0"}


def broken(value, where=""):
    """Every copy of a JSON value with one part missing, or of another type; and that part's name."""
    inside = value.items() if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else ()
    for key, item in inside:
        name = f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}".lstrip(".")
        rest = [(other, one) for other, one in inside if other != key]
        for changed in (rest, *([*rest, (key, odd)] for odd in ("odd", None, [], {}, True))):
            if isinstance(value, dict):
                yield name, dict(changed)
            elif any(other == key for other, _ in changed):
                yield name, [one for _, one in sorted(changed, key=lambda pair: pair[0])]
        for deep, changed in broken(item, name):
            copy = value | {key: changed} if isinstance(value, dict) else [*value[:key], changed, *value[key + 1 :]]
            yield deep, copy


def refusal_of(file: Path) -> Refusal | None:
    try:
        read_folders([file])
    except Refusal as refusal:
        return refusal
    return None


RESULTS = [study("runs/x", depth=1), theory("runs/x", depth=1), point("squad2", 70.0), point("rte", 0.6),
           pairs("x", 0.7), masked_loss("x", 2.0), similarity("x"), finetuned("x", 0.7)]  # fmt: skip


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.get("suite", result.get("task", result["kind"])))
def test_a_result_of_a_malformed_form_is_refused_by_file_and_field_or_what_is_odd_is_not_read(
    result, tmp_path, monkeypatch
):
    monkeypatch.setattr(plots, "svg", lambda figure: plots.plt.close(figure) or "<svg></svg>")
    file, refused = tmp_path / "result.json", set()
    file.write_text(json.dumps(result))
    assert list(parts(read_folders([file]))), "as it is it can be read"
    for field, changed in broken(result):
        file.write_text(json.dumps(changed))
        if field in ("kind", "suite"):
            continue
        refusal = refusal_of(file)
        if refusal is None:
            list(parts(read_folders([file])))
            continue
        assert refusal.where == str(file)
        first = re.split(r"[.\[]", field)[0]
        assert first in refusal.found or (first == "metric" and "scores" in refusal.found)
        refused.add(field)
    read = {"rank": "layers[0].clean_input.rank", "theory": "bounds.scaled[1].cubic", "finetune": "scores.dev"}
    assert read.get(result["kind"], "model") in refused


def test_empty_results_are_refused(tmp_path):
    file = tmp_path / "rank.json"
    for text, found in (('{"kind": "rank"}', "no tau"), (json.dumps(study("x") | {"layers": []}), "layers, which is ")):
        file.write_text(text)
        with pytest.raises(Refusal, match=rf"rank\.json: found {found}"):
            read_folders([file])


# Downstream


def test_table_1_has_medians_spread_average_and_marks(tmp_path):
    results = [point(task, 0.6 + 0.01 * seed, seed, subset=task == "qnli") for task in GLUE for seed in range(3)]
    results += [point("cola", 0.5, seed, learning_rate=1e-5) for seed in range(3)]
    folders = read_folders([put(write_journal(tmp_path / "x"), *results, point("squad2", 70.0))])
    table = glue_table(entries(folders))
    row = row_of(table, "x")
    assert row["RTE"] == "61.0 [60.0..62.0]"
    assert row["MNLI-(m/mm)"] == "61.0/61.1 [60.0..62.0]"
    assert row["CoLA"] == "61.0 [60.0..62.0]"
    assert row["QNLI †"] == "61.0 [60.0..62.0] †"
    assert row["AVG †"] == "61.0 †"
    assert (row["SQuAD 2.0 EM"], row["SQuAD 2.0 F1"], row["seeds"]) == ("67.0", "70.0", "1–3")
    assert "QNLI train 10 of 1,000" in table.note
    assert list(TABLE_1["MAE-LM, base, published"].values()) == [
        *(str(value) for value in row_of(table, "MAE-LM, base, published").values())][1:-1]  # fmt: skip
    tasks = tasks_table(entries(folders))
    best = row_of(Table("", tasks.columns[1:], tuple(row[1:] for row in tasks.rows)), "CoLA")
    assert (best["seeds"], best["settings tried"], best["fine-tunings"]) == ("60.0 61.0 62.0", 2, 6)
    assert "rate 3e-05" in str(best["best setting"])


def test_no_average_of_fewer_than_eight_tasks_and_failed_runs_are_flagged(tmp_path):
    results = [point("rte", 0.53, seed, degenerate=seed == 1) for seed in range(2)]
    results[1]["degenerate_because"] = ["of a reason"]
    table = glue_table(entries(read_folders([put(tmp_path / "x", *results)])))
    row = row_of(table, "x")
    assert "AVG" not in row
    assert row["RTE"] == "53.0 [53.0..53.0] ‡"
    assert table.note.endswith(" ‡ Degenerate: x on RTE (1 of 2 seeds: of a reason).")
    whole = glue_table(entries(read_folders([put(tmp_path / "y", point("rte", 0.6))])))
    assert whole is not None
    assert "egenerate" not in whole.note


def test_what_a_majority_is_follows_from_the_kinds_of_tasks(tmp_path):
    kinds = {"rte": "classification", "stsb": "regression", "squad2": "span"}
    for number, (task, kind) in enumerate(kinds.items()):
        put(tmp_path / "x", point(task, 0.6) | {"task_kind": kind})
        table = tasks_table(entries(read_folders([tmp_path / "x"])))
        told = ("the training data's commonest class", "the training data's mean", "nothing")
        assert [answer in table.note for answer in told] == [place <= number for place in range(3)]
    old = tasks_table(entries(read_folders([put(tmp_path / "old", point("rte", 0.6))])))
    assert "Majority" not in old.note


def test_two_tasks_of_ones_own_are_two_rows(tmp_path):
    one = {**point("rte", 0.6, fingerprint="one"), "task": "own", "title": "own"}
    two = {**point("rte", 0.7, fingerprint="two"), "task": "own", "title": "own"}
    table = tasks_table(entries(read_folders([put(tmp_path / "x", one, two)])))
    assert sorted(str(row[3]) for row in table.rows) == ["60.0", "70.0"]


def test_results_on_files_of_one_folder_are_told_apart_by_the_files(tmp_path):
    each = [similarity("x") | {"options": {"data": "tasks", "dev": dev}} for dev in ("alike.csv", "b/other.csv", "")]
    saved = [finetuned("x", 0.8) | {"options": {"data": "tasks", "dev": "later.csv"}, "task": task,
                                    "data": {"dev": {"fingerprint": task}}} for task in ("rte", "mrpc")]  # fmt: skip
    folders = read_folders([put(tmp_path / "x", *each, *saved)])
    assert sorted(row[1] for row in similarity_table(folders).rows) == ["alike.csv", "other.csv", "tasks"]
    assert {row[3] for row in finetuned_table(folders).rows} == {"later.csv"}, "of two tasks"


def test_results_on_other_data_of_one_name_are_told_apart(tmp_path):
    """By the folders above; those of the same data, wherever they lay, are called alike."""
    places = {"one": ("/a/en/alike.csv", "/b/en/alike.csv"), "two": ("/a/de/alike.csv",), "three": ("/a/de/alike.csv",)}
    each = [(print_, place) for print_, all_places in places.items() for place in all_places]
    alike = [similarity("x") | {"options": {"data": place}, "data": {"fingerprint": print_}} for print_, place in each]
    saved = [finetuned("x", 0.8) | {"options": {"data": "d", "dev": place}, "data": {"dev": {"fingerprint": print_}}}
             for print_, place in each]  # fmt: skip
    right = [pairs("x", 0.1 * number) | {"options": {"data": place}, "data": {"fingerprint": print_}}
             for number, (print_, place) in enumerate(each)]  # fmt: skip
    old = similarity("x") | {"options": {"data": "/a/en/alike.csv"}}
    folders = read_folders([put(tmp_path / "x", *alike, *saved, *right, old)])
    named = ["alike.csv, data three", "alike.csv, data two", "en/alike.csv", "en/alike.csv"]
    assert sorted(row[1] for row in similarity_table(folders).rows) == ["alike.csv", *named]
    assert {row[3] for row in finetuned_table(folders).rows} == set(named)
    assert sorted(column.split(", ", 1)[1] for column in pairs_table(folders).columns[1:]) == named
    assert {entry.title for entry in entries(folders)} == {f"Minimal pairs, {name}" for name in named}


def test_evaluations_on_a_part_of_the_data_are_marked(tmp_path):
    part = {"subset": {"pairs": "the first 2 of each file"}}
    folders = read_folders([put(tmp_path / "x", {**pairs("x", 0.6), **part}, {**similarity("x"), **part})])
    for table in (pairs_table(folders), similarity_table(folders)):
        assert "†" in str(table.columns) + str(table.rows)
        assert "these numbers are not comparable with published ones: pairs the first 2 of each file." in table.note
    whole = read_folders([put(tmp_path / "y", pairs("y", 0.6), similarity("y"))])
    for table in (pairs_table(whole), similarity_table(whole)):
        assert "†" not in f"{table.columns}{table.rows}{table.note}"


def test_complete_data_go_before_a_subset_of_them(tmp_path):
    results = [point("rte", 0.9, subset=True, fingerprint="part"), point("rte", 0.6, fingerprint="all")]
    for ordered in itertools.permutations(results):
        folder = put(tmp_path / str(results.index(ordered[0])), *ordered)
        row = row_of(glue_table(entries(read_folders([folder]))), "x")
        assert row["RTE"] == "60.0"


def test_of_minimal_pairs_on_parts_of_one_set_the_largest_part_stands_for_the_model(tmp_path):
    part = {"subset": {"pairs": "a part"}}
    results = [pairs("x", score) | part | {"pairs": count} for score, count in ((0.5, 67), (0.6, 134), (0.7, 9))]
    for number, ordered in enumerate(itertools.permutations(results)):
        [entry] = entries(read_folders([put(tmp_path / str(number), *ordered)]))
        assert (entry.shown, entry.data) == (60, "134 pairs")


def test_every_version_of_a_task_s_data_is_a_row_and_the_first_is_what_other_tables_have(tmp_path):
    few = [point("rte", score, seed, subset=True, fingerprint="few") for seed, score in enumerate((0.5, 0.52))]
    more = point("rte", 0.7, fingerprint="more") | {"subset": {"train": "200 of 1,000"}}
    whole = point("cola", 0.4)
    every = entries(read_folders([put(tmp_path / "x", more, *few, whole)]))
    assert row_of(glue_table(every), "x")["RTE †"].startswith("51.0")
    table = tasks_table(every)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    rte = [row for row in rows if row["task"] != "CoLA"]
    assert [(row["median"], row["subset"]) for row in rte] == [
        ("51.0", "† train 10 of 1,000"), ("70.0", "† train 200 of 1,000")]  # fmt: skip
    assert len({row["task"] for row in rte}) == 2, "told apart by their data"
    assert "several versions of its data" in table.note
    alone = tasks_table(entries(read_folders([put(tmp_path / "y", more, whole)])))
    assert [row[1] for row in alone.rows] == ["CoLA", "RTE"]
    assert "several versions" not in alone.note


def test_checkpoints_of_one_run_are_a_curve_beside_points_of_others(tmp_path):
    put(write_journal(tmp_path / "x"), *(point("rte", 0.5 + step / 1e4, step=step) for step in (500, 1000, 2000)))
    put(write_journal(tmp_path / "y"), point("rte", 0.66, run="y"), point("cola", 0.4, run="y"))
    folders = read_folders([tmp_path / "x", tmp_path / "y"])
    drawings = checkpoint_drawings(entries(folders))
    assert [drawing.name for drawing in drawings] == ["checkpoints-rte-seconds", "checkpoints-rte-flops"]
    assert "Figure 3" in drawings[0].note
    names = [row[0] for row in glue_table(entries(folders)).rows[:4]]
    assert names == ["x, step 500", "x, step 1,000", "x, step 2,000", "y"]
    assert not checkpoint_drawings(entries(folders[1:]))


def test_checkpoints_that_were_tried_on_other_data_are_not_joined(tmp_path, monkeypatch):
    drawn = []

    def lines(series, *_, **__):
        drawn.append({name: [(x, round(y)) for x, y in points] for name, points in series.items()})
        return plots.plt.subplots()[0]

    monkeypatch.setattr(plots, "lines", lines)
    monkeypatch.setattr(plots, "svg", lambda figure: plots.plt.close(figure) or "<svg></svg>")
    tried = [point("rte", 0.5 + step / 1e4, step=step) for step in (500, 1000)]
    put(write_journal(tmp_path / "x"), *tried, point("rte", 0.9, step=1500, fingerprint="other"))
    put(write_journal(tmp_path / "y"), point("rte", 0.66, run="y", fingerprint="other"))
    drawings = checkpoint_drawings(entries(read_folders([tmp_path / "x", tmp_path / "y"])))
    assert drawn[0] == {"x": [(50, 55), (100, 60)]}, "neither the later checkpoint of x nor y's"
    assert len(drawings) == 2, "on the other data no run has two"
    drawn.clear()
    put(tmp_path / "x", point("rte", 0.95, step=2000, fingerprint="other"))
    drawings = checkpoint_drawings(entries(read_folders([tmp_path / "x", tmp_path / "y"])))
    assert drawn[::2] == [{"x": [(50, 55), (100, 60)]}, {"x": [(150, 90), (200, 95)], "y": [(100, 66)]}]
    titles = [drawing.title for drawing in drawings if drawing.name.endswith("-seconds")]
    assert all(re.fullmatch(r"RTE, data \w{8} of checkpoints against seconds", title) for title in titles)
    assert len({drawing.name for drawing in drawings}) == 4


def test_minimal_pairs_and_masked_losses(tmp_path):
    put(tmp_path / "x", pairs("x", 0.7), pairs("x", 0.75, whole_words=True), masked_loss("x", 2.5))
    put(tmp_path / "y", pairs("y", 0.6), masked_loss("y", 2.0, rate=0.5))
    folders = read_folders([tmp_path / "x", tmp_path / "y"])
    table = pairs_table(folders)
    assert table.columns == ("field", "x", "x, whole words", "y")
    assert row_of(table, "overall") == {"field": "overall", "x": "70.0", "x, whole words": "75.0", "y": "60.0"}
    assert row_of(table, "semantics")["y"] == "55.0"
    losses = masked_loss_table(folders)
    assert row_of(losses, "x")["nats per masked token"] == 2.5
    assert "do not compare" in losses.note


def test_saved_models_have_a_row_for_each_development_file(tmp_path):
    part = finetuned("x", 0.33, is_constant=True) | {"subset": {"train": "10 of 1,000"}, "options": {"data": "mine"}}
    table = finetuned_table(read_folders([put(tmp_path / "x", finetuned("x", 0.7), part)]))
    assert table is not None
    assert [row[2:] for row in table.rows] == [
        ("MNLI", "MNLI", "matched", "accuracy 70.0"),
        ("MNLI", "MNLI", "mismatched", "accuracy 70.1"),
        ("MNLI", "mine", "matched", "accuracy 33.0 † ‡"),
        ("MNLI", "mine", "mismatched", "accuracy 33.1 † ‡"),
    ]
    assert {row[:2] for row in table.rows} == {("x", "mnli-e3-lr2e-05-b32-w0.06-s0-abc.model")}
    assert "‡ Degenerate" in table.note
    assert "train 10 of 1,000" in table.note


def test_minimal_pairs_of_different_data_stay_apart(tmp_path):
    of = {name: {"options": {"data": f"some/{name}"}} for name in ("blimp", "mine.jsonl")}
    few = {**pairs("x", 0.9), **of["blimp"], "subset": {"pairs": "the first 2 of each file"}}
    put(tmp_path / "x", pairs("x", 0.7) | of["blimp"], pairs("x", 0.5) | of["mine.jsonl"], few)
    folders = read_folders([tmp_path / "x"])
    found = {entry.title: entry.shown for entry in entries(folders)}
    assert found == {"Minimal pairs, blimp": 70.0, "Minimal pairs, mine.jsonl": 50.0}  # all of the pairs before a few
    overall = row_of(pairs_table(folders), "overall")
    assert overall == {"field": "overall", "x, blimp": "70.0", "x, mine.jsonl": "50.0", "x, blimp †": "90.0"}
    put(tmp_path / "y", masked_loss("y", 2.0) | of["blimp"], masked_loss("y", 3.0, text="other") | of["mine.jsonl"])
    losses = masked_loss_table(read_folders([tmp_path / "y"]))
    assert {row[1]: row[2] for row in losses.rows} == {"blimp": 2.0, "mine.jsonl": 3.0}
    assert "do not compare" in losses.note


# Representations


def test_table_3_has_a_row_a_model_and_a_column_a_task(tmp_path):
    put(tmp_path / "x", study("runs/x"), study("runs/x/downstream/mnli-e3-lr2e-05-b32-w0.06-s0-ab.model", top=40))
    put(tmp_path / "y", study("runs/y", sees_masks=False, top=100))
    folders = read_folders([tmp_path / "x", tmp_path / "y"])
    table = rank_table(Material.of(folders).ranks)
    row = row_of(table, "x")
    assert (row["pretrained"], row["MNLI"]) == ("90 (92)", "40 (42)")
    assert (row_of(table, "y")["pretrained"], row_of(table, "y")["MNLI"]) == ("100 (102)", None)
    assert not [row for row in table.rows if "published" in str(row[0])]  # these models have 128 dimensions
    drawings = {drawing.name: drawing.svg for drawing in rank_drawings(Material.of(folders).ranks_over_seeds)}
    assert set(drawings) == {"rank-clean-input", "rank-clean-input-mnli", "rank-masked-input", "rank-masked-input-real",
                             "rank-masks"}  # fmt: skip
    assert ">y<" in drawings["rank-clean-input"]
    assert ">y<" not in drawings["rank-masks"]
    wide = rank_table(Material.of(read_folders([put(tmp_path / "z", study("runs/z", width=768))])).ranks)
    assert row_of(wide, "MAE-LM, base, published")["pretrained"] == "491"


def test_several_studies_of_one_run_are_all_kept_and_named_by_what_differs(tmp_path):
    first = study("runs/x")
    others = [first | {"rate": 0.5}, first | {"tau": 0.8}, first | {"specials": "counted"}]
    put(write_journal(tmp_path / "x"), first)
    files = []
    for number, other in enumerate([*others, first]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(other))
    folders = read_folders([*files[:2], tmp_path / "x", *files[2:]])
    names = {
        "x, 15% masked, tau 0.9, special tokens left out",
        "x, 50% masked, tau 0.9, special tokens left out",
        "x, 15% masked, tau 0.8, special tokens left out",
        "x, 15% masked, tau 0.9, special tokens counted",
    }
    material = Material.of(folders)
    assert {row[0] for row in rank_table(material.ranks).rows} == names
    assert len(rank_table(material.ranks).rows) == 4, "the same study in two places is one"
    masked = masked_table(material.ranks)
    assert {(row[0], row[1]) for row in masked.rows} == {(name, name[3:6]) for name in names}
    drawings = {drawing.name: drawing for drawing in rank_drawings(material.ranks_over_seeds)}
    for name in names:
        end, drawn = ("-0.8", "rank") if "tau 0.8" in name else ("-0.9", "rank-masked-input")
        assert f">{name}<" in drawings[drawn + end].svg or name in drawings[drawn + end].note
    assert "Masked at the rates named" in drawings["rank-masked-input-0.9"].note
    assert "15% of the tokens masked" in drawings["rank-masks-0.8"].note


def test_models_studied_at_different_rates_say_theirs_and_those_that_see_no_mask_do_not(tmp_path):
    put(tmp_path / "x", study("runs/x"), study("runs/x/downstream/mnli-e3-lr2e-05-b32-w0.06-s0-ab.model"))
    put(tmp_path / "y", study("runs/y") | {"rate": 0.5})
    put(tmp_path / "z", study("runs/z", sees_masks=False) | {"rate": 0.4})
    folders = read_folders([tmp_path / name for name in "xyz"])
    assert [row[0] for row in rank_table(Material.of(folders).ranks).rows] == ["x, 15% masked", "y, 50% masked", "z"]
    assert row_of(rank_table(Material.of(folders).ranks), "x, 15% masked")["MNLI"] == "90 (92)"
    alone = Material.of(folders[:1])
    assert [row[0] for row in rank_table(alone.ranks).rows] == ["x"]
    drawings = rank_drawings(alone.ranks_over_seeds)[1:]
    assert all("15% of the tokens masked." in drawing.note for drawing in drawings)


def test_two_models_of_one_name_are_two(tmp_path):
    runs = ("a/x", "b/x")
    for run in runs:
        (tmp_path / f"{run[0]}.json").write_text(json.dumps(study(f"runs/{run}")))
    folders = read_folders([tmp_path / "a.json", tmp_path / "b.json"])
    assert [row[0] for row in rank_table(Material.of(folders).ranks).rows] == ["x, runs/a/x", "x, runs/b/x"]


def test_few_vectors_are_hollow_in_figures_and_flagged_in_tables(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "svg", lambda figure: figures.append(figure) or "<svg></svg>")
    few = study("runs/x")
    few["layers"][2]["masks"]["few_vectors"] = few["layers"][4]["masks"]["few_vectors"] = True
    layered = theory("runs/x")
    layered["layers"][4]["few_vectors"] = True
    folders = read_folders([put(tmp_path / "x", few, layered), put(tmp_path / "y", study("runs/y"))])
    drawings = [*rank_drawings(Material.of(folders).ranks_over_seeds), *theory_parts(Material.of(folders).theories)[:1]]
    hollow = {drawing.name: [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_linestyle() == "None"]
              for drawing, figure in zip(drawings, figures, strict=True)}  # fmt: skip
    assert hollow.pop("rank-masks") == [[2, 4]]
    assert hollow.pop("outside") == [[4]]
    assert not any(hollow.values())
    assert [drawing.name for drawing in drawings if "Hollow: few vectors" in drawing.note] == ["rank-masks", "outside"]
    for figure in figures:
        assert ("hollow" in figure.axes[0].get_xlabel()) == any(
            line.get_linestyle() == "None" for line in figure.axes[0].lines)  # fmt: skip
        plots.plt.close(figure)
    table = masked_table(Material.of(folders).ranks)
    assert row_of(table, "x")["[MASK]"] == "27 (29)*"
    assert row_of(table, "y")["[MASK]"] == "27 (29)"
    assert "* Few vectors" in table.note
    assert "* Few vectors" in theory_parts(Material.of(folders).theories)[1].note
    assert "*" not in rank_table(Material.of(folders).ranks).note


def test_a_run_has_one_colour_and_marker_in_every_figure_of_a_page(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "svg", lambda figure: figures.append(figure) or "<svg></svg>")
    names = ["a", "b", "c", "d"]
    for name in names[:3]:
        put(write_journal(tmp_path / name), *(point("rte", 0.5, step=step, run=name) for step in (10, 20)))
    for name in ("c", "d"):
        put(tmp_path / name, study(f"runs/{name}", sees_masks=name == "d"), theory(f"runs/{name}"))
    tuned = study("runs/c/downstream/mnli-e3-lr2e-05-b32-w0.06-s0-ab.model", top=40)
    put(tmp_path / "c", tuned)
    (tmp_path / "z.json").write_text(json.dumps(study("runs/b")))
    list(parts(read_folders([tmp_path / "z.json", *(tmp_path / name for name in names)])))
    looks: dict[str, set[tuple]] = {}
    for figure in figures:
        legends = [*figure.legends, *filter(None, [figure.axes[0].get_legend()])]
        for text, line in ((text, line) for legend in legends for text, line in zip(
                legend.get_texts(), legend.get_lines(), strict=True)):  # fmt: skip
            looks.setdefault(text.get_text()[0], set()).add((line.get_color(), line.get_marker()))
        plots.plt.close(figure)
    assert sorted(looks) == names
    assert all(len(each) == 1 for each in looks.values())
    assert len(set.union(*looks.values())) == 4, "z.json is a study of b"
    figures.clear()
    rank_drawings(Material.of(read_folders([tmp_path / "c"])).ranks_over_seeds)
    first, second = figures[0].axes[0].lines
    assert (first.get_color(), first.get_marker()) == (second.get_color(), second.get_marker())
    assert first.get_linestyle() != second.get_linestyle()
    plots.plt.close("all")


def test_theory_at_several_taus_and_rates_is_told_apart(tmp_path):
    put(tmp_path / "x", theory("runs/x"), theory("runs/x") | {"tau": 0.8}, theory("runs/x") | {"rate": 0.5})
    *drawings, last, _ = theory_parts(Material.of(read_folders([tmp_path / "x"])).theories)
    assert sorted((drawing.name, drawing.note.split(" of the real")[0]) for drawing in drawings) == [
        ("outside-0.8", "Leading: those that carry 80%"), ("outside-0.9", "Leading: those that carry 90%")]  # fmt: skip
    assert {row[:3] for row in last.rows} == {("x, 15% masked, tau 0.9", "0.9", "15%"),
                                              ("x, 15% masked, tau 0.8", "0.8", "15%"),
                                              ("x, 50% masked, tau 0.9", "0.9", "50%")}  # fmt: skip
    [both] = [drawing.svg for drawing in drawings if drawing.name == "outside-0.9"]
    assert ">x, 15% masked, tau 0.9: [MASK]<" in both
    assert ">x, 50% masked, tau 0.9: [MASK]<" in both


def test_theory_where_it_was_measured(tmp_path):
    parts = theory_parts(Material.of(read_folders([put(tmp_path / "x", theory("runs/x"))])).theories)
    assert [type(part) for part in parts] == [Drawing, Table, Table]
    assert row_of(parts[1], "x")["[MASK] outside"] == "25.0%"
    assert [row[3] for row in parts[2].rows] == ["7.5", "7e+02", "7.5", "7.5"]


# Costs and trends


def test_costs_are_computed_and_published_ones_say_so(tmp_path):
    runs = read_folders([write_curve(tmp_path / "a", "three_ml_self_base", 2.0, 7200), write_journal(tmp_path / "b")])
    table = costs_table(runs)
    row = row_of(table, "a")
    assert row["share of RoBERTa's (published)"] == "78% (published)"
    assert row["card-hours so far (measured)"] == 2.0
    assert row_of(table, "b")["share of MLM's, plain (computed)"] == "100.0%"
    assert "share of RoBERTa's (published)" not in costs_table(runs[1:]).columns
    start, *lines = read_folders([tmp_path / "a"])[0].lines
    del start["run"]["masking"]["vector"]
    old = row_of(table := costs_table([*runs, RunFolder("c", tmp_path, [start, *lines])]), "c")
    assert (old["card-hours so far (measured)"], old["million parameters kept"]) == (2.0, None)
    training, shape = start["run"]["training"], start["run"]["shape"]
    tokens = 1000 * training["batch_rows"] * shape["row_tokens"]
    assert old["PFLOP so far, plain"] == row["PFLOP so far, plain"] == pytest.approx(tokens * 6e6 / 1e15)
    assert "c (run.masking.vector: found nothing; wanted this field)" in table.note
    assert costs_table([]) is None


def test_runs_that_differ_in_one_field_are_a_trend(tmp_path):
    for delta, seed in itertools.product((0.0, 0.5, 1.0), (0, 1)):
        fields = {"masking.delta": delta, "training.seed": seed}
        write_curve(tmp_path / f"{delta}-{seed}", "delta_tiny", 2.0 + delta + 0.2 * seed, 60, fields)
    runs = read_folders([tmp_path])
    [(fields, members)] = sweeps(runs)
    assert (fields, members) == (("masking.delta",), runs)
    [drawing] = trend_drawings(Material.of(members), fields, members)
    assert drawing.name == "trend-masking-delta-validation-loss"
    assert "Medians over runs" in drawing.note
    write_curve(tmp_path / "odd", "delta_tiny", 2.0, 60, {"masking.delta": 0.1, "training.steps": 7})
    assert not sweeps(read_folders([tmp_path]))


def test_the_ends_of_figure_4_may_be_runs_of_the_recipes_that_they_are(tmp_path):
    for name, delta in (("mae_lm_tiny", 0.0), ("delta_tiny", 0.5), ("mask_in_encoder_tiny", 1.0)):
        write_curve(tmp_path / name, name, 2.0 + delta, 60, {"masking.delta": delta})
    runs = read_folders([tmp_path])
    assert len({str(run.fields["masking.joins"]) for run in runs}) == 3
    assert [fields for fields, _ in sweeps(runs)] == [("masking.delta",)]
    write_curve(tmp_path / "none", "mae_lm_tiny", 2.0, 60)
    assert not sweeps(read_folders([tmp_path])), "which delta that is, is not said"


@pytest.mark.parametrize(("one", "other", "fields"), [
    ("mae_lm_tiny", "decoder_6_layers_tiny", [("decoder.depth",)]),
    ("mae_lm_tiny", "mask_in_encoder_tiny", []), ("mlm_tiny", "mlm_80_10_10_tiny", []),
])  # fmt: skip
def test_recipes_that_differ_in_one_number_are_a_trend_and_in_anything_else_systems(one, other, fields, tmp_path):
    for name in (one, other):
        write_curve(tmp_path / name, name, 2.0, 60)
    assert [found for found, _ in sweeps(read_folders([tmp_path]))] == fields


def test_what_is_called_alike_has_files_and_ids_of_its_own(tmp_path):
    """Two sweeps over one field; data whose names are of no Latin letters; the same pairs, in whole and in part."""
    for name, delta in itertools.product(("some", "others"), (0.0, 0.5)):
        run = write_curve(tmp_path / name / f"{delta}", "delta_tiny", 2.0, 60, {"masking.delta": delta})
        some, more = ({**masked_loss("x", 3.0 + delta), "options": {"data": text}} for text in ("東京", "Москва"))
        part = {"subset": {"pairs": "the first 2 of each file"}} if name == "some" else {}
        put(run, some, more, pairs("x", 0.6 + delta / 10) | part)
        (tmp_path / name / "sweep.json").write_text(json.dumps({"vary": {"masking.delta": [0, 0.5]}}))
    run_report(ReportOptions((str(tmp_path / "some"), str(tmp_path / "others")), tmp_path / "r.html"))
    page, text = (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()
    ids = re.findall(r'id="?([^" >]+)', page)
    assert len(ids) == len(set(ids))
    files = re.findall(r"\]\((r\.[^)]+)\)", text)
    assert len(files) == len(set(files)) == page.count("<figure>")
    assert {path.name for path in tmp_path.glob("r.*.svg")} == set(files)
    for name in ("some", "others"):
        assert f"## Sweep over masking.delta in {name}\n" in text
        assert f"Validation loss against masking.delta in {name}" in text
    for section in re.findall(r"<a href=#([^>]+)>", page):
        assert section in ids


@given(st.lists(st.sampled_from(["a", "a-2", "a-3", "b"])))
def test_names_that_come_again_get_a_number(names):
    found = distinct(names)
    assert len(found) == len(set(found)) == len(names)
    assert set(names) <= set(found)
    assert all(one == name or one.startswith(f"{name}-") for one, name in zip(found, names, strict=True))


def test_a_product_has_a_line_for_each_setting_of_the_other_field_and_words_stand_on_the_axis(tmp_path):
    for decay, rate in itertools.product(("linear", "cosine"), (0.15, 0.3)):
        fields = {"training.decay": decay, "masking.rate": rate}
        folder = write_curve(tmp_path / f"{decay}-{rate}", "mlm_tiny", 2.0 + rate, 60, fields)
        put(folder, *(point(task, 0.7, run=folder.name, subset=task == "qqp") for task in GLUE))
    (tmp_path / "sweep.json").write_text(json.dumps({"vary": {"training.decay": [], "masking.rate": []}}))
    runs = read_folders([tmp_path])
    [(fields, members)] = sweeps(runs)
    assert fields == ("training.decay", "masking.rate")
    table = trend_table(Material.of(members), fields, members)
    assert table.columns == ("training.decay", "masking.rate", "steps", "validation loss", "GLUE average †", "end")
    assert table.rows[0][:2] == ("cosine", "0.15")
    loss, average = trend_drawings(Material.of(members), fields, members)
    for word in ("masking.rate 0.3", "linear", "cosine"):
        assert f">{word}<" in loss.svg
    assert "subsets" in average.note


# The page


class Page(HTMLParser):
    """Collects what a page would load, and what is on it."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str | None] = []
        self.ids: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.text += data


def test_page_needs_nothing_else_and_markdown_says_the_same(tmp_path):
    odd = "<b>run & co"
    folders = [*everything(tmp_path), write_journal(tmp_path / odd)]
    out = tmp_path / "out" / "my report.html"
    run_report(ReportOptions(tuple(map(str, folders)), out, "What <we> did"))
    text = out.read_text()
    page = Page(text)
    assert "://" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    assert not {"script", "link", "img", "iframe", "b-run"} & set(page.tags)
    assert all(str(place).startswith("#") for place in page.loaded)
    assert len(page.ids) == len(set(page.ids))
    assert {str(place)[1:] for place in page.loaded} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert odd in page.text
    assert "@media print" in text
    markdown = out.with_suffix(".md").read_text()
    links = re.findall(r"!\[.*\]\(([^)]+)\)", markdown)
    assert len(links) == page.tags.count("svg")
    assert all((out.parent / link.replace("%20", " ")).read_text().startswith("<svg") for link in links)
    assert markdown.count("## ") == page.tags.count("h2")
    for value in ("5.25", "mae_lm_base", "masking.joins", "80.0 80.4 80.8", "published", "Bounds of appendix A", "†"):
        assert value in page.text
        assert value in markdown
    assert "<b>" not in markdown
    assert "&lt;b>run &amp; co" in markdown


def test_one_run_alone(tmp_path):
    run_report(ReportOptions((str(write_journal(tmp_path / "run")),), tmp_path / "r.html"))
    page = Page((tmp_path / "r.html").read_text())
    assert page.tags.count("svg") == 3
    assert "Settings that differ" not in page.text
    assert "Sweep" not in page.text


def test_cells_and_tables():
    assert [shown(value) for value in (None, 12345, 0.123456, 12345.6, "x")] == ["", "12,345", "0.1235", "12,346", "x"]
    table = Table("T", ("a", "b"), (("x|y", 1), ("z", None)), "note")
    assert table.markdown() == "## T\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n| z |  |\n\nnote\n"
    assert Table("T", ("a",), (), "none").markdown() == "## T\n\nnone\n"
    wide = crossed("T", ("field", "run"), ["a"], [f"r{number}" for number in range(20)], lambda row, column: column)
    assert wide.columns == ("run", "a")
    assert wide.rows[19] == ("r19", 19)
    page = html_page("<t>", [table], "a <lead>")
    assert page.index("a &lt;lead&gt;") < page.index("<table>")
    assert "<h1>&lt;t&gt;</h1>" in page


def test_report_runs_without_torch(tmp_path):
    folders = tuple(map(str, everything(tmp_path)))
    program = (
        "import sys; from pathlib import Path; from latemask.report.page import ReportOptions, run_report\n"
        f"run_report(ReportOptions({folders!r}, Path({str(tmp_path / 'r.html')!r})))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_of_the_report_says_that_it_knows_no_torch():
    import latemask.report

    for path in Path(next(iter(latemask.report.__path__))).glob("*.py"):
        assert not re.search(r"^\s*(import|from) torch", path.read_text(), re.MULTILINE), path


def test_marks_go_with_a_number_into_trends_and_curves(tmp_path):
    for delta in (0.0, 1.0):
        folder = write_curve(tmp_path / str(delta), "delta_tiny", 2.0, 60, {"masking.delta": delta})
        put(folder, *(point("rte", 0.53, step=step, run=folder.name, subset=True, degenerate=delta == 1 and step == 900)
                      for step in (300, 900)))  # fmt: skip
    put(tmp_path / "0.0", pairs("0.0", 0.7))
    runs = read_folders([tmp_path])
    [(fields, members)] = sweeps(runs)
    table = trend_table(Material.of(members), fields, members)
    assert [row[3] for row in table.rows] == ["53.0", "53.0 ‡"]
    assert table.columns[3] == "RTE †"
    _, rte = trend_drawings(Material.of(members), fields, members)  # minimal pairs of one run alone are no trend
    assert rte.title == "RTE † against masking.delta"
    assert "subsets" in rte.note
    assert "‡" in rte.note
    assert all("†" in drawing.title and "‡" in drawing.note for drawing in checkpoint_drawings(entries(runs)))


def test_a_run_that_has_not_ended_or_diverged_is_no_point_of_a_loss_trend(tmp_path):
    for delta in (0.0, 0.5, 1.0):
        write_curve(tmp_path / str(delta), "delta_tiny", 2.0 + delta, 60, {"masking.delta": delta})
    runs = read_folders([tmp_path])
    write_lines(tmp_path / "1.0", [*runs[2].lines[:-1], {"kind": "skip", "step": 9, "skips_in_a_row": 20}])
    runs = read_folders([tmp_path])
    assert [run.ending for run in runs] == ["steps", "steps", "diverged"]
    [drawing] = trend_drawings(Material.of(runs), ("masking.delta",), runs)
    assert "have not ended" in drawing.note
    assert ">1.0<" not in drawing.svg
    assert row_of(trend_table(Material.of(runs), ("masking.delta",), runs), "1")["end"] == "diverged"

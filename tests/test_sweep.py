"""A sweep: everything is checked before the first run, each run is the one that pretrain would make, stopped ones go
on, and several processes share the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from latemask.cli import sweep as command
from latemask.cli.sweep import finish, points, read_vary, run_sweep, sweep
from latemask.config import replace
from latemask.downstream.claims import claimed
from latemask.errors import Refusal
from latemask.joins import DECODER, Join
from latemask.rates import RateStep
from latemask.recipes import recipe
from latemask.report.folders import read_folders
from latemask.report.page import ReportOptions, run_report
from latemask.training import checkpoint, loop
from latemask.training.loop import PREEMPTED, Diverged, pretrain
from reported import masked_loss, put, study, write_journal
from training_support import assert_same_bits, lines_of, tiny_run, write_store

DELTAS = ["masking.delta=0,.5,1"]
NAMES = ["masking.delta=0", "masking.delta=0.5", "masking.delta=1"]


@pytest.fixture(scope="module")
def swept(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("swept") / "out"
    assert sweep(tiny_run("delta", steps=2), DELTAS, data, out) == 0
    return out


def folders_of(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


# Values


@pytest.mark.parametrize(("vary", "values"), [
    ("masking.delta=0,.25, 1", [0.0, 0.25, 1.0]),
    ("training.steps=1,20", [1, 20]),
    ("training.batch-rows=4,8", [4, 8]),
    ("training.validation_rate=none,0.5", [None, 0.5]),
    ("masking.later-rates=none,.5:.3 .8:.1", [(), (RateStep(0.5, 0.3), RateStep(0.8, 0.1))]),
    ("training.decay=linear,cosine", ["linear", "cosine"]),
    ("masking.aligned=true,False", [True, False]),
    ("training.betas=.9 .98,.9 .999", [(0.9, 0.98), (0.9, 0.999)]),
    ("masking.joins=decoder,0:0:0.2 decoder:0.2:1",
     [(Join(DECODER),), (Join(0, 0.0, 0.2), Join(DECODER, 0.2, 1.0))]),
    ("training.learning_rate=1e-3,5e-4", [0.001, 0.0005]),
])  # fmt: skip
def test_values_are_what_the_field_holds(vary, values):
    [found] = read_vary(recipe("delta_tiny" if "delta" in vary else "mae_lm_tiny"), [vary]).values()
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize(("name", "vary", "takers"), [
    ("mae_lm_tiny", "masking.delta=0,.5", {"delta_tiny"}),
    ("mlm_small", "masking.delta=0,.5", {"delta_small"}),
    ("mlm_tiny", "masking.joins=decoder,0", {"mask_in_encoder_tiny", "mae_lm_tiny", "decoder_resets_mask_tiny"}),
    ("mae_lm_tiny", "masking.rate=2", set()),
    ("mae_lm_base_plus", "masking.delta=.5", set()),
])  # fmt: skip
def test_recipes_of_the_size_that_take_the_values_are_named(name, vary, takers):
    with pytest.raises(Refusal) as refused:
        read_vary(recipe(name), [vary])
    named = refused.value.do.partition("Recipes that take ")[2].partition(": ")[2]
    assert set(filter(None, named.split(", "))) == takers
    for taker in takers:
        assert read_vary(recipe(taker), [vary])


def test_no_recipe_is_named_where_another_flag_is_in_the_way():
    with pytest.raises(Refusal) as refused:
        read_vary(replace(recipe("mlm_tiny"), {"shape.row_tokens": 16}), ["masking.rate=.95"])
    assert refused.value.do == ""


@pytest.mark.parametrize(("vary", "named"), [
    (["masking.delt=0,1"], "masking.delt"), (["delta=0"], "delta"), (["masking=0"], "masking"),
    (["masking.delta=0,two"], "masking.delta"), (["masking.delta=0,1.5"], "masking.delta"),
    (["masking.delta="], "FIELD=VALUE"), (["masking.delta=0,,1"], "FIELD=VALUE"), (["=1"], "FIELD=VALUE"),
    ([], "nothing"),
    (["masking.delta=0,0.0"], "twice"), (["masking.delta=0", "masking.delta=1"], "twice"),
    (["training.steps=1.5"], "whole number"), (["training.steps=none"], "training.steps"),
    (["training.learning_rate=nan"], "finite"), (["training.decay=step"], "training.decay"),
    (["shape.vocabulary=100,200"], "shape.vocabulary"), (["shape.specials=1"], "shape.specials"),
    (["masking.joins=7:1"], "masking.joins"), (["shape.heads=3"], "shape.heads"),
    (["masking.aligned=maybe"], "true or"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(vary, named, data, tmp_path):
    with pytest.raises(Refusal, match=named):
        sweep(tiny_run("delta"), vary, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rule_that_two_fields_break_together_is_refused_before_the_first_run(data, tmp_path):
    vary = ["shape.width=32,48", "shape.heads=2,32"]
    with pytest.raises(Refusal, match=r"shape\.heads"):
        sweep(tiny_run("delta"), vary, data, tmp_path / "out")
    with pytest.raises(Refusal, match="nowhere"):
        sweep(tiny_run("delta"), DELTAS, tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_points_are_the_product_in_order_and_named_by_their_settings():
    run = recipe("delta_tiny")
    found = points(run, read_vary(run, ["training.decay=linear,cosine", "masking.delta=0,.5"]))
    assert [point.name for point in found] == [
        "training.decay=linear,masking.delta=0", "training.decay=linear,masking.delta=0.5",
        "training.decay=cosine,masking.delta=0", "training.decay=cosine,masking.delta=0.5",
    ]  # fmt: skip
    assert found[3].run == replace(run, {"training.decay": "cosine", "masking.delta": 0.5})
    plain = recipe("mae_lm_tiny")
    joins = points(plain, read_vary(plain, ["masking.joins=decoder,0:0:0.2 decoder:0.2:1"]))
    assert all(set(point.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.=+-") for point in joins)
    with pytest.raises(Refusal, match="one name"):
        points(run, read_vary(run, ["masking.delta=0.1,0.1000000000001"]))


# Runs


RATES = "warning: Not measured alike (20% masked and 50% masked): these losses do not compare. Validate all at one rate"
ROWS = "warning: Not measured alike (rows of 8 tokens and rows of 16 tokens): these losses do not compare."


@pytest.mark.parametrize(("vary", "changes", "warning"), [
    ("masking.rate=.2,.5", {}, f"{RATES}: --training.validation-rate 0.15"),
    ("masking.rate=.2,.5", {"validation_rate": 0.3}, None),
    ("masking.rate=.2,.5", {"validate_every": 0}, None),
    ("shape.row_tokens=8,16", {}, ROWS),
    ("training.seed=1,2", {}, None),
])  # fmt: skip
def test_losses_that_will_not_compare_are_told_before_the_first_run(
    vary, changes, warning, data, tmp_path, monkeypatch, capsys
):
    def begins(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(command, "_train", begins)
    with pytest.raises(InterruptedError):
        sweep(tiny_run(**changes), [vary], data, tmp_path / "out")
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warnings == ([] if warning is None else [warning])


def test_each_run_is_the_one_that_pretrain_makes(swept, data, tmp_path):
    assert folders_of(swept) == NAMES
    alone = pretrain(replace(tiny_run("delta", steps=2), {"masking.delta": 0.5}), data, tmp_path / "alone")
    assert_same_bits(swept / NAMES[1] / alone.step.name, alone.step)
    losses = [lines_of(swept / name, "validation")[-1]["loss"] for name in NAMES]
    assert len(set(losses)) == 3
    assert (swept / "trend-masking-delta-validation-loss.svg").is_file()
    assert json.loads((swept / "sweep.json").read_text())["vary"] == {"masking.delta": ["0", "0.5", "1"]}


def test_what_is_done_is_passed_over_and_new_values_are_added(swept, data, monkeypatch, capsys):
    trained: list[Path] = []
    inner = loop.pretrain
    monkeypatch.setattr(loop, "pretrain", lambda run, data, out, **rest: (trained.append(out), inner(
        run, data, out, **rest))[1])  # fmt: skip
    before = {name: (swept / name / "journal.jsonl").read_bytes() for name in NAMES}
    assert sweep(tiny_run("delta", steps=2), DELTAS, data, swept) == 0
    assert not trained
    assert before == {name: (swept / name / "journal.jsonl").read_bytes() for name in NAMES}
    said = capsys.readouterr().out
    assert all(f"{name}: done\n" in said for name in NAMES)
    assert f"latemask report {swept}" in said
    assert "Sweep over masking.delta" in said
    assert sweep(tiny_run("delta", steps=2), ["masking.delta=.75"], data, swept) == 0
    assert trained == [swept / "masking.delta=0.75"]
    assert json.loads((swept / "sweep.json").read_text())["vary"] == {"masking.delta": ["0", "0.5", "1", "0.75"]}


def test_other_settings_data_or_fields_in_the_same_folder_are_refused(swept, data, tmp_path):
    with pytest.raises(Refusal, match=r"with training\.steps 2; wanted training\.steps 3"):
        sweep(tiny_run("delta", steps=3), DELTAS, data, swept)
    with pytest.raises(Refusal, match="other data"):
        sweep(tiny_run("delta", steps=2), DELTAS, write_store(tmp_path / "store", train_rows=20), swept)
    with pytest.raises(
        Refusal, match=r"found the run masking\.delta=0; wanted only runs of a sweep over training\.seed"
    ):
        sweep(tiny_run("delta", steps=2), ["training.seed=5,6"], data, swept)
    with pytest.raises(
        Refusal, match=r"masking\.delta=0: found a run with training\.steps 2; wanted training\.steps 3"
    ):
        sweep(tiny_run("delta", steps=3), ["masking.delta=.9"], data, swept)
    with pytest.raises(Refusal, match="other data"):
        sweep(tiny_run("delta", steps=2), ["masking.delta=.9"], write_store(tmp_path / "more", train_rows=20), swept)
    begun = tmp_path / "begun"
    pretrain(replace(tiny_run("delta", steps=2), {"masking.delta": 0.5}), data, begun / NAMES[1])
    with pytest.raises(Refusal, match=r"learning_rate 0\.01; wanted training\.learning_rate 0\.5"):
        sweep(tiny_run("delta", steps=2, learning_rate=0.5), DELTAS, data, begun)
    assert folders_of(begun) == [NAMES[1]]


def test_another_recipe_in_the_same_folder_is_refused_by_that_alone(data, tmp_path):
    pretrain(replace(tiny_run("mlm", steps=2), {"training.seed": 1}), data, tmp_path / "training.seed=1")
    with pytest.raises(Refusal, match=r'found a run with recipe "mlm_tiny"; wanted recipe "mae_lm_tiny"\. Give'):
        sweep(tiny_run("mae_lm", steps=2), ["training.seed=1"], data, tmp_path)


def test_other_results_in_a_sweep_s_folder_do_not_stand_in_its_way(swept, tmp_path, capsys):
    swept = shutil.copytree(swept, tmp_path / "swept")
    finish(swept)
    told = capsys.readouterr().out
    (swept / "another.json").write_text(json.dumps(study("another")))
    finish(swept)
    assert capsys.readouterr().out == told


def test_a_folder_of_other_runs_is_refused_before_anything_is_written(data, tmp_path):
    """What the table would show as a point of the sweep: a run of any name in it, and the folder that is a run."""
    out, run = tmp_path / "runs", tiny_run("delta", steps=2)
    pretrain(run, data, out / "mine")
    before = sorted(tmp_path.rglob("*"))
    for folder, found in ((out, "the run mine"), (out / "mine", "a run itself")):
        with pytest.raises(Refusal) as refused:
            sweep(run, DELTAS, data, folder)
        assert (refused.value.where, refused.value.found) == (str(folder), found)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sweep_that_did_not_fit_its_card_goes_on_in_fewer_rows_at_once(swept, data, tmp_path, capsys):
    swept = shutil.copytree(swept, tmp_path / "swept")
    for values in (DELTAS, ["masking.delta=.5"]):
        assert sweep(tiny_run("delta", steps=2, micro_rows=1, recompute=True), values, data, swept) == 0
    assert capsys.readouterr().out.count(": done") == len(NAMES) + 1


def test_a_sweep_from_before_there_were_graphs_goes_on(swept, data, tmp_path, capsys):
    swept = shutil.copytree(swept, tmp_path / "before")
    for name in NAMES:
        file = swept / f"{name}.json"
        held = json.loads(file.read_text())
        assert held["run"]["training"].pop("graphs") == "auto"
        file.write_text(json.dumps(held))
    assert sweep(tiny_run("delta", steps=2), DELTAS, data, swept) == 0
    assert capsys.readouterr().out.count(": done") == len(NAMES)
    with pytest.raises(Refusal, match=r'with training\.graphs "auto"; wanted training\.graphs "off"'):
        sweep(tiny_run("delta", steps=2, graphs="off"), DELTAS, data, swept)


@pytest.mark.parametrize("run", [None, [], {"recipe": "x"}, "text"])
def test_a_result_without_a_run_is_refused_by_name(run, swept, data, tmp_path):
    file = tmp_path / f"{NAMES[0]}.json"
    file.write_text(json.dumps(json.loads((swept / file.name).read_text()) | {"run": run}))
    with pytest.raises(Refusal, match=re.escape(str(file))):
        sweep(tiny_run("delta", steps=2), DELTAS, data, tmp_path)


def test_a_stopped_sweep_goes_on_where_it_stood(swept, data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    saved = checkpoint.write
    written: list[str] = []

    def stopping(folder: Path, *rest: object) -> Path:
        written.append(folder.name)
        if len(written) == 4:  # the first save of the second run
            signal.raise_signal(signal.SIGTERM)
        return saved(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "write", stopping)
    run = tiny_run("delta", steps=2, save_every=1)
    assert sweep(run, DELTAS, data, out) == PREEMPTED
    assert folders_of(out) == NAMES[:2]
    assert sorted(path.name for path in out.glob("*.json")) == [f"{NAMES[0]}.json", "sweep.json"]
    assert not list(out.glob("*.claim-*"))
    monkeypatch.setattr(checkpoint, "write", saved)
    first = (out / NAMES[0] / "journal.jsonl").read_bytes()
    assert sweep(run, DELTAS, data, out) == 0
    assert (out / NAMES[0] / "journal.jsonl").read_bytes() == first
    for name in NAMES:
        assert_same_bits(*(checkpoint.newest(folder / name) for folder in (out, swept)))


def test_a_signal_in_the_last_save_of_a_run_stops_the_sweep(swept, data, tmp_path, monkeypatch):
    """That run is done and counted, the next does not begin."""
    out, saved = tmp_path / "out", checkpoint.write

    def stopping(folder: Path, run: object, state: checkpoint.State, *rest: object) -> Path:
        if state.updates == 2:
            signal.raise_signal(signal.SIGTERM)
        return saved(folder, run, state, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "write", stopping)
    run = tiny_run("delta", steps=2, save_every=1)
    assert sweep(run, DELTAS, data, out) == PREEMPTED
    assert folders_of(out) == NAMES[:1]
    assert json.loads((out / f"{NAMES[0]}.json").read_text())["end"] == "steps"
    monkeypatch.setattr(checkpoint, "write", saved)
    assert sweep(run, DELTAS, data, out) == 0
    assert folders_of(out) == NAMES


def test_a_run_that_somebody_is_at_is_left_to_them(data, tmp_path, capsys):
    run = tiny_run("delta", steps=1)
    with claimed(tmp_path / "out", NAMES[1]) as is_ours:
        assert is_ours
        assert sweep(run, DELTAS, data, tmp_path / "out") == PREEMPTED, "not all runs are there"
    assert folders_of(tmp_path / "out") == [NAMES[0], NAMES[2]]
    said = capsys.readouterr().out
    assert f"{NAMES[1]}: process {os.getpid()} on {socket.gethostname()} is at it" in said
    assert "1 of 3 runs are others' and not done. The same command goes on." in said
    assert ": done" not in said
    assert sweep(run, DELTAS, data, tmp_path / "out") == 0
    assert folders_of(tmp_path / "out") == NAMES
    said = capsys.readouterr().out
    assert f"{NAMES[0]}: done" in said
    assert f"{NAMES[2]}: done" in said
    assert "is at it" not in said
    assert "not done" not in said


@pytest.mark.slow
def test_processes_share_the_folder_and_do_no_run_twice(data, tmp_path):
    out, vary = tmp_path / "out", "masking.delta=0,.25,.5,1"
    arguments = ["delta_tiny", "--vary", vary, "--data", str(data), "--out", str(out), "--training.steps", "2",
                 "--training.batch-rows", "4", "--training.save-every", "2", "--training.validate-every", "2",
                 "--training.validation-rows", "4", "--shape.depth", "2", "--shape.row-tokens", "16"]  # fmt: skip
    command_line = [sys.executable, "-m", "latemask", "sweep", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            for _ in range(2)]  # fmt: skip
    said = []
    for process in both:
        output, error = process.communicate(timeout=240)
        assert process.returncode in (0, PREEMPTED), error
        said.append(output)
    assert any(process.returncode == 0 for process in both), "who ends last has all runs"
    assert len(list(out.glob("masking.delta=*.json"))) == 4
    for name in folders_of(out):
        assert [line["kind"] for line in lines_of(out / name, "start", "resume", "end")] == ["start", "end"]
    lines = [line for output in said for line in output.splitlines() if " of 4, " in line]
    passed = sum(line.endswith((": done", " is at it")) for line in lines)
    assert passed == 4


def test_no_values_are_lost_where_sweeps_begin_at_once(tmp_path):
    """Each notes values of its own, between whose reading and writing another would find time."""
    code = (
        f"import time\nfrom pathlib import Path\nfrom latemask.cli import sweep\nwrite = sweep.write_json\n"
        f"def slowly(path, value):\n    time.sleep(0.1)\n    write(path, value)\nsweep.write_json = slowly\n"
        f"sweep._note_down(Path({str(tmp_path / 'out')!r}), 'mlm_tiny', {{'masking.rate': [float(input())]}})"
    )
    rates = ["0.1", "0.2", "0.3", "0.4"]
    begun = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) for _ in rates]
    for process, rate in zip(begun, rates, strict=True):
        assert process.stdin is not None
        process.stdin.write(f"{rate}\n")
        process.stdin.close()
    assert [process.wait(120) for process in begun] == [0] * 4
    held = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert sorted(held["vary"]["masking.rate"]) == rates
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sweep.json"]


@pytest.mark.parametrize("held", ["[]", '{"recipe": "x", "vary": 3}', '{"recipe": "x", "vary": {"a": 3}}'])
def test_a_sweep_s_file_made_by_hand_is_refused_by_name(held, tmp_path):
    (tmp_path / "sweep.json").write_text(held)
    with pytest.raises(Refusal, match=r"sweep\.json: found a field that is of another kind"):
        command._note_down(tmp_path, "x", {"a": [1]})


def test_a_run_that_diverges_is_a_result_and_the_others_are_run(data, tmp_path, monkeypatch, capsys):
    inner = loop.pretrain

    def diverging(run, data, out, **rest):
        if run.masking.delta == 0:
            raise Diverged("step 1", "20 updates in a row that were not finite", "a finite loss and gradient")
        return inner(run, data, out, **rest)

    monkeypatch.setattr(loop, "pretrain", diverging)
    out = tmp_path / "out"
    assert sweep(tiny_run("delta", steps=2), ["masking.delta=0,1"], data, out) == 0
    assert json.loads((out / f"{NAMES[0]}.json").read_text())["end"] == "diverged"
    assert json.loads((out / f"{NAMES[2]}.json").read_text())["end"] == "steps"
    assert "diverged" in capsys.readouterr().err


def test_figures_of_measures_called_alike_have_files_of_their_own(tmp_path):
    for delta in (0, 0.5):
        run = write_journal(tmp_path / f"{delta}", "delta_tiny", fields={"masking.delta": delta})
        for data in ("東京", "Москва"):
            put(run, {**masked_loss(run.name, 3.0 + delta), "options": {"data": data}})
    (tmp_path / "sweep.json").write_text(json.dumps({"vary": {"masking.delta": [0, 0.5]}}))
    finish(tmp_path)
    assert len(list(tmp_path.glob("trend-*.svg"))) == 3, "with that of the validation loss"


def test_the_report_takes_the_folder_of_a_sweep(swept, tmp_path):
    run_report(ReportOptions((str(swept),), tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert "Sweep over masking.delta" in page
    assert [run.varied for run in read_folders([swept])] == [("masking.delta",)] * len(folders_of(swept))


def test_several_processes_of_one_run_and_a_missing_recipe_are_refused(data, tmp_path, monkeypatch):
    with pytest.raises(Refusal, match="no recipe"):
        run_sweep(["--vary", "a.b=1", "--data", str(data), "--out", str(tmp_path)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refusal, match="CUDA_VISIBLE_DEVICES"):
        sweep(tiny_run("delta"), DELTAS, data, tmp_path / "out")


def test_several_vary_flags_are_all_heard(data, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(command, "sweep", lambda run, vary, data, out: heard.append((run, vary)) or 0)
    flags = ["--vary", "masking.delta=0,1", "--vary", "training.seed=1,2", "--data", str(data), "--out", "x",
             "--training.steps", "5"]  # fmt: skip
    assert run_sweep(["delta_tiny", *flags]) == 0
    assert heard == [(replace(recipe("delta_tiny"), {"training.steps": 5}), ("masking.delta=0,1", "training.seed=1,2"))]

"""The measuring programs of speed: what they make of journals, what they launch, and one of them from end to end."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmark_files import BENCHMARKS, load
from latemask.cli.pretrain import read
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.kernels import linear_cross_entropy, relative_attention
from latemask.report.folders import RunFolder
from training_support import wait_until, write_store

curves, processes, start, tiles = load("curves"), load("processes"), load("start"), load("tiles")

NARROW = ("--shape.depth 1 --shape.width 16 --shape.heads 1 --shape.feedforward 16 --shape.row-tokens 16 "
          "--decoder.depth 1 --decoder.width 16 --decoder.heads 1 --decoder.feedforward 16")  # fmt: skip

losses_of = st.lists(st.floats(0.1, 20), min_size=1, max_size=40)


def numbered(losses: list, every: int = 10) -> list[list]:
    return [[every * (place + 1), loss] for place, loss in enumerate(losses)]


def train_line(step: int, **values) -> dict:
    line = {"kind": "train", "step": step, "loss": 10.0 / step, "tokens_per_second": 100.0, "memory_bytes": step}
    return line | {"mfu": None} | values


# what all of them do


def ended_of(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program of ``benchmarks/``, run in ``folder``."""
    program, *rest = arguments
    command = [sys.executable, str(BENCHMARKS / f"{program}.py"), *rest]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def assert_refused(arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's ``main`` in ``folder``, here: a line, status 1, and nothing else printed."""
    program, main = load("refusals").program, load(arguments[0]).main
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            program(main)
    assert ended.value.code == said
    assert capsys.readouterr() == ("", "")


def test_a_refusal_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = ended_of(["attention", "--ways", "torch", "torch"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "--ways: found torch twice; wanted each once\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [
    ["start", "--data", "d"], ["processes", "--data", "d"], ["idle", "--data", "d"], ["sizes", "--size", "tiny"],
    ["curves", "--data", "d", "--recipe", "x"], ["soak"], ["prepare", "d", "--tokenizer", "t"],
    ["updates", "--size", "tiny"], ["repeats", "--size", "tiny"], ["joins", "--size", "tiny"],
])  # fmt: skip
def test_a_result_that_could_not_be_kept_is_refused_before_anything_runs(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flag = "--json" if arguments[0] in ("soak", "prepare") else "--out"
    given = [*arguments, flag, "file" if arguments[0] == "curves" else "file/x.json"]
    assert_refused(given, f"{flag}: found file, a file; wanted a folder to write into", tmp_path, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("program", "name"), [
    ("start", "flags"), ("processes", "flags"), ("curves", "flags"), ("evidence", "flags"), ("evidence", "finetuning"),
])  # fmt: skip
def test_a_quotation_that_is_not_closed_is_refused(program: str, name: str, tmp_path: Path) -> None:
    given = {"study": "collapse", "out": tmp_path} if program == "evidence" else {}
    with pytest.raises(Refusal, match=rf"--{name}: found .*'3.*closing quotation"):
        load(program).Options(data=tmp_path, **given, **{name: "--training.seed '3"})


def test_a_folder_is_emptied_that_a_measurement_left_and_no_other(tmp_path: Path) -> None:
    emptied = load("disk").emptied
    for _ in range(2):
        folder = emptied(tmp_path / "new" / "runs")
        assert not (folder / "old").exists()
        (folder / "old").mkdir()
    (tmp_path / "mine").mkdir()
    assert emptied(tmp_path / "mine").is_dir()  # nothing was in it
    with pytest.raises(Refusal, match="found other things"):
        emptied(tmp_path)
    assert (tmp_path / "new" / "runs" / "old").is_dir()


def test_counts_are_from_one_on_and_some() -> None:
    @dataclasses.dataclass
    class Some:
        one: int | None = 1
        more_rows: tuple[int, ...] = (1, 2)

    for right in (Some(), Some(None), Some(7, (3,))):
        load("asked").counts(right, "one", "more_rows")
    for wrong, flag in ((Some(0), "--one: found 0"), (Some(1, (2, -1)), "--more-rows: found -1"),
                        (Some(1, ()), "--more-rows: found nothing")):  # fmt: skip
        with pytest.raises(Refusal, match=f"^{flag}"):
            load("asked").counts(wrong, "one", "more_rows")


@pytest.mark.parametrize(("arguments", "said"), [
    (["milliseconds", "--only", "mlm", "mlm"], "--only: found mlm twice"),
    (["processes", "--data", ".", "--cards-list", "1", "2", "1"], "--cards-list: found 1 twice"),
    (["curves", "--data", ".", "--cards", "0", "0"], "--cards: found 0 twice"),
    (["evidence", "collapse", "--data", ".", "--out", "o", "--cards", "0", "0"], "--cards: found 0 twice"),
    (["finetune", "speed", "--data", ".", "--systems", "latemask", "latemask"], "--systems: found latemask twice"),
])  # fmt: skip
def test_what_is_named_twice_is_refused_before_anything_runs(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(arguments, f"{said}; wanted each once", tmp_path, capsys)
    assert not list(tmp_path.iterdir())


def test_a_program_ends_with_its_status_or_in_a_line() -> None:
    def raising(error: BaseException) -> None:
        raise error

    program = load("refusals").program
    for main, status in ((lambda: None, None), (lambda: 1, 1), (lambda: raising(KeyboardInterrupt()), "interrupted"),
                         (lambda: raising(Refusal("--x", "1", "2")), "--x: found 1; wanted 2")):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            program(main)
        assert ended.value.code == status


# start


def test_a_start_is_timed_by_the_lines_of_its_journal_in_turn(tmp_path: Path) -> None:
    code = (
        "import json, pathlib, sys, time; out = pathlib.Path(sys.argv[1]); out.mkdir(); j = out / 'journal.jsonl'\n"
        "for kind in ('start', 'save', 'train', 'train', 'end'):\n"
        "    time.sleep(.15); j.open('a').write(json.dumps({'kind': kind, 'step': 0}) + '\\n')"
    )
    run = tmp_path / "run"
    found = start.measured([sys.executable, "-c", code, str(run)], run, os.environ, 60)
    to, parts = found["to"], found["parts"]
    assert list(to) == ["start", "save", "train", "end"]
    assert 0.15 <= to["start"] < to["save"] < to["train"] < to["end"] <= found["process_seconds"]
    assert found["seconds"] == to["train"]
    assert math.isclose(sum(parts.values()), to["train"])
    assert min(parts.values()) > 0


@pytest.mark.parametrize(("code", "says"), [
    ("print('no such data'); raise SystemExit(2)", "exit status 2; no such data"),
    ("pass", "exit status 0"),
    ("import time; time.sleep(60)", "nothing after"),
])  # fmt: skip
def test_a_start_that_trains_nothing_is_refused_with_its_log(code: str, says: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(Refusal, match=says):
        start.measured([sys.executable, "-c", code], tmp_path / "run", os.environ, 1.5 if "sleep" in code else 60)
    assert time.monotonic() - begun < 50


def test_starts_are_judged_by_their_median(tmp_path: Path) -> None:
    starts = {"cold": [{"seconds": 60.5}], "warm": [{"seconds": 30.0}, {"seconds": 19.0}, {"seconds": 10.0}]}
    found = start.judged(starts, "mlm_base", "NVIDIA H100 80GB HBM3")
    assert (found["cold"]["is_met"], found["warm"]["is_met"]) == (False, True)
    assert found["warm"]["median_seconds"] == 19.0
    assert "warm" not in start.judged({"cold": [{"seconds": 1.0}], "warm": []}, "mlm_base", "NVIDIA H200")
    assert start.judged(starts, "mlm_large", "NVIDIA H200") == start.judged(starts, "mlm_base", "cpu") == {}


def test_fewer_starts_than_none_are_refused() -> None:
    assert start.Options(data=Path("d"), warm=0).warm == 0
    with pytest.raises(Refusal, match=r"^--warm: found -1"):
        start.Options(data=Path("d"), warm=-1)


def test_each_floor_of_a_start_holds_the_one_before(monkeypatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(start.subprocess, "run", lambda command, **_: ran.append(command[-1]))
    assert list(start.floors(False, {})) == ["importing", "importing_with_compiler"]
    assert len(start.floors(True, {})) == 3
    assert ran[:2] == ran[2:4]
    assert ran[4].startswith(ran[3])
    assert ran[3].startswith(ran[2])


# processes


@pytest.mark.parametrize("name", ["mlm_base", "mae_lm_tiny"])
def test_every_world_trains_the_same_and_only_losses_runs_drop_nothing(name: str, tmp_path: Path) -> None:
    options = processes.Options(tmp_path, recipe=name)
    trials, left_out = processes.trials_of(options, 8)
    assert left_out == []
    assert len({trial.name for trial in trials}) == len(trials)
    runs = []
    for trial in trials:
        command = processes.command_of(options, trial)
        assert command[command.index("--nproc-per-node") + 1] == str(trial.cards)
        _, run = read(command[command.index("pretrain") + 1 :])
        assert run is not None
        assert run.training.data_parallel == trial.way
        assert (run.shape.dropout == 0) == (trial.purpose == "losses")
        assert run.decoder is None or trial.purpose == "speed" or run.decoder.dropout == 0
        rows = options.micro_rows * trial.cards if trial.purpose == "speed" else options.batch_rows
        assert run.training.batch_rows == rows
        told = json.loads(run.to_json())
        del told["training"]["data_parallel"], told["training"]["batch_rows"]
        runs.append(json.dumps([trial.purpose, told]))
    assert len(set(runs)) == 2
    assert {(trial.way, trial.cards) for trial in trials if trial.purpose == "speed"} == {
        ("replicate", 1), ("replicate", 2), ("replicate", 4), ("shard", 2), ("shard", 4)}  # fmt: skip
    assert sum(trial.repeat for trial in trials) == 1


def test_worlds_beyond_the_cards_are_left_out_by_name(tmp_path: Path) -> None:
    trials, left_out = processes.trials_of(processes.Options(tmp_path), 2)
    assert {trial.cards for trial in trials} == {1, 2}
    assert left_out == ["4 cards: only 2 here"]
    assert processes.trials_of(processes.Options(tmp_path), None)[1] == []


def test_speed_is_the_median_of_the_intervals_after_the_first_steps(tmp_path: Path) -> None:
    options = processes.Options(tmp_path, log_every=5, skipped_steps=20)
    first = {"kind": "start", "micro_rows": 128, "world": 4}
    speeds = {5: 1.0, 10: 1.0, 15: 1.0, 20: 1.0, 25: 900.0, 30: 1000.0, 35: 5000.0}
    lines = [first, *(train_line(step, tokens_per_second=speed, mfu=0.4) for step, speed in speeds.items())]
    found = processes.measured(lines, processes.Trial("speed", "shard", 4), options)
    assert (found["tokens_per_second"], found["mfu"], found["memory_bytes"]) == (1000.0, 0.4, 35)
    assert found["intervals"] == [900.0, 1000.0, 5000.0]
    short = processes.measured(lines[:4], processes.Trial("speed", "shard", 4), options)
    assert short["tokens_per_second"] is None


def test_ratios_are_over_cards_times_one_card(tmp_path: Path) -> None:
    options = processes.Options(tmp_path, log_every=5, skipped_steps=0)

    def run(purpose, way, cards, speed, repeat=0, loss=1.0):
        lines = [{"kind": "start", "micro_rows": 1, "world": cards}]
        lines += [train_line(step, tokens_per_second=speed, loss=loss / step) for step in (5, 10)]
        return processes.measured(lines, processes.Trial(purpose, way, cards, repeat), options)

    runs = [run("speed", "replicate", 1, 100.0), run("speed", "replicate", 4, 390.0), run("speed", "shard", 4, 200.0),
            run("losses", "replicate", 1, 1.0), run("losses", "replicate", 4, 1.0, loss=1.01),
            run("losses", "replicate", 1, 1.0, repeat=1)]  # fmt: skip
    found = processes.with_ratios(runs)
    assert [one["ratio"] for one in found[:3]] == [1.0, 0.975, 0.5]
    assert found[3]["beside_one_card"] is None
    assert found[4]["beside_one_card"]["largest"] == pytest.approx(0.01)
    assert found[5]["beside_one_card"] == {"steps": 2, "largest": 0.0, "at_step": 5, "mean": 0.0}
    assert processes.goal_of(found) == {"cards": 4, "wanted": 0.97, "found": 0.975, "is_met": True}
    alone_missing = processes.with_ratios(runs[1:3] + runs[4:])
    assert [one["ratio"] for one in alone_missing[:2]] == [None, None]
    assert processes.goal_of(alone_missing)["is_met"] is None


def test_differences_are_of_equal_steps() -> None:
    found = processes.difference([[1, 9.0], [2, 8.0], [3, 7.0]], [[2, 10.0], [3, 7.0], [4, 1.0]])
    assert found == {"steps": 2, "largest": pytest.approx(0.2), "at_step": 2, "mean": pytest.approx(0.1)}
    broken = processes.difference([[1, 9.0], [2, None]], [[1, 9.0], [2, 8.0]])
    assert (broken["largest"], broken["at_step"]) == (None, 2)


def test_a_failed_run_says_why_and_a_late_one_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert processes.ran([sys.executable, "-c", "print('fine')"], log, 60) == ""
    reason = processes.ran([sys.executable, "-c", "print('x' * 9); raise SystemExit(7)"], log, 60)
    assert reason.splitlines() == ["exit status 7", "xxxxxxxxx"]
    begun = time.monotonic()
    late = processes.ran([sys.executable, "-c", "import time; time.sleep(100)"], log, 1)
    assert late.startswith("not done after 1 s")
    assert time.monotonic() - begun < 60


def test_what_torchrun_adds_does_not_hide_what_its_processes_said() -> None:
    said = ["step 1", "latemask (rank 1): training.batch_rows: found 15; wanted a multiple of 2"]
    added = ["E1128 05:58:14.945000 27200 torch/distributed/elastic/multiprocessing/api.py:1002] failed", "Traceback"]
    assert processes.last_words("\n".join(said + added * 40)) == said
    assert processes.last_words("\n".join(added)) == added


# curves


def test_variants_differ_in_what_they_say_alone(tmp_path: Path) -> None:
    options = curves.Options(tmp_path)
    runs = {variant: curves.settings_of(options, variant) for variant in get_args(curves.Variant)}
    fast = runs["fast"]
    assert fast.shape.dropout == fast.decoder.dropout == 0
    assert fast.training.order_seed == fast.training.seed == 0

    def changed(variant):
        return {name: value for name, value in dataclasses.asdict(runs[variant].training).items()
                if value != getattr(fast.training, name)}  # fmt: skip

    assert changed("plain") == {"compile": "off"}
    assert changed("fp8") == {"precision": "fp8"}
    assert changed("seed") == {"seed": 1}
    assert changed("fp32") == {"compile": "off", "precision": "fp32", "steps": 150, "warmup_share": 100 / 150}
    assert all(dataclasses.replace(run, training=fast.training) == fast for run in runs.values())
    assert {run.training.order_seed for run in runs.values()} == {0}


def test_the_learning_rate_of_a_step_does_not_depend_on_how_many_there_are(tmp_path: Path) -> None:
    from latemask.training.schedules import learning_rate, share_of_updates

    options = curves.Options(tmp_path, steps=300, fp32_steps=120, warmup_steps=100)
    fast, short = (curves.settings_of(options, variant).training for variant in ("fast", "fp32"))
    for update in range(120):
        rates = [learning_rate(one, share_of_updates(update, one.steps)) for one in (fast, short)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)
    assert rates[0] == fast.learning_rate
    with pytest.raises(Refusal, match="--fp32-steps"):
        curves.Options(tmp_path, fp32_steps=50, warmup_steps=100)


@given(losses_of, st.integers(1, 6), st.floats(-1, 1))
def test_a_shifted_curve_lies_the_shift_apart(losses: list[float], width: int, shift: float) -> None:
    found = curves.apart(numbered([loss + shift for loss in losses]), numbered(losses), width)
    assert len(found["points"]) == max(0, len(losses) - width + 1)
    if found["points"]:
        assert found["largest"] == pytest.approx(abs(shift), abs=1e-9)
        assert found["mean"] == pytest.approx(abs(shift), abs=1e-9)
    else:
        assert found["mean"] is None


def test_smoothing_is_the_mean_of_the_last_points_and_opposite_differences_do_not_cancel() -> None:
    assert curves.smoothed(numbered([1.0, 2.0, 6.0]), 2) == {20: 1.5, 30: 4.0}
    assert curves.smoothed(numbered([1.0, None, 6.0, 2.0]), 2) == {20: None, 30: None, 40: 4.0}
    found = curves.apart(numbered([1.0, 3.0, 9.0]), numbered([2.0, 2.0]), 1)
    assert found == {"points": [[10, -1.0], [20, 1.0]], "mean": 1.0, "largest": 1.0}
    assert curves.apart(numbered([None, 3.0]), numbered([2.0, 2.0]), 1)["largest"] is None


def test_speed_of_a_variant_leaves_the_first_half_out() -> None:
    first = {"kind": "start", "micro_rows": 8, "card": "cpu", "versions": {}, "run": {"training": {"steps": 4}}}
    lines = [first, *(train_line(step, tokens_per_second=float(step)) for step in (1, 2, 30, 50)), {"kind": "end"}]
    found = curves.measured(lines)
    assert (found["tokens_per_second"], found["memory_bytes"], len(found["losses"])) == (40.0, 50, 4)


def test_the_plain_path_has_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off where the model asks, at the time of training, for plain and fp32 and for no other."""
    asked: dict[str, tuple] = {}
    for kernel in (relative_attention, linear_cross_entropy):
        monkeypatch.setattr(kernel, "is_supported", lambda *_: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    x = torch.zeros(1)
    for variant in ("fast", "plain"):
        monkeypatch.setattr(curves.latemask, "pretrain", lambda run, *_, variant=variant: asked.update(
            {variant: (relative_attention.is_supported(x.device, x.dtype, 64), linear_cross_entropy.is_supported(x))}
        ), raising=False)  # fmt: skip
        assert curves.train(curves.Options(tmp_path), variant) == 0
    assert asked == {"fast": (True, True), "plain": (False, False)}


def test_curves_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variants trained in processes of their own lie on each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store, out = write_store(tmp_path / "data", train_rows=60), tmp_path / "out"
    arguments = ["--data", str(store), "--recipe", "mae_lm_tiny", "--out", str(out), "--runs", str(tmp_path / "runs"),
                 f"--flags={NARROW}", "--batch-rows", "4", "--steps", "6", "--fp32-steps", "4", "--warmup-steps", "2",
                 "--log-every", "1", "--smoothed-steps", "2", "--cards", "0", "1"]  # fmt: skip
    assert curves.main([*arguments, "--variants", "plain", "fast"]) == 0
    found = json.loads((out / "curves_mae_lm_tiny.json").read_text())
    assert list(found["variants"]) == ["plain", "fast"]
    assert [step for step, _ in found["variants"]["fast"]["losses"]] == [1, 2, 3, 4, 5, 6]
    assert found["beside_plain"]["fast"]["largest"] == pytest.approx(0, abs=1e-5)
    assert len(found["beside_plain"]["fast"]["points"]) == 5
    assert (out / "curves_mae_lm_tiny.svg").read_text().startswith("<svg")
    assert (out / "curves_mae_lm_tiny_difference.svg").exists()
    assert not list(tmp_path.glob("runs/**/step-*"))


PROGRAM = """
import json, os, pathlib, signal, sys, time
folder, _, variant = sys.argv[1:]
if variant == "fp8": sys.exit(3)
if variant == "fp32": sys.exit("broken")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
run = pathlib.Path(folder) / variant
(run / "step-0000000").mkdir(parents=True)
start = {"kind": "start", "micro_rows": 1, "card": "x", "versions": {}, "run": {"training": {}}}
train = {"kind": "train", "step": 1, "loss": 2.0, "tokens_per_second": 3.0, "memory_bytes": 4}
(run / "aside").write_text(json.dumps(start) + "\\n" + json.dumps(train) + "\\n")
os.replace(run / "aside", run / "journal.jsonl")
time.sleep(100 if variant == "plain" else 0)
"""


def test_what_fails_is_named_and_what_is_told_to_stop_counts_as_far_as_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, run = tmp_path / "program.py", tmp_path / "runs" / "mae_lm_base"
    program.write_text(PROGRAM)

    class Late(subprocess.Popen):
        """Its time is over as soon as ``plain`` has trained a step."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == curves.PATIENCE_SECONDS or timeout is None or self.args[-1] != "plain":
                return super().wait(timeout)
            wait_until((run / "plain" / "journal.jsonl").exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(curves, "__file__", str(program))
    monkeypatch.setattr(curves.subprocess, "Popen", Late)
    options = curves.Options(
        tmp_path, out=tmp_path, runs=tmp_path / "runs", cards=(0, 1), variants=("plain", "fp32", "fp8", "fast")
    )
    cards = curves.Cards(options, [str(run)])
    cards.work()
    assert cards.failed == {"fp32": "exit status 1\nbroken"}
    assert cards.left_out == ["fp8: not on this device"]
    assert {name: one["was_stopped"] for name, one in cards.found.items()} == {"plain": True, "fast": False}
    assert cards.found["plain"]["losses"] == [[1, 2.0]]
    assert not list(run.glob("*/step-*"))


# tiles


def blocks_now(kernel: str, kind: str) -> tuple[int, ...]:
    """Queries, keys, warps and stages that the kernel would be started with, at 512 tokens in bf16."""
    q = torch.empty(1, 1, 512, 64, dtype=torch.bfloat16)
    drops, has_table = tiles.KINDS[kind]
    found = relative_attention._blocks(kernel, q, q if has_table else None, 0.1 if drops else 0.0, 512)
    return tuple(found[name] for name in ("ROWS", "COLUMNS", "num_warps", "num_stages"))


def test_a_tile_is_in_force_for_its_kernel_and_kind_alone_and_tokens_are_padded_for_it() -> None:
    def all_now() -> dict:
        return {(kernel, kind): blocks_now(kernel, kind) for kernel in tiles.PASSES for kind in tiles.KINDS}

    before, padded = all_now(), relative_attention.padded(435)
    assert before == {place: tiles.chosen_tile(*place) for place in before}
    for place in before:
        tile = tiles.Tile(64, 256, 8, 2)
        with tiles.in_force(*place, tile):
            assert all_now() == before | {place: (64, 256, 8, 2)}
            assert relative_attention.padded(435) == 512
        with pytest.raises(ValueError, match="midway"), tiles.in_force(*place, tile):
            raise ValueError("midway")
        assert (all_now(), relative_attention.padded(435)) == (before, padded)


times_of = st.dictionaries(st.sampled_from(tiles.TRIED), st.floats(0.01, 10))


@given(times_of, st.sampled_from(list(tiles.PASSES)), st.sampled_from(list(tiles.KINDS)))
def test_the_fastest_tile_is_one_that_ran(times: dict, kernel: str, kind: str) -> None:
    failed = {tile: "does not fit" for tile in tiles.TRIED if tile not in times}
    found = tiles.judged(kernel, kind, times, failed)
    assert [tile["ms"] for tile in found["tried"]] == list(times.values())
    assert [tiles.Tile(*list(one.values())[:4]) for one in found["tried"] + found["failed"]] == [*times, *failed]
    if times:
        assert found["fastest"] in found["tried"]
        assert found["fastest"]["ms"] == min(times.values())
    else:
        assert found["fastest"] is None
    chosen = tiles.chosen_tile(kernel, kind)
    assert found["chosen"] == chosen._asdict() | {"ms": times.get(chosen)}


MACHINE = {"card": "a card", "driver": "1", "versions": {}}


def test_every_kernel_and_kind_is_swept_and_what_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here 128 x 128 does not fit and a tile takes the longer the more it holds; own tiles are tried too."""
    errors = pytest.importorskip("triton.runtime.errors")
    options = tiles.Options(tmp_path / "tiles.json", swept_tokens=300)
    own = (32, 16, 2, 1)
    monkeypatch.setitem(relative_attention.TILES["keys"], "bare", own)
    parts, written = [], []

    def layer(options, tokens, kind, device):
        assert tokens == 300
        return next(name for name, one in tiles.KINDS.items() if one == kind)

    def time_of(kind: str, part: str) -> float:
        parts.append((kind, part))
        now = {kernel: blocks_now(kernel, kind) for kernel in tiles.PASSES}
        if (128, 128) in {block[:2] for block in now.values()}:
            raise errors.OutOfResources(300_000, 232_448, "shared memory")
        names = ("forward",) if part == "forward" else ("keys", "queries")
        return float(sum(queries * keys + stages for queries, keys, _, stages in map(now.__getitem__, names)))

    def compared(options, tokens, kind, device) -> list[dict]:
        return [tiles.attention_of("ours", tokens, kind, 1.0, 2.0)]

    monkeypatch.setattr(tiles, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(tiles, "machine_of", lambda device: MACHINE)
    monkeypatch.setattr(tiles, "write_json", lambda path, value: written.append(json.dumps(value)))
    for name, double in (("Layer", layer), ("time_of", time_of), ("compared", compared)):
        monkeypatch.setattr(tiles, name, double)
    found = tiles.measure(options)
    assert found.items() >= MACHINE.items()
    assert [(one["tokens"], one["drops"], one["has_table"]) for one in found["attention"]] == [
        (tokens, drops, has_table) for tokens in (512, 435) for drops in (False, True) for has_table in (False, True)
    ]
    sweep = {(one["kernel"], one["kind"]): one for one in found["sweep"]}
    assert list(sweep) == [(kernel, kind) for kind in tiles.KINDS for kernel in tiles.PASSES]
    for (kernel, kind), one in sweep.items():
        assert parts.count((kind, one["pass"])) >= len(tiles.TRIED)
        assert one["pass"] == ("forward" if kernel == "forward" else "backward")
        smallest = own if (kernel, kind) == ("keys", "bare") else (32, 64, 4, 1)
        assert tuple(one["fastest"].values())[:4] == smallest
        assert one["chosen"]["ms"] is not None
        error = "out of resource: shared memory, Required: 300000, Hardware limit: 232448"
        assert [tuple(tile.values())[:4] for tile in one["failed"]] == [(128, 128, 8, 2)]
        assert one["failed"][0]["error"].startswith(error)
        assert len(one["tried"]) == len(tiles.TRIED) - 1 + ((kernel, kind) == ("keys", "bare"))
    assert [len(json.loads(text)["sweep"]) for text in written] == [0, 0, *range(1, 10)]
    assert json.loads(written[-1]) == json.loads(json.dumps(found))
    assert tiles.rows_of_sweep(found["sweep"])[1][:5] == ("keys", "bare", "backward", "32 x 16, 2, 1",
                                                          sweep["keys", "bare"]["fastest"]["ms"])  # fmt: skip
    some = tiles.measure(dataclasses.replace(options, kernels=("keys", "queries"), kinds=("table",)))["sweep"]
    assert [(one["kernel"], one["kind"]) for one in some] == [("keys", "table"), ("queries", "table")]


def test_tiles_need_a_gpu_and_base_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "pick_device", lambda: torch.device("cpu"))
    with pytest.raises(Refusal, match="wanted a GPU"):
        tiles.measure(tiles.Options(tmp_path / "tiles.json"))
    assert not (tmp_path / "tiles.json").exists()
    for wrong in ({"row_tokens": (512, 513)}, {"swept_tokens": 0}, {"dropout": 0.0}):
        with pytest.raises(Refusal):
            tiles.Options(**wrong)


LAYER = """
import torch, tiles
kind, passes = tiles.KINDS["table"], []
torch.manual_seed(0)
layer = tiles.Layer(tiles.Options(rows=1), 40, kind, torch.device("cpu"))
for tile in (tiles.chosen_tile("keys", "table"), tiles.Tile(16, 64, 4, 1)):
    torch.manual_seed(1)
    with tiles.in_force("keys", "table", tile):
        forward, backward = layer.ours()
        passes.append([forward()[0], *backward()])
assert passes[0][2].shape == (12, 183) and passes[0][2].any()
for one, other in zip(*passes, strict=True):
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
"""


def test_a_layer_of_base_runs_by_our_kernels_in_the_interpreter_the_same_with_another_tile() -> None:
    pytest.importorskip("triton")
    told = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(str(tiles.__file__)).parent)}
    done = subprocess.run([sys.executable, "-c", LAYER], env=os.environ | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# instructions


def test_former_numbers_stand_beside_equal_tiles_alone(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    instructions = load("instructions")

    def one(kernel: str, keys: int, registers: int, *loops: int) -> dict:
        return {"kernel": kernel, "kind": "table", "drops": True, "tile": {"queries": 64, "keys": keys},
                "registers": registers, "loops": [{"instructions": count} for count in loops]}  # fmt: skip

    former = tmp_path / "former.json"
    told = {"what": instructions.WHAT, "settings": {"head_width": 64}, "kernels": [one("forward", 32, 99, 8, 9),
                                                                                  one("keys", 64, 77, 5)]}  # fmt: skip
    former.write_text(json.dumps(told))
    now = [one("forward", 32, 90, 6, 7), one("keys", 32, 70, 4), one("queries", 64, 60, 3)]
    found = instructions.beside(now, instructions.kernels_of(former, 64))
    assert found == [now[0] | {"loops_before": [8, 9], "registers_before": 99}, *now[1:]]
    for path, width in ((former, 32), (tmp_path / "none.json", 64), (Path(__file__), 64)):
        with pytest.raises(Refusal, match="--before"):
            instructions.kernels_of(path, width)
    (other := tmp_path / "other.json").write_text("[]")
    with pytest.raises(Refusal, match="which is none"):
        instructions.kernels_of(other, 64)


# attention


def test_attention_goes_the_chosen_way() -> None:
    attention = load("attention")
    projected, before = torch.zeros(1, 2, 128, dtype=torch.bfloat16, device="meta"), relative_attention.pays
    for way, wanted in (("torch", [False, False]), ("ours", [True, True]), ("shipped", [False, True])):
        with attention.chosen(way), patch.object(relative_attention, "is_supported", lambda *_: True):
            assert [relative_attention.pays(projected, 64, dropout, 512) for dropout in (0.0, 0.1)] == wanted
    assert relative_attention.pays is before


def test_attention_is_told_over_torchs_of_the_same_entry() -> None:
    times = {("mlm", "ours"): 90.0, ("mlm", "torch"): 100.0, ("mae", "torch"): 50.0, ("mae", "shipped"): 55.0}
    timed = [{"name": name, "way": way, "milliseconds": ms} for (name, way), ms in times.items()]
    assert load("attention").ratios(timed) == {
        "mlm": {"ours": 0.9, "torch": 1.0},
        "mae": {"torch": 1.0, "shipped": 1.1},
    }


def test_attention_without_torchs_is_refused() -> None:
    with pytest.raises(Refusal, match="found ours shipped; wanted torch among them"):
        load("attention").Options(ways=("ours", "shipped"))


def test_attention_asks_for_a_gpu() -> None:
    attention = load("attention")
    with patch.object(attention, "pick_device", lambda: torch.device("cpu")), pytest.raises(Refusal, match="a GPU"):
        attention.measure(attention.Options())


# gpu_time


def test_a_gpu_is_held_before_its_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1

        def record(self) -> None:
            self.at = len(order)
            order.append("clock")

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"held {cycles}"))
    gpu_milliseconds = load("gpu_time").gpu_milliseconds
    assert gpu_milliseconds(lambda: order.append("work")) == 2
    assert gpu_milliseconds(lambda: order.append("work"), 7) == 2
    timed = ["clock", "work", "clock", "wait"]
    assert order == ["wait", *timed, "wait", "held 7", *timed]


# gelu


def test_gelu_asks_for_a_gpu() -> None:
    gelu = load("gelu")
    with patch.object(gelu, "pick_device", lambda: torch.device("cpu")), pytest.raises(Refusal, match="a GPU"):
        gelu.measure(gelu.Options())


# updates


def test_updates_are_those_of_short_runs() -> None:
    """Rotary positions wherever tokens attend to themselves, all rows in one pass, the recipe's dropout."""
    updates, studies = load("updates"), load("studies")
    for name in ("mlm_base", "mae_lm_base", "decoder_cross_base"):
        run = updates.run_of(name, 32, "on")
        _, asked = read([name, "--data", "d", "--out", "o", *studies.short_run(10**7, name, 32, dropout="0.1")])
        assert asked is not None
        assert (run.shape, run.decoder, run.masking) == (asked.shape, asked.decoder, asked.masking)
        assert (run.training.batch_rows, run.training.micro_rows, run.training.graphs) == (32, 32, "on")


def test_updates_of_an_unknown_system_are_refused_before_those_of_a_known_one() -> None:
    with pytest.raises(Refusal, match="nope_tiny"):
        load("updates").Options(size="tiny", systems=("mlm", "nope"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed by the program itself")
@pytest.mark.parametrize("has_data", [True, False])
def test_updates_of_a_cpu_are_timed_without_graphs(has_data: bool, tmp_path: Path) -> None:
    updates, out = load("updates"), tmp_path / "updates.json"
    data = write_store(tmp_path / "data", train_rows=60) if has_data else None
    systems = ("mlm", "decoder_cross", "falling_rate")
    options = updates.Options(data, out, "tiny", systems, (1, 2), rounds=3, updates=1)
    found = updates.measure(options)
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert [(one["recipe"], one["rows"], one["graphs"]) for one in found["updates"]] == [
        (f"{system}_tiny", rows, "off") for system in systems for rows in (1, 2)]  # fmt: skip
    for one in found["updates"]:
        assert len(one["rounds"]) == 3
        assert one["milliseconds"] == sorted(one["rounds"])[1]
        assert one["spread"] == pytest.approx((max(one["rounds"]) - min(one["rounds"])) / one["milliseconds"])
        assert one["tokens_per_second"] == pytest.approx(1e3 * one["rows"] * 128 / one["milliseconds"])


# repeats


def test_gradients_differ_where_any_pass_has_other_bits_than_the_first() -> None:
    same, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.5])
    passes = [{"a": same, "b": same}, {"a": same, "b": other}, {"a": same.clone(), "b": same}]
    assert load("repeats").differing(passes) == {"b": {"elements": 3, "differ": 2}}


@pytest.mark.parametrize("rows", [1, 3])
def test_every_look_up_reads_the_same_and_has_the_same_gradient(rows: int) -> None:
    table = torch.arange(15.0).view(5, 3).requires_grad_()
    seats = torch.stack([torch.randperm(5) for _ in range(rows)])
    weights = torch.arange(1.0, rows * 15 + 1).view(rows, 5, 3)
    wanted = torch.zeros(5, 3)
    for row, weight in zip(seats, weights, strict=True):
        for seat, one in zip(row, weight, strict=True):
            wanted[seat] += one
    for look_up in load("repeats").LOOK_UPS.values():
        found = look_up(table, seats)
        assert found.tolist() == [[table[seat].tolist() for seat in row] for row in seats]
        (gradient,) = torch.autograd.grad(found, table, weights)
        assert gradient.tolist() == wanted.tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured by the program itself")
def test_passes_on_a_cpu_repeat_themselves(tmp_path: Path) -> None:
    """Dropout and all, with positions in tables and by rotation."""
    repeats, out = load("repeats"), tmp_path / "repeats.json"
    options = repeats.Options(out, "tiny", ("mae_lm", "no_relative"), (2,), ("off",), passes=2)
    found = repeats.measure(options)
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert [(one["recipe"], one["rows"], one["differ"]) for one in found["recipes"]] == [
        ("mae_lm_tiny", 2, {}), ("no_relative_tiny", 2, {})]  # fmt: skip
    assert all(one["gradients"] > 50 for one in found["recipes"])
    assert [one["look_up"] for one in found["tables"]] == list(repeats.LOOK_UPS)


@pytest.mark.parametrize(("given", "said"), [
    ({"passes": 1}, "--passes: found 1"), ({"compiled": ()}, "--compiled: found nothing"),
    ({"systems": ()}, "--systems: found nothing"), ({"systems": ("x",)}, "x_"),
])  # fmt: skip
def test_passes_that_could_not_be_compared_are_refused(given: dict, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        load("repeats").Options(**given)


# joins


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed by the program itself")
def test_joins_are_timed_as_the_study_trains_them(tmp_path: Path) -> None:
    joins, out = load("joins"), tmp_path / "joins.json"
    names = ("k=0,rate=0.15", "self,rate=0.5", "k=2,rate=0.5")
    found = joins.measure(joins.Options(out, "tiny", 1, names, rounds=3, updates=1))
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert {one["trial"] for one in found["trials"]} == set(names)
    for one in found["trials"]:
        assert one["milliseconds"] == sorted(one["rounds"])[1]
        assert one["tokens_per_second"] == pytest.approx(1e3 * 512 / one["milliseconds"])
    half = next(one for one in found["trials"] if one["trial"] == "k=2,rate=0.5")
    _, run = read(["three_ml_tiny", "--data", "d", "--out", "o", "--masking.joins", "2:0:1", "--masking.rate", "0.5",
                   "--shape.row-tokens", "512", "--shape.positions", "rotary"])  # fmt: skip
    assert half["executed_flops_per_token"] == flops_per_token(run).executed


@pytest.mark.parametrize(("slow", "taken"), [
    ([], [1.0, 1.01, 1.02]),
    ([2.0, 1.5], [1.0, 1.01, 1.02]),
    ([1.0, 2.0] * 9, [1.0, 2.0, 1.0]),
])  # fmt: skip
def test_rounds_count_that_agree_or_the_last_of_many(slow: list[float], taken: list[float]) -> None:
    made = iter([*slow, 1.0, 1.01, 1.02])
    assert load("joins").agreeing(lambda: next(made), 3) == taken


def test_one_round_agrees_with_itself() -> None:
    assert load("joins").agreeing(lambda: 7.0, 1) == [7.0]


def test_an_unknown_join_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match=r"--only: found k=5,rate=0.5; wanted some of: k=0,rate=0.15 "):
        load("joins").Options(only=("k=5,rate=0.5",))


# alone


def test_runs_that_shared_a_card_are_told_by_the_clock_of_one_alone(tmp_path: Path) -> None:
    """Seconds of journals and of what was measured of their checkpoints, speeds and MFU; losses stay."""
    alone = load("alone")
    _, run = read(["three_ml_tiny", "--data", "d", "--out", "o", "--masking.joins", "2:0:1", "--masking.rate", "0.5",
                   *load("studies").short_run(2048, "three_ml_tiny", 1)])  # fmt: skip
    settings = {"size": "tiny", "rows": 1}
    costs = {"settings": settings, "card": "C", "trials": [{"trial": "k=0,rate=0.15", "milliseconds": 9.0},
                                              {"trial": "k=2,rate=0.5", "milliseconds": 500.0}]}  # fmt: skip
    lines = [{"kind": "start", "step": 0, "run": json.loads(run.to_json())},
             train_line(4, seconds=77.0, tokens_per_second=512.0, mfu=0.1),
             {"kind": "save", "step": 4, "seconds": 77.0}]  # fmt: skip
    result = {"kind": "blimp", "model": {"step": 4, "pretraining_seconds": 77.0}, "score": 0.6}
    folder = RunFolder("x", tmp_path, lines, [result, {"kind": "rank"}])
    found = alone.alone(folder, alone.milliseconds_of(costs))
    assert found.card_seconds == 2.0
    assert found.saved_at == {4: 2.0}
    assert found.lines[1] == lines[1] | {"seconds": 2.0, "tokens_per_second": 1024.0, "mfu": 0.2}
    assert found.results == [result | {"model": {"step": 4, "pretraining_seconds": 2.0}}, {"kind": "rank"}]
    with pytest.raises(Refusal, match="a run like none of the trials"):
        alone.alone(folder, alone.milliseconds_of(costs | {"trials": costs["trials"][:1]}))
    _, other = read(["three_ml_tiny", "--data", "d", "--out", "o", "--masking.joins", "2:0:1", "--masking.rate", "0.5",
                     *load("studies").short_run(2048, "three_ml_tiny", 1), "--training.recompute", "True"])  # fmt: skip
    lines[0]["run"] = json.loads(other.to_json())
    with pytest.raises(Refusal, match="a run like none of the trials"):
        alone.alone(RunFolder("y", tmp_path, lines), alone.milliseconds_of(costs))


def test_costs_come_from_several_files_of_one_card(tmp_path: Path) -> None:
    def of(name: str, card: str, **milliseconds: float) -> Path:
        trials = [{"trial": f"k={layer[1:]},rate=0.5", "milliseconds": one} for layer, one in milliseconds.items()]
        costs = {"settings": {"size": "tiny", "rows": 1}, "card": card, "trials": trials}
        (tmp_path / name).write_text(json.dumps(costs))
        return tmp_path / name

    first, second, other = of("1", "C", k0=1.0, k2=2.0), of("2", "C", k2=5.0, k3=3.0), of("3", "D", k0=1.0)
    read_costs = load("alone").read_costs
    found, card = read_costs([first, second])
    joins = [(fields["masking.joins"][0][0], taken) for fields, taken in found]
    assert (joins, card) == ([("0", 1.0), ("2", 2.0), ("2", 5.0), ("3", 3.0)], "C")
    for wrong, said in (([first, other], "1 of a C, .*3 of a D; wanted"), ([], "--costs: found nothing")):
        with pytest.raises(Refusal, match=said):
            read_costs(wrong)


@pytest.mark.parametrize("text", [
    "", "[1]", "{}", '{"settings": {"size": "tiny", "rows": 1}, "trials": [{}]}',
    '{"settings": {"size": "tiny", "rows": 1}, "trials": [{"trial": "k=0,rate=0.15", "milliseconds": 1}]}',
])  # fmt: skip
def test_costs_that_are_none_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (costs := tmp_path / "costs.json").write_text(text)
    program, main = load("refusals").program, load("alone").main
    said = r"^--costs: found .*costs\.json \(.*; wanted JSON of benchmarks/joins\.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["alone", "x", "--costs", str(costs), "--out", str(tmp_path / "o")])
        with pytest.raises(SystemExit, match=said):
            program(main)
    assert list(tmp_path.iterdir()) == [costs]


# milliseconds


@pytest.mark.parametrize(("kernel", "wanted"), [
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64>", "matrix products"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x64", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*)", "attention"),
    ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)", "attention"),
    ("forward_kernel", "attention"),
    ("turn_kernel", "attention"),
    ("cross_entropy_kernel", "cross-entropy"),
    ("cross_entropy_gradient_kernel", "cross-entropy"),
    ("triton_per_fused_add_native_layer_norm_native_layer_norm_backward_sum_4", "LayerNorm, residual, dropout"),
    ("triton_poi_fused_gelu_gelu_backward_2", "GELU"),
    ("triton_poi_fused__to_copy_abs_add_clamp_exp2_mul_sub_2", "GELU"),
    ("triton_red_fused_sum_7", "bias gradients and sums"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and clipping"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies, casts, fills"),
    ("Memcpy DtoD (Device -> Device)", "copies, casts, fills"),
    ("void at::native::vectorized_gather_kernel<16, long>", "embeddings and gathers"),
    ("void at::native::(anonymous namespace)::compute_grad_weight<float, long>", "embeddings and gathers"),
    ("what_nobody_knows", "other"),
])  # fmt: skip
def test_a_kernel_has_the_class_of_its_name(kernel, wanted) -> None:
    assert load("milliseconds").class_of(kernel) == wanted


def test_our_kernels_names_are_those_that_are_told_apart() -> None:
    """A kernel that is renamed, or a new one, falls into its class still."""
    pytest.importorskip("triton")
    from latemask.kernels import cross_entropy_triton, relative_triton, rotary_triton

    milliseconds = load("milliseconds")
    for module, wanted in ((relative_triton, "attention"), (rotary_triton, "attention"),
                           (cross_entropy_triton, "cross-entropy")):  # fmt: skip
        names = [name for name in vars(module) if name.endswith("_kernel")]
        assert names
        assert {milliseconds.class_of(name) for name in names} == {wanted}


def test_classes_add_up_to_all_kernels_the_longest_first() -> None:
    milliseconds = load("milliseconds")
    kernels = [("nvjet_a", 8.0, 4), ("nvjet_b", 4.0, 8), ("turn_kernel", 2.0, 2), ("sdpa", 20.0, 2), ("x", 1.0, 2)]
    launches = [milliseconds.Launch(name, 100.0, 100.0 + total / count)
                for name, total, count in kernels for _ in range(count)]  # fmt: skip
    found = milliseconds.by_class(launches, 2)
    assert list(found) == ["attention", "matrix products", "other"]
    assert sum(each["milliseconds"] for each in found.values()) == pytest.approx(35.0 / 2)
    assert sum(each["launches"] for each in found.values()) == 18 / 2
    assert [each["kernel"] for each in found["matrix products"]["longest"]] == ["nvjet_a", "nvjet_b"]


def test_idle_is_when_no_kernel_runs() -> None:
    milliseconds = load("milliseconds")
    times = [(5.0, 6.0), (0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (6.0, 7.0), (9.0, 9.5)]  # two gaps: 4 to 5, and 7 to 9
    assert milliseconds.idle([milliseconds.Launch("x", *each) for each in times]) == 3.0
    assert milliseconds.idle([]) == 0


def test_milliseconds_need_a_gpu(tmp_path, monkeypatch) -> None:
    milliseconds = load("milliseconds")
    monkeypatch.setattr(milliseconds, "pick_device", lambda: torch.device("cpu"))
    with pytest.raises(Refusal, match=r"milliseconds\.py: found a cpu"):
        milliseconds.measure(milliseconds.Options(out=tmp_path / "found.json"))


def test_the_table_of_milliseconds_has_every_class_and_what_is_left() -> None:
    milliseconds = load("milliseconds")
    entries = [{"name": name, "milliseconds": 5.0,
                "classes": milliseconds.by_class([milliseconds.Launch(kernel, 0.0, 4.0)], 1),
                "idle_milliseconds": 1.0, "arithmetic_floor_milliseconds": 2.0}
               for name, kernel in (("mlm", "nvjet"), ("mae_lm", "turn_kernel"))]  # fmt: skip
    head, rows = milliseconds.rows_of_table(entries)
    assert head == ["ms", "mlm", "mae_lm"]
    assert rows == [("matrix products", 4.0, None), ("attention", None, 4.0), ("idle", 1.0, 1.0), ("step", 5.0, 5.0),
                    ("its arithmetic", 2.0, 2.0)]  # fmt: skip


# generated


@pytest.mark.timeout(240)
def test_a_block_moves_no_more_than_it_must(tmp_path: Path) -> None:
    """Compiled for a GPU: the residual's gradient is added within a product, and with dropout, too, the backward pass
    of the first LayerNorm reads two gradients and the sum before it in bf16, and writes two; products alone
    read GELU's gradient, four times as wide."""
    pytest.importorskip("triton")
    done = ended_of(["generated", "--rows", "8", "--out", "found.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["kernels"]
    one = 8 * 512 * 768 * 2  # tokens in bf16
    for dropout in (0.0, 0.1):
        backward = [kernel for kernel in found if (kernel["dropout"], kernel["pass"]) == (dropout, "backward")]
        assert sum("addmm" in kernel["kernel"] for kernel in backward) == 1
        norms = [kernel["bytes"] for kernel in backward if "layer_norm" in kernel["kernel"]]
        assert len(norms) > 1
        assert max(norms) < 5.5 * one
        assert sum("gelu_gradients" in kernel["kernel"] for kernel in backward) == 1
        assert all(kernel["bytes"] < 3.5 * one for kernel in backward if "fused_sum" in kernel["kernel"])

"""The evidence runs: every command of every study is one that latemask takes, and jobs wait for what they need."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from benchmark_files import load
from latemask import __main__ as command_line
from latemask.cli.options import parse
from latemask.cli.pretrain import read
from latemask.downstream.runner import output_folder
from latemask.errors import Refusal

cards, commands, studies, evidence, roberta = map(load, ("cards", "jobs", "studies", "evidence", "roberta"))


COLA = "gj04\t1\t\tThe sailors rode the breeze.\ngj04\t0\t*\tThe more does Bill smoke.\n"
ASKED = [{"id": str(number), "question": f"which {number}?", "answers": [], "is_impossible": True} for number in (1, 2)]
PARAGRAPHS = [{"context": "A text.\nOf two lines.", "qas": ASKED}]
SQUAD = json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": PARAGRAPHS}]})


def options(study: str, folder: Path, **changes):
    """With a folder of all data that the study reads."""
    data = {name: folder for name in ("glue", "squad", "blimp") if study in studies.TAKEN_BY[name]}
    return evidence.Options(study, folder, folder / "out", **data, **changes)


@pytest.mark.parametrize("study", get_args(studies.Study))
@pytest.mark.parametrize("size", [None, "tiny"])
def test_every_command_is_one_that_latemask_takes(study, size, tmp_path):
    tuned = {"finetuning": "--epochs 3 --batch-rows 32"} if study in studies.TAKEN_BY["finetuning"] else {}
    jobs = evidence.jobs_of(options(study, tmp_path, size=size, **tuned))
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for place, job in enumerate(jobs):
        assert job.after is None or job.after in names[:place]
        if job.command[1:3] != ("-m", "latemask"):
            _, run = roberta.read(job.command[2:])
            assert run.training.validation_rate == 0.15
            continue
        name, *rest = job.command[3:]
        if name == "pretrain":
            found, run = read(rest)
            assert found.resume_if_present
            assert run is not None
            assert run.training.validation_rate == 0.15
        else:
            command = next(command for command in command_line.COMMANDS if command.name == name)
            parse(command_line.named(command.options), rest, prog=name, positional=command.positional)
            assert (name == "finetune") == ("--epochs" in rest)


def test_flags_that_finetune_does_not_take_are_refused_before_the_pretraining(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        options("objectives", tmp_path, finetuning="--epoch 3")
    assert ended.value.code == 2
    assert "--epoch" in capsys.readouterr().err


def test_flags_of_every_fine_tuning_come_after_the_program_s_own(tmp_path):
    """The last of two counts."""
    command = next(command for command in command_line.COMMANDS if command.name == "finetune")
    strides = []
    for job in evidence.jobs_of(options("objectives", tmp_path, size="tiny", finetuning="--stride-tokens 7 --seeds 2")):
        if job.command[3] == "finetune":
            parsed = parse(command_line.named(command.options), job.command[4:], prog="finetune", positional=("model",))
            assert (parsed.stride_tokens, parsed.seeds) == (7, 2)
            strides.append("squad2" in parsed.task)
    assert {True, False} == set(strides)


def test_paired_runs_see_the_same_data_and_as_many_tokens(tmp_path):
    runs = {}
    for job in evidence.jobs_of(options("objectives", tmp_path, seeds=(4, 5))):
        if job.command[3] == "pretrain":
            _, run = read(job.command[4:])
            assert run is not None
            runs[job.name] = run.training
    systems = ("mlm", "mae_lm", "three_ml_self", "three_ml")
    assert set(runs) == {f"{system},seed={seed}" for system in systems for seed in (4, 5)}
    assert runs["mlm,seed=4"] == runs["mae_lm,seed=4"] == runs["three_ml_self,seed=4"] != runs["mlm,seed=5"]
    assert runs["mlm,seed=4"].learning_rate == 4e-4
    assert runs["mlm,seed=4"].steps * 64 * 512 >= 249_900_000
    by_clock = evidence.jobs_of(options("objectives", tmp_path, seeds=(4,), seconds=386.0))
    [run] = [read(job.command[4:])[1] for job in by_clock if job.name == "mae_lm,seconds=386,seed=4"]
    assert run is not None
    assert run.training == dataclasses.replace(runs["mae_lm,seed=4"], max_seconds=386.0)


@pytest.mark.parametrize("study", ["masks", "delta", "three-ml", "time"])
def test_seeds_of_any_study_are_its_trials_again_with_other_weights_and_another_order(study, tmp_path):
    alone, _ = studies.trials_of(options(study, tmp_path))
    trials, _ = studies.trials_of(options(study, tmp_path, seeds=(2, 3)))
    assert [trial.name for trial in trials] == [f"{one.name},seed={seed}" for seed in (2, 3) for one in alone]
    for trial, one in zip(trials, [*alone, *alone], strict=True):
        assert trial.flags == (*one.flags, "--training.seed", trial.name[-1])
        assert dataclasses.replace(trial, name=one.name, flags=one.flags) == one


def test_a_decoder_has_half_the_rate_where_the_warm_up_is_short(tmp_path):
    for tokens, rate in ((250_000_000, 4e-4), (100_000_000, 2e-4)):
        jobs = evidence.jobs_of(options("objectives", tmp_path, seeds=(4,), tokens=tokens))
        runs = [read(job.command[4:])[1] for job in jobs if job.command[3] == "pretrain"]
        assert [run.training.learning_rate for run in runs if run is not None] == [4e-4, rate, rate, 4e-4]


@pytest.mark.parametrize(("study", "flag", "value"), [
    ("masks", "seconds", 100.0), ("real-text", "seconds", 100.0), ("tuning", "rows", 128), ("real-text", "rows", 64),
    ("tuning", "rate", "2e-4"), ("real-text-rotary", "rate", "1e-3"), ("real-text", "tokens", 1000),
    ("tuning", "seeds", (1, 2)), ("tuning", "glue", Path(".")), ("three-ml", "squad", Path(".")),
    ("collapse", "blimp", Path(".")), ("collapse", "first", 2), ("tuning", "tasks", ("cola",)),
    ("real-text", "finetuning_seeds", 1), ("real-text", "parallel", 1), ("tuning", "together", 2),
    ("collapse", "finetuning", "--epochs 3"),
])  # fmt: skip
def test_a_flag_that_a_study_makes_nothing_of_is_refused(study, flag, value, tmp_path):
    said = " ".join(map(str, value)) if isinstance(value, tuple) else value
    flag_said = f"--{flag.replace('_', '-')}"
    with pytest.raises(Refusal, match=rf"^{flag_said}: found {said}, .*{study}.*; wanted it with one of: .*objectives"):
        options(study, tmp_path, **{flag: value})


@pytest.mark.parametrize(("flag", "value", "others", "wanted"), [
    ("first", 2, ("glue", "squad"), "--blimp"), ("tasks", ("cola",), ("squad", "blimp"), "--glue"),
    ("finetuning_seeds", 1, ("blimp",), "--glue or --squad"), ("finetuning", "--epochs 3", (), "--glue or --squad"),
])  # fmt: skip
def test_a_flag_whose_data_are_not_given_is_refused(flag, value, others, wanted, tmp_path):
    given = dict.fromkeys(others, tmp_path)
    with pytest.raises(Refusal, match=rf"^--{flag.replace('_', '-')}: .*; wanted it with {wanted}$"):
        evidence.Options("objectives", tmp_path, tmp_path / "out", **given, **{flag: value})
    evidence.Options("objectives", tmp_path, tmp_path / "out", **given)


@pytest.mark.parametrize("flag", ["seconds", "rows", "rate", "tokens", "seeds"])
@pytest.mark.parametrize("study", get_args(studies.Study))
def test_a_flag_that_a_study_takes_changes_its_commands(study, flag, tmp_path):
    value = {"seconds": 7.0, "rows": 7, "rate": "7e-7", "tokens": 7_000_000, "seeds": (7,)}[flag]
    if study in studies.TAKEN_BY[flag]:
        changed = evidence.jobs_of(options(study, tmp_path, **{flag: value}))
        assert {job.command for job in changed}.isdisjoint(
            job.command for job in evidence.jobs_of(options(study, tmp_path)) if job.run is not None
        )


def test_what_rewrites_rows_is_asked_for_no_chance_of_one_token(tmp_path):
    names = {job.name for job in evidence.jobs_of(options("masks", tmp_path))}
    assert "decoder_cross/blimp" in names
    assert "decoder_causal_cross/glue" in names
    assert "decoder_causal_cross/blimp" not in names


@pytest.mark.parametrize("size", [None, "tiny"])
def test_rows_are_what_a_label_and_the_number_of_tokens_say(size, tmp_path):
    for trial in studies.trials_of(options("tuning", tmp_path, size=size))[0]:
        run = peer_or_ours(trial, tmp_path)
        assert f",{run.training.batch_rows}x{run.shape.row_tokens}," in trial.name
    for study in ("objectives", "three-ml", "collapse"):
        for trial in studies.trials_of(options(study, tmp_path, size=size, tokens=1_000_000))[0]:
            run = peer_or_ours(trial, tmp_path)
            row_tokens, training = run.shape.row_tokens, run.training
            assert row_tokens == 512
            assert 0 <= 1_000_000 - training.steps * training.batch_rows * row_tokens < 512 * 64


def peer_or_ours(trial, folder: Path):
    """The run that a trial trains."""
    words = [trial.recipe, "--data", str(folder), "--out", "x", *trial.flags]
    return (roberta.read if trial.is_peer else read)(words)[1]


def test_of_three_ml_the_corners_of_the_front_come_first(tmp_path):
    names = [job.name for job in evidence.jobs_of(options("three-ml", tmp_path)) if job.run is not None]
    assert len(names) == 6 * 5
    assert names[:6] == ["k=0,rate=0.15", "k=0,rate=0.5", "self,rate=0.5", "k=0,rate=0.4", "self,rate=0.4",
                         "cross,rate=0.5"]  # fmt: skip
    assert set(names) == {f"{system},rate={rate}" for system in ("k=0", "k=3", "k=6", "k=9", "self", "cross")
                          for rate in (0.15, 0.3, 0.4, 0.5, 0.6)}  # fmt: skip
    few = evidence.jobs_of(options("three-ml", tmp_path, trials=3))
    assert [job.name for job in few if job.run is not None] == names[:3]
    assert [job.name for job in few] == [name for trial in names[:3] for name in (trial, f"{trial}/blimp",
                                                                                   f"{trial}/glue")]  # fmt: skip
    with pytest.raises(Refusal, match=r"--only: found none of the first 2"):
        evidence.jobs_of(options("three-ml", tmp_path, trials=2, only=("k=9,rate=0.6",)))


@pytest.mark.parametrize(("tokens", "steps"), [(250_000_000, 7629), (512 * 64 * 3, 3), (1, 1)])
def test_time_measures_checkpoints_that_are_saved_and_the_last_one(tokens, steps, tmp_path):
    jobs = evidence.jobs_of(options("time", tmp_path, tokens=tokens))
    trials, _ = studies.trials_of(options("time", tmp_path, tokens=tokens))
    for trial in trials:
        assert trial.steps[0] == steps == max(trial.steps)
        assert len(set(trial.steps)) == len(trial.steps) <= 6
        [run] = [job for job in jobs if job.name == trial.name]
        flags = dict(zip(run.command, run.command[1:], strict=False))
        assert flags["--training.steps"] == str(steps)
        assert all(step % int(flags["--training.save-every"]) == 0 for step in trial.steps[1:])


def test_a_slice_on_another_machine_does_not_do_again_what_is_whole(tmp_path):
    """There are the notes, and no weights: a pretraining is done again only for what is still to be measured of it."""

    def job(name, after=None, run=None, *more):
        return commands.Job(name, (sys.executable, "-c", code, name, *more), after, run=run)

    code = f"import sys; open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1] + ' ')"
    jobs = [job("a", run=tmp_path / "a"), job("a/x", "a", None, "--parallel", "4")]

    def work(jobs):
        (tmp_path / "order").write_text("")
        queue = cards.Queue(jobs, commands.Runner(jobs, tmp_path, "study", lambda: False).run)
        queue.work([0])
        assert len(queue.done) == len(jobs)
        return (tmp_path / "order").read_text().split()

    assert work(jobs) == ["a", "a/x"]
    assert work(jobs) == []
    more = [jobs[0], job("a/x", "a", None, "--parallel", "8"), job("a/y", "a")]
    assert work(more) == ["a", "a/y"]
    assert work(more) == []
    (tmp_path / "a" / "step-0000001").mkdir(parents=True)
    (tmp_path / "a" / "step-0000001" / "encoder.safetensors").touch()
    assert work([*more, job("a/z", "a")]) == ["a/z"]


def test_what_is_timed_has_its_card_to_itself_and_measurements_share_one():
    running, most = [], []
    lock = threading.Lock()
    together = threading.Barrier(2, timeout=60)

    def run(job, card):
        with lock:
            running.append(job)
            most.append([other.name for other in running])
        if not job.is_alone:
            together.wait()  # is passed by two at once
        with lock:
            running.remove(job)
        return True

    def measurement(name, after):
        return commands.Job(name, (), after)

    jobs = [
        commands.Job("a", (), run=Path("a"), is_alone=True),
        measurement("a/x", "a"),
        measurement("a/y", "a"),
        commands.Job("b", (), run=Path("b"), is_alone=True),
        measurement("b/x", "b"),
        measurement("b/y", "b"),
    ]
    queue = cards.Queue(jobs, run)
    queue.work([0], at_once=2)
    assert len(queue.done) == 6
    assert all(names == [name] for names in most for name in names if "/" not in name)


@pytest.mark.parametrize("at_once", [1, 3])
def test_pretrainings_that_share_their_card_are_measured_on_the_way(at_once, tmp_path):
    asked = options("time", tmp_path, size="tiny", tokens=32 * 512 * 64, only=("mlm",), shared=True)
    jobs = evidence.jobs_of(asked)
    assert not any(job.is_alone for job in jobs)
    alone = evidence.jobs_of(dataclasses.replace(asked, shared=False))
    assert [job.is_alone for job in alone] == [job.run is not None for job in alone]
    assert not any(job.checkpoint for job in alone)
    saved = {f"mlm,step={step}": tmp_path / "out" / "time" / "mlm" / f"step-{step:07d}" for step in (4, 32)}
    order, measured = [], threading.Barrier(2, timeout=60)

    def run(job, card):
        order.append(job.name)
        if job.run is not None:
            saved["mlm,step=4"].mkdir(parents=True)
            if at_once > 1:
                measured.wait()  # while it trains
            return False  # told to stop: what it had saved is measured all the same
        if job.name == "mlm,step=4/blimp" and at_once > 1:
            measured.wait()
        return True

    queue = cards.Queue(jobs, run)
    queue.work([0], at_once=at_once)
    assert set(order) == {"mlm", "mlm,step=4/blimp", "mlm,step=4/glue"}
    assert queue.failed == {job.name for job in jobs} - queue.done >= {"mlm", "mlm,step=32/blimp"}


def test_what_ends_by_the_clock_does_not_share_its_card(tmp_path):
    for study, changes in (("objectives", {"seconds": 9.0}), ("real-text", {})):
        with pytest.raises(Refusal, match="--shared"):
            options(study, tmp_path, shared=True, **changes)


def test_what_a_job_raises_is_raised_and_the_others_are_done():
    def run(job, card):
        if job.name == "a":
            raise ValueError("a")
        return True

    jobs = [commands.Job("a", ()), commands.Job("a/x", (), "a"), commands.Job("b", ())]
    queue = cards.Queue(jobs, run)
    with pytest.raises(ValueError, match="a"):
        queue.work([0, 1])
    assert (queue.done, queue.failed) == ({"b"}, {"a", "a/x"})


@pytest.mark.parametrize("changes", [{"rows": 0}, {"tokens": 0}, {"first": 0}, {"together": 0}, {"parallel": -1},
                                     {"seeds": ()}, {"cards": ()}, {"tasks": ()}])  # fmt: skip
def test_what_counts_nothing_is_refused_before_any_job(changes, tmp_path):
    [name] = changes
    with pytest.raises(Refusal, match=f"^--{name}: "):
        options("objectives", tmp_path, **changes)


@pytest.mark.parametrize("study", ["objectives", "tuning"])
@pytest.mark.parametrize(("flag", "values", "said"), [
    ("--cards", ("0", "-1"), "--cards: found -1"), ("--tasks", ("cola", "nonsense"), "--task: found 'nonsense'"),
    ("--flags=--training.seed -1", (), "training.seed: found -1"), ("--size", ("huge",), "recipe: found 'mlm_huge'"),
    ("--flags=--nonsense 3", (), "--nonsense"),
])  # fmt: skip
def test_what_a_command_would_refuse_is_refused_before_any_job(
    study, flag, values, said, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["evidence.py", study, "--data", str(tmp_path), "--out", str(out), flag, *values])
    with pytest.raises((Refusal, SystemExit)) as ended:
        evidence.main()
    assert said in f"{ended.value} {capsys.readouterr().err}"
    assert not out.exists()


@pytest.mark.parametrize(("flag", "files", "said"), [
    ("blimp", (), "no .jsonl file"), ("squad", (), "mini-train-v2.0.json: found no such file"),
    ("squad", ("mini-train-v2.0.json",), "mini-dev-v2.0.json: found no such file"),
    ("glue", (), "train.tsv: found no such file"), ("glue", ("train.tsv",), "dev.tsv: found no such file"),
])  # fmt: skip
def test_a_folder_that_lacks_what_is_measured_is_refused_before_any_job(flag, files, said, tmp_path, monkeypatch):
    folder, out = tmp_path / flag, tmp_path / "out"
    folder.mkdir()
    for name in files:
        (folder / name).write_text(COLA if flag == "glue" else SQUAD, encoding="utf-8")
    command = ["evidence.py", "objectives", "--data", str(tmp_path), "--out", str(out), f"--{flag}", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, *(("--tasks", "cola") if flag == "glue" else ())])
    with pytest.raises(Refusal, match=re.escape(said)):
        evidence.main()
    assert not out.exists()


KILLED = """
import subprocess
import sys
from pathlib import Path
from benchmark_files import load
commands = load("jobs")
job = commands.Job("a", (sys.executable, "-c", *sys.argv[2:]))
commands.Runner([job], Path(sys.argv[1]), "study", lambda: False).run(job, 0)
"""


def test_what_a_killed_program_left_running_is_waited_for(tmp_path):
    code = ("import sys, time\nwith open(sys.argv[1], 'a', buffering=1) as file:\n"
            "    file.write('begun\\n'); time.sleep(3); file.write('ended\\n')")  # fmt: skip
    order = tmp_path / "order"
    job = commands.Job("a", (sys.executable, "-c", code, str(order)))
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), code, str(order)],
                          cwd=Path(__file__).parent) as killed:  # fmt: skip
        while not (order.exists() and order.read_text()):
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
    assert not commands.Runner([job], tmp_path, "study", lambda: True).run(job, 0)
    assert order.read_text() == "begun\n"
    for _ in range(2):
        assert commands.Runner([job], tmp_path, "study", lambda: False).run(job, 0)
        assert order.read_text() == "begun\nended\n" * 2


def test_jobs_run_once_in_order_over_cards_and_what_failed_stops_only_its_own(tmp_path):
    def job(name, code, after=None):
        return commands.Job(name, (sys.executable, "-c", code, name), after)

    append = f"import sys; open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1] + ' ')"
    jobs = [job("a", append), job("b", "raise SystemExit(3)"), job("a/x", append, "a"), job("b/x", append, "b")]
    for _ in range(2):
        queue = cards.Queue(jobs, commands.Runner(jobs, tmp_path, "study", lambda: False).run)
        queue.work([0])
        assert (queue.done, queue.failed, queue.left) == ({"a", "a/x"}, {"b", "b/x"}, [])
    assert (tmp_path / "order").read_text() == "a a/x "
    assert json.loads((tmp_path / "jobs" / "study" / "a.json").read_text())["card"] == 0
    with tarfile.open(tmp_path / "evidence.tar.gz") as archive:
        assert {"jobs/study/a.json", "jobs/study/a-x.json", "logs/study/b.log"} <= set(archive.getnames())


def test_a_job_told_to_stop_in_the_middle_is_gone_on_with(tmp_path):
    code = (
        "import pathlib, signal, sys, time; file = pathlib.Path(sys.argv[1])\n"
        "if file.exists(): sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (file.touch(), sys.exit(75)))\n"
        "time.sleep(60); sys.exit(1)"
    )
    stopped = commands.Job("a", (sys.executable, "-c", code, str(tmp_path / "file")), stop_at_seconds=2)
    assert commands.Runner([stopped], tmp_path, "study", lambda: False).run(stopped, 0)
    assert (tmp_path / "file").exists()


def test_the_peer_begins_anew_in_the_folder_of_a_run_and_in_no_other(data, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(roberta, "Trainer", lambda run, options, store: SimpleNamespace(train=lambda: begun.append(1)))
    out = tmp_path / "run"
    for name in ("step-0000002", ".step-0000004.partial", "downstream"):
        (out / name).mkdir(parents=True)
    command = ["roberta.py", "mlm_tiny", "--data", str(data), "--out", str(out), "--overwrite"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(Refusal, match="something already there"):
        roberta.main()
    assert not begun
    (out / "journal.jsonl").touch()
    monkeypatch.setattr(sys, "argv", command[:-1])
    with pytest.raises(Refusal, match="something already there"):
        roberta.main()
    assert (out / "step-0000002").is_dir()
    monkeypatch.setattr(sys, "argv", command)
    roberta.main()
    assert begun
    assert [path.name for path in out.iterdir()] == ["downstream"]


def test_fine_tuned_models_are_ranked_on_the_held_out_texts_of_their_task(tmp_path):
    """After their fine-tuning, whose model is found when the job begins."""
    jobs = {job.name: job for job in evidence.jobs_of(options("objectives", tmp_path, seeds=(4,)))}
    for task in ("mnli", "squad2"):
        saves, ranks = jobs[f"mlm,seed=4/save-{task}"], jobs[f"mlm,seed=4/rank-{task}"]
        (Path(saves.command[4]) / "step-0000001").mkdir(parents=True, exist_ok=True)
        assert (saves.after, ranks.after) == ("mlm,seed=4", saves.name)
        again = jobs[f"mlm,seed=4/{'glue' if task == 'mnli' else 'squad'}"]
        assert again.after == saves.name, "it would take the first of the task's fine-tunings, and save no model"
        assert "--save" in saves.command
        saved = output_folder("", saves.command[4]) / f"{task}-x.model"
        saved.mkdir(parents=True)
        assert commands.said_in_full(ranks.command)[4] == str(saved)
        assert ranks.command[ranks.command.index("--data") + 1] == str(tmp_path / "out" / f"held-out-{task}.jsonl")
    assert commands.said_in_full(("a*", "*.py")) == ["a*", "*.py"]
    assert next(job for job in evidence.jobs_of(options("masks", tmp_path)) if job.name == "mlm/glue").after == "mlm"


def test_held_out_texts_are_the_task_s_pairs_each_as_one_text(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "MNLI").mkdir()
    for split in ("train", "dev_matched", "dev_mismatched"):
        lines = [f"index\tsentence1\tsentence2\tgold_label\n0\t{split} one\ttwo é\tneutral\n"]
        (tmp_path / "MNLI" / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "mini-dev-v2.0.json").write_text(SQUAD)
    evidence.write_texts(options("objectives", tmp_path))
    files = {task: (tmp_path / "out" / f"held-out-{task}.jsonl").read_text(encoding="utf-8").splitlines()
             for task in ("mnli", "squad2")}  # fmt: skip
    texts = {task: [json.loads(line)["text"] for line in lines] for task, lines in files.items()}
    assert texts["mnli"] == ["dev_matched one two é"]
    assert texts["squad2"] == [f"which {number}? A text.\nOf two lines." for number in (1, 2)]

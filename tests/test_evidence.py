"""The evidence runs: every command of every study is one that latemask takes, and jobs wait for what they need."""

from __future__ import annotations

import dataclasses
import json
import sys
import tarfile
from pathlib import Path
from typing import get_args

import pytest

from benchmark_files import load
from latemask import __main__ as command_line
from latemask.cli.options import parse
from latemask.cli.pretrain import read
from latemask.downstream.runner import output_folder
from latemask.errors import Refusal

evidence, roberta = load("evidence"), load("roberta")


def options(study: str, folder: Path, **changes):
    return evidence.Options(study, folder, folder / "out", folder, folder, folder, **changes)


@pytest.mark.parametrize("study", get_args(evidence.Study))
@pytest.mark.parametrize("size", [None, "tiny"])
def test_every_command_is_one_that_latemask_takes(study, size, tmp_path):
    jobs = evidence.jobs_of(options(study, tmp_path, size=size))
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


def test_paired_runs_see_the_same_data_and_as_many_tokens(tmp_path):
    runs = {}
    for job in evidence.jobs_of(options("objectives", tmp_path, seeds=(4, 5))):
        if job.command[3] == "pretrain":
            _, run = read(job.command[4:])
            assert run is not None
            runs[job.name] = run.training
    assert set(runs) == {f"{system},seed={seed}" for system in ("mlm", "mae_lm") for seed in (4, 5)}
    assert runs["mlm,seed=4"] == runs["mae_lm,seed=4"] != runs["mlm,seed=5"]
    assert runs["mlm,seed=4"].steps * 128 * 512 >= 249_900_000
    by_clock = evidence.jobs_of(options("objectives", tmp_path, seeds=(4,), seconds=386.0))
    [run] = [read(job.command[4:])[1] for job in by_clock if job.name == "mae_lm,seconds=386,seed=4"]
    assert run is not None
    assert run.training == dataclasses.replace(runs["mae_lm,seed=4"], max_seconds=386.0)


@pytest.mark.parametrize("changes", [{"rows": 0}, {"tokens": 0}, {"first": 0}, {"together": 0}, {"parallel": -1},
                                     {"seeds": ()}, {"cards": ()}, {"tasks": ()}])  # fmt: skip
def test_what_counts_nothing_is_refused_before_any_job(changes, tmp_path):
    [name] = changes
    with pytest.raises(Refusal, match=f"^--{name}: "):
        options("objectives", tmp_path, **changes)


def test_jobs_run_once_in_order_over_cards_and_what_failed_stops_only_its_own(tmp_path):
    def job(name, code, after=None):
        return evidence.Job(name, (sys.executable, "-c", code, name), after)

    append = f"import sys; open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1] + ' ')"
    jobs = [job("a", append), job("b", "raise SystemExit(3)"), job("a/x", append, "a"), job("b/x", append, "b")]
    for name in ("jobs", "logs"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        cards = evidence.Cards(jobs, tmp_path, lambda: False)
        cards.work(0)
        assert (cards.done, cards.failed) == ({"a", "a/x"}, {"b", "b/x"})
    assert (tmp_path / "order").read_text() == "a a/x "
    assert json.loads((tmp_path / "jobs" / "a.json").read_text())["card"] == 0
    with tarfile.open(tmp_path / "evidence.tar.gz") as archive:
        assert {"jobs/a.json", "jobs/a-x.json", "logs/b.log"} <= set(archive.getnames())


def test_a_job_told_to_stop_in_the_middle_is_gone_on_with(tmp_path):
    code = (
        "import pathlib, signal, sys, time; file = pathlib.Path(sys.argv[1])\n"
        "if file.exists(): sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (file.touch(), sys.exit(75)))\n"
        "time.sleep(60); sys.exit(1)"
    )
    for name in ("jobs", "logs"):
        (tmp_path / name).mkdir()
    stopped = evidence.Job("a", (sys.executable, "-c", code, str(tmp_path / "file")), stop_at_seconds=2)
    cards = evidence.Cards([stopped], tmp_path, lambda: False)
    cards.work(0)
    assert cards.done == {"a"}
    assert (tmp_path / "file").exists()


def test_fine_tuned_models_are_ranked_on_the_held_out_texts_of_their_task(tmp_path):
    """After their fine-tuning, whose model is found when the job begins."""
    jobs = {job.name: job for job in evidence.jobs_of(options("objectives", tmp_path, seeds=(4,)))}
    for task in ("mnli", "squad2"):
        saves, ranks = jobs[f"mlm,seed=4/save-{task}"], jobs[f"mlm,seed=4/rank-{task}"]
        (Path(saves.command[4]) / "step-0000001").mkdir(parents=True, exist_ok=True)
        assert (saves.after, ranks.after) == ("mlm,seed=4", saves.name)
        assert "--save" in saves.command
        saved = output_folder("", saves.command[4]) / f"{task}-x.model"
        saved.mkdir(parents=True)
        assert evidence.said_in_full(ranks.command)[4] == str(saved)
        assert ranks.command[ranks.command.index("--data") + 1] == str(tmp_path / "out" / f"held-out-{task}.jsonl")
    assert evidence.said_in_full(("a*", "*.py")) == ["a*", "*.py"]


def test_held_out_texts_are_the_task_s_pairs_each_as_one_text(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "MNLI").mkdir()
    for split in ("train", "dev_matched", "dev_mismatched"):
        lines = [f"index\tsentence1\tsentence2\tgold_label\n0\t{split} one\ttwo é\tneutral\n"]
        (tmp_path / "MNLI" / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    asked = [
        {"id": str(number), "question": f"which {number}?", "answers": [], "is_impossible": True} for number in (1, 2)
    ]
    article = {"title": "t", "paragraphs": [{"context": "A text.\nOf two lines.", "qas": asked}]}
    (tmp_path / "mini-dev-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    evidence.write_texts(options("objectives", tmp_path))
    files = {task: (tmp_path / "out" / f"held-out-{task}.jsonl").read_text(encoding="utf-8").splitlines()
             for task in ("mnli", "squad2")}  # fmt: skip
    texts = {task: [json.loads(line)["text"] for line in lines] for task, lines in files.items()}
    assert texts["mnli"] == ["dev_matched one two é"]
    assert texts["squad2"] == [f"which {number}? A text.\nOf two lines." for number in (1, 2)]

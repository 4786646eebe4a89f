"""A measurement's file is replaced by the same measurement again, by another only where that is asked for."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest

from latemask import bench
from latemask.cli.rank import RankOptions, run_rank
from latemask.cli.theory import TheoryOptions, run_theory
from latemask.downstream.evaluation import evaluate, run_evaluate
from latemask.downstream.options import EvaluateOptions, FinetuneOptions
from latemask.downstream.runner import run_finetune
from latemask.errors import Refusal
from latemask.measurement import refuse_another
from latemask.report.folders import read_folders
from latemask.study import passes
from latemask.text.prepare import prepare
from latemask.training import checkpoint
from samples import small
from trained import byte_level, write_run

HELD = {"kind": "rank", "tau": 0.9, "data": "data/en", "rate": 0.15, "options": {"tokens": 500}, "layers": [1]}
ASKED = {name: value for name, value in HELD.items() if name != "layers"}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a run and two texts, where the commands are given."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", small("mlm"), byte_level())
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"the cat saw the bird {name}\n\nthe bird ran\n" * 20)
    return tmp_path


@pytest.mark.parametrize(("change", "found", "wanted"), [
    ({"data": "b"}, 'data "data/en"', 'data "b"'),
    ({"tau": 0.5, "options": {"tokens": 9}}, "tau 0.9, options.tokens 500", "tau 0.5, options.tokens 9"),
    ({"options": {"tokens": 500, "row_tokens": 9}}, "options.row_tokens null", "options.row_tokens 9"),
])  # fmt: skip
def test_what_differs_is_named_with_the_file_and_what_to_do(change, found, wanted, tmp_path):
    file = tmp_path / "rank.json"
    file.write_text(json.dumps(HELD))
    with pytest.raises(Refusal) as refused:
        refuse_another(file, {**ASKED, **change}, overwrite=False)
    assert str(refused.value) == (f"{file}: found a result with {found}; wanted one with {wanted}. Take another --out, "
                                  "or --overwrite to replace it")  # fmt: skip
    refuse_another(file, {**ASKED, **change}, overwrite=True)


@pytest.mark.parametrize("held", ["notes", "[]", "{}", '{"kind": "theory"}'])
def test_what_is_no_such_result_is_kept(held, tmp_path):
    file = tmp_path / "x.json"
    file.write_text(held)
    with pytest.raises(Refusal, match="found no result of kind rank; wanted a new file"):
        refuse_another(file, ASKED, overwrite=False)


def test_a_result_of_an_older_version_is_refused_with_what_it_does_not_say(tmp_path):
    file = tmp_path / "rank.json"
    file.write_text(json.dumps({name: value for name, value in HELD.items() if name != "options"}))
    with pytest.raises(Refusal) as refused:
        refuse_another(file, {**ASKED, "identity": {"data": "1f"}}, overwrite=False)
    assert str(refused.value) == (
        f"{file}: found a result of an older version, which does not say its options, identity; wanted one that says "
        "what was measured. Take another --out, or --overwrite to replace it"
    )


MEASURED = [
    (run_rank, RankOptions("run", "data", tokens=50, device="cpu")),
    (run_theory, TheoryOptions("run", "data", tokens=50, device="cpu")),
    (run_rank, RankOptions("run", "a.txt", tokens=50, device="cpu")),
    (evaluate, EvaluateOptions("run", "masked-loss", "data", rows=2, row_tokens=20)),
    (evaluate, EvaluateOptions("run", "masked-loss", "data", rows=2, row_tokens=20, out="run/found.json")),
    (evaluate, EvaluateOptions("run", "masked-loss", "a.txt", rows=2, row_tokens=20)),
]


def write_data(folder: Path, text: str) -> None:
    """Prepared text, with ``text`` held out."""
    train, held = (folder.with_name(f"{name}.txt") for name in ("train", "held"))
    train.write_text("the cat ran\n\n")
    held.write_text(f"{text}\n\n" * 20)
    prepare([train], byte_level(), folder, valid_files=[held], overwrite=True, workers=1)


@pytest.mark.parametrize(("run", "options"), MEASURED)
def test_the_same_is_the_same_wherever_model_and_data_lie(run, options, here, monkeypatch):
    write_data(here / "data", "the cat saw the bird")
    run(options)
    (here / "elsewhere").mkdir()
    for name, now in (("run", "renamed"), ("data", "data"), ("a.txt", "b.txt")):
        (here / name).rename(here / "elsewhere" / now)
    monkeypatch.chdir(here / "elsewhere")
    before = sorted(Path("renamed").rglob("*.json"))
    data, out = ("b.txt" if options.data == "a.txt" else options.data), options.out and "renamed/found.json"
    run(dataclasses.replace(options, model="renamed", data=data, out=out))
    assert sorted(Path("renamed").rglob("*.json")) == before


@pytest.mark.parametrize(("run", "options"), MEASURED)
def test_other_text_and_other_weights_in_the_same_place_are_others(run, options, here):
    write_data(here / "data", "the cat saw the bird")
    options = dataclasses.replace(options, out="run/found.json")
    run(options)
    write_data(here / "data", "the bird saw the cat")
    (here / "a.txt").write_text("the bird saw the cat\n\n" * 20)
    with pytest.raises(Refusal, match="found a result of other data; wanted one of this model and these data"):
        run(dataclasses.replace(options))
    run(dataclasses.replace(options, overwrite=True))
    [step] = (here / "run").glob("step-*")
    shutil.rmtree(step)
    write_run(here / "run", small("mlm", feedforward=40), byte_level())
    with pytest.raises(Refusal, match="found a result of another model; wanted one of this model and these data"):
        run(dataclasses.replace(options))


@pytest.mark.parametrize(("run", "options"), [
    (run_rank, RankOptions("run", "a.txt", tokens=50, device="cpu")),
    (run_theory, TheoryOptions("run", "a.txt", tokens=50, device="cpu")),
    (evaluate, EvaluateOptions("run", "masked-loss", "a.txt", rows=2, row_tokens=20, out="found.json")),
])  # fmt: skip
def test_a_result_is_not_lost_to_another_measurement(run, options, here, monkeypatch):
    run(options)
    [file] = [*here.glob("*.json"), *(here / "run").glob("*.json")]
    first = file.read_bytes()
    how = {"batch_tokens": 40} if run is evaluate else {"micro_rows": 3}
    run(dataclasses.replace(options, data=str(here / "a.txt"), **how))  # the same, otherwise made
    first = file.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_of_encoder", None)
        patch.setattr(checkpoint, "read_pretrainer", None)
        for change in (
            {"data": "b.txt"},
            {"rate": 0.3},
            {"rows" if run is evaluate else "tokens": 30},
            {"row_tokens": 10},
        ):
            with pytest.raises(Refusal, match=f"{file.name}: found a result (of|with) .*--overwrite"):
                run(dataclasses.replace(options, **change))
    assert file.read_bytes() == first
    run(dataclasses.replace(options, data="b.txt", overwrite=True))
    assert file.read_bytes() != first


def test_a_result_in_its_usual_place_is_the_same_from_another_folder_and_through_a_link(here, monkeypatch):
    (here / "link").symlink_to("run")
    masked_loss = EvaluateOptions("run", "masked-loss", "a.txt", rows=2, row_tokens=20)
    rank = RankOptions("run", "a.txt", tokens=50, device="cpu")
    found = evaluate(masked_loss)
    run_rank(rank)
    files = sorted((here / "run").rglob("*.json"))
    assert evaluate(dataclasses.replace(masked_loss, model="link"))["model"] | {"folder": "run"} == found["model"]
    run_rank(dataclasses.replace(rank, model="link"))
    monkeypatch.chdir("run")
    evaluate(dataclasses.replace(masked_loss, model=".", data="../a.txt"))
    assert sorted((here / "run").rglob("*.json")) == files


def test_a_checkpoint_that_has_been_trained_on_is_another(here):
    options = RankOptions("run", "a.txt", tokens=50, device="cpu")
    masked_loss = EvaluateOptions("run", "masked-loss", "a.txt", rows=2, row_tokens=20, out="found.json")
    run_rank(options)
    evaluate(masked_loss)
    [step] = (here / "run").glob("step-*")
    step.rename(step.with_name("step-0000077"))
    with pytest.raises(Refusal, match=r"found a result with step \d+; wanted one with step 77"):
        run_rank(dataclasses.replace(options))
    with pytest.raises(Refusal, match=r"found a result with model\.step \d+; wanted one with model\.step 77"):
        evaluate(masked_loss)


def test_a_benchmark_of_other_entries_is_another(tmp_path, monkeypatch):
    options = bench.BenchOptions(size="tiny", only=("mlm",), rows=1, rounds=1, steps=1, out=str(tmp_path / "b.json"))
    bench.run_bench(options)
    bench.run_bench(options)
    monkeypatch.setattr(bench, "built", None)
    with pytest.raises(Refusal, match=r'b\.json: found a result with options\.only \["mlm"\]; wanted one with'):
        bench.run_bench(dataclasses.replace(options, only=("mae_lm",)))
    for name in ("rounds", "steps"):
        with pytest.raises(Refusal, match=rf"wanted one with options\.{name} 2\."):
            bench.run_bench(dataclasses.replace(options, **{name: 2}))


@pytest.mark.parametrize(("command", "options", "shown"), [
    (run_rank, RankOptions("my run", "a.txt", tokens=50, device="cpu"), "my run"),
    (run_theory, TheoryOptions("my run", "a.txt", tokens=50, device="cpu"), "my run"),
    (run_rank, RankOptions("my run", "a.txt", tokens=50, device="cpu", out="other.json"), "other.json"),
    (run_evaluate, EvaluateOptions("my run", "masked-loss", "a.txt", rows=2, row_tokens=20), "my run"),
    (run_finetune, FinetuneOptions("my run", ("own",), ".", train="own.csv", dev="own.csv", epochs=1,
                                   sequence_tokens=20), "my run"),
    (run_finetune, FinetuneOptions("my run", ("own",), ".", train="own.csv", dev="own.csv", epochs=1,
                                   sequence_tokens=20, out="tuned"), "tuned"),
])  # fmt: skip
def test_what_shows_a_result_is_said_last_and_shows_it(command, options, shown, here, capsys):
    (here / "run").rename(here / "my run")
    start = {"kind": "start", "step": 0, "run": json.loads(small("mlm").to_json())}
    (here / "my run" / "journal.jsonl").write_text(json.dumps(start) + "\n")
    (here / "own.csv").write_text("text,label\nthe cat,1\nthe dog,2\n" * 4)
    command(options)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("Next: ")] == said[-1:]
    program, *arguments = shlex.split(said[-1].removeprefix("Next: "))
    assert (program, arguments) == ("latemask", ["report", shown, "--out", "report.html"])
    assert sum(len(folder.results) for folder in read_folders([arguments[1]])) == 1

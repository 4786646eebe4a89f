"""A measurement's file is replaced by the same measurement again, by another only where that is asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from latemask import bench
from latemask.cli.rank import RankOptions, run_rank
from latemask.cli.theory import TheoryOptions, run_theory
from latemask.downstream.evaluation import evaluate
from latemask.downstream.options import EvaluateOptions
from latemask.errors import Refusal
from latemask.measurement import refuse_another
from latemask.study import passes
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
    ({"step": 3}, "step null", "step 3"),
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


def test_the_same_is_the_same_however_its_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rank.json").write_text(json.dumps(HELD))
    refuse_another(Path("rank.json"), {**ASKED, "data": str(tmp_path / "data" / "en")}, overwrite=False)


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
            with pytest.raises(Refusal, match=f"{file.name}: found a result with .*--overwrite"):
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

"""The benchmark: entries and goals are arithmetic on what was timed, peers see the same data, a small one runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from latemask import bench, goals
from latemask.bench import BenchOptions, Entry, entries_of
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.goals import Timed
from latemask.recipes import recipe
from samples import batch_of, small

CPU = torch.device("cpu")


def timed(entry: Entry, tokens_per_second: float) -> Timed:
    plain, executed = flops_per_token(entry.run)
    return Timed(entry.name, entry.rows, 1.0, 0.0, tokens_per_second, plain, plain if entry.is_plain else executed,
                 tokens_per_second * plain / 989e12, None, None, 0.0)  # fmt: skip


def test_options_start_without_torch():
    program = "import sys; from latemask.bench import BenchOptions; BenchOptions(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


@pytest.mark.parametrize(("wrong", "flag"), [
    ({"rounds": 0}, "--rounds"), ({"steps": 0}, "--steps"), ({"rows": 0}, "--rows"),
    ({"peer_rows": (64, 0)}, "--peer-rows"),
])  # fmt: skip
def test_bad_options_are_refused(wrong, flag):
    with pytest.raises(Refusal, match=rf"^{flag}: found 0"):
        BenchOptions(**wrong)


def test_unknown_entries_are_refused():
    with pytest.raises(Refusal, match="nonsense"):
        entries_of("base", BenchOptions(only=("nonsense",)), compiles=True)


@pytest.mark.parametrize(("given", "compiles", "tried"), [
    ((), True, [32, 64, 128, 256]), ((), False, [5]), ((8, 2, 8), True, [8, 2]), ((8, 2), False, [8, 2]),
])  # fmt: skip
def test_peers_are_tried_with_each_row_count_once(given, compiles, tried):
    entries = entries_of("base", BenchOptions(rows=5, peer_rows=given), compiles=compiles)
    assert [entry.rows for entry in entries if entry.name.startswith("roberta, eager")] == tried
    assert len({entry.name for entry in entries}) == len(entries)


@pytest.mark.parametrize("place", [".", "file/x.json"])
def test_a_result_that_could_not_be_kept_is_refused_before_anything_runs(place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench, "built", None)  # not callable: nothing is built
    with pytest.raises(Refusal, match="--out"):
        bench.run_bench(BenchOptions(size="tiny", out=str(tmp_path / place)))


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory."), MemoryError("Unable to allocate 954. GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5580800000 bytes."),
])  # fmt: skip
@pytest.mark.parametrize("moment", ["random_batches", "made", "time"])
def test_what_does_not_fit_is_left_out_whenever_that_is_found(moment, error, monkeypatch, capsys):
    """At the batch, the model and, beside all others, a step; without any entry there is nothing to tell."""
    options = BenchOptions(size="tiny", only=("mlm", "mae_lm"), against="none", rows=1, rounds=1, steps=1)
    place = bench.Stepper if moment == "time" else bench
    before = getattr(place, moment)
    run_of = {"random_batches": lambda run, *_: run, "made": lambda entry, *_: entry.run,
              "time": lambda stepper, *_: stepper.entry.run}[moment]  # fmt: skip
    too_large = {"mlm_tiny", "mae_lm_tiny"}

    def short(*arguments):
        if run_of(*arguments).recipe in too_large:
            raise error
        return before(*arguments)

    monkeypatch.setattr(place, moment, short)
    with pytest.raises(Refusal, match="no entry that fits"):
        bench.run_bench(options)
    told = capsys.readouterr()
    assert told.err.count(": 1 rows do not fit the memory, left out") == 2
    assert "done" not in told.out + told.err
    too_large.remove("mlm_tiny")
    bench.run_bench(options)
    assert "mae_lm: 1 rows" in (told := capsys.readouterr()).err
    assert "mlm    " in told.out


def test_other_errors_are_not_taken_for_too_little_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(bench, "made", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        bench.run_bench(BenchOptions(size="tiny", only=("mlm",), against="none", rows=1))


@pytest.mark.parametrize("size", ["tiny", "base", "large"])
def test_entries_are_what_their_names_say(size):
    entries = {entry.name: entry for entry in entries_of(size, BenchOptions(), compiles=True)}
    ours = {name: entry for name, entry in entries.items() if entry.peer is None}
    for name, entry in ours.items():
        assert (entry.run.shape.dropout > 0) == ("dropout" in name)
        assert entry.run.shape.has_relative_bias == ("relative" in name)
        assert (entry.run.shape.positions == "rotary") == ("rotary" in name)
        assert (entry.run.masking.rate == 0.5) == ("3ml" in name)
    assert ours["plain mlm"].run == ours["mlm"].run
    assert [ours[f"3ml_self .5, {n} layers"].run.decoder.depth for n in (2, 4)] == [2, 4]
    assert ours["mae_lm cross-only"].run.decoder.sublayers == ("cross",)
    assert ours["mae_lm, dropout, relative bias"].run == recipe(f"mae_lm_{size}")
    for way in ("eager", "compiled", "blocks compiled"):
        assert sum(name.startswith(f"roberta, {way}, ") for name in entries) == 4
    with_float8 = {entry.name: entry for entry in entries_of(size, BenchOptions(), compiles=True, has_float8=True)}
    assert with_float8.keys() - entries.keys() == (set() if size == "tiny" else {"mlm, fp8"})
    if size != "tiny":
        training = replace(entries["mlm"].run.training, precision="fp8")
        assert with_float8["mlm, fp8"] == replace(entries["mlm"], name="mlm, fp8",
                                                  run=replace(entries["mlm"].run, training=training))  # fmt: skip
    assert all(entry.compiled == "no" for entry in entries_of(size, BenchOptions(), compiles=False))
    assert all(entry.peer is None for entry in entries_of(size, BenchOptions(against="none"), compiles=True))


def test_goals_are_ratios_of_time_beside_ratios_of_flops():
    entries = {entry.name: entry for entry in entries_of("base", BenchOptions(), compiles=True)}
    speeds = {name: timed(entry, 700e3) for name, entry in entries.items()}
    speeds["mlm, dropout"] = timed(entries["mlm, dropout"], 600e3)
    speeds["mae_lm"] = timed(entries["mae_lm"], 350e3)
    speeds["roberta, compiled, 128 rows"] = timed(entries["roberta, compiled, 128 rows"], 800e3)
    found = {goal.what: goal for goal in goals.goals_of("base", speeds)}
    assert found["MAE-LM, 4 self-attention layers: time over plain MLM"].found == 2
    best = "MLM, dropout .1: tokens/s over RoBERTa at its best"
    assert found[best].found == 0.75  # The fastest peer counts, however it runs.
    for faster in ("roberta, eager, 64 rows", "roberta, blocks compiled, 64 rows"):
        others = speeds | {faster: timed(entries[faster], 1200e3)}
        assert next(goal.found for goal in goals.goals_of("base", others) if goal.what == best) == 0.5
    assert found["dropout .1: time over dropout 0"].found == pytest.approx(7 / 6)
    assert found["rotary positions: time over absolute ones"].found == pytest.approx(6 / 7)
    mae, mlm = entries["mae_lm"].run, entries["mlm"].run
    wanted = flops_per_token(mae).executed / flops_per_token(mlm).plain
    assert found["MAE-LM, 4 self-attention layers: time over plain MLM"].flops == pytest.approx(wanted)
    assert found["MLM, dropout 0: MFU"].found == pytest.approx(700e3 * flops_per_token(mlm).plain / 989e12)
    assert found["MLM, dropout 0, FP8: MFU of the bf16 peak"].found is None
    speeds["mlm, fp8"] = timed(entries["mlm"], 800e3)
    for size, goal in (("base", ">= .55"), ("large", ">= .60")):
        (float8,) = (line for line in goals.goals_of(size, speeds) if "FP8" in line.what)
        assert (float8.found, float8.goal) == (speeds["mlm, fp8"].plain_mfu, goal)
    assert all(goal.found is None for goal in goals.goals_of("base", {}) + goals.goals_of("large", {}))


def loss_of(entry: Entry) -> float:
    torch.manual_seed(0)
    batch = batch_of(entry.run, entry.rows)
    _, loss = bench.made(entry, batch, CPU)
    return float(loss().detach())


def test_plain_mlm_is_mlm():
    entry = Entry("mlm", small("mlm"), 3, compiled="no")
    assert loss_of(replace(entry, is_plain=True)) == pytest.approx(loss_of(entry), rel=1e-5)


def test_an_entry_in_float8_multiplies_in_it(monkeypatch):
    multiplied = []
    monkeypatch.setattr("latemask.training.float8.multiply_in_float8",
                        lambda model, predictions: multiplied.append((model, predictions)))  # fmt: skip
    for precision in ("bf16", "fp8"):
        run = small("mlm")
        run = replace(run, training=replace(run.training, precision=precision))
        model, _ = bench._ours(Entry("mlm", run, 3, compiled="no"), batch_of(run, 3), CPU)
        assert multiplied == ([(model, 3 * run.predicted_tokens)] if precision == "fp8" else [])


def test_roberta_loses_the_same_with_its_head_on_masked_positions():
    pytest.importorskip("transformers")
    entry = Entry("roberta", small("mlm"), 3, peer="roberta", compiled="no")
    assert loss_of(replace(entry, peer="roberta masked")) == pytest.approx(loss_of(entry), rel=1e-5)


def test_one_round_has_no_spread(capsys):
    steppers = [bench.Stepper(Entry("mlm", small("mlm"), 1), lambda: None, CPU) for _ in range(2)]
    for stepper, rounds in zip(steppers, ([[1.0, 3.0]], [[1.0, 1.0], [3.0, 3.0]]), strict=True):
        stepper.rounds = rounds
    one, two = (stepper.result(None) for stepper in steppers)
    assert (one.milliseconds, one.spread) == (2000, None)
    assert (two.milliseconds, two.spread) == (2000, 1)
    machine = {"card": "none", "versions": {"torch": "none"}}
    goals.show("tiny", machine, {"one": one}, [])
    printed = capsys.readouterr()
    assert "%" not in printed.out
    assert printed.err == ""
    goals.show("tiny", machine, {"one": one, "two": two}, [])
    assert "1 of 2 entries differ by more than 10% between rounds (mlm by 100.0%)" in capsys.readouterr().err


def test_a_small_benchmark_prints_and_keeps_what_it_measured(tmp_path, capsys):
    out = tmp_path / "bench.json"
    names = ("mlm", "mlm, dropout", "roberta, eager, 1 rows")
    bench.run_bench(BenchOptions(size="tiny", only=names, rows=1, rounds=2, steps=1, out=str(out)))
    kept = json.loads(out.read_text())
    assert [entry["name"] for entry in kept["entries"]] == list(names)
    for entry in kept["entries"]:
        assert entry["tokens_per_second"] == pytest.approx(128e3 / entry["milliseconds"])
    ratio = next(goal for goal in kept["goals"] if goal["what"].startswith("MLM, dropout .1"))["found"]
    speed = {entry["name"]: entry["tokens_per_second"] for entry in kept["entries"]}
    assert ratio == pytest.approx(speed["mlm, dropout"] / speed["roberta, eager, 1 rows"])
    assert {"card", "driver", "versions"} <= kept.keys()
    printed = capsys.readouterr().out
    assert "roberta, eager, 1 rows" in printed
    assert ">= 1.8" in printed
    goals.show("tiny", kept, {}, [goals.Goal("MLM", ">= 1.8", None)])  # entries that no goal is about
    assert "Goals" not in capsys.readouterr().out

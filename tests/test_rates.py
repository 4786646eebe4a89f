"""Rates that change in a run: batches stay pure, a resume across a border is bit for bit, cost and journal follow."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from latemask.cli.cost import run_cost
from latemask.cli.recipes import RecipesOptions, run_recipes
from latemask.config import Masking, Run, Shape, replace
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.feed.prefetch import Prefetch
from latemask.hf.card import numbers
from latemask.rates import RateStep
from latemask.recipes import recipe
from latemask.report.costs import costs_table
from latemask.report.folders import read_folders
from latemask.report.plots import loss_points
from latemask.training import loop, micro
from latemask.training.checkpoint import read_run
from latemask.training.loop import pretrain
from samples import batch_of, prose, small
from training_support import assert_same_bits, lines_of, tensors_of, tiny_run, with_training

LAST = "step-0000006"
RATES = [0.5, 0.5, 0.3, 0.3, 0.3, 0.15]


def falling(**training) -> Run:
    """Six updates: two at .5, three at .3, one at .15; 8, 5 and 2 masked tokens of 16."""
    run = tiny_run("falling_rate", **training)
    return replace(run, {"masking.rate": 0.5, "masking.later_rates": ("0.33:0.3", "0.83:0.15")})


def feed(run: Run, rows: int = 4) -> TrainingBatches:
    return TrainingBatches(Rows(prose(run.shape), run.shape, run.most_masked_tokens), run.masking, rows, 1, run.updates)


# The text of a step


@given(some.floats(0, 1, exclude_min=True, exclude_max=True), some.floats(0, 1, exclude_min=True, exclude_max=True))
def test_text_holds_a_step_exactly(start, rate):
    step = RateStep(start, rate)
    assert RateStep.parse(str(step)) == step


@pytest.mark.parametrize("text", ["", "0.5", "0.5:", ":0.5", "0.5:0.3:0.1", "a:0.5", "0:0.5", "0.5:1", "nan:0.5"])
def test_a_step_that_cannot_be_is_refused(text):
    with pytest.raises(Refusal, match=r"masking\.later_rates"):
        RateStep.parse(text)


# Batches


def test_each_batch_masks_as_many_as_its_stage_says_and_keeps_rows_and_order():
    """Which rows a batch holds does not depend on the rates; a lower rate masks a part of what the higher masks."""
    run = falling()
    batches, steady = feed(run), feed(replace(run, {"masking.later_rates": ()}))
    for index, rate in enumerate([*RATES, 0.15, 0.15]):
        batch, at_half = batches.batch_at(index), steady.batch_at(index)
        assert batch.n_masked == int(rate * 16 + 0.5)
        assert np.array_equal(batches.keys_at(index)[1], steady.keys_at(index)[1])
        assert (batch.positions.sort(1).values == torch.arange(16)).all()
        masked = batch.positions[:, batch.n_visible :]
        assert torch.equal(masked, at_half.positions[:, at_half.n_visible :][:, : batch.n_masked])


@settings(max_examples=20)
@given(some.integers(0, 9), some.integers(0, 4))
def test_any_split_of_any_batch_is_the_same(index, cut):
    batches, whole = feed(falling()), feed(falling()).batch_at(index)
    parts = [batches.batch_at(index, start, stop) for start, stop in ((0, cut), (cut, 4)) if start < stop]
    assert torch.equal(torch.cat([part.positions for part in parts]), whole.positions)


def test_prefetching_across_a_border_gives_the_stage_s_own_batches():
    batches = feed(falling())
    with Prefetch(batches, 0, 4, 3, torch.device("cpu")) as prefetch:
        for index in (0, 1, 2, 3, 4, 5, 2, 1):
            taken = prefetch.take(index)
            assert [part.n_masked for part in taken] == [int(RATES[index] * 16 + 0.5)] * 2
            assert torch.equal(torch.cat([part.ids for part in taken]), batches.batch_at(index).ids)


def test_rows_carry_the_masks_of_every_stage():
    """A rate that rises: rows with too few ordinary tokens for the last stage are kept out from the beginning."""
    run = replace(falling(), {"masking.rate": 0.15, "masking.later_rates": ("0.5:0.8",)})
    assert (run.masked_tokens, run.most_masked_tokens) == (2, 13)
    batches = feed(run)
    assert len(batches.rows.refused) > 0
    for index in range(6):
        batches.batch_at(index)
    with pytest.raises(ValueError, match="planned number"):
        TrainingBatches(batches.rows, run.masking, 4, 1)


def test_every_shape_that_is_still_to_come_is_named_once():
    batches = feed(falling())
    assert [batches.new_shapes_from(index) for index in (0, 1, 2, 4, 5, 9)] == [
        [0, 2, 5], [1, 2, 5], [2, 5], [4, 5], [5], [9],
    ]  # fmt: skip
    assert feed(tiny_run()).new_shapes_from(3) == [3]


@given(some.floats(0.05, 1), some.floats(0.1, 0.8), some.integers(10, 60))
def test_the_same_number_is_predicted_in_every_row_the_last_to_join(share, rate, row_tokens):
    masking, shape = Masking(rate=rate, predicted_share=share), Shape(row_tokens=row_tokens, vocabulary=70)
    batch = Rows(prose(shape), shape, 1).batch(np.arange(2), masking, 0, np.zeros(2, int)) if rate < 0.5 else None
    if batch is not None:
        assert batch.targets.shape == (2, int(share * batch.n_masked + 0.5))
        assert torch.equal(batch.targets, batch.ids[:, row_tokens - batch.targets.shape[1] :])
        assert batch.slice(0, 1).to("cpu").n_unpredicted == batch.n_unpredicted


# Training


def test_a_run_stopped_on_either_side_of_a_border_is_the_run_that_was_not(data: Path, tmp_path: Path) -> None:
    """At dropout .1, with validation; bit for bit in weights, moments and journal."""
    run = falling(log_every=1, save_every=6)
    pretrain(run, data, tmp_path / "whole")
    accumulate = loop._accumulate
    for stop in (1, 2, 5):
        out = tmp_path / f"stopped in {stop}"
        with pytest.MonkeyPatch.context() as patch:

            def accumulated(parts, micro_batches, index, *rest, stop=stop):
                if index == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                return accumulate(parts, micro_batches, index, *rest)

            patch.setattr(loop, "_accumulate", accumulated)
            assert pretrain(run, data, out).reason == "signal"
        assert pretrain(None, None, out, resume="always").reason == "steps"
        assert_same_bits(tmp_path / "whole" / LAST, out / LAST)
        assert lines_of(out, "train", "validation") == lines_of(tmp_path / "whole", "train", "validation")


def test_the_journal_tells_the_stage_s_own_rate_and_flops(data: Path, tmp_path: Path) -> None:
    run = falling(log_every=1)
    pretrain(run, data, tmp_path / "run")
    whole = loop.journal.read(tmp_path / "run" / "journal.jsonl")
    trained = [line for line in whole if line["kind"] == "train"]
    assert [line["masking_rate"] for line in trained] == RATES
    for line, rate in zip(trained, RATES, strict=True):
        own = flops_per_token(replace(run, {"masking.rate": rate, "masking.later_rates": ()})).executed
        assert line["flops_per_second"] == pytest.approx(line["tokens_per_second"] * own)
    assert {line["rate"] for line in whole if line["kind"] == "validation"} == {0.5}
    mean = np.mean([flops_per_token(run, range(index, index + 1)).executed for index in range(6)])
    assert whole[0]["flops_per_token"] == pytest.approx(mean)


def test_a_border_inside_a_journal_line_counts_by_its_batches(data: Path, tmp_path: Path) -> None:
    run = falling(log_every=4)
    pretrain(run, data, tmp_path / "run")
    lines = [line for line in loop.journal.read(tmp_path / "run" / "journal.jsonl") if line["kind"] == "train"]
    for line, batches in zip(lines, (range(4), range(4, 6)), strict=True):
        own = flops_per_token(run, batches).executed
        assert line["flops_per_second"] == pytest.approx(line["tokens_per_second"] * own)


def test_the_report_counts_each_batch_at_its_own_rate(data: Path, tmp_path: Path) -> None:
    """At every validation, in the middle of a stage too; and what a stopped run has cost is not the mean of a whole."""
    run = falling(validate_every=1)
    pretrain(run, data, tmp_path / "run")
    [folder] = read_folders([tmp_path / "run"])
    a_batch = run.training.batch_rows * run.shape.row_tokens
    spent = [0.0, *itertools.accumulate(
        a_batch * flops_per_token(run, range(index, index + 1)).plain for index in range(6))]  # fmt: skip
    assert [flops for flops, _ in loss_points(folder.lines, "flops")] == pytest.approx(spent)
    assert [folder.flops_at(step) for step in range(7)] == pytest.approx(spent)
    begun = [line for line in folder.lines if line["step"] <= 2 and line["kind"] != "end"]
    table = costs_table([dataclasses.replace(folder, lines=begun)])
    assert table is not None
    assert table.rows[0][table.columns.index("PFLOP so far, plain")] == pytest.approx(spent[2] / 1e15)


def test_another_planned_number_of_updates_is_refused_where_borders_follow_from_it(data: Path, tmp_path: Path) -> None:
    run = falling(save_every=3)
    pretrain(run, data, tmp_path / "run")
    longer = with_training(run, steps=8)
    with pytest.raises(Refusal, match=r"training\.steps: found 8 updates; wanted 6, as the run began"):
        pretrain(longer, data, tmp_path / "run", resume="always")
    with pytest.raises(Refusal, match=r"training\.steps"):
        pretrain(with_training(run, max_tokens=3 * 7 * 16), data, tmp_path / "run", resume="always")
    pretrain(with_training(run, log_every=3), data, tmp_path / "run", resume="always")
    steady = tiny_run(steps=2)
    pretrain(steady, data, tmp_path / "steady")
    assert pretrain(with_training(steady, steps=4), data, tmp_path / "steady", resume="always").step.name.endswith("4")


def test_every_stage_is_compiled_before_the_clock_starts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first pass of each shape takes, no training line has it; the weights are those of a run without."""
    monkeypatch.setattr("latemask.training.parts.compile_blocks", lambda model: None)
    heard: list[object] = []
    accumulate, start = loop._accumulate, loop.Stopwatch.start
    monkeypatch.setattr(loop, "_accumulate", lambda *given: (heard.append(given[2]), accumulate(*given))[1])
    monkeypatch.setattr(loop.Stopwatch, "start", lambda watch: (heard.append("clock"), start(watch))[1])
    rare = {"validate_every": 0, "save_every": 6}
    compiled = pretrain(falling(compile="on", **rare), data, tmp_path / "compiled").step
    assert heard[: heard.index("clock")] == [0, 2, 5]
    assert [index for index in heard[heard.index("clock") :] if index != "clock"] == [0, 1, 2, 3, 4, 5]
    assert_same_bits(compiled, pretrain(falling(compile="off", **rare), data, tmp_path / "plain").step)


def test_a_share_is_predicted_in_training_and_all_in_validation(data: Path, tmp_path: Path) -> None:
    run = replace(tiny_run("predict_subset"), {"masking.rate": 0.5, "masking.predicted_share": 0.25})
    every = replace(run, {"masking.predicted_share": 1.0})
    for name, one in (("some", run), ("every", every)):
        pretrain(one, data, tmp_path / name)
    first = [lines_of(tmp_path / name, "validation")[0]["loss"] for name in ("some", "every")]
    assert first[0] == first[1]
    some, whole = (tensors_of(tmp_path / name / LAST) for name in ("some", "every"))
    assert any(not torch.equal(some[name], whole[name]) for name in some)
    assert read_run(tmp_path / "some" / LAST).masking.predicted_share == 0.25


def test_rows_at_once_fit_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage that needs most memory decides, wherever it stands: 10, 25 and 20 GB a row of 100 GB free."""
    batches = feed(falling())
    needs = {0: 10, 2: 25, 5: 20}
    asked: list[int] = []

    def step_bytes(model, batches, index, rows, *rest):
        asked.append(index)
        return needs[index] * rows * 10**9

    world = SimpleNamespace(device=torch.device("cuda"), least=lambda number: number)
    model = SimpleNamespace(run=falling(), parameters=list)
    monkeypatch.setattr(micro, "_step_bytes", step_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 10**9, 100 * 10**9))
    assert micro.find_micro_rows(model, batches, 8, nullcontext, world) == 2  # type: ignore[arg-type]
    assert set(asked) == set(needs)
    needs[2] = 90
    with pytest.raises(Refusal, match="for one row"):
        micro.find_micro_rows(model, batches, 8, nullcontext, world)  # type: ignore[arg-type]


class Card:
    """A model of one weight on a card that holds ``a_row`` bytes a row where a pass turns back, and at its end its
    gradient, counted by what torch.cuda is asked."""

    def __init__(self, a_row: int, patch: pytest.MonkeyPatch):
        self.a_row, self.run, self.weight = a_row, falling(), torch.nn.Parameter(torch.zeros(10**7))
        self.gradient_bytes, self.peak = 4 * self.weight.numel(), 0
        asked = {"reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: None,
                 "memory_allocated": lambda *_: self.held, "max_memory_allocated": lambda *_: self.peak}  # fmt: skip
        for name, answer in asked.items():
            patch.setattr(torch.cuda, name, answer)

    @property
    def held(self) -> int:
        return 0 if self.weight.grad is None else self.gradient_bytes

    def __call__(self, rows: int) -> torch.Tensor:
        self.peak = max(self.held + rows * self.a_row, self.gradient_bytes)
        return self.weight

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight]

    def new_shapes_from(self, index: int) -> list[int]:
        return [index]

    def batch_at(self, index: int, start: int, rows: int) -> SimpleNamespace:
        return SimpleNamespace(to=lambda device: rows)


@pytest.mark.parametrize("megabytes_a_row", [2, 9, 30, 100])
def test_rows_at_once_are_found_by_what_activations_take(megabytes_a_row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of a model that has a gradient of 40 MB hold most when it has come, many when they turn back."""
    card = Card(megabytes_a_row * 10**6, monkeypatch)
    room = (3 * card.gradient_bytes + 65 * card.a_row) / micro.MEMORY_SHARE  # with two moments
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, room))
    world = SimpleNamespace(device=torch.device("cuda"), least=lambda number: number)
    assert micro.find_micro_rows(card, card, 1024, nullcontext, world) == 64  # type: ignore[arg-type]
    assert card.weight.grad is None


def three_rates_compiled(data: Path, out: Path) -> None:
    rare = {"micro_rows": 7, "save_every": 6, "validate_every": 0}
    run = replace(tiny_run("mlm", compile="on", **rare), {
        "masking.rate": 0.5, "masking.later_rates": ("0.33:0.3", "0.66:0.15"), "masking.joins": ("0:0:0.5", "1:0.5:1"),
        "shape.dropout": 0.0,
    })  # fmt: skip
    pretrain(run, data, out / "compiled")
    pretrain(with_training(run, compile="off"), data, out / "plain")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rates_of_masks_that_arrive_in_two_parts_compile(data: Path, tmp_path: Path) -> None:
    """Three rates and two joins, so six row lengths: within the compiler's limit, and the losses of a plain run."""
    work = f"from test_rates import *; three_rates_compiled(Path({str(data)!r}), Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", work], check=True, cwd=Path(__file__).parent)
    losses = [[line["loss"] for line in lines_of(tmp_path / name, "train")] for name in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# What a person reads


def test_cost_recipes_and_card_name_every_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_cost(["falling_rate_tiny", "--masking.later-rates", ".5:.25"])
    said = capsys.readouterr().out
    assert "64 + 64, then 96 + 32" in said
    assert "64 x 4, then 96 x 4" in said
    run_recipes(RecipesOptions("base"))
    said = " ".join(capsys.readouterr().out.split())
    assert "falling_rate_base" in said
    assert "predict_subset_base" in said
    shown = dict(numbers(tmp_path / "step-0000001", recipe("falling_rate_base")))
    assert shown["masking rate in pretraining"] == (
        "50%, 40% from 20% on, 30% from 40% on, 20% from 60% on, 15% from 80% on"
    )


def test_the_model_takes_any_stage():
    """One model, batches of every stage: nothing in it is sized by the rate."""
    run = small("falling_rate")
    assert [batch_of(run, index=index).n_masked for index in (0, 400, 800, 1200, 1600)] == [18, 14, 11, 7, 5]

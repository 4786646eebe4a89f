"""A run that was stopped and resumed is the run that was not: same bits, same journal. What would not be is refused."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.joins import Join
from latemask.text.store import open_store
from latemask.training import checkpoint, guards, journal, loop
from latemask.training.distributed import World
from latemask.training.loop import Diverged, pretrain
from latemask.training.schedules import learning_rate
from latemask.training.validation import Validation
from training_support import (
    Gradients,
    Process,
    assert_same_bits,
    lines_of,
    stop_in_batch,
    tiny_run,
    wait_until,
    with_training,
    write_store,
)

LAST = "step-0000006"


def stopped_and_resumed(run: Run, data: Path, out: Path, stop: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_in_batch(patch, stop)
        assert pretrain(run, data, out).reason == "signal"
    assert pretrain(None, None, out, resume="always").reason == "steps"


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_one_process_stops_between_micro_batches(at: int, data: Path, tmp_path: Path) -> None:
    """SIGTERM in the forward pass ``at`` (two a step): the rest of its step is not computed, an unfinished batch not
    counted, and the run that goes on is the one never stopped."""
    run, passes = tiny_run(validate_every=0), []
    forward = loop.Pretrainer.forward

    def counted(model, batch):
        passes.append(batch.rows)
        if len(passes) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Pretrainer, "forward", counted)
        outcome = pretrain(run, data, tmp_path / "parts")
    assert (outcome.reason, outcome.was_signalled) == ("signal", True)
    assert checkpoint.step_number(outcome.step) == at // 2
    assert len(passes) == at
    pretrain(None, None, tmp_path / "parts", resume="always")
    pretrain(run, data, tmp_path / "whole")
    assert_same_bits(tmp_path / "whole" / LAST, tmp_path / "parts" / LAST)
    assert lines_of(tmp_path / "parts", "train") == lines_of(tmp_path / "whole", "train")


def test_a_signal_is_answered_at_once_and_says_what_comes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the step is done; another process of the same run says nothing."""
    told = []
    accumulate = loop._accumulate

    def accumulated(parts, micro_batches, index, world, *rest):
        capfd.readouterr()
        os.kill(os.getpid(), signal.SIGINT)
        told.append(capfd.readouterr().err)
        return accumulate(parts, micro_batches, index, world, *rest)

    monkeypatch.setattr(loop, "_accumulate", accumulated)
    outcome = pretrain(tiny_run(), data, tmp_path / "run")
    assert (outcome.reason, outcome.validation_loss) == ("signal", None), "the loss of step 0 is no result"
    assert [("Ctrl-C" in text, "saving" in text, "again" in text) for text in told] == [(True, True, True)]
    with guards.signals(World(1, 2, torch.device("cpu"))) as heard:
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert "SIGTERM" not in capfd.readouterr().err


@pytest.mark.parametrize(("step", "saves", "seconds"), [(0, 3, None), (2, 3, None), (3, 3, None), (6, 3, None),
                                                         (6, 6, 1e6)])  # fmt: skip
def test_a_signal_breaks_a_validation_off_and_the_resumed_run_makes_it(
    step: int, saves: int, seconds: float | None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of its three passes no third is made, whether it is the first, one between saves, or the last; the
    run that goes on is the one never stopped, with the same best step, and no validation is missing or comes twice."""
    run = tiny_run(validate_every=2 if step == 2 else 3, save_every=saves, max_seconds=seconds)
    pretrain(run, data, tmp_path / "whole")
    measure, passes = Validation.loss, []

    def measured(validation, model, *rest):
        def counted(*inputs):
            made = any(line["step"] == step - (step > 0) for line in lines_of(tmp_path / "run", "train", "start"))
            passes.append(made)
            if sum(passes) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return model(*inputs)

        counted.train, counted.eval, counted.training = model.train, model.eval, model.training
        return measure(validation, counted, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "loss", measured)
        outcome = pretrain(run, data, tmp_path / "run")
    assert (outcome.reason, outcome.step.name) == ("signal", f"step-000000{step}")
    assert sum(passes) == 2
    assert step not in [line["step"] for line in lines_of(tmp_path / "run", "validation")]
    assert checkpoint.read_state(outcome.step).validation_due
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    assert pretrain(None, None, tmp_path / "run", resume="always").reason == "steps"
    kinds = ("train", "validation", "plateau")
    assert lines_of(tmp_path / "run", *kinds) == lines_of(tmp_path / "whole", *kinds)
    states = [checkpoint.read_state(tmp_path / name / LAST) for name in ("run", "whole")]
    assert not states[0].validation_due
    if step != 2:
        assert states[0].best_step == states[1].best_step
    assert_same_bits(tmp_path / "whole" / LAST, tmp_path / "run" / LAST)
    with monkeypatch.context() as patch:  # killed again, between the validation's line and the state that knows of it
        patch.setattr(checkpoint, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain(None, None, tmp_path / "killed", resume="always")
    pretrain(None, None, tmp_path / "killed", resume="always")
    assert lines_of(tmp_path / "killed", *kinds) == lines_of(tmp_path / "whole", *kinds)


def interrupted(*_) -> None:
    raise KeyboardInterrupt


def test_a_signal_too_late_to_stop_the_run_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the last save: all is done, and who called must not begin another run."""
    write = checkpoint.write

    def written(out, run, state, *rest):
        if state.updates == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return write(out, run, state, *rest)

    monkeypatch.setattr(checkpoint, "write", written)
    outcome = pretrain(tiny_run(), data, tmp_path / "run")
    assert (outcome.step.name, outcome.reason, outcome.was_signalled) == (LAST, "steps", True)
    monkeypatch.undo()
    assert not pretrain(None, None, tmp_path / "run", resume="always").was_signalled


def test_fewer_steps_than_were_made_are_refused_and_nothing_changes(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pretrain(tiny_run(), data, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(Refusal, match=r"training.steps: found 3 in all; wanted 6 or more"):
        pretrain(tiny_run(steps=3), None, out, resume="always")
    with pytest.raises(Refusal, match=r"training.steps: found 2 in all"):
        pretrain(tiny_run(max_tokens=2 * 7 * 16), None, out, resume="always")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert pretrain(tiny_run(steps=6), None, out, resume="always").step == out / LAST


def test_a_resume_writes_down_its_settings(data: Path, tmp_path: Path) -> None:
    pretrain(tiny_run(), data, tmp_path / "run")
    pretrain(tiny_run(steps=7, learning_rate=1e-3), None, tmp_path / "run", resume="always")
    start, resume = lines_of(tmp_path / "run", "start", "resume")
    assert start["run"]["training"]["learning_rate"] == 1e-2
    assert (resume["run"]["training"]["learning_rate"], resume["run"]["training"]["steps"]) == (1e-3, 7)


@pytest.mark.parametrize(("system", "stops"), [("mae_lm", (0, 1, 2, 4)), ("mlm_80_10_10", (3,))])
def test_stopped_anywhere_and_resumed_equals_never_stopped(
    system: str, stops: tuple[int, ...], data: Path, tmp_path: Path
) -> None:
    """At dropout .1; the 30 rows end inside batch 4, so stops lie before and in the epoch's end. The mean loss
    over 4 updates goes on through the stop too."""
    run = tiny_run(system, log_every=4)
    assert run.shape.dropout == 0.1
    pretrain(run, data, tmp_path / "whole")
    kinds = ("train", "validation")
    for stop in stops:
        parts = tmp_path / f"stopped in {stop}"
        stopped_and_resumed(run, data, parts, stop)
        assert_same_bits(tmp_path / "whole" / LAST, parts / LAST)
        assert lines_of(parts, *kinds) == lines_of(tmp_path / "whole", *kinds)
    assert [line["step"] for line in lines_of(tmp_path / "whole", "train")] == [4, 6]


def test_a_stop_between_two_lines_leaves_one_until_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    """The mean of the steps since the last line; a resumed run that makes no step leaves it there, and one that does
    logs as if never stopped."""
    pretrain(tiny_run(), data, tmp_path / "each")
    each = {line["step"]: line for line in lines_of(tmp_path / "each", "train")}
    run, out = tiny_run(log_every=4), tmp_path / "run"
    pretrain(run, data, tmp_path / "whole")
    for stop, steps in ((2, [2]), (2, [2]), (3, [3]), (4, [4]), (5, [4, 5])):
        with pytest.MonkeyPatch.context() as patch:
            stop_in_batch(patch, stop)
            assert pretrain(run, data, out, resume="if-present").reason == "signal"
        lines = lines_of(out, "train")
        assert [line["step"] for line in lines] == steps
        since = range(1, stop + 1) if stop <= 4 else (5,)
        mean = sum(each[step]["loss"] for step in since) / len(since)
        assert lines[-1] == {**each[stop], "loss": pytest.approx(mean, rel=1e-6)}
    shutil.copytree(out, tmp_path / "done")
    assert pretrain(tiny_run(steps=5), None, tmp_path / "done", resume="always").reason == "steps"
    assert lines_of(tmp_path / "done", "train") == lines
    pretrain(run, data, out, resume="always")
    assert lines_of(out, "train") == lines_of(tmp_path / "whole", "train")
    assert_same_bits(tmp_path / "whole" / LAST, out / LAST)


def test_dropout_and_data_matter_to_these_tests(data: Path, tmp_path: Path) -> None:
    """Another seed of dropout alone, or of data alone, gives other bits: equality above is not for free."""
    run = tiny_run()
    pretrain(run, data, tmp_path / "one")
    for number, changed in enumerate([replace(run, {"shape.dropout": 0.0}), with_training(run, data_seed=1)]):
        pretrain(changed, data, tmp_path / f"other-{number}")
        with pytest.raises(AssertionError):
            assert_same_bits(tmp_path / "one" / LAST, tmp_path / f"other-{number}" / LAST)


@pytest.mark.parametrize(("bad", "stops"), [({0}, (0, 2)), ({2}, (0, 2, 3)), ({1, 2, 4}, (1, 3))], ids=str)
def test_skipped_updates_and_a_stop(
    bad: set[int], stops: tuple[int, ...], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips before, at and after the stop: no batch comes twice, no update is lost, the schedule counts updates."""
    run = tiny_run()
    gradients = Gradients(monkeypatch, bad.__contains__)
    pretrain(run, data, tmp_path / "whole")
    assert gradients.batches == list(range(6 + len(bad)))
    lines = lines_of(tmp_path / "whole", "train", "validation", "skip")
    for stop in stops:
        parts = tmp_path / f"stopped in {stop}"
        gradients.batches.clear()
        stopped_and_resumed(run, data, parts, stop)
        assert gradients.batches == sorted([*range(6 + len(bad)), stop]), "the unfinished batch is done again"
        assert_same_bits(tmp_path / "whole" / LAST, parts / LAST)
        assert lines_of(parts, "train", "validation", "skip") == lines
    assert [line["batch"] for line in lines if line["kind"] == "skip"] == sorted(bad)
    rates = [line["learning_rate"] for line in lines if line["kind"] == "train"]
    assert rates == [learning_rate(run.training, (update + 0.5) / 6) for update in range(6)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_skipped_update_changes_nothing(
    value: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batch 2 spoiled, the state after two updates is that of a run which never met batch 2."""
    Gradients(monkeypatch, {2}.__contains__, value)
    pretrain(tiny_run(save_every=1), data, tmp_path / "spoiled")
    monkeypatch.undo()
    pretrain(tiny_run(save_every=1), data, tmp_path / "clean")
    assert_same_bits(tmp_path / "spoiled/step-0000002", tmp_path / "clean/step-0000002")
    (skip,) = lines_of(tmp_path / "spoiled", "skip")
    assert (skip["step"], skip["batch"], skip["skips_in_a_row"]) == (2, 2, 1)


def test_a_loss_that_is_not_finite_skips_too(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = loop._accumulate

    def accumulated(parts, micro_batches, index, world, *rest):
        loss = accumulate(parts, micro_batches, index, world, *rest)
        return loss * math.inf if index == 1 else loss

    monkeypatch.setattr(loop, "_accumulate", accumulated)
    pretrain(tiny_run(log_every=6), data, tmp_path / "run")
    assert [line["batch"] for line in lines_of(tmp_path / "run", "skip")] == [1]
    (train,) = lines_of(tmp_path / "run", "train")
    assert math.isfinite(train["loss"])


def test_twenty_skips_in_a_row_stop_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = tiny_run(), tmp_path / "run"
    assert run.training.max_skips == 20
    Gradients(monkeypatch, lambda batch: batch >= 4)
    with pytest.raises(Diverged) as stopped:
        pretrain(run, data, out)
    rows = Rows(open_store(data).train, run.shape, run.masked_tokens)
    numbers = TrainingBatches(rows, run.masking, 7, seed=0).keys_at(23)[1].tolist()
    assert str(numbers) in str(stopped.value)
    assert "20 updates in a row" in str(stopped.value)
    skips = lines_of(out, "skip")
    assert [line["batch"] for line in skips] == list(range(4, 24))
    assert skips[-1]["rows"] == numbers
    assert [line["skips_in_a_row"] for line in skips] == list(range(1, 21))
    assert checkpoint.newest(out).name == "step-0000003"
    monkeypatch.undo()
    pretrain(None, None, out, resume="always")
    pretrain(run, data, tmp_path / "whole")
    assert_same_bits(tmp_path / "whole" / LAST, out / LAST)
    assert lines_of(out, "skip") == []


def test_skips_are_counted_in_a_row_and_through_a_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(max_skips=3)
    with pytest.MonkeyPatch.context() as patch:
        Gradients(patch, {1, 2, 4, 5, 7, 8}.__contains__)
        assert pretrain(run, data, tmp_path / "never three").reason == "steps"
    Gradients(monkeypatch, {1, 2, 3}.__contains__)
    with pytest.MonkeyPatch.context() as patch:
        stop_in_batch(patch, 2)
        pretrain(run, data, tmp_path / "run")
    with pytest.raises(Diverged, match="3 updates in a row"):
        pretrain(None, None, tmp_path / "run", resume="always")
    assert [line["batch"] for line in lines_of(tmp_path / "run", "skip")] == [1, 2, 3]


def test_a_weight_that_is_not_finite(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is best, nothing is updated, the run stops, and its folder can still be read."""
    fresh = loop.Pretrainer

    def spoiled(run: Run) -> torch.nn.Module:
        model = fresh(run)
        with torch.no_grad():
            model.encoder.tokens.weight[10, 3] = math.nan
        return model

    monkeypatch.setattr(loop, "Pretrainer", spoiled)
    with pytest.raises(Diverged):
        pretrain(tiny_run(max_skips=4), data, tmp_path / "run")
    assert lines_of(tmp_path / "run", "validation")[0]["loss"] is None
    assert checkpoint.read_state(checkpoint.newest(tmp_path / "run")).best_loss is None


def test_lines_and_folders_after_the_resumed_step_are_made_again_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed after step 5 goes on from its checkpoint of step 3 and meets the bad batch 3 again."""
    run, whole, out = tiny_run(), tmp_path / "whole", tmp_path / "run"
    Gradients(monkeypatch, {3}.__contains__)
    pretrain(run, data, whole)
    shutil.copytree(whole, out)
    shutil.rmtree(out / LAST)
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    killed = [line for line in lines if '"end"' not in line and '"step": 6' not in line]
    (out / "journal.jsonl").write_text("".join(killed) + '{"kind": "train", "st')
    pretrain(None, None, out, resume="always")
    kinds = ("start", "train", "validation", "skip", "save", "end")
    assert lines_of(out, *kinds) == lines_of(whole, *kinds)
    assert [line["step"] for line in lines_of(out, "resume")] == [3]
    assert_same_bits(whole / LAST, out / LAST)


def test_a_broken_checkpoint_is_passed_over_named_and_made_again(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, out = tiny_run(save_every=2, keep=1, validate_every=0), tmp_path / "run"
    pretrain(run, data, out)
    shutil.copytree(out, tmp_path / "whole")
    pretrain(with_training(run, keep=0), data, out, overwrite=True)
    for step in (4, 6):
        (out / f"step-000000{step}" / checkpoint.REST).write_bytes(b"")
    assert pretrain(with_training(run, keep=1), data, out, resume="always").step == out / LAST
    told = capfd.readouterr().err
    assert "passed over step-0000006: rest.safetensors differs" in told
    assert "passed over step-0000004" in told
    assert [step.name for step in checkpoint.steps(out)] == ["step-0000000", LAST]
    assert (out / "broken-step-0000006").is_dir()
    assert checkpoint.fault(out / LAST) is None
    assert_same_bits(out / LAST, tmp_path / "whole" / LAST)


def test_rows_at_once_are_remembered_because_dropout_depends_on_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another amount of free memory would find another number."""
    run = tiny_run(micro_rows=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("latemask.training.parts.find_micro_rows", lambda *_: 2)
        pretrain(run, data, tmp_path / "whole")
        stop_in_batch(patch, 2)
        pretrain(run, data, tmp_path / "parts")
    monkeypatch.setattr("latemask.training.parts.find_micro_rows", lambda *_: 3)
    pretrain(None, None, tmp_path / "parts", resume="always")
    assert_same_bits(tmp_path / "parts" / LAST, tmp_path / "whole" / LAST)


@pytest.mark.parametrize(("changed", "found"), [
    ({"precision": "fp32"}, 3), ({"recompute": True}, 3), ({"data_parallel": "shard"}, 3),
    ({"learning_rate": 1e-3}, 2), ({"micro_rows": 4, "recompute": True}, 4),
])  # fmt: skip
def test_rows_at_once_are_found_anew_where_a_setting_changes_what_fits(
    changed: dict, found: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(micro_rows=None, validate_every=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("latemask.training.parts.find_micro_rows", lambda *_: 2)
        stop_in_batch(patch, 2)
        pretrain(run, data, tmp_path / "run")
    monkeypatch.setattr("latemask.training.parts.find_micro_rows", lambda *_: 3)
    pretrain(with_training(run, **changed), None, tmp_path / "run", resume="always")
    assert lines_of(tmp_path / "run", "resume")[0]["micro_rows"] == found


def test_start_or_resume_in_one_call(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call starts, goes on, and finds the work done."""
    run, out = tiny_run(), tmp_path / "run"
    gradients = Gradients(monkeypatch, lambda batch: False)
    with pytest.MonkeyPatch.context() as patch:
        stop_in_batch(patch, 1)
        assert pretrain(run, data, out, resume="if-present").reason == "signal"
    for _ in range(2):
        assert pretrain(run, data, out, resume="if-present").step == out / LAST
    assert gradients.batches == [0, 1, *range(1, 6)]
    pretrain(run, data, tmp_path / "whole")
    assert_same_bits(out / LAST, tmp_path / "whole" / LAST)


def test_killed_before_the_first_checkpoint_starts_again(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / ".step-0000000.partial").mkdir(parents=True)
    (out / "journal.jsonl").write_text('{"kind": "start", "step": 0}\n')
    pretrain(tiny_run(), data, out)
    assert len(lines_of(out, "start")) == 1
    assert not list(out.glob(".step*"))


@pytest.mark.parametrize(("ends", "asked"), [
    ({}, {}), ({}, {"learning_rate": 0.5, "save_every": 1}),
    ({"steps": 10_000, "max_seconds": 1e-6}, {}), ({"steps": 10_000, "max_seconds": 0.2}, {}),
])  # fmt: skip
def test_to_go_on_with_a_finished_run_changes_nothing(
    ends: dict[str, Any], asked: dict[str, Any], data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "run", tiny_run(**ends)
    first = pretrain(run, data, out)
    last_line = capfd.readouterr().err.splitlines()[-1]
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    again = pretrain(tiny_run(**ends, **asked), data, out, resume="if-present")
    assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before
    assert again == first
    assert capfd.readouterr().err.splitlines() == [last_line]
    (out / "journal.jsonl").unlink()
    pretrain(None, None, out, resume="always")
    assert lines_of(out, "end"), "what a kill kept from the journal is written"


def test_a_run_that_lost_the_checkpoint_of_its_end_is_not_finished(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = pretrain(tiny_run(steps=10_000, max_seconds=0.2, save_every=1), data, out)
    assert ended.reason == "seconds"
    shutil.rmtree(ended.step)
    assert pretrain(None, None, out, resume="always").reason == "seconds"
    assert len(lines_of(out, "resume")) == 1


def test_a_finished_run_goes_on_with_more_steps_and_other_training_settings(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pretrain(tiny_run(), data, out)
    longer = tiny_run(steps=9, learning_rate=1e-3, decay="constant", micro_rows=7, save_every=4, clip_norm=None)
    assert pretrain(longer, data, out, resume="always").step == out / "step-0000009"
    assert checkpoint.read_run(out / "step-0000009").training == longer.training
    assert [line["learning_rate"] for line in lines_of(out, "train")[6:]] == [1e-3] * 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shape.depth": 3}, r"with shape.depth 2; wanted shape.depth 3\."),
        (
            {"shape.dropout": 0.2, "decoder.depth": 2},
            r"with shape.dropout 0.1, decoder.depth 1; wanted shape.dropout 0.2, decoder.depth 2\.",
        ),
        ({"masking.rate": 0.4}, "with masking.rate 0.3; wanted masking.rate 0.4"),
        ({"masking.joins": (Join(0),)}, r'with masking.joins \["decoder:0.0:1.0"\]; wanted masking.joins \["0'),
        ({"training.batch_rows": 9}, "training.batch_rows"),
        ({"training.seed": 1}, "training.seed"),
        ({"training.data_seed": 1}, "training.seed"),
    ],
    ids=str,
)
def test_what_would_make_it_another_run_is_refused(changes: dict, named: str, data: Path, tmp_path: Path) -> None:
    pretrain(tiny_run(steps=1), data, tmp_path / "run")
    for resume in ("always", "if-present"):
        with pytest.raises(Refusal, match=named):
            pretrain(replace(tiny_run(steps=1), changes), data, tmp_path / "run", resume=resume)


def test_another_recipe_is_refused(data: Path, tmp_path: Path) -> None:
    pretrain(tiny_run(steps=1), data, tmp_path / "run")
    with pytest.raises(Refusal, match=r'with recipe "mae_lm_tiny"; wanted recipe "mlm_tiny"\.'):
        pretrain(tiny_run("mlm", steps=1), data, tmp_path / "run", resume="if-present")


def test_resuming_on_other_data_is_refused_and_on_moved_data_goes_on(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    moved = shutil.copytree(data, tmp_path / "moved")
    pretrain(tiny_run(steps=1), moved, out)
    others = {
        "tokenizer": write_store(tmp_path / "tokenizer", words=8),
        "rows": write_store(tmp_path / "rows", train_rows=31),
    }
    for other in others.values():
        with pytest.raises(Refusal, match="other tokens or another tokenizer"):
            pretrain(None, other, out, resume="always")
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match=r"moved: found no store.json; wanted the data that .*step-0000001.*--data"):
        pretrain(None, None, out, resume="always")
    pretrain(tiny_run(steps=2), tmp_path / "elsewhere", out, resume="always")
    assert checkpoint.read_state(checkpoint.newest(out)).data == str(tmp_path / "elsewhere")
    assert pretrain(None, None, out, resume="always").reason == "steps"


def test_a_folder_that_is_taken_is_refused(data: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "run", tiny_run(steps=1)
    pretrain(run, data, out)
    before = (out / "journal.jsonl").read_bytes()
    with pytest.raises(Refusal, match=r"a run already.*--resume.*--overwrite"):
        pretrain(run, data, out)
    assert (out / "journal.jsonl").read_bytes() == before
    pretrain(tiny_run(steps=2, save_every=1), data, out, overwrite=True)
    assert [step.name for step in checkpoint.steps(out)] == ["step-0000000", "step-0000001", "step-0000002"]
    assert len(lines_of(out, "start")) == 1

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(Refusal, match=r"other files \(thesis.txt\)"):
        pretrain(run, data, tmp_path / "other")
    with pytest.raises(Refusal, match=r"other files \(thesis.txt\)"):
        pretrain(run, data, tmp_path / "other", overwrite=True)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    with pytest.raises(Refusal, match=r"cannot be written"):
        pretrain(run, data, tmp_path / "other" / "thesis.txt")
    for resume in ("always", "if-present"):
        with pytest.raises(Refusal, match=r"--overwrite: found --resume"):
            pretrain(run, data, out, resume=resume, overwrite=True)
    with pytest.raises(Refusal, match="no such folder"):
        pretrain(None, None, tmp_path / "mistyped", resume="always")
    assert not (tmp_path / "mistyped").exists()


def test_a_refused_start_leaves_nothing_behind(data: Path, tmp_path: Path) -> None:
    """Neither a lock nor a folder that it made; a folder that was there stays."""
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "deep" / "run", tmp_path / "empty"):
        with pytest.raises(Refusal):
            pretrain(tiny_run(), tmp_path / "no data", out)
        with pytest.raises(Refusal):
            pretrain(tiny_run(batch_rows=7), data, out, trackers=["tensorboard", "no such"])  # type: ignore[list-item]
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_a_lock_file_that_is_left_over_or_deleted_locks_nothing(tmp_path: Path) -> None:
    """Whoever waits with a deleted file open does not hold the lock of the one that stands there now."""
    alone = World(0, 1, torch.device("cpu"))
    (tmp_path / ".lock").write_text("process 1 on nowhere, killed")
    with guards.locked(tmp_path, alone):
        assert "killed" not in (tmp_path / ".lock").read_text()
        with pytest.raises(Refusal, match="another process"), guards.locked(tmp_path, alone):
            pass
        assert (tmp_path / ".lock").exists()
    assert not list(tmp_path.iterdir())


def test_two_runs_on_one_folder(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = Process(lambda: pretrain(tiny_run(steps=100_000), data, out))
    try:
        wait_until(lambda: bool(checkpoint.steps(out)))
        for resume in ("never", "if-present", "always"):
            with pytest.raises(
                Refusal, match=rf"another process that is training in it \(process {first.process.pid} on"
            ):
                pretrain(tiny_run(), data, out, resume=resume)
        assert first.is_alive
    finally:
        first.kill()
    assert pretrain(tiny_run(), data, out, resume="if-present").reason == "steps"


def test_signals_end_a_run_through_the_command_line_with_75(data: Path, tmp_path: Path) -> None:
    """SIGTERM: saved at the next step, status 75; the same command then goes on to the end, status 0."""
    out = tmp_path / "run"
    wanted = tiny_run(steps=40, save_every=1000)
    shape = {"width": 32, "depth": 2, "feedforward": 48, "row-tokens": 16}
    flags = [f"--shape.{name}={value}" for name, value in shape.items()]
    flags += ["--decoder.width=32", "--decoder.feedforward=48", "--masking.rate=0.3", "--training.batch-rows=7",
              "--training.micro-rows=4", "--training.steps=40", "--training.log-every=1"]  # fmt: skip
    command = [sys.executable, "-m", "latemask", "pretrain", "mae_lm_tiny", f"--data={data}", f"--out={out}",
               "--resume-if-present", *flags]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert first.stderr is not None
        while "step 3/40" not in first.stderr.readline():
            assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == loop.PREEMPTED == 75
    finally:
        first.kill()
        first.stderr.close() if first.stderr else None
    stopped = checkpoint.newest(out)
    assert 3 <= (checkpoint.step_number(stopped) or 0) < 40
    assert lines_of(out, "end")[-1]["reason"] == "signal"
    second = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert second.returncode == 0, second.stderr
    assert [line["step"] for line in lines_of(out, "train")] == list(range(1, 41))
    assert checkpoint.newest(out).name == "step-0000040"
    assert checkpoint.read_run(checkpoint.newest(out)).masked_tokens == wanted.masked_tokens


def test_every_row_comes_once_an_epoch_through_stops(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 batches of 6 are 3 epochs of 30 rows: each row 3 times, though the run was stopped three times."""
    rows: list[int] = []
    accumulate = loop._accumulate

    def accumulated(parts, micro_batches, index, world, *rest):
        epochs, numbers = parts.batches.keys_at(index)
        whole = parts.rows.batch(numbers, run.masking, 0, epochs)
        assert torch.equal(torch.cat([batch.ids for batch in micro_batches]), whole.ids)
        loss = accumulate(parts, micro_batches, index, world, *rest)
        rows.extend([] if loss is None else numbers.tolist())
        return loss

    monkeypatch.setattr(loop, "_accumulate", accumulated)
    run = tiny_run(steps=15, batch_rows=6, save_every=100, validate_every=0)
    for stop in (3, 7, 11):
        with pytest.MonkeyPatch.context() as patch:
            stop_in_batch(patch, stop)
            pretrain(run, data, tmp_path / "run", resume="if-present")
    pretrain(run, data, tmp_path / "run", resume="if-present")
    assert np.bincount(rows).tolist() == [3] * 30
    for epoch in range(3):
        assert len(set(rows[30 * epoch : 30 * epoch + 30])) == 30


def test_the_end_is_written_once_each_time(data: Path, tmp_path: Path) -> None:
    stopped_and_resumed(tiny_run(), data, tmp_path / "run", 2)
    kinds = [line["kind"] for line in journal.read(tmp_path / "run" / "journal.jsonl")]
    assert kinds[0] == "start"
    assert [kind for kind in kinds if kind in ("end", "resume")] == ["end", "resume", "end"]

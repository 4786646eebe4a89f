"""The arithmetic of training: schedule, optimizer, micro-batches, validation, memory, compiled blocks."""

from __future__ import annotations

import copy
import itertools
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from latemask.config import Run, Training, replace
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.feed.prefetch import Prefetch
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import recipe
from latemask.text.store import open_store
from latemask.training import checkpoint, loop, watch
from latemask.training.distributed import World
from latemask.training.loop import pretrain
from latemask.training.micro import _divisor, find_micro_rows, rows_are_to_fit
from latemask.training.optimizer import make_optimizer, update
from latemask.training.parts import Parts, assemble, autocast
from latemask.training.schedules import learning_rate, share_of_updates
from latemask.training.validation import Validation
from training_support import (
    TRAIN_ROWS,
    VALID_ROWS,
    VOCABULARY,
    assert_same_bits,
    lines_of,
    tensors_of,
    tiny_run,
    with_training,
    without_dropout,
    write_store,
)

ALONE = World(0, 1, torch.device("cpu"))


def assembled(run: Run, data: Path) -> Parts:
    torch.manual_seed(run.training.seed)
    return assemble(run, open_store(data), Pretrainer(run), {}, None, ALONE)


# The schedule


@pytest.mark.parametrize(
    ("decay", "warmup", "expected"),
    [
        ("linear", 0.2, {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 0.5, 0.9: 0.125, 1: 0}),
        ("cosine", 0.2, {0.1: 0.5, 0.2: 1, 0.4: (2 + math.sqrt(2)) / 4, 0.6: 0.5, 1: 0}),
        ("constant", 0.5, {0.25: 0.5, 0.5: 1, 0.75: 1, 1: 1}),
        ("linear", 0.0, {0: 1, 0.25: 0.75, 1: 0}),
        ("linear", 1.0, {0: 0, 0.5: 0.5, 0.999: 0.999}),
    ],
)
def test_schedule_by_hand(decay: str, warmup: float, expected: dict[float, float]) -> None:
    training = Training(learning_rate=3.0, warmup_share=warmup, decay=decay)  # type: ignore[arg-type]
    for share, height in expected.items():
        assert learning_rate(training, share) == pytest.approx(3.0 * height, abs=1e-9)


@given(
    steps=some.integers(1, 10_000),
    update_share=some.floats(0, 1, exclude_max=True),
    warmup=some.floats(0, 1),
    decay=some.sampled_from(["linear", "cosine", "constant"]),
)
def test_no_update_has_a_rate_of_zero_or_above_the_peak(
    steps: int, update_share: float, warmup: float, decay: str
) -> None:
    training = Training(learning_rate=2.0, warmup_share=warmup, decay=decay)  # type: ignore[arg-type]
    for number in (0, int(update_share * steps), steps - 1):
        assert 0 < learning_rate(training, share_of_updates(number, steps)) <= 2.0


def test_the_run_follows_its_schedule(data: Path, tmp_path: Path) -> None:
    run = tiny_run(steps=5, warmup_share=0.4, decay="linear", learning_rate=1e-2)
    pretrain(run, data, tmp_path / "run")
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "run", "train")]
    assert rates == pytest.approx([0.0025, 0.0075, 0.01 * 5 / 6, 0.005, 0.01 / 6])


@pytest.mark.parametrize(("every", "long_seconds", "is_told"), [(5, -1.0, False), (6, -1.0, True), (6, 1800.0, False)])
def test_a_long_run_without_a_checkpoint_before_its_end_says_so(
    every: int, long_seconds: float, is_told: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(watch, "LOG_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(watch, "UNSAVED_SECONDS", long_seconds)
    pretrain(tiny_run(save_every=every, validate_every=0), data, tmp_path / "run")
    saved_before = {line["step"] for line in lines_of(tmp_path / "run", "save")} - {0, 6}
    assert bool(saved_before) == (every == 5)
    assert (f"--training.save-every {every} of 6 steps" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(("most", "steps"), [(3 * 7 * 16, 3), (4 * 7 * 16 - 1, 3), (1, 1), (10**9, 6)])
def test_max_tokens(most: int, steps: int, data: Path, tmp_path: Path) -> None:
    """The last whole batch within ``max_tokens`` is the last update, and the schedule ends there."""
    run = tiny_run(max_tokens=most, validate_every=0)
    outcome = pretrain(run, data, tmp_path / "run")
    assert (outcome.reason, outcome.step.name) == ("steps", checkpoint.step_name(steps))
    last = lines_of(tmp_path / "run", "train")[-1]
    assert last["tokens"] == steps * 7 * 16
    assert last["learning_rate"] == learning_rate(run.training, (steps - 0.5) / steps)


def test_max_seconds(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks a second whenever it is read: the schedule is done when the time is, not before."""
    ticks = itertools.count()
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    rates, shares = [], []
    decide, updated = World.decide, loop.update

    def decided(self: World, *values: float) -> list[float]:
        if len(values) > 1:
            shares.append(values[-1])
        return decide(self, *values)

    def noted(model: nn.Module, optimizer: torch.optim.AdamW, rate: float, *rest) -> tuple[Tensor, Tensor]:
        rates.append(rate)
        return updated(model, optimizer, rate, *rest)

    monkeypatch.setattr(World, "decide", decided)
    monkeypatch.setattr(loop, "update", noted)
    run = tiny_run(steps=10**6, max_seconds=60, warmup_share=0.25, validate_every=20, save_every=15, log_every=5)
    outcome = pretrain(run, data, tmp_path / "run")
    assert outcome.reason == "seconds"
    assert shares[-1] >= 1 > shares[-2]
    assert len(rates) == len(shares) - 1 == checkpoint.step_number(outcome.step)
    expected = [learning_rate(run.training, max(share, (number + 0.5) / 10**6)) for number, share in enumerate(shares)]
    assert rates == expected[:-1]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(run.training.learning_rate, rel=0.1)
    assert rates[-1] < run.training.learning_rate / 10
    last = {kind: lines_of(tmp_path / "run", kind)[-1] for kind in ("train", "validation", "end")}
    assert last["end"]["reason"] == "seconds"
    assert {line["step"] for line in last.values()} == {checkpoint.step_number(outcome.step)}
    assert last["validation"]["loss"] == outcome.validation_loss
    assert checkpoint.read_state(outcome.step).seconds >= 60
    validations = len(lines_of(tmp_path / "run", "validation"))
    assert pretrain(None, None, tmp_path / "run", resume="always").step == outcome.step
    assert len(lines_of(tmp_path / "run", "validation")) == validations


def test_compiling_takes_no_time_from_the_schedule(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward pass compiles, for a hundred seconds; all others take one. The warm-up is none the shorter, and
    the weights are those of a run that compiles nothing."""
    now, costs = SimpleNamespace(seconds=0.0), iter([100.0])
    accumulate = loop._accumulate

    def timed(*given) -> Tensor:
        now.seconds += next(costs, 1.0)
        return accumulate(*given)

    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr("latemask.training.parts.compile_blocks", lambda model: None)
    monkeypatch.setattr(loop, "_accumulate", timed)
    clocked = {"steps": 10**6, "max_seconds": 10, "warmup_share": 0.5, "log_every": 1, "validate_every": 0}
    outcome = pretrain(tiny_run(compile="on", **clocked), data, tmp_path / "compiled")
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "compiled", "train")]
    assert (len(rates), outcome.step.name) == (10, checkpoint.step_name(10))
    peak = tiny_run().training.learning_rate
    assert rates[1:] == pytest.approx([peak * height for height in (0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2)])
    plain = pretrain(tiny_run(compile="off", **clocked), data, tmp_path / "plain").step
    ours, theirs = (checkpoint.read_pretrainer(step).state_dict() for step in (outcome.step, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_clock_stands_still_while_validating_and_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    clock = watch.Stopwatch(7.0)
    now.seconds += 50
    with clock.paused():
        now.seconds += 5
    assert clock.seconds == 7.0
    clock.start()
    now.seconds += 2
    with clock.paused():
        now.seconds += 30
        assert clock.seconds == 9.0
    now.seconds += 1
    assert clock.seconds == 10.0


# The optimizer


def test_each_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    for system in ("mae_lm", "three_ml_cross", "decoder_causal_cross"):
        run = recipe(f"{system}_tiny")
        model = Pretrainer(run)
        decayed, plain = make_optimizer(model, run.training).param_groups
        names = {parameter: name for name, parameter in model.named_parameters()}
        grouped = [names[parameter] for group in (decayed, plain) for parameter in group["params"]]
        assert sorted(grouped) == sorted(names.values())
        assert (decayed["weight_decay"], plain["weight_decay"]) == (run.training.weight_decay, 0.0)
        for parameter in plain["params"]:
            name = names[parameter]
            assert parameter.ndim == 1
            assert name.endswith("bias") or "norm" in name or name == "mask_vector", name
        assert all(parameter.ndim == 2 for parameter in decayed["params"])


def test_update_is_adamw_of_the_book_in_float64() -> None:
    """Against the formulas of Adam and decoupled decay written out, with clipping, over five updates."""
    training = Training(betas=(0.8, 0.95), epsilon=1e-3, weight_decay=0.3)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = make_optimizer(model, training)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(1, 6):
        rate, most = 0.1 / step, 1.5
        gradients = {name: torch.randn_like(value) for name, value in values.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        norm, skipped = update(model, optimizer, rate, most, torch.tensor(1.0))
        length = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
        assert float(norm) == pytest.approx(length)
        assert not skipped
        for name, value in values.items():
            gradient = gradients[name] * min(1.0, most / (length + 1e-6))
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            value *= 1 - rate * (0.3 if name == "weight" else 0.0)
            value -= rate * (first[name] / (1 - 0.8**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-3)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), values[name], rtol=1e-12, atol=1e-12)
            assert parameter.grad is None


def test_clipping_off_leaves_gradients_alone() -> None:
    norms = []
    for clip in (None, 1e9):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        model(torch.ones(1, 3)).pow(2).sum().mul(1e3).backward()
        norms.append(update(model, make_optimizer(model, Training()), 1e-3, clip, torch.tensor(0.0))[0])
        norms.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(norms[0], norms[2])
    assert torch.equal(norms[1], norms[3])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_skip_leaves_weights_moments_and_count_unchanged(value: float, where: str, is_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make_optimizer(model, Training())

    def step(value: float, loss: float) -> bool:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        model.bias.grad[1] = value  # type: ignore[index]
        return bool(update(model, optimizer, 1e-2, 2.0, torch.tensor(loss))[1])

    if not is_first:
        assert not step(1.0, 1.0)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    assert step(value if where == "gradient" else 0.5, value if where == "loss" else 1.0)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    for number, parts in after.items():
        before = state.get(number, {key: torch.zeros_like(tensor) for key, tensor in parts.items()})
        assert all(torch.equal(parts[key], before[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert not step(1.0, 1.0)
    assert all(float(parts["step"]) == 1 + (not is_first) for parts in optimizer.state_dict()["state"].values())
    assert not torch.equal(weights["weight"], model.weight)


# Micro-batches


@pytest.mark.parametrize("system", ["mae_lm", "decoder_causal_cross"])
@pytest.mark.parametrize("micro_rows", [1, 3, 5, 13])
def test_any_split_gives_the_gradient_of_the_whole_batch(system: str, micro_rows: int, data: Path) -> None:
    """13 rows as 3 + 3 + 3 + 3 + 1 and so on: the mean of means would weigh the last row three times."""
    run = without_dropout(tiny_run(system, batch_rows=13, micro_rows=micro_rows))
    parts = assembled(run, data)
    whole = parts.batches.batch_at(2)
    expected = parts.model(whole).mean()
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in parts.model.named_parameters()}  # type: ignore
    parts.model.zero_grad()
    with Prefetch(parts.batches, 0, 13, parts.micro_rows, ALONE.device) as prefetch:
        micro_batches = prefetch.take(2)
    rest = [13 % micro_rows] if 13 % micro_rows else []
    assert [batch.rows for batch in micro_batches] == [micro_rows] * (13 // micro_rows) + rest
    assert torch.equal(torch.cat([batch.ids for batch in micro_batches]), whole.ids)
    loss = loop._accumulate(parts, micro_batches, 2, ALONE)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in parts.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6 * scale)


def test_dropout_follows_from_seed_and_batch_alone(data: Path) -> None:
    """Computing batch 2 gives the same loss whatever was drawn before, and another seed gives another."""

    def loss(seed: int, index: int = 2) -> float:
        parts = assembled(tiny_run(seed=seed, data_seed=0), data)
        parts.model.load_state_dict(weights)
        torch.rand(seed + 17)
        return float(loop._accumulate(parts, [parts.batches.batch_at(2)], index, ALONE))

    weights = assembled(tiny_run(), data).model.state_dict()
    assert loss(0) == loss(0)
    assert len({loss(0), loss(1), loss(0, index=3)}) == 3


def test_prefetch_gives_any_batch_in_any_order_and_hands_errors_on(data: Path) -> None:
    run = tiny_run()
    rows = Rows(open_store(data).train, run.shape, run.masked_tokens)
    batches = TrainingBatches(rows, run.masking, 7, seed=0)
    before = threading.active_count()
    with Prefetch(batches, 2, 7, 3, torch.device("cpu")) as prefetch:
        for index in (0, 1, 2, 9, 9, 3, 4):
            taken = prefetch.take(index)
            assert [batch.rows for batch in taken] == [3, 2]
            assert torch.equal(torch.cat([batch.ids for batch in taken]), batches.batch_at(index, 2, 7).ids)
        batches.rows = None  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            prefetch.take(20)
    assert threading.active_count() == before


@given(rows=some.integers(1, 300), most=some.integers(1, 300))
def test_micro_rows_divide_the_batch_unless_that_wastes_half(rows: int, most: int) -> None:
    found = _divisor(rows, most)
    divisors = [number for number in range(1, min(rows, most) + 1) if rows % number == 0]
    assert 1 <= found <= min(rows, most)
    assert found == divisors[-1] or 2 * divisors[-1] < min(rows, most) == found


def test_micro_rows_are_found_on_a_cpu(data: Path, tmp_path: Path) -> None:
    for batch_rows, row_tokens, found in [(64, 128, 32), (7, 16, 7), (600, 16, 200), (509, 16, 256)]:
        run = replace(tiny_run(), {"shape.row_tokens": row_tokens})
        assert find_micro_rows(Pretrainer(run), None, batch_rows, nullcontext, ALONE) == found  # type: ignore[arg-type]
    pretrain(with_training(tiny_run(steps=1), micro_rows=None), data, tmp_path / "run")
    assert lines_of(tmp_path / "run", "start")[0]["micro_rows"] == 7


def test_running_out_of_memory_says_what_to_set(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(Pretrainer, "forward", out_of_memory)
    with pytest.raises(Refusal) as refused:
        pretrain(tiny_run(validate_every=0), data, tmp_path / "run")
    assert "training.micro_rows: found too little memory for 4 rows" in str(refused.value)
    assert "--training.micro-rows 2" in str(refused.value)
    with pytest.raises(Refusal, match=r"1 row at once.*smaller recipe"):
        pretrain(tiny_run(validate_every=0, micro_rows=1), data, tmp_path / "another")


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"), rows_are_to_fit(2):
        raise RuntimeError("shapes cannot be multiplied")
    with pytest.raises(Refusal, match="micro-rows 1"), rows_are_to_fit(2):
        torch.empty(2**60)


# Validation


def test_validating_twice_gives_the_same_bits_and_leaves_no_trace(data: Path) -> None:
    parts = assembled(tiny_run(), data)
    assert parts.validation is not None
    parts.model.train()
    losses = [parts.validation.loss(parts.model, 4, nullcontext, ALONE) for _ in range(2)]
    assert losses[0] == losses[1]
    assert parts.model.training
    assert all(parameter.grad is None for parameter in parts.model.parameters())
    another = Validation(tiny_run(seed=5, batch_rows=8), open_store(data))
    assert another.loss(parts.model, 4, nullcontext, ALONE) == losses[0], "the run's seed does not move the masks"
    split = parts.validation.loss(parts.model, 3, nullcontext, ALONE)
    assert split.overall == pytest.approx(losses[0].overall, rel=1e-6)
    assert split.by_source == pytest.approx(losses[0].by_source, rel=1e-6)


@pytest.mark.parametrize("rate", [None, 0.5])
def test_loss_by_source_equals_a_slow_loop(rate: float | None, data: Path) -> None:
    run, store = tiny_run(validation_rate=rate), open_store(data)
    torch.manual_seed(0)
    model = Pretrainer(run).eval()
    validation = Validation(run, store)
    assert validation.rate == (rate or 0.3)
    masked = 8 if rate else 5
    found = validation.loss(model, 4, nullcontext, ALONE)
    losses: dict[str, list[float]] = {}
    assert len(validation) == VALID_ROWS
    for row in range(VALID_ROWS):
        batch = validation.batches.batch(row, row + 1)
        assert batch.n_masked == masked
        for place, loss in enumerate(model(batch)[0].tolist()):
            offset = row * 15 + int(batch.positions[0, batch.n_visible + place]) - 1
            assert store.valid.tokens[offset] == batch.targets[0, place]
            document = next(d for d in itertools.count() if store.valid.starts[d + 1] > offset)
            losses.setdefault(store.source_names[store.valid.sources[document]], []).append(loss)  # type: ignore[index]
    assert found.by_source == pytest.approx({name: sum(some) / len(some) for name, some in losses.items()}, rel=1e-6)
    assert sorted(found.by_source) == ["books", "news"], "no entry for a source without rows"
    every = list(itertools.chain(*losses.values()))
    assert len(every) == masked * VALID_ROWS
    assert found.overall == pytest.approx(sum(every) / len(every), rel=1e-6)


@pytest.mark.parametrize("system", ["mlm", "mae_lm", "three_ml_cross", "decoder_causal_cross"])
def test_an_untrained_model_knows_nothing(system: str, data: Path, tmp_path: Path) -> None:
    """ln T nats: the padded ids (70 of 128) take no probability."""
    outcome = pretrain(tiny_run(system, steps=1, learning_rate=1e-9), data, tmp_path / "run")
    first, last = lines_of(tmp_path / "run", "validation")
    assert first["loss"] == pytest.approx(math.log(VOCABULARY), abs=0.08)
    assert outcome.validation_loss == pytest.approx(last["loss"]) == pytest.approx(first["loss"], abs=1e-4)
    assert (first["rows"], first["rate"]) == (10, 0.3)


def test_loss_by_source_of_a_decoder_that_rewrites_is_that_of_every_token_of_the_row(data: Path) -> None:
    run, store = tiny_run("decoder_causal_cross"), open_store(data)
    model = Pretrainer(run).eval()
    validation = Validation(run, store)
    found = validation.loss(model, 4, nullcontext, ALONE)
    losses: dict[str, list[float]] = {}
    for row in range(VALID_ROWS):
        for place, loss in enumerate(model(validation.batches.batch(row, row + 1))[0].tolist()):
            document = next(d for d in itertools.count() if store.valid.starts[d + 1] > row * 15 + place)
            losses.setdefault(store.source_names[store.valid.sources[document]], []).append(loss)  # type: ignore[index]
    assert found.by_source == pytest.approx({name: sum(some) / len(some) for name, some in losses.items()}, rel=1e-6)
    every = list(itertools.chain(*losses.values()))
    assert len(every) == 15 * VALID_ROWS
    assert found.overall == pytest.approx(sum(every) / len(every), rel=1e-6)


def test_fewer_validation_rows(data: Path) -> None:
    assert len(Validation(tiny_run(validation_rows=3), open_store(data))) == 3


def test_no_validation_split_and_no_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_store(tmp_path / "data", valid_rows=0, sources=())
    assert len(open_store(data).valid.tokens) == 0
    outcome = pretrain(tiny_run(), data, tmp_path / "run")
    assert outcome.validation_loss is None
    assert lines_of(tmp_path / "run", "validation") == []
    assert f"no validation: {data} holds out 0 tokens, one row takes 15" in capsys.readouterr().err
    unnamed = write_store(tmp_path / "unnamed", sources=())
    pretrain(tiny_run(), unnamed, tmp_path / "another")
    assert {str(line["by_source"]) for line in lines_of(tmp_path / "another", "validation")} == {"{}"}
    pretrain(tiny_run(validate_every=0), unnamed, tmp_path / "never")
    assert lines_of(tmp_path / "never", "validation") == []
    assert "no validation" not in capsys.readouterr().err


@pytest.mark.parametrize("rate", [0.01, 0.99])
def test_a_validation_rate_that_leaves_nothing_is_refused(rate: float, data: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"training.validation_rate: found (0|16) masked tokens in a row of 16"):
        pretrain(tiny_run(validation_rate=rate), data, tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == []


# Precision and compiled blocks


def test_a_gpu_that_only_emulates_bf16_trains_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16 in (False, True):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, has=has_bf16: (
            has or including_emulation))  # fmt: skip
        assert (autocast("auto", torch.device("cuda")) is not nullcontext) == has_bf16


def test_bf16_on_a_cpu_trains_close_to_fp32(data: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        pretrain(without_dropout(tiny_run(precision=precision)), data, tmp_path / precision)
    exact, rounded = (lines_of(tmp_path / name, "train") for name in ("fp32", "bf16"))
    losses = [[line["loss"] for line in lines] for lines in (exact, rounded)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "bf16/step-0000006").values()} == {torch.float32}


def compiled_and_plain(data: Path, folder: Path) -> None:
    """A run compiled, one plain, one that went on plain, one that went on compiled."""
    settings = {"batch_rows": 6, "micro_rows": 3, "validate_every": 0, "decay": "constant", "warmup_share": 0.0}
    plain = without_dropout(tiny_run(**settings, learning_rate=1e-3))
    compiled = with_training(plain, compile="on")
    pretrain(compiled, data, folder / "compiled")
    pretrain(plain, data, folder / "plain")
    for first, second in ((compiled, plain), (plain, compiled)):
        out = folder / f"{first.training.compile}, then {second.training.compile}"
        pretrain(with_training(first, steps=3), data, out)
        pretrain(second, data, out, resume="always")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_blocks_give_the_same_run_and_the_same_keys(data: Path, tmp_path: Path) -> None:
    """No wrapper's name in a key, losses equal to rounding. In a process of its own: these tests check shapes as the
    compiler reads the code, and it cannot read that."""
    work = f"from test_training import *; compiled_and_plain(Path({str(data)!r}), Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", work], check=True, cwd=Path(__file__).parent)
    names = [tensors_of(tmp_path / name / "step-0000006").keys() for name in ("compiled", "plain")]
    assert names[0] == names[1]
    assert not [name for name in names[0] if "_orig_mod" in name or "module." in name]
    losses = [[line["loss"] for line in lines_of(tmp_path / name, "train")] for name in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in ("on, then off", "off, then on"):
        mixed = [line["loss"] for line in lines_of(tmp_path / name, "train")]
        assert mixed == pytest.approx(losses[1], rel=1e-5)


def test_saved_keys_carry_no_wrapper_and_reading_needs_none(data: Path, tmp_path: Path) -> None:
    step = pretrain(tiny_run(steps=1), data, tmp_path / "run").step
    assert not [name for name in tensors_of(step) if "_orig_mod" in name or "module." in name]
    pretrain(tiny_run(steps=1), data, tmp_path / "again")
    assert_same_bits(step, tmp_path / "again" / step.name)


# Long runs


def usage() -> tuple[float, int, int]:
    """Resident megabytes, open files, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6, len(os.listdir("/proc/self/fd")), threading.active_count()


def soak(run: Run, data: Path, out: Path, patch: pytest.MonkeyPatch, enough: Callable[[int], bool]) -> list:
    """Usage after each step; the run is stopped by SIGTERM when ``enough(step)``."""
    seen: list[tuple[float, int, int]] = []
    updated = loop.update

    def counted(*arguments):
        seen.append(usage())
        if enough(len(seen)):
            os.kill(os.getpid(), 15)
        return updated(*arguments)

    patch.setattr(loop, "update", counted)
    pretrain(run, data, out)
    return seen


@pytest.mark.slow
def test_memory_and_open_files_stay_flat(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps with saves and validations; ``LATEMASK_SOAK_SECONDS=3600`` makes it an hour."""
    seconds = float(os.environ.get("LATEMASK_SOAK_SECONDS", "0"))
    end = time.monotonic() + seconds
    run = tiny_run(steps=10**7, save_every=20, validate_every=20, keep=2)
    seen = soak(run, data, tmp_path / "run", monkeypatch, lambda step: step >= 300 and time.monotonic() >= end)
    warm, rest = seen[100:150], seen[150:]
    assert len(rest) >= 150
    assert max(memory for memory, _, _ in rest) < max(memory for memory, _, _ in warm) + 20
    assert max(files for _, files, _ in rest) <= max(files for _, files, _ in warm)
    assert max(threads for _, _, threads in rest) <= max(threads for _, _, threads in warm)
    assert len(checkpoint.steps(tmp_path / "run")) <= 4
    steps = [line["step"] for line in lines_of(tmp_path / "run", "train")]
    assert steps == list(range(1, len(seen) + 1))
    assert (tmp_path / "run" / "journal.jsonl").stat().st_size < 600 * len(seen)


def test_rows_of_the_epoch_are_all_used(data: Path) -> None:
    assert Rows(open_store(data).train, tiny_run().shape, tiny_run().masked_tokens).count == TRAIN_ROWS


@pytest.mark.parametrize("field", ["shape.depth", "shape.width", "shape.feedforward", "decoder.depth", "decoder.width"])
def test_a_model_beyond_the_machine_s_memory_is_refused_before_it_is_built(
    field: str, data: Path, tmp_path: Path
) -> None:
    run = replace(tiny_run(), {field: 2 * 10**14})
    with pytest.raises(Refusal, match=r"shape, decoder: found .* parameters of mae_lm_tiny, .* GB; wanted at most"):
        pretrain(run, data, tmp_path / "run")
    assert os.listdir(tmp_path) == []

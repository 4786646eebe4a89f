"""A run with CUDA graphs is the run without, to the bit: on a GPU with graphs, elsewhere with a double of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latemask.config import Run, Training, replace
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.text.store import open_store
from latemask.training import graphs, loop, parts
from latemask.training.distributed import World, pick_device
from latemask.training.graphs import MOST_TOKENS, Graphs, uses_graphs
from latemask.training.loop import pretrain
from latemask.training.optimizer import make_optimizer, update
from training_support import Gradients, assert_same_bits, lines_of, stop_in_batch, tiny_run, with_training

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LAST = "step-0000006"
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Double:
    """``torch.cuda`` as far as graphs ask for it, on a CPU: what is called while a graph is captured is not done then,
    but at each launch."""

    def __init__(self) -> None:
        self.captured: Any = None
        self.launches = 0
        self.breaks: Exception | None = None
        """What a capture ends with."""

    def deferred(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``work``, whose first argument is a model, the gradients of which have to stay where they are."""

        def called(model: nn.Module, *rest: Any) -> Tensor:
            if self.captured is None:
                return work(model, *rest)
            loss, gradients = torch.full((), torch.nan), [weight.grad for weight in model.parameters()]

            def replay() -> None:
                assert all(weight.grad is gradients[i] for i, weight in enumerate(model.parameters()))
                self.launches += 1
                loss.copy_(work(model, *rest))

            self.captured.replay = replay
            return loss

        return called

    @contextmanager
    def graph(self, graph: Any, **_: Any) -> Iterator[None]:
        self.captured = graph
        try:
            yield
            if self.breaks is not None:
                raise self.breaks
        finally:
            self.captured = None

    def put(self, patch: pytest.MonkeyPatch) -> None:
        stream = SimpleNamespace(wait_stream=lambda other: None)
        doubles: dict[str, Any] = {
            "graph": self.graph, "CUDAGraph": SimpleNamespace, "graph_pool_handle": lambda: None,
            "Stream": lambda device: stream, "current_stream": lambda device: stream,
            "stream": lambda stream: nullcontext(), "get_rng_state": lambda device: torch.get_rng_state(),
            "set_rng_state": lambda state, device: torch.set_rng_state(state),
        }  # fmt: skip
        for name, double in doubles.items():
            patch.setattr(torch.cuda, name, double)
        patch.setattr(parts, "forward_backward", self.deferred(graphs.forward_backward))
        patch.setattr(parts, "uses_graphs", lambda training, *_: training.graphs == "on")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double | None:
    """None on a GPU."""
    if torch.cuda.is_available():
        return None
    (made := Double()).put(monkeypatch)
    return made


def assert_same_run(one: Path, other: Path, *kinds: str) -> None:
    """Weights, moments, losses and gradient norms, bit for bit."""
    kinds = kinds or ("train", "validation")
    assert lines_of(one, *kinds) == lines_of(other, *kinds)
    assert_same_bits(one / LAST, other / LAST)


def both_ways_compiled(data: Path, folder: Path) -> None:
    for out, way in (("on", "on"), ("off", "off"), ("again", "off")):
        run = tiny_run("mlm", graphs=way, compile="on", batch_rows=8, validate_every=0, save_every=6)
        pretrain(run, data, folder / out)


@needs_a_gpu
def test_compiled_blocks_draw_the_same_numbers_in_a_graph(data: Path, tmp_path: Path) -> None:
    """In a process of its own: these tests check shapes as the compiler reads the code, and it cannot read that.

    First that what is compiled repeats itself without graphs, for else there is nothing that they could equal.
    """
    work = f"from test_graphs import *; both_ways_compiled(Path({str(data)!r}), Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", work], check=True, cwd=Path(__file__).parent)
    assert_same_run(tmp_path / "off", tmp_path / "again")
    assert_same_run(tmp_path / "on", tmp_path / "off")


FALLING = {"masking.later_rates": ("0.33:0.5", "0.83:0.15"), "masking.predicted_share": 0.5}


@pytest.mark.parametrize(("system", "changes"), [("mlm", {}), ("mae_lm", FALLING), ("decoder_causal_cross", {})])
def test_a_run_with_graphs_is_the_run_without(
    system: str, changes: dict, data: Path, tmp_path: Path, double: Double | None
) -> None:
    """Dropout, relative bias, batches of 4 + 3 rows, several masking rates, validation in between."""
    run = replace(tiny_run(system), changes)
    assert run.shape.dropout > 0
    for way in ("on", "off"):
        pretrain(with_training(run, graphs=way), data, tmp_path / way)
    assert_same_run(tmp_path / "on", tmp_path / "off")
    if double is not None:  # two micro-batches of each of six batches, and of the first of each rate before them
        assert double.launches == 2 * (6 + len(run.stages))


def test_a_run_goes_on_with_graphs_or_without(data: Path, tmp_path: Path, double: Double | None) -> None:
    pretrain(tiny_run(graphs="off"), data, tmp_path / "whole")
    for first, second in (("on", "off"), ("off", "on"), ("on", "on")):
        out = tmp_path / f"{first}, then {second}"
        with pytest.MonkeyPatch.context() as patch:
            stop_in_batch(patch, 4)
            assert pretrain(tiny_run(graphs=first), data, out).reason == "signal"
        pretrain(tiny_run(graphs=second), data, out, resume="always")
        assert_same_run(tmp_path / "whole", out)


def test_a_skipped_update_leaves_nothing_behind(data: Path, tmp_path: Path, double: Double | None) -> None:
    """Its gradients, which are not finite, are no longer there at the next one."""
    for way in ("on", "off"):
        with pytest.MonkeyPatch.context() as patch:
            Gradients(patch, lambda index: index == 2)
            pretrain(tiny_run(graphs=way), data, tmp_path / way)
    assert [line["batch"] for line in lines_of(tmp_path / "on", "skip")] == [2]
    assert_same_run(tmp_path / "on", tmp_path / "off", "train", "validation", "skip")


def assembled(run: Run, data: Path) -> tuple[parts.Parts, World]:
    world = World(0, 1, pick_device())
    store = open_store(data)
    torch.manual_seed(0)
    return parts.assemble(run, store, Pretrainer(store.fitted(run)), {}, None, world), world


def test_a_shape_that_comes_in_the_middle_of_an_update_changes_no_gradient(data: Path, double: Double | None) -> None:
    """Without a first round that captures all of them: 4 rows, and then 3."""
    found = []
    for way in ("on", "off"):
        made, world = assembled(tiny_run(graphs=way), data)
        batches = [made.batches.batch_at(2, start, stop).to(world.device) for start, stop in ((0, 4), (4, 7), (0, 4))]
        loss = loop._accumulate(made, batches, 2, world)
        found.append([loss, *(weight.grad for weight in made.model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# What is captured


ALONE, ON_CPU, TWO = World(0, 1, CUDA), World(0, 1, CPU), World(0, 2, CUDA)


def test_auto_takes_graphs_where_they_can_be_and_pay() -> None:
    auto = Training()
    assert auto.graphs == "auto"
    assert uses_graphs(auto, ALONE, True, MOST_TOKENS)
    recomputing = dataclasses.replace(auto, recompute=True)
    for training, world, is_compiled, tokens in (
        (auto, ALONE, True, MOST_TOKENS + 1), (auto, ALONE, False, 512), (auto, ON_CPU, True, 512),
        (auto, TWO, True, 512), (recomputing, ALONE, True, 512), (Training(graphs="off"), ALONE, True, 512),
    ):  # fmt: skip
        assert not uses_graphs(training, world, is_compiled, tokens)


def test_on_is_refused_by_name_where_it_cannot_be(data: Path, tmp_path: Path) -> None:
    on = Training(graphs="on")
    assert uses_graphs(on, ALONE, False, 10 * MOST_TOKENS)
    recomputing = dataclasses.replace(on, recompute=True)
    for training, world, found in (
        (on, ON_CPU, "on, on cpu; wanted a CUDA GPU"),
        (on, TWO, "on, with 2 processes; wanted one process"),
        (recomputing, ALONE, "on beside training.recompute; wanted one of the two"),
    ):
        with pytest.raises(Refusal, match=f"^training.graphs: found {found}"):
            uses_graphs(training, world, True, 512)
    with pytest.raises(Refusal, match=r"training\.graphs: found on beside|training\.graphs: found on, on"):
        pretrain(tiny_run(graphs="on", recompute=True), data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="breaks captures of the double")
@pytest.mark.parametrize(("error", "says"), [
    (torch.OutOfMemoryError("CUDA out of memory."), r"training\.micro_rows: found too little memory for 4 rows"),
    (RuntimeError("operation not permitted"), r"training\.graphs: .*operation not permitted.*; wanted off"),
])  # fmt: skip
def test_what_breaks_a_capture_is_told(
    error: Exception, says: str, data: Path, tmp_path: Path, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the capture then ends with another error."""
    capture = double.graph

    @contextmanager
    def ended_with_another(graph: Any, **given: Any) -> Iterator[None]:
        try:
            with capture(graph, **given):
                yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    double.breaks = error
    monkeypatch.setattr(torch.cuda, "graph", ended_with_another)
    with pytest.raises(Refusal, match=says):
        pretrain(tiny_run(graphs="on"), data, tmp_path / "run")


def test_each_shape_has_a_graph_of_its_own(data: Path, double: Double | None) -> None:
    """Also one of as many masked tokens, fewer of which are predicted."""
    made, world = assembled(tiny_run(graphs="on"), data)
    batch = made.batches.batch_at(0).to(world.device)
    captured = made.forward_backward
    assert isinstance(captured, Graphs)
    shapes = [batch, batch.slice(0, 3), dataclasses.replace(batch, n_unpredicted=1)]
    for one in [*shapes, *shapes]:
        captured(one)
    assert len(captured.captured) == 3


# What a run keeps


def test_gradients_are_zeroed_where_they_are_or_dropped() -> None:
    weights = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make_optimizer(model, Training())
        for number in (1.0, torch.nan, 2.0):
            model.zero_grad(set_to_none=not keeps)
            (model(torch.ones(3)).sum() * number).backward()
            before = [weight.grad for weight in model.parameters()]
            update(model, optimizer, 0.1, 1.0, torch.tensor(number), keeps)
            after = [weight.grad for weight in model.parameters()]
            assert after == (before if keeps else [None, None])
            assert not keeps or all(float(gradient.abs().sum()) == 0 for gradient in after)
        weights.append(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_run_from_before_there_were_graphs_can_be_read() -> None:
    plain = json.loads(tiny_run().to_json())
    assert plain["training"].pop("graphs") == "auto"
    assert Run.from_json(json.dumps(plain)) == tiny_run()

"""A sharded model is the same run: losses, weights and files are those of replicas and of one process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from latemask.config import Run, replace
from latemask.counts import memory
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Block, Door
from latemask.training import checkpoint, loop, micro, parts
from latemask.training.data_parallel import shard
from latemask.training.distributed import joined_world
from latemask.training.loop import pretrain
from training_support import (
    lines_of,
    on_ranks,
    start_ranks,
    tensors_of,
    tiny_run,
    with_training,
    without_dropout,
)

LAST = "step-0000006"


def steady(system: str = "mae_lm", **training: Any) -> Run:
    """Dropout 0, 8 rows a batch, a rate that does not depend on the number of steps; 3 rows of validation."""
    settings = {"batch_rows": 8, "decay": "constant", "warmup_share": 0.0, "validation_rows": 3}
    return without_dropout(tiny_run(system, **settings | training))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of these tests on one process, by system."""
    out = tmp_path_factory.mktemp("alone")
    for system in ("mae_lm", "three_ml_cross"):
        pretrain(steady(system), data, out / system)
    return out


def held_while_training(run: Run, data: Path, out: Path) -> tuple[int, int]:
    """Numbers of weights and of moments on this process after a run."""
    assembled: list[parts.Parts] = []
    assemble = loop.assemble
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "assemble", lambda *given: assembled.append(assemble(*given)) or assembled[-1])
        pretrain(run, data, out)
    model, optimizer = assembled[0].model, assembled[0].optimizer
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return tuple(sum(shard(tensor).numel() for tensor in tensors) for tensors in (model.parameters(), moments))  # type: ignore


def assert_same_run(out: Path, expected: Path, steps: int = 6) -> None:
    """Losses and gradient norms to 1e-6, grown by a few updates; weights as far as Adam lets them, which divides by
    gradients that are rounding alone."""
    names = {"train": ("loss", "gradient_norm", "learning_rate"), "validation": ("loss", "by_source")}
    for kind, fields in names.items():
        ours, theirs = lines_of(out, kind), lines_of(expected, kind)
        assert ours
        for one, other in zip(ours, theirs[: len(ours)], strict=True):
            for field in fields:
                assert one[field] == pytest.approx(other[field], rel=2e-5), (kind, field, one["step"])
    step = checkpoint.step_name(steps)
    ours, theirs = tensors_of(out / step), tensors_of(expected / step)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in ours.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()
    }
    for name, tensor in theirs.items():
        if name.startswith(checkpoint.OPTIMIZER):
            assert torch.allclose(ours[name], tensor, rtol=1e-3, atol=1e-5 * float(tensor.abs().max())), name
    apart = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours if "optimizer" not in name])
    assert float((apart < 1e-5).float().mean()) > 0.99
    assert float(apart.max()) < 0.1


@pytest.mark.parametrize(("system", "way", "settings"), [
    ("mae_lm", "replicate", {"micro_rows": 4}),
    ("mae_lm", "shard", {"micro_rows": 1}),
    ("three_ml_cross", "shard", {"micro_rows": 4, "recompute": True}),
], ids=str)  # fmt: skip
def test_shards_replicas_and_one_process_train_the_same_model(
    system: str, way: str, settings: dict[str, Any], data: Path, alone: Path, tmp_path: Path
) -> None:
    """Three rows of validation: with a row at once, one process makes two passes where the other has one row."""
    run = steady(system, data_parallel=way, **settings)
    held = on_ranks(2, partial(held_while_training, run, data, tmp_path / "run"))
    assert_same_run(tmp_path / "run", alone / system)
    parameters = sum(parameter.numel() for parameter in Pretrainer(run).parameters())
    assert lines_of(tmp_path / "run", "start")[0]["parameters"] == parameters
    if way == "replicate":
        assert held == [(parameters, 2 * parameters)] * 2
    else:
        assert [sum(numbers) for numbers in zip(*held, strict=True)] == [parameters, 2 * parameters]
        assert max(weights for weights, _ in held) < 0.51 * parameters


def test_four_processes_of_which_one_holds_nothing_of_a_tensor(data: Path, tmp_path: Path) -> None:
    """Inner layers 6 wide, two for each of three processes, and three rows of validation."""
    run = replace(steady(steps=3), {"shape.feedforward": 6})
    pretrain(run, data, tmp_path / "alone")
    on_ranks(4, partial(pretrain, with_training(run, data_parallel="shard"), data, tmp_path / "run"))
    assert_same_run(tmp_path / "run", tmp_path / "alone", 3)


def test_a_run_goes_on_sharded_replicated_and_alone(data: Path, alone: Path, tmp_path: Path) -> None:
    """Files know nothing of shards: saved in one way, resumed in the other, to the result of an uninterrupted run."""
    out = tmp_path / "run"
    legs = [(2, "shard", 1), (2, "replicate", 3), (2, "shard", 4), (1, "shard", 6)]
    for count, way, steps in legs:
        run = steady(data_parallel=way, steps=steps, validate_every=0)
        on_ranks(count, partial(pretrain, run, data, out, resume="if-present"))
        assert checkpoint.read_run(checkpoint.newest(out)).training.data_parallel == way
    assert [line["world"] for line in lines_of(out, "start", "resume")] == [count for count, _, _ in legs]
    assert [line["step"] for line in lines_of(out, "train")] == [1, 2, 3, 4, 5, 6]
    ours, theirs = ([line["loss"] for line in lines_of(one, "train")] for one in (out, alone / "mae_lm"))
    assert ours == pytest.approx(theirs, rel=3e-6)


def test_a_skip_on_one_process_is_a_skip_on_all(data: Path, tmp_path: Path) -> None:
    def work(out: Path) -> None:
        forward, taken, accumulate = Pretrainer.forward, SimpleNamespace(index=0, rank=0), loop._accumulate

        def accumulated(parts, micro_batches, index, world, *rest):
            taken.index, taken.last = index, world.rank == world.size - 1
            return accumulate(parts, micro_batches, index, world, *rest)

        def spoiled(self, batch):
            loss = forward(self, batch)
            return loss * float("nan") if self.training and taken.index == 2 and taken.last else loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "_accumulate", accumulated)
            patch.setattr(Pretrainer, "forward", spoiled)
            pretrain(steady(data_parallel="shard"), data, out)

    on_ranks(2, partial(work, tmp_path / "two"))
    on_ranks(1, partial(work, tmp_path / "one"))
    for out in (tmp_path / "one", tmp_path / "two"):
        assert [(line["batch"], line["step"]) for line in lines_of(out, "skip")] == [(2, 2)]
    assert_same_run(tmp_path / "two", tmp_path / "one")


class Exchanges(TorchDispatchMode):
    """Counts what processes exchange, by torch's name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.__name__.split(".")[0]] += 1
        return function(*args, **kwargs or {})


def exchanged_in_an_update(run: Run, data: Path, out: Path) -> tuple[int, int, int]:
    """How often tensors were reduced, shard by shard and whole, and gathered."""
    accumulate, exchanges = loop._accumulate, Exchanges()

    def accumulated(*given):
        with exchanges:
            return accumulate(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_accumulate", accumulated)
        pretrain(run, data, out)
    sharded, whole, gathered = (sum(count for name, count in exchanges.counts.items() if kind in name)
                                for kind in ("reduce_scatter", "allreduce", "allgather"))  # fmt: skip
    return sharded, whole, gathered


@pytest.mark.parametrize("way", ["replicate", "shard"])
def test_gradients_are_reduced_once_an_update(way: str, data: Path, tmp_path: Path) -> None:
    """Whatever the number of micro-batches. Sharded: once for each block and once for the rest; weights are gathered
    for each of these, for a block once forward and once backward, for the rest once. One sum more is that of the loss.
    """
    found = {}
    for rows in (4, 1):
        run = steady(data_parallel=way, micro_rows=rows, steps=1, validate_every=0)
        found[rows], other = on_ranks(2, partial(exchanged_in_an_update, run, data, tmp_path / str(rows)))
        assert found[rows] == other
    blocks = sum(isinstance(module, Block) for module in Pretrainer(steady()).modules())
    passes = {4: 1, 1: 4}
    if way == "replicate":
        assert found == dict.fromkeys(passes, (0, 1 + 1, 0))  # all gradients of so small a model are one bucket
    else:
        assert found == {rows: (blocks + 1, 1, count * (2 * blocks + 1)) for rows, count in passes.items()}


def test_rows_that_do_not_divide_are_refused(data: Path, tmp_path: Path) -> None:
    run = steady(data_parallel="shard", batch_rows=7)
    for process in start_ranks(2, partial(pretrain, run, data, tmp_path / "run")):
        name, message = process.error()
        assert name == "Refusal"
        assert message.startswith("training.batch_rows: found 7; wanted a multiple of 2 processes")
    assert not (tmp_path / "run").exists()
    assert pretrain(steady(data_parallel="shard", batch_rows=7, steps=1), data, tmp_path / "run").reason == "steps"


def test_float8_without_a_gpu_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"training.precision: found fp8 on (cpu|mps)"):
        pretrain(steady(precision="fp8"), data, tmp_path / "run")


def rows_with_room(rooms: tuple[int, int]) -> int | str:
    """Micro-rows of 64 where a row takes 1,000 bytes and this process has so many bytes free."""
    with joined_world() as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (rooms[world.rank], 10**9))
        patch.setattr(micro, "_step_bytes", lambda model, batches, index, rows, *rest: 1000 * rows)
        model = SimpleNamespace(run=steady(), parameters=lambda: [nn.Parameter(torch.zeros(100))])
        batches = SimpleNamespace(new_shapes_from=lambda index: [0])
        on_gpu = dataclasses.replace(world, device=torch.device("cuda", 0))
        try:
            return micro.find_micro_rows(model, batches, 64, nullcontext, on_gpu)  # type: ignore[arg-type]
        except Refusal as refusal:
            return str(refusal)


def counted_with_room(shares: tuple[float, float]) -> int | None:
    """Micro-rows of 64, by count, where this process has so many times what two micro-batches of 64 rows need."""
    run = steady()
    with joined_world() as world, pytest.MonkeyPatch.context() as patch:
        needed = 2 * memory(run, 64, cards=world.size).total / micro.MEMORY_SHARE
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (needed * shares[world.rank], 10**12))
        on_gpu = dataclasses.replace(world, device=torch.device("cuda", 0))
        assert micro.counted_micro_rows(run, 64, world) is None, "on a CPU"
        patch.setattr(micro, "is_supported", lambda *_: False)
        assert micro.counted_micro_rows(run, 64, on_gpu) is None, "without the kernels"
        patch.setattr(micro, "is_supported", lambda *_: True)
        return micro.counted_micro_rows(run, 64, on_gpu)


def test_nothing_is_measured_where_every_process_has_plenty_of_room() -> None:
    assert on_ranks(2, partial(counted_with_room, (1.01, 3.0))) == [64, 64]
    assert on_ranks(2, partial(counted_with_room, (3.0, 0.99))) == [None, None]


def test_the_process_with_the_least_room_decides(tmp_path: Path) -> None:
    """12 bytes for each of 100 numbers, 8 in 10 of what is free for the rest."""
    assert on_ranks(2, partial(rows_with_room, (30_000, 90_000))) == [16, 16]
    for refusal in on_ranks(2, partial(rows_with_room, (90_000, 1000))):
        assert str(refusal).startswith("training.micro_rows")


def compiled(data: Path, folder: Path) -> None:
    """Replicas and shards, their blocks compiled by the compiler's first half alone; prints the number of graphs."""

    def work(run: Run, out: Path) -> int:
        graphs = []

        def kept(graph: torch.fx.GraphModule, _inputs: object) -> Any:
            graphs.append(graph)
            return graph.forward

        def compile_blocks(model: nn.Module) -> None:
            for module in model.modules():
                if isinstance(module, Block | Door):
                    module.compile(dynamic=False, backend=kept)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "compile_blocks", compile_blocks)
            pretrain(run, data, out)
        return len(graphs)

    for way in ("replicate", "shard"):
        print(on_ranks(2, partial(work, steady(data_parallel=way, compile="on"), folder / way)))


@pytest.mark.slow
def test_compiled_blocks_are_sharded_as_well(data: Path, alone: Path, tmp_path: Path) -> None:
    """As many graphs as for replicas: gathering and reducing stay outside of them. In a process of its own, where
    shapes are not checked."""
    program = f"from test_sharding import *; compiled(Path({str(data)!r}), Path({str(tmp_path)!r}))"
    folder = Path(__file__).parent
    told = subprocess.run([sys.executable, "-c", program], check=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    replicated, sharded = told.stdout.splitlines()
    assert replicated == sharded != "[0, 0]"
    assert_same_run(tmp_path / "shard", alone / "mae_lm")

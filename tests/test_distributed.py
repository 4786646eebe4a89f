"""The same run on any number of processes, and no process that waits for ever."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from latemask.config import Run
from latemask.errors import Refusal
from latemask.training import checkpoint, distributed, loop, watch
from latemask.training.distributed import World, joined_world
from latemask.training.loop import Outcome, pretrain
from training_support import (
    Process,
    lines_of,
    on_ranks,
    start_ranks,
    tensors_of,
    tiny_run,
    wait_until,
    with_training,
    without_dropout,
    write_store,
)

LAST = "step-0000006"


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of these tests on one process: dropout 0, 7 rows a batch, 30 rows an epoch."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    pretrain(steady(), data, out)
    return out


def steady(**training: Any) -> Run:
    return without_dropout(tiny_run(**training))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def losses(out: Path) -> dict[str, list[float]]:
    """Of training and validation, in order; by source too."""
    valid = lines_of(out, "validation")
    return {
        "train": [line["loss"] for line in lines_of(out, "train")],
        "norm": [line["gradient_norm"] for line in lines_of(out, "train")],
        "validation": [line["loss"] for line in valid],
        "sources": [loss for line in valid for loss in line["by_source"].values()],
    }


def assert_same_losses(out: Path, alone: Path) -> None:
    """To 1e-6, grown by a few updates; nothing but rounding stands between the two."""
    ours, theirs = losses(out), losses(alone)
    for name, values in theirs.items():
        assert values, name
        assert ours[name] == pytest.approx(values, rel=2e-5 if name == "norm" else 3e-6), name
    assert ours["train"][0] == pytest.approx(theirs["train"][0], rel=1e-6)


@pytest.mark.parametrize(("count", "micro_rows"), [(1, 1), (1, 7), (2, 4), (2, 2), (3, 1), (3, 7)])
def test_losses_and_weights_do_not_depend_on_processes_and_micro_batches(
    count: int, micro_rows: int, data: Path, alone: Path, tmp_path: Path
) -> None:
    """7 rows as 7, as 3 + 4 and as 2 + 2 + 3, each in micro-batches.

    Adam divides by the size of the gradient: where a gradient is nothing but rounding, the update may be anything up to
    the learning rate (1e-2). So weights are compared by their mean: 99 of 100 agree to a thousandth of a step.
    """
    outcomes = on_ranks(count, partial(pretrain, steady(micro_rows=micro_rows), data, tmp_path / "run"))
    assert {outcome.step for outcome in outcomes} == {tmp_path / "run" / LAST}
    assert len({outcome.validation_loss for outcome in outcomes}) == 1
    assert_same_losses(tmp_path / "run", alone)
    ours, theirs = tensors_of(tmp_path / "run" / LAST), tensors_of(alone / LAST)
    assert ours.keys() == theirs.keys()
    apart = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours if "optimizer" not in name])
    assert float((apart < 1e-5).float().mean()) > 0.99
    assert float(apart.max()) < 0.1


def first_gradients(run: Run, data: Path, out: Path) -> tuple[dict[str, Tensor], list[tuple[int, Tensor]]]:
    """Of the first update on this process, and the (batch, ids) that it was computed from, over two steps."""
    gradients: dict[str, Tensor] = {}
    taken: list[tuple[int, Tensor]] = []
    accumulate, update = loop._accumulate, loop.update

    def accumulated(parts, micro_batches, index, world, *rest):
        taken.append((index, torch.cat([torch.cat([b.ids, b.positions, b.filler], 1) for b in micro_batches])))
        return accumulate(parts, micro_batches, index, world, *rest)

    def updated(model, *rest):
        if not gradients:
            gradients.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        return update(model, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_accumulate", accumulated)
        patch.setattr(loop, "update", updated)
        pretrain(run, data, out)
    return {name: gradient.numpy() for name, gradient in gradients.items()}, [(i, ids.numpy()) for i, ids in taken]  # type: ignore


@pytest.mark.parametrize("count", [2, 3])
def test_first_gradients_and_rows_are_the_same(count: int, data: Path, tmp_path: Path) -> None:
    run = steady(steps=2, validate_every=0)
    (expected, batches), *_ = on_ranks(1, partial(first_gradients, run, data, tmp_path / "alone"))
    results = on_ranks(count, partial(first_gradients, run, data, tmp_path / "run"))
    largest = max(float(abs(gradient).max()) for gradient in expected.values())
    for gradients, _ in results:
        for name, gradient in gradients.items():
            assert gradient == pytest.approx(expected[name], rel=1e-5, abs=1e-6 * largest), name
    for step, (index, ids) in enumerate(batches):
        parts = [taken[step] for _, taken in results]
        assert [number for number, _ in parts] == [index] * count
        assert torch.equal(torch.cat([torch.from_numpy(part) for _, part in parts]), torch.from_numpy(ids))
        assert {len(part) for _, part in parts} == ({3, 4} if count == 2 else {2, 3})


def test_any_rows_are_shared_whole() -> None:
    cpu = torch.device("cpu")
    for size in (1, 2, 3, 5):
        for rows in (size, 7, 8, 64):
            shares = [World(rank, size, cpu).share(rows) for rank in range(size)]
            assert [row for start, stop in shares for row in range(start, stop)] == list(range(rows))
            assert max(stop - start for start, stop in shares) - min(stop - start for start, stop in shares) <= 1


def test_fewer_rows_than_processes_are_refused(data: Path, tmp_path: Path) -> None:
    run = steady(batch_rows=2, micro_rows=1)
    for process in start_ranks(3, partial(pretrain, run, data, tmp_path / "run")):
        name, message = process.error()
        assert name == "Refusal"
        assert message.startswith("training.batch_rows: found 2; wanted a row for each of 3 processes")


def stopping(run: Run, data: Path, out: Path, at: int, who: int = 0, **arguments: Any) -> Outcome:
    """SIGTERM to process ``who`` as batch ``at`` begins."""
    accumulate = loop._accumulate

    def accumulated(parts, micro_batches, index, world, *rest):
        if index == at and world.rank == who:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate(parts, micro_batches, index, world, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_accumulate", accumulated)
        return pretrain(run, data, out, **arguments)


@pytest.mark.parametrize("counts", [(2, 1, 3), (4, 2, 1, 4)], ids=str)
def test_saved_on_some_and_resumed_on_others(counts: tuple[int, ...], data: Path, alone: Path, tmp_path: Path) -> None:
    """An update or two on each number of processes, across the epoch's end: the same rows, the same losses."""
    out = tmp_path / "run"
    for count, stop in zip(counts, (1, 3, 99) if len(counts) == 3 else (1, 2, 3, 99), strict=True):
        work = partial(stopping, steady(), data, out, stop, resume="if-present")
        outcomes = on_ranks(count, work)
        assert {outcome.reason for outcome in outcomes} == {"steps" if stop == 99 else "signal"}
        made = stop if count == 1 else stop + 1  # one process stops before its next micro-batch, several after the step
        assert {outcome.step.name for outcome in outcomes} == {LAST if stop == 99 else f"step-000000{made}"}
    assert [line["world"] for line in lines_of(out, "start", "resume")] == list(counts)
    assert_same_losses(out, alone)


def test_the_signal_of_rank_0_decides(data: Path, alone: Path, tmp_path: Path) -> None:
    """All stop at the same step, before its validation, which the resumed run makes; another process's signal alone
    changes nothing."""
    stopped = on_ranks(2, partial(stopping, steady(), data, tmp_path / "first", 2, who=0))
    assert {(outcome.reason, outcome.step.name) for outcome in stopped} == {("signal", "step-0000003")}
    assert [line["step"] for line in lines_of(tmp_path / "first", "validation")] == [0]
    on_ranks(2, partial(pretrain, None, None, tmp_path / "first", resume="always"))
    assert_same_losses(tmp_path / "first", alone)
    went_on = on_ranks(2, partial(stopping, steady(), data, tmp_path / "second", 2, who=1))
    assert {(outcome.reason, outcome.step.name) for outcome in went_on} == {("steps", LAST)}


def on_wrong_clocks(run: Run, data: Path, out: Path) -> Outcome:
    """Rank 1's clock is a year ahead."""
    read = watch.Stopwatch.seconds.fget
    assert read is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch.Stopwatch, "seconds", property(lambda clock: read(clock) + 3e7 * rank()))
        return pretrain(run, data, out)


def test_the_clock_of_rank_0_decides(data: Path, tmp_path: Path) -> None:
    run = steady(steps=10**6, max_seconds=0.5, validate_every=0, save_every=10**6)
    outcomes = on_ranks(2, partial(on_wrong_clocks, run, data, tmp_path / "run"))
    assert len({outcome.step for outcome in outcomes}) == 1
    assert {outcome.reason for outcome in outcomes} == {"seconds"}
    assert (checkpoint.step_number(outcomes[0].step) or 0) > 1


def test_all_stop_where_rank_0_sees_the_plateau(tmp_path: Path) -> None:
    data = write_store(tmp_path / "data", draw=lambda numbers, count: 9 + numbers.geometric(0.9, count))
    run = steady(steps=8, validate_every=2, learning_rate=1e-9, stops_on_plateau=True)
    outcomes = on_ranks(2, partial(pretrain, run, data, tmp_path / "run"))
    assert {(outcome.reason, outcome.step.name) for outcome in outcomes} == {("plateau", "step-0000004")}
    assert lines_of(tmp_path / "run", "end")[0]["reason"] == "plateau"


def test_a_skip_on_one_process_is_a_skip_on_all(data: Path, tmp_path: Path) -> None:
    """Only rank 1's rows have a loss that is not a number: everyone skips, and the run goes on as one."""

    def work(count: int, out: Path) -> Outcome:
        accumulate = loop._accumulate

        def accumulated(parts, micro_batches, index, world, *rest):
            bad = index == 2 and world.rank == count - 1
            batches = [spoil(batch) for batch in micro_batches] if bad else micro_batches
            return accumulate(parts, batches, index, world, *rest)

        def spoil(batch):
            nothing = torch.nn.Parameter(torch.tensor(float("nan")))
            hook = loop.Pretrainer.forward

            def forward(self, given):
                loss = hook(self, given)
                return loss * nothing.detach() if given is batch else loss

            patch.setattr(loop.Pretrainer, "forward", forward)
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "_accumulate", accumulated)
            return pretrain(steady(), data, out)

    on_ranks(2, partial(work, 2, tmp_path / "two"))
    on_ranks(1, partial(work, 1, tmp_path / "one"))
    for out in (tmp_path / "one", tmp_path / "two"):
        assert [(line["batch"], line["step"]) for line in lines_of(out, "skip")] == [(2, 2)]
    assert_same_losses(tmp_path / "two", tmp_path / "one")


class Trouble(Exception):
    """Made by a test."""


def in_trouble(run: Run, data: Path, out: Path, trouble: Callable[[], None]) -> Outcome:
    """``trouble`` comes over rank 1 while batch 2 is computed."""
    accumulate = loop._accumulate

    def accumulated(parts, micro_batches, index, world, *rest):
        if index == 2 and world.rank == 1:
            trouble()
        return accumulate(parts, micro_batches, index, world, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_accumulate", accumulated)
        patch.setattr(distributed, "TIMEOUT", timedelta(seconds=3))
        return pretrain(run, data, out)


def raising() -> None:
    raise Trouble("rank 1 has had enough")


def refusing() -> None:
    raise Refusal("train.tokens: bytes 128 to 4,224", "numbers that differ from their checksum", "what was written")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def dying() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stalling() -> None:
    time.sleep(1000)


@pytest.mark.parametrize("trouble", [raising, refusing, out_of_memory, dying, stalling])
def test_when_one_process_fails_the_others_say_so_and_end(
    trouble: Callable[[], None], data: Path, tmp_path: Path
) -> None:
    """Within seconds (a stall: within the timeout, here 3 s); what was saved stays, and the run goes on from there."""
    out, run = tmp_path / "run", steady(save_every=1)
    began = time.monotonic()
    processes = start_ranks(3, partial(in_trouble, run, data, out, trouble))
    try:
        for process in (processes[0], processes[2]):
            name, message = process.error(30)
            assert name == "Refusal"
            assert "another process gone or stalled" in message
            assert "\n" not in message
            assert not re.search(r"\.(cc|cpp|h):\d|GLHF", message), "the library's own words to its developers"
        if trouble is raising:
            assert processes[1].error() == ("Trouble", "rank 1 has had enough")
        if trouble in (refusing, out_of_memory):
            name, message = processes[1].error()
            assert name == ("Refusal" if trouble is refusing else "OutOfMemory")
            assert ("differ from their checksum" if trouble is refusing else "memory") in message
    finally:
        processes[1].kill()
    assert time.monotonic() - began < 40
    assert checkpoint.newest(out).name in ("step-0000001", "step-0000002")
    assert on_ranks(2, partial(pretrain, None, None, out, resume="always"))[1].step.name == LAST


def test_processes_come_to_their_end_every_time(data: Path, tmp_path: Path) -> None:
    """The group's threads and the interpreter must not wait for each other as a run is left: about one run in three
    did, before the group's last owner was settled."""
    run = steady(steps=1, validate_every=0)
    for number in range(5):
        on_ranks(3, partial(pretrain, run, data, tmp_path / str(number)))


def test_a_refusal_on_rank_0_ends_all(data: Path, tmp_path: Path) -> None:
    """Rank 0 alone looks into the run folder; the others wait for its word."""
    with_run = tmp_path / "run"
    holder = Process(partial(pretrain, steady(steps=10**6), data, with_run))
    try:
        wait_until(lambda: bool(checkpoint.steps(with_run)))
        first, second = start_ranks(2, partial(pretrain, steady(), data, with_run))
        assert "another process that is training in it" in first.error()[1]
        assert "another process gone or stalled" in second.error()[1]
    finally:
        holder.kill()


def exchanged() -> tuple[list[float], str, str, list[float]]:
    with joined_world() as world:
        mine = torch.tensor([1.0, 10.0]) * (world.rank + 1)
        return (
            world.decide(world.rank + 0.5, 7.0),
            world.decide_text("/data/Größe ☃" if world.leads else "mine"),
            world.decide_text("" if world.leads else "mine"),
            world.total(mine).tolist(),
        )


def test_what_processes_tell_each_other() -> None:
    assert on_ranks(3, exchanged) == [([0.5, 7.0], "/data/Größe ☃", "", [6.0, 60.0])] * 3
    assert exchanged() == ([0.5, 7.0], "/data/Größe ☃", "", [1.0, 10.0])


@pytest.mark.parametrize("micro_rows", [2, None])
def test_dropout_differs_between_processes_and_resumes_exactly(
    micro_rows: int | None, data: Path, tmp_path: Path
) -> None:
    """At dropout .1 and 2 processes throughout, which take 3 and 4 rows, 3 + resume + 3 equals 6."""
    run = tiny_run(micro_rows=micro_rows)
    on_ranks(2, partial(pretrain, run, data, tmp_path / "whole"))
    on_ranks(2, partial(stopping, run, data, tmp_path / "parts", 2))
    on_ranks(2, partial(pretrain, None, None, tmp_path / "parts", resume="always"))
    ours, theirs = tensors_of(tmp_path / "parts" / LAST), tensors_of(tmp_path / "whole" / LAST)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ends", ["finishes", "one is killed", "is told to stop"])
def test_torchrun(ends: str, data: Path, alone: Path, tmp_path: Path) -> None:
    """The command line under torchrun on two processes: finished, one killed (all end within a minute), or stopped."""
    out = tmp_path / "run"
    steps = 6 if ends == "finishes" else 100_000
    run = steady(steps=steps, save_every=3)
    pretrain(with_training(run, steps=1), data, out)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "latemask",
               "pretrain", f"--resume={out}", f"--training.steps={steps}"]  # fmt: skip
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as group:
        try:
            if ends != "finishes":
                wait_until(lambda: checkpoint.steps(out)[-1].name >= LAST, 120)
                children = subprocess.run(
                    ["pgrep", "-P", str(group.pid)], capture_output=True, text=True
                ).stdout.split()
                began = time.monotonic()
                if ends == "one is killed":
                    os.kill(int(children[-1]), signal.SIGKILL)
                else:
                    group.send_signal(signal.SIGTERM)
            _, told = group.communicate(timeout=180)
        finally:
            group.kill()
    if ends == "finishes":
        assert group.returncode == 0, told
        assert checkpoint.newest(out).name == LAST
        return
    assert group.returncode != 0
    assert time.monotonic() - began < 60
    assert checkpoint.newest(out).name >= LAST
    if ends == "one is killed":
        assert "another process gone or stalled" in told
    else:
        assert lines_of(out, "end")[-1]["reason"] == "signal"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_on_several_hosts(data: Path, alone: Path, tmp_path: Path) -> None:
    """As README has it, two processes on each of two hosts, which share a disk: here both are this machine. The run of
    one process goes on there, and ends as it would have ended alone."""
    out = tmp_path / "run"
    stopping(steady(), data, out, 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "latemask", "pretrain", f"--resume={out}"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"host-{number}.log" for number in range(2)]
    hosts = [subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment,
                              start_new_session=True) for log in logs]  # fmt: skip
    try:
        ended = [host.wait(timeout=240) for host in hosts]
    finally:
        for host in hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
    assert ended == [0, 0], [log.read_text() for log in logs]
    assert lines_of(out, "resume")[-1]["world"] == 4
    assert_same_losses(out, alone)


def test_an_environment_without_peers_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that there are two processes while the other never comes: an error within the timeout."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(Refusal, match="process 1 of 2: found another process gone or stalled"), joined_world():
        pass

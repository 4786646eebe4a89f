"""Nothing is lost to SIGKILL: a run killed at any moment and started again ends as one that was never killed.

The slow harness kills 200 runs and, where the environment variable LATEMASK_RESULTS names a folder, writes what it saw
to ``kill_pretraining.json`` there.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from latemask.config import Run
from latemask.training import checkpoint
from latemask.training.loop import Outcome, pretrain
from training_support import Process, assert_same_bits, lines_of, on_ranks, start_ranks, tiny_run

RUN = tiny_run(steps=8, log_every=3, save_every=2, validate_every=4, keep=1)
"""Dropout .1; 8 batches of 7 rows pass over the 30 rows nearly twice; steps 0, 2, 4, 6, 8 are saved. So few
teach it no more than word frequencies: one line of the journal says so."""
LAST, LINES = "step-0000008", 14


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody killed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    pretrain(RUN, data, out)
    assert len((out / "journal.jsonl").read_text().splitlines()) == LINES
    return out


def start_or_go_on(run: Run, data: Path, out: Path) -> Outcome:
    return pretrain(run, data, out, resume="if-present")


def kill_after_line(number: int, delay: float, processes: list[Process], out: Path) -> str:
    """Kill so many seconds after the journal's line ``number``; what was killed."""
    journal = out / "journal.jsonl"
    while processes[0].is_alive and (journal.read_bytes().count(b"\n") if journal.exists() else 0) < number:
        time.sleep(0.0005)
    time.sleep(delay)
    return kill(processes, out)


def kill_in_save(number: int, delay: float, processes: list[Process], out: Path) -> str:
    """Kill as the ``number``-th save of the run is under way."""
    seen: set[str] = set()
    while len(seen) < number and processes[0].is_alive:
        seen.update(path.name for path in out.glob(".step-*.partial"))
        time.sleep(0.0005)
    time.sleep(delay)
    return kill(processes, out)


def kill(processes: list[Process], out: Path) -> str:
    finished = not processes[0].is_alive
    for process in processes:
        process.kill()
    if finished:
        return "after the end"
    if list(out.glob(".step-*.partial")):
        return "while a checkpoint was written"
    if list(out.glob(".step-*.deleted")):
        return "while a checkpoint was deleted"
    return "between checkpoints" if checkpoint.steps(out) else "before the first checkpoint"


def moments(kills: int) -> list[Callable[[list[Process], Path], str]]:
    """Three kills of five spread evenly over the run's lines, two inside a save, each with its own random delay."""
    chance = random.Random(kills)
    chosen: list[Callable[[list[Process], Path], str]] = []
    for number in range(kills):
        if number % 5 in (1, 3):
            chosen.append(partial(kill_in_save, 1 + number // 2 % 5, chance.uniform(0, 0.004)))
        else:
            chosen.append(partial(kill_after_line, LINES * number // kills, chance.uniform(0, 0.05)))
    return chosen


def assert_as_if_never_killed(out: Path, whole: Path) -> None:
    assert checkpoint.newest(out).name == LAST
    assert_same_bits(out / LAST, whole / LAST)
    for kinds in (("start",), ("train", "validation", "skip")):
        assert lines_of(out, *kinds) == lines_of(whole, *kinds)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_started_again(kills: int, data: Path, whole: Path, tmp_path: Path) -> None:
    """The same command after each kill ends with the same bits in weights and optimizer, and the same journal."""
    began, met = time.monotonic(), Counter[str]()
    for number, strike in enumerate(moments(kills)):
        out = tmp_path / str(number)
        met[strike([Process(partial(start_or_go_on, RUN, data, out))], out)] += 1
        if checkpoint.steps(out):
            passed_over: list[str] = []
            checkpoint.newest(out, passed_over)
            assert passed_over == []
        assert start_or_go_on(RUN, data, out).step == out / LAST
        assert_as_if_never_killed(out, whole)
    assert met["while a checkpoint was written"] >= kills // 10
    assert met["after the end"] <= kills // 4
    if kills >= 200 and (results := os.environ.get("LATEMASK_RESULTS")):
        summary = {
            "what": "pretraining killed by SIGKILL, started again by the same call, compared with a run never killed",
            "kills": kills,
            "killed": dict(sorted(met.items())),
            "equal_bit_for_bit": kills,
            "seconds": round(time.monotonic() - began, 1),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        Path(results).mkdir(parents=True, exist_ok=True)
        (Path(results) / "kill_pretraining.json").write_text(json.dumps(summary, indent=2) + "\n")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_killed_again_and_again(seed: int, data: Path, whole: Path, tmp_path: Path) -> None:
    """One run killed until it ends by itself, its resumed parts too."""
    chance, out, met = random.Random(seed), tmp_path / "run", Counter[str]()
    for _ in range(40):
        process = Process(partial(start_or_go_on, RUN, data, out))
        met[kill_in_save(chance.randint(1, 3), chance.uniform(0, 0.05), [process], out)] += 1
        if met["after the end"]:
            break
    start_or_go_on(RUN, data, out)
    assert_as_if_never_killed(out, whole)
    assert met.total() > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_killed_at_random_moments(data: Path, tmp_path: Path) -> None:
    """Both at once; the run goes on with two, and equals two that nobody killed."""
    on_ranks(2, partial(start_or_go_on, RUN, data, tmp_path / "whole"))
    for number, strike in enumerate(moments(20)):
        out = tmp_path / str(number)
        strike(start_ranks(2, partial(start_or_go_on, RUN, data, out)), out)
        on_ranks(2, partial(start_or_go_on, RUN, data, out))
        assert_as_if_never_killed(out, tmp_path / "whole")

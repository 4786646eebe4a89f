"""Commands with workers end as quietly as those without: one line at Ctrl-C, and no process and no claim is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from latemask import workers
from latemask.config import replace
from latemask.downstream.runner import STOPPED
from latemask.recipes import recipe
from trained import byte_level, write_run
from training_support import of_session, wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a task and a text whose work takes longer than any test."""
    folder = tmp_path_factory.mktemp("workers")
    narrow = {"shape.depth": 1, "shape.width": 32, "shape.heads": 2, "shape.feedforward": 64, "shape.row_tokens": 48}
    write_run(folder / "run", replace(recipe("mlm_tiny"), narrow), byte_level())
    byte_level().save(folder / "tok")
    for name in ("train", "dev"):
        rows = [{"text": f"the bird saw the {animal}", "animal": animal} for animal in ("cat", "dog") * 30]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("the bird saw the cat and the dog.\n\n" * 3_000_000)
    return folder


FINETUNE = ["finetune", "run", "--task", "own", "--data", ".", "--train", "train.jsonl", "--dev", "dev.jsonl",
            "--label", "animal", "--seeds", "4", "--epochs", "5000", "--learning-rate", "1e-3", "--batch-rows", "8",
            "--parallel", "2", "--together", "2"]  # fmt: skip
PREPARE = ["prepare", "text.txt", "--tokenizer", "tok", "--workers", "2"]


def workers_of(session: int) -> list[int]:
    """Those of them that multiprocessing spawned to work."""
    found = []
    for number in of_session(session):
        try:
            command = Path(f"/proc/{number}/cmdline").read_bytes()
        except OSError:
            continue
        found += [number] * (b"spawn_main" in command)
    return found


def start(command: list[str], folder: Path, out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "latemask", *command, "--out", str(out)], cwd=folder, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def both_are_at_it(out: Path, session: int) -> bool:
    """With two points each."""
    return len(list(out.glob("*.claim-?"))) == 4


def one_is_born(out: Path, session: int) -> bool:
    return bool(workers_of(session))


def both_are_born(out: Path, session: int) -> bool:
    return len(workers_of(session)) == 2


@pytest.mark.parametrize(("command", "moment"), [
    (FINETUNE, both_are_at_it),
    pytest.param(FINETUNE, one_is_born, marks=pytest.mark.slow),
    pytest.param(FINETUNE, both_are_born, marks=pytest.mark.slow),
    (PREPARE, one_is_born),
    pytest.param(PREPARE, both_are_born, marks=pytest.mark.slow),
])  # fmt: skip
def test_ctrl_c_is_one_line_of_the_parent(
    command: list[str], moment: Callable[[Path, int], bool], folder: Path, tmp_path: Path
) -> None:
    """As a terminal sends it, to every process at once; also while the workers import."""
    out = tmp_path / "out"
    running = start(command, folder, out)
    wait_until(lambda: moment(out, running.pid), 100)
    os.killpg(running.pid, signal.SIGINT)
    _, told = running.communicate(timeout=100)
    assert told.strip().splitlines()[-1] == "latemask: interrupted"
    assert "Traceback" not in told
    assert running.returncode == 130
    wait_until(lambda: not of_session(running.pid))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, STOPPED), (signal.SIGKILL, -signal.SIGKILL)])
def test_workers_end_with_their_parent(number: int, status: int, folder: Path, tmp_path: Path) -> None:
    """However it ends, and they give up what they were at."""
    out = tmp_path / "out"
    running = start(FINETUNE, folder, out)
    try:
        wait_until(lambda: both_are_at_it(out, running.pid), 100)
        running.send_signal(number)
        assert running.wait(30) == status
        wait_until(lambda: not of_session(running.pid))
        assert list(out.iterdir()) == []
    finally:
        for left in of_session(running.pid):
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("has_thread", [False, True])
def test_an_interrupt_is_heard_after_workers_are_started_and_not_while(has_thread: bool) -> None:
    """Another thread of the parent does not block it."""
    program = f"""
import os, signal, threading, time
from latemask.workers import deaf_to_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
if {has_thread}:
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
try:
    with deaf_to_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(50):
            time.sleep(0.01)
        print("started")
    print("lost")
except KeyboardInterrupt:
    print("heard")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["started", "heard"]


LEAVING = """
import multiprocessing, os, signal, sys, time, weakref
from latemask import workers
workers.TOLD_AGAIN_SECONDS = 0.2
workers.exit_when_told(3)
"""


def left(program: str) -> tuple[list[str], int, str]:
    """What a process printed that was told to end, its status, and its errors."""
    done = subprocess.run([sys.executable, "-c", LEAVING + program], capture_output=True, text=True, timeout=100)
    return done.stdout.split(), done.returncode, done.stderr


def test_an_exit_that_is_lost_in_a_callback_is_raised_again() -> None:
    said, status, errors = left("""
class Thing:
    pass
thing = Thing()
held = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
try:
    del thing
    print("lost", flush=True)
    while True:
        time.sleep(0.05)
finally:
    print("given-up", flush=True)
""")
    assert (said, status) == (["lost", "given-up"], 3)
    assert "SystemExit" in errors


def test_nothing_cuts_into_the_clean_up_of_an_exit() -> None:
    """Neither the alarm nor who tells it again, also inside of a generator that is closed, nor at the very end."""
    said, status, errors = left("""
import atexit, contextlib
def slow(name):
    signal.raise_signal(signal.SIGTERM)
    for _ in range(10):
        time.sleep(0.05)
    print(name, flush=True)
def lane():
    try:
        yield
    finally:
        slow("closed")
@contextlib.contextmanager
def claimed():
    try:
        yield
    finally:
        slow("given-up")
going = lane()
next(going)
with claimed():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        going.close()
""")
    assert (said, status, errors) == (["closed", "given-up"], 3, "")


def test_an_end_without_a_signal_is_as_ever() -> None:
    assert left("print('done')") == (["done"], 0, "")


def ends_late(path: str) -> None:
    def heard(*_):
        time.sleep(0.5)
        (Path(path) / "ended").touch()
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, heard)
    (Path(path) / "ready").touch()
    while True:
        time.sleep(0.05)


def test_who_ends_workers_waits_for_them(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=ends_late, args=(str(tmp_path),))
    process.start()
    wait_until(lambda: (tmp_path / "ready").exists())
    workers.end([process])
    assert (tmp_path / "ended").exists()
    assert process.exitcode == 3

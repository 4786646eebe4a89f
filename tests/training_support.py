"""What the tests of training share: a tiny prepared folder, a tiny run, and processes that can be killed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from latemask.batch import Batch
from latemask.config import Run, Specials, replace
from latemask.recipes import recipe
from latemask.text.array import VERSION
from latemask.text.store import SPLITS, SplitWriter, open_store, write_summary
from latemask.text.tokenizer import Tokenizer
from latemask.training import checkpoint, journal, loop
from samples import words_tokenizer

ROW_TOKENS, VOCABULARY = 16, 70
SPECIALS = Specials()
TRAIN_ROWS, VALID_ROWS = 30, 10
SOURCES = ("books", "news", "none of it")

fork = multiprocessing.get_context("fork")


def evenly(numbers: np.random.Generator, count: int) -> np.ndarray:
    """Ids of ordinary words, each as probable as the others."""
    return numbers.integers(max(SPECIALS.ids) + 1, VOCABULARY, count)


def write_store(folder: Path, *, train_rows: int = TRAIN_ROWS, valid_rows: int = VALID_ROWS, seed: int = 0,
                words: int = VOCABULARY - 5, sources: tuple[str, ...] = SOURCES,
                draw: Callable[[np.random.Generator, int], np.ndarray] = evenly) -> Path:  # fmt: skip
    """A prepared folder of random ids: documents of 3 to 30 tokens of the first two sources.

    ``words``: of its tokenizer; another number makes another tokenizer. ``draw``: the ids of a document.
    """
    tokenizer = Tokenizer(words_tokenizer(words))
    fingerprint = tokenizer.fingerprint
    tokenizer.save(folder)
    numbers = np.random.default_rng(seed)
    splits = {}
    for name, rows in zip(SPLITS, (train_rows, valid_rows), strict=True):
        writer = SplitWriter(folder, name, "<u2", fingerprint, SPECIALS.unk)
        total = rows * (ROW_TOKENS - 1) + min(rows, 4)
        while writer.tokens.count < total:
            length = min(int(numbers.integers(3, 31)), total - writer.tokens.count)
            ids = draw(numbers, length)
            ids[-1] = SPECIALS.eos
            writer.write(ids, np.array([length]), numbers.integers(0, 2, 1) if sources else np.zeros(1, np.int64))
        writer.close()
        splits[name] = writer.summary
    specials = {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 4}
    write_summary(folder, {"version": VERSION, "tokenizer_fingerprint": fingerprint, "vocabulary": VOCABULARY,
                           "specials": specials, "source_names": list(sources), "splits": splits})  # fmt: skip
    assert len(open_store(folder).train.tokens) == splits["train"]["tokens"]
    return folder


def tiny_run(system: str = "mae_lm", **training: Any) -> Run:
    """A recipe of two narrow blocks; 6 steps of 7 rows (micro-batches of 4 and 3) pass over the 30 rows 1.4 times."""
    settings = {"steps": 6, "batch_rows": 7, "micro_rows": 4, "learning_rate": 1e-2, "log_every": 1, "save_every": 3,
                "validate_every": 3, "keep": 0, "compile": "off"}  # fmt: skip
    run = recipe(f"{system}_tiny")
    narrow: dict[str, Any] = {"width": 32, "heads": 2, "feedforward": 48}
    shape = narrow | {"depth": 2, "row_tokens": ROW_TOKENS, "vocabulary": VOCABULARY, "specials": SPECIALS}
    fields = {f"shape.{name}": value for name, value in shape.items()}
    fields |= {f"decoder.{name}": value for name, value in narrow.items() if run.decoder is not None}
    run = replace(run, fields | {"masking.rate": 0.3})
    return with_training(run, **settings | training)


def with_training(run: Run, **training: Any) -> Run:
    return replace(run, {f"training.{name}": value for name, value in training.items()})


def without_dropout(run: Run) -> Run:
    return replace(run, {"shape.dropout": 0.0})


def tensors_of(step: Path) -> dict[str, Tensor]:
    """Every tensor of a step folder, under ``<file>:<key>``."""
    files = (checkpoint.ENCODER, checkpoint.REST, checkpoint.OPTIMIZER)
    return {f"{name}:{key}": tensor for name in files for key, tensor in load_file(step / name).items()}


def assert_same_bits(one: Path, other: Path) -> None:
    """Weights and optimizer of two step folders are equal bit for bit."""
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    apart = {name: float((ours[name] - theirs[name]).abs().max())
             for name in ours if not torch.equal(ours[name], theirs[name])}  # fmt: skip
    assert not apart, f"not the same bits, largest difference of each: {apart}"


def lines_of(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """The journal's lines of these kinds, without what a clock measured."""
    clocked = ("seconds", "tokens_per_second", "flops_per_second", "mfu", "memory_bytes")
    lines = [line for line in journal.read(out / "journal.jsonl") if line["kind"] in kinds]
    return [{name: value for name, value in line.items() if name not in clocked} for line in lines]


class Gradients:
    """Spoils gradients: ``spoil`` is told a batch index and says whether that batch's gradient becomes ``value``."""

    def __init__(self, patch: pytest.MonkeyPatch, spoil: Callable[[int], bool], value: float = float("nan")):
        self.batches: list[int] = []
        accumulate, update = loop._accumulate, loop.update

        def accumulated(parts: Any, micro_batches: list[Batch], index: int, world: Any, *rest: Any) -> Tensor:
            self.batches.append(index)
            return accumulate(parts, micro_batches, index, world, *rest)

        def updated(model: torch.nn.Module, *rest: Any) -> tuple[Tensor, Tensor]:
            if spoil(self.batches[-1]):
                last = list(model.parameters())[-1].grad
                assert last is not None
                last.view(-1)[0] = value
            return update(model, *rest)

        patch.setattr(loop, "_accumulate", accumulated)
        patch.setattr(loop, "update", updated)


def stop_in_batch(patch: pytest.MonkeyPatch, index: int) -> None:
    """SIGTERM while batch ``index`` is computed."""
    accumulate = loop._accumulate

    def accumulated(parts, micro_batches, now, world, *rest):
        if now == index:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate(parts, micro_batches, now, world, *rest)

    patch.setattr(loop, "_accumulate", accumulated)


class Process:
    """A forked process that runs ``work()``; it may be killed, and its result or traceback is fetched by ``join``."""

    def __init__(self, work: Callable[[], Any], **environment: str):
        self.mine, theirs = fork.Pipe(duplex=False)
        self.process = fork.Process(target=self._work, args=(work, environment, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @staticmethod
    def _work(work: Callable[[], Any], environment: dict[str, str], pipe: Any) -> None:
        os.environ.update(environment)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.dump_traceback_later(50)
        try:
            pipe.send((True, work()))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))

    def join(self, seconds: float = 60) -> Any:
        """What ``work`` returned. Raises ``AssertionError`` with its traceback, or where it takes longer."""
        whole, result = self.ended(seconds)
        assert whole, result[2]
        return result

    def error(self, seconds: float = 60) -> tuple[str, str]:
        """Name and message of the exception that ``work`` raised."""
        whole, result = self.ended(seconds)
        assert not whole, f"returned {result}"
        return result[:2]

    def ended(self, seconds: float) -> tuple[bool, Any]:
        try:
            assert self.mine.poll(seconds), f"still running after {seconds} s"
            return self.mine.recv()
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.join()
        self.mine.close()

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()


def start_ranks(count: int, work: Callable[[], Any]) -> list[Process]:
    """``work`` on ``count`` gloo processes, as torchrun starts them."""
    import torch._dynamo  # noqa: F401  DistributedDataParallel does, for seconds: once here, not in every process

    with ExitStack() as stack:
        free = stack.enter_context(socket.socket())
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [Process(work, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(count)]


def on_ranks(count: int, work: Callable[[], Any]) -> list[Any]:
    """What ``work`` returns on each of ``count`` processes; 1: on this one."""
    return [work()] if count == 1 else [process.join() for process in start_ranks(count, work)]


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"nothing after {seconds} s"
        time.sleep(0.005)


def of_session(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


@contextmanager
def mounted_disk(place: Path, size: str) -> Iterator[Path]:
    """A disk of its own at ``place``, of ``size`` as mount says it; where none may be mounted, the test is skipped."""
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    ).returncode:
        pytest.skip("a disk can be mounted by root only")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)

"""Blocks become ids on all cores: what a worker process does over and over, and the pool that keeps their order."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from latemask.errors import Refusal
from latemask.text.blocks import BLOCK_BYTES, Block, Reading
from latemask.text.corpus import Counts, read_block
from latemask.text.tokenizer import Tokenizer
from latemask.workers import deaf_to_interrupts, end_with_parent


@dataclass(frozen=True)
class Encoded:
    """The documents of a block."""

    tokens: np.ndarray
    """All ids one after the other, each document followed by ``</s>`` [tokens]."""
    lengths: np.ndarray
    """Ids of each document, its ``</s>`` included [documents] int64."""
    hashes: np.ndarray
    """BLAKE2b of each document's text, 16 bytes as two big-endian numbers [documents, 2] uint64."""
    source_names: list[str]
    """The sources in this block, in order of appearance."""
    sources: np.ndarray
    """Index into ``source_names`` of each document [documents] int64."""
    counts: Counts
    refusal: tuple[str, str, str, str] | None = None
    """What the block was refused for; it then holds nothing."""


class BlockEncoder:
    """Encodes blocks with one tokenizer, whose words it remembers from block to block."""

    def __init__(self, tokenizer: Tokenizer, reading: Reading):
        self.tokenizer, self.reading = tokenizer, reading

    def encode(self, block: Block) -> Encoded:
        """Read and encode ``block``; a ``Refusal`` becomes a part of the result, in its place among the others."""
        refusal = None
        try:
            documents, counts = read_block(block, self.reading)
        except Refusal as error:
            documents, counts, refusal = [], Counts(), (error.where, error.found, error.wanted, error.do)
        digests = b"".join(hashlib.blake2b(document.utf8, digest_size=16).digest() for document in documents)
        names: dict[str, int] = {}
        sources = np.array([names.setdefault(document.source, len(names)) for document in documents], np.int64)
        tokens, lengths = self.tokenizer.encode_stream([document.text for document in documents], end=True)
        hashes = np.frombuffer(digests, ">u8").reshape(-1, 2)
        return Encoded(tokens, lengths, hashes, list(names), sources, counts, refusal)


_encoder: BlockEncoder


def start_worker(tokenizer_json: str, reading: Reading) -> None:
    """Make this process ready to encode."""
    global _encoder
    end_with_parent(lambda: os._exit(1))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    import tokenizers

    _encoder = BlockEncoder(Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_json)), reading)


def encode_in_worker(block: Block) -> Encoded:
    """Encode ``block`` in this worker."""
    return _encoder.encode(block)


class Task(NamedTuple):
    """A block, the number of its file, and the bytes of text it stands for in the progress."""

    file: int
    amount: float
    block: Block


Encode = Callable[[Iterator[Task]], Iterator[tuple[Task, Encoded]]]


@contextmanager
def encoders(tokenizer: Tokenizer, reading: Reading, workers: int) -> Iterator[Encode]:
    """A function from tasks to each task and what it gave, in the order of the tasks.

    ``workers`` 1 is this process. At most 8 MB per worker are under way, or one block.
    """
    if workers == 1:
        encoder = BlockEncoder(tokenizer, reading)
        yield lambda tasks: ((task, encoder.encode(task.block)) for task in tasks)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), start_worker, (tokenizer.library.to_str(), reading)
    )

    def in_order(tasks: Iterator[Task]) -> Iterator[tuple[Task, Encoded]]:
        waiting: deque[tuple[Task, Future[Encoded]]] = deque()
        under_way = 0
        for task in tasks:
            size = len(task.block.data)
            while waiting and (len(waiting) > 4 * workers or under_way + size > 8 * workers * BLOCK_BYTES):
                done, future = waiting.popleft()
                under_way -= len(done.block.data)
                yield done, future.result()
            under_way += size
            with deaf_to_interrupts():  # it may start a worker
                waiting.append((task, pool.submit(encode_in_worker, task.block)))
        for done, future in waiting:
            yield done, future.result()

    try:
        yield in_order
    except BrokenProcessPool as error:
        raise Refusal("--workers", "a worker process that was killed", "enough memory for all of them",
                      f"Take fewer than {workers} workers, or a smaller --longest-document-mb") from error  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)

"""Files become a token store: read here, encoded on all cores, written in input order for any number of workers.

A document is held out for validation by the hash of its text, so the choice survives another order, another tokenizer
and more data.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from latemask.cards import recipe_for_here
from latemask.console import progress, say, table, warn
from latemask.errors import Refusal
from latemask.recipes import recipe
from latemask.text.blocks import BLOCK_BYTES, Reading, ReadingFlags, blocks, estimated_text_bytes
from latemask.text.corpus import Counts, read_block, refuse_without_text, without_text
from latemask.text.files import File, find
from latemask.text.tokenizer import Tokenizer, load_tokenizer
from latemask.workers import exit_when_told
from latemask.writing import check_free, written_aside

if TYPE_CHECKING:
    import numpy as np

    from latemask.text.encoding import Encoded, Task
    from latemask.text.store import SplitWriter

SMALL_BYTES = 8 * BLOCK_BYTES
"""Less text than this is not worth starting worker processes."""
BYTES_PER_DUPLICATE = 120
"""Memory that removing duplicates takes per document: a 16-byte hash as a Python object in a set."""
SHOWN_ROWS = (128, 512)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(ReadingFlags):
    """Turn text into a token store that ``latemask pretrain`` reads."""

    files: Annotated[tuple[str, ...], Positional]
    """Files, folders or patterns; - for standard input."""
    tokenizer: str = "tok"
    """Folder with a tokenizer.json, or that file."""
    out: str = "data/en"
    """Folder for the store."""
    valid_share: float = 0.01
    """Share of documents held out for validation, chosen by the hash of their text."""
    valid_files: tuple[str, ...] = ()
    """Files that are the validation documents, also where the input names them; of others nothing is then held out."""
    deduplicate: bool = False
    """Keep only the first of documents with the same text; takes about 120 bytes of memory per document."""
    workers: int | None = None
    """Number of encoding processes; all cores where not given. Each takes up to about 400 MB."""
    overwrite: bool = False
    """Replace the store in the folder."""


@dataclass
class FileCounts:
    """What became of one file: ``read.documents`` = train + held_out + duplicates + read.empty + read.left_out."""

    path: str
    read: Counts = field(default_factory=Counts)
    train: int = 0
    held_out: int = 0
    duplicates: int = 0
    train_tokens: int = 0
    held_out_tokens: int = 0
    also_in_validation: int = 0
    """Training documents with the same text as one of the validation files (duplicates, where those are removed)."""


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    valid_share: float = 0.01,
    valid_files: Sequence[str | os.PathLike[str]] = (),
    deduplicate: bool = False,
    workers: int | None = None,
    reading: Reading | None = None,
    overwrite: bool = False,
) -> list[FileCounts]:
    """Encode the text of ``inputs`` into the token store ``out``; returns each file's counts, validation files first.

    Raises ``Refusal`` for bad input as ``reading.invalid`` says, for files that give no training document or
    ``valid_files`` that give none, for too little room on the disk, and for an ``out`` that exists. Nothing is then
    left behind.
    """
    from latemask.text.encoding import encoders
    from latemask.text.store import SUMMARY, write_summary

    out = Path(out)
    reading = ReadingFlags.of(reading)
    if not 0 <= valid_share < 1:
        raise Refusal("--valid-share", str(valid_share), "a share from 0 to below 1")
    workers = _cores() if workers is None else workers
    if workers < 1:
        raise Refusal("--workers", str(workers), "at least 1")
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    check_free(out, overwrite, SUMMARY)
    held_out = find(valid_files, reading) if valid_files else []
    files = _without(held_out, find(inputs, reading))
    sizes = estimated_text_bytes([*held_out, *files], reading)
    total = None if None in sizes else sum(size for size in sizes if size)
    if total is not None and total < SMALL_BYTES:
        workers = 1
    _check_room(files, reading, tokenizer, total, out)
    if deduplicate:
        say(f"Removing duplicates takes about {BYTES_PER_DUPLICATE} bytes of memory per document")

    with written_aside(out) as aside:
        writer = _Writer(aside, tokenizer, len(held_out), valid_share, deduplicate)
        counts = writer.counts = [FileCounts(file.path) for file in [*held_out, *files]]
        with (
            progress("preparing", total and total / 1e6, "MB") as advance,
            encoders(tokenizer, reading, workers) as encode,
        ):
            for task, encoded in encode(_tasks([*held_out, *files], sizes, reading)):
                writer.write(task.file, encoded)
                advance(task.amount / 1e6)
        writer.close()
        refuse_without_text({one.path: one.read for one in counts})
        if not writer.train.sources.count:
            raise Refusal(out, "no training document", "at least one",
                          "All were held out, duplicates or left out: see --valid-share and --deduplicate")  # fmt: skip
        if writer.train.tokens.count == writer.train.sources.count:
            raise Refusal(tokenizer.where, "no id for any of the text", "a tokenizer for this text")
        tokenizer.save(aside)
        options = dataclasses.asdict(reading)
        write_summary(aside, writer.summary(options | {"valid_share": valid_share, "deduplicate": deduplicate}))
    _warn(counts, writer, deduplicate)
    return counts


def _without(held_out: Sequence[File], files: Sequence[File]) -> list[File]:
    """The ``files`` to train on. Raises ``Refusal`` where all of them are for validation."""
    of_validation = {os.path.realpath(file.path) for file in held_out}
    left = [file for file in files if os.path.realpath(file.path) not in of_validation]
    if not left:
        raise Refusal("--valid-files", "all of the input", "some of it left to train on")
    if len(left) < len(files):
        say(f"{len(files) - len(left)} of {len(files)} input files are validation text and left out of training")
    return left


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_room(files: list[File], reading: Reading, tokenizer: Tokenizer, total: int | None, out: Path) -> None:
    """Say how large the store will be, judging by the first block, and refuse where the disk is too small."""
    if not total:
        return
    for file in files:
        block = next(iter(blocks(file, reading)), None)
        documents = read_block(block, reading)[0] if block else []
        texts = [document.text[: 1 << 16] for document in documents[:64]]
        if texts:
            break
    else:
        return
    ids, _ = tokenizer.encode_stream(texts)
    tokens = round(total * len(ids) / sum(len(text.encode()) for text in texts))
    needed = tokens * ids.dtype.itemsize
    home = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(home).free
    say(f"About {_shown_bytes(total)} of text, {tokens:,} tokens, {_shown_bytes(needed)} on disk "
        f"({_shown_bytes(free)} free)")  # fmt: skip
    if needed > free:
        raise Refusal(out, f"{_shown_bytes(free)} free", f"about {_shown_bytes(needed)}", "Take another --out")


def _shown_bytes(size: float) -> str:
    """A size as people say it: none that is something is shown as nothing."""
    if size >= 1e7:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size:,.0f} bytes"


def _tasks(files: list[File], sizes: list[int | None], reading: Reading) -> Iterator[Task]:
    from latemask.text.encoding import Task

    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        before, on_disk = 0, file.bytes_on_disk
        for block in blocks(file, reading):
            share = (block.position - before) / on_disk if on_disk else 0.0
            before = block.position
            yield Task(number, len(block.data) if size is None else size * share, block)


class _Writer:
    """Decides which split each document belongs to, writes it there and counts it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, valid_files: int, valid_share: float, deduplicate: bool):
        from latemask.text.store import SplitWriter, token_kind

        def split(name: Any) -> SplitWriter:
            kind = token_kind(tokenizer.vocabulary)
            return SplitWriter(folder, name, kind, tokenizer.fingerprint, tokenizer.specials.unk)

        self.folder, self.tokenizer, self.deduplicate = folder, tokenizer, deduplicate
        self.train, self.valid = split("train"), split("valid")
        self.valid_files = valid_files
        self.held_out_below = 0 if valid_files else int(valid_share * 2**64)
        self.seen: set[bytes] = set()
        self.validation: set[bytes] = set()
        self.sources: dict[str, int] = {}
        self.counts: list[FileCounts] = []

    def write(self, number: int, encoded: Encoded) -> None:
        """Write the documents of one block of file ``number``."""
        import numpy as np

        if encoded.refusal:
            raise Refusal(*encoded.refusal)
        counts = self.counts[number]
        if 0 < self.valid_files <= number and not self.validation:
            without_text({one.path: one.read for one in self.counts[: self.valid_files]}, "--valid-files")
        counts.read.add(encoded.counts)
        lengths = encoded.lengths
        fresh = self._fresh(number, encoded, counts)
        if number < self.valid_files:
            held = np.ones(len(lengths), bool)
        else:
            held = encoded.hashes[:, 0] < self.held_out_below if self.held_out_below else np.zeros(len(lengths), bool)
        sources = self._source_numbers(encoded)
        for writer, chosen in ((self.train, fresh & ~held), (self.valid, fresh & held)):
            tokens = encoded.tokens if chosen.all() else encoded.tokens[np.repeat(chosen, lengths)]
            writer.write(tokens, lengths[chosen], sources[chosen])
        counts.train += int((fresh & ~held).sum())
        counts.held_out += int((fresh & held).sum())
        counts.duplicates += int((~fresh).sum())
        counts.train_tokens += int(lengths[fresh & ~held].sum())
        counts.held_out_tokens += int(lengths[fresh & held].sum())

    def _fresh(self, number: int, encoded: Encoded, counts: FileCounts) -> np.ndarray:
        """Which documents were not seen before [documents] bool; all, unless duplicates are removed."""
        import numpy as np

        fresh = np.ones(len(encoded.lengths), bool)
        if not self.deduplicate and not self.valid_files:
            return fresh
        for index, row in enumerate(encoded.hashes):
            key = row.tobytes()
            if number < self.valid_files:
                self.validation.add(key)
            elif key in self.validation:
                counts.also_in_validation += 1
            if self.deduplicate:
                fresh[index] = key not in self.seen
                self.seen.add(key)
        return fresh

    def _source_numbers(self, encoded: Encoded) -> np.ndarray:
        import numpy as np

        from latemask.text.store import MOST_SOURCES

        numbers = [self.sources.setdefault(name, len(self.sources)) for name in encoded.source_names]
        if len(self.sources) > MOST_SOURCES:
            raise Refusal("--source-field", f"more than {MOST_SOURCES:,} different values",
                          "names of groups of documents", "Name another field, or one that is not there")  # fmt: skip
        return np.array(numbers, np.int64)[encoded.sources]

    def close(self) -> None:
        """Complete the files; sources that name nothing are dropped."""
        for writer in (self.train, self.valid):
            writer.close()
        if self.sources.keys() <= {""}:
            self.sources = {}
            for path in self.folder.glob("*.sources"):
                path.unlink()

    def summary(self, options: dict[str, Any]) -> dict[str, Any]:
        """For ``store.json``."""
        from latemask.text.array import VERSION

        return {
            "version": VERSION,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "vocabulary": self.tokenizer.vocabulary,
            "specials": {role: getattr(self.tokenizer.specials, role) for role in ("bos", "pad", "eos", "unk", "mask")},
            "splits": {"train": self.train.summary, "valid": self.valid.summary},
            "source_names": [name or "(unnamed)" for name in self.sources],
            "options": options,
            "files": [dataclasses.asdict(one) for one in self.counts],
            "latemask": importlib.metadata.version("latemask"),
        }


def _warn(counts: list[FileCounts], writer: _Writer, deduplicate: bool) -> None:
    for one in counts:
        for place in one.read.places:
            warn(f"left out: {place}")
        if one.also_in_validation:
            warn(f"{one.path}: {one.also_in_validation:,} documents are also in the validation files"
                 + ("" if deduplicate else "; --deduplicate takes them out of training"))  # fmt: skip
        if one.read.parted:
            warn(f"{one.path}: {one.read.parted:,} cuts through documents longer than --longest-document-mb")
    tokens, unknown = writer.train.tokens.count, writer.train.unknown_tokens
    if unknown > tokens / 100:
        warn(f"{unknown / tokens:.1%} of the training tokens are unknown to the tokenizer: is it one for this text?")
    if not writer.valid.sources.count:
        warn("no document is held out for validation: give --valid-files, a larger --valid-share, or smaller documents")


def _report(counts: list[FileCounts], seconds: float) -> int:
    """Print the counts; the tokens of the training text."""
    columns = ("file", "documents", "train", "held out", "duplicates", "empty", "left out", "train tokens",
               "held-out tokens", "repaired bytes", "left-out bytes")  # fmt: skip
    rows: list[list[Any]] = [
        [one.path, one.read.handed_on, one.train, one.held_out, one.duplicates, one.read.empty, one.read.left_out,
         one.train_tokens, one.held_out_tokens, one.read.repaired_bytes, one.read.left_out_bytes]
        for one in counts
    ]  # fmt: skip
    total: list[Any] = ["total", *(sum(column) for column in list(zip(*rows, strict=True))[1:])]
    megabytes = sum(one.read.text_bytes for one in counts) / 1e6
    title = f"{megabytes:,.1f} MB of text in {seconds:,.1f} s, {megabytes / seconds:,.1f} MB/s"
    table(title, columns, rows if len(rows) == 1 else [*rows, total])
    tokens = total[columns.index("train tokens")]
    lengths = (f"{tokens // (n - 1):,} rows of {n} ({tokens % (n - 1):,} tokens left over)" for n in SHOWN_ROWS)
    say(f"Training text: {tokens:,} tokens: {', '.join(lengths)}")
    return tokens


def run_prepare(options: PrepareOptions) -> None:
    """What ``latemask prepare`` does: prepare, print the counts, and the next command. SIGTERM cleans up and ends."""
    exit_when_told(128 + signal.SIGTERM)
    begun = time.monotonic()
    counts = prepare(
        options.files,
        options.tokenizer,
        options.out,
        valid_share=options.valid_share,
        valid_files=options.valid_files,
        deduplicate=options.deduplicate,
        workers=options.workers,
        reading=options,
        overwrite=options.overwrite,
    )
    tokens = _report(counts, time.monotonic() - begun)
    name, flags = recipe_for_here()
    row_tokens = recipe(name).shape.row_tokens
    if tokens < row_tokens - 1:
        say(f"Next: the same with more text, for {tokens:,} tokens fill no row of {row_tokens}; "
            f"or pretrain on shorter rows, with --shape.row-tokens up to {tokens + 1:,}")  # fmt: skip
    else:
        say(f"Next: latemask pretrain {name} --data {shlex.quote(options.out)} --out runs/{name}{flags}")

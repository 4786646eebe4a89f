"""Whatever stands in a file or on the command line: it is used, or refused in one line; never a traceback, and never a
part of an output under its final name.

Files are damaged byte by byte (flip, delete, insert, cut, repeat, splice) and, where they are JSON, value by value.
Each example is drawn from its own number: a failure names it, and it can be run alone.
"""

from __future__ import annotations

import faulthandler
import gzip
import json
import lzma
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latemask.cli import pretrain as pretrain_command
from latemask.config import replace
from latemask.downstream.blimp import read_pairs
from latemask.downstream.glue import read_task
from latemask.downstream.inputs import Inputs
from latemask.downstream.settings import Settings
from latemask.downstream.squad import make_windows, read_squad
from latemask.downstream.tasks import GLUE
from latemask.errors import Refusal
from latemask.hf.checksums import SUMS
from latemask.hf.exporting import export
from latemask.hf.loading import load_encoder, load_tokenizer_of
from latemask.recipes import recipe
from latemask.report.page import ReportOptions, run_report
from latemask.text.blocks import Reading
from latemask.text.prepare import prepare
from latemask.text.store import open_store
from latemask.text.tokenizer import load_tokenizer
from latemask.training import checkpoint, journal
from latemask.training.loop import pretrain
from latemask.writing import file_checksum, json_checksum
from trained import TEXT, byte_level, write_run
from training_support import Process, tiny_run, write_store

ODD = (None, True, -1, 0, 1, 2**63, 10**30, 0.5, -1e308, float("nan"), float("inf"), "", "x", "\ud800", "\0",
       "a" * 5000, [], [[]], {}, {"": None}, [1, "2", None])  # fmt: skip
"""Values that a field may not expect."""


def damaged(data: bytes, chance: random.Random, other: bytes) -> bytes:
    """``data`` after one to four accidents; ``other`` is what is spliced in."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        size = len(data)
        start = chance.randint(0, size)
        stop = min(size, start + chance.choice((1, 2, 8, 64, 4096)))
        some = bytes(chance.choice((0, 10, 34, 92, 125, 255, chance.randrange(256))) for _ in range(stop - start or 1))
        data = chance.choice((
            data[:start] + some + data[stop:],
            data[:start] + bytes(byte ^ 1 << chance.randrange(8) for byte in data[start:stop]) + data[stop:],
            data[:start] + data[stop:],
            data[:start] + some + data[start:],
            data[:start],
            data[:stop] + data[start:stop] * chance.choice((1, 3, 50)) + data[stop:],
            data[:start] + other[chance.randint(0, len(other)) :][:4096] + data[stop:],
        ))  # fmt: skip
    return data


def altered(value: Any, chance: random.Random) -> Any:
    """``value`` with an odd value, a missing or an unknown field somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        match chance.randrange(12):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return value | {chance.choice(("x", "__class__", "")): chance.choice(ODD)}
        return value | {name: altered(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], altered(value[place], chance), *value[place + 1 :]]
    return chance.choice(ODD)


def spoil(path: Path, chance: random.Random) -> None:
    """Damage a file: bytes, or a value of its JSON."""
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and chance.random() < 0.6:
        lines = data.splitlines() if path.suffix == ".jsonl" else [data]
        place = chance.randrange(len(lines))
        lines[place] = json.dumps(altered(json.loads(lines[place]), chance)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_bytes(damaged(data, chance, bytes(chance.randrange(256) for _ in range(64)) + data[::-1]))


@dataclass(frozen=True)
class Target:
    """Something that reads files."""

    make: Callable[[Path], Any]
    """Write a whole example into an empty folder."""
    files: str
    """Pattern of the files that are damaged."""
    use: Callable[[Path], Any]
    """Read the folder as a user would. May raise ``Refusal``."""


def text_files(folder: Path) -> None:
    texts = [f"{number} naïve café. {TEXT}" for number in range(12)]
    lines = "".join(json.dumps({"text": text, "source": "a"}) + "\n" for text in texts).encode()
    (folder / "a.txt").write_text("\r\n\r\n".join(texts), encoding="utf-8-sig")
    (folder / "b.jsonl").write_bytes(lines)
    pq.write_table(pa.table({"text": texts, "source": ["a", "b"] * 6}), folder / "c.parquet", row_group_size=5)
    (folder / "d.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode(), mtime=0))
    (folder / "e.jsonl.zst").write_bytes(pa.Codec("zstd").compress(lines, asbytes=True))
    (folder / "f.txt.xz").write_bytes(lzma.compress("\n\n".join(texts).encode()))


def preparing(folder: Path) -> None:
    """Each file alone, in the way its place in the alphabet says."""
    out = folder / "out" / "store"
    (path,) = (path for path in folder.iterdir() if path.is_file())
    chance = random.Random(path.read_bytes())
    reading = Reading(invalid=chance.choice(("refuse", "replace", "skip")), longest_document_mb=1,
                      documents=chance.choice(("blank-line", "line", "file")))  # fmt: skip
    try:
        prepare([path], byte_level(), out, workers=1, valid_share=0.2, reading=reading)
    except Refusal:
        assert not out.parent.exists() or list(out.parent.iterdir()) == []
        raise
    open_store(out).check()


def a_store(folder: Path) -> None:
    write_store(folder / "data")


def reading_store(folder: Path) -> None:
    """What can be read is what was written."""
    store, whole = open_store(folder / "data"), open_store(folder.parent / "whole" / "data")
    for ours, theirs in ((store.train, whole.train), (store.valid, whole.valid)):
        begins = np.arange(len(theirs.tokens) - 15)
        assert np.array_equal(ours.read(begins, 15), theirs.read(begins, 15))
        assert np.array_equal(ours.starts, theirs.starts)
        assert np.array_equal(ours.sources, theirs.sources)  # type: ignore[arg-type]
    assert store.summary == whole.summary


def a_run(folder: Path) -> None:
    write_store(folder / "data")
    pretrain(tiny_run(steps=2, save_every=1, validate_every=1), folder / "data", folder / "run")
    shutil.rmtree(folder / "run" / "step-0000000")


def resuming(folder: Path) -> None:
    """An older whole checkpoint is there, so that damage to the newest alone is no reason to stop."""
    step = pretrain(None, folder / "data", folder / "run", resume="always").step
    assert step.name == "step-0000002"
    assert checkpoint.fault(step) is None


def reading_step(folder: Path) -> None:
    """The newest step with checksums that agree with what it holds, as if someone had meant it so."""
    step = folder / "run" / "step-0000002"
    path = step / checkpoint.STATE
    try:
        content = json.loads(path.read_bytes())
        content["files"] = {name: file_checksum(step / name) for name in checkpoint.CHECKED}
        content.pop("checksum", None)
        path.write_text(json.dumps(content | {"checksum": json_checksum(content)}))
    except (ValueError, TypeError):
        pass
    checkpoint.read_state(step)
    load_encoder(step)
    load_tokenizer_of(step)
    checkpoint.read_pretrainer(step)
    pretrain(None, folder / "data", folder / "run", resume="always")


def reporting(folder: Path) -> None:
    journal.read(folder / "run" / "journal.jsonl")
    run_report(ReportOptions((str(folder / "run"),), out=folder / "page.html"))


def going_on(folder: Path) -> None:
    """No journal is a reason to stop, and what the run goes on with is whole."""
    pretrain(None, folder / "data", folder / "run", resume="always")
    assert journal.read(folder / "run" / "journal.jsonl")[-1]["kind"] == "end"


def an_export(folder: Path) -> None:
    shape = {"depth": 1, "width": 32, "heads": 2, "feedforward": 64, "row_tokens": 48, "positions": "absolute"}
    run = replace(recipe("mlm_tiny"), {f"shape.{name}": value for name, value in shape.items()})
    write_run(folder / "run", run, byte_level())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("latemask.hf.verification.verify", lambda *_, **__: fake_verified())
        export(folder / "run", folder / "hf")
    shutil.rmtree(folder / "run")


def an_export_without_checksums(folder: Path) -> None:
    an_export(folder)
    (folder / "hf" / SUMS).unlink()


def fake_verified() -> Any:
    from latemask.hf.verification import Verified

    return Verified("RobertaModel", "PreTrainedTokenizerFast", 0.0, True, "5")


def loading(folder: Path) -> None:
    load_encoder(folder / "hf")(torch.tensor([[0, 50, 2]]))
    load_tokenizer_of(folder / "hf").encode_batch([TEXT])


def tasks(folder: Path) -> None:
    (folder / "RTE").mkdir()
    (folder / "CoLA").mkdir()
    rows = "".join(f"{i}\tthe cat saw {i}\tthe dog\t{'entailment' if i % 2 else 'not_entailment'}\n" for i in range(9))
    for name in ("train", "dev"):
        (folder / "RTE" / f"{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + rows)
        (folder / "CoLA" / f"{name}.tsv").write_text("".join(f"s\t{i % 2}\t*\tthe cat {i}\n" for i in range(9)))


def reading_tasks(folder: Path) -> None:
    for name in ("rte", "cola"):
        read_task(GLUE[name], folder)


def questions(folder: Path) -> None:
    context = "the cat saw the dog and the bird"
    qas = [{"id": str(i), "question": "who?", "is_impossible": i == 2, "answers": [{"text": "cat", "answer_start": 4}]}
           for i in range(4)]  # fmt: skip
    text = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]}
    (folder / "train.json").write_text(json.dumps(text))


def reading_questions(folder: Path) -> None:
    make_windows(read_squad(folder / "train.json"), Inputs(byte_level(), 48),
                 Settings(epochs=1, learning_rate=1e-3, batch_rows=8, sequence_tokens=48, stride_tokens=8))  # fmt: skip


def minimal_pairs(folder: Path) -> None:
    rows = [{"sentence_good": "the cat saw", "sentence_bad": "the cat saws", "UID": "u", "field": "f", "pairID": str(i)}
            for i in range(5)]  # fmt: skip
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_tokenizer(folder: Path) -> None:
    byte_level().save(folder)


def tokenizing(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for ids in tokenizer.encode_batch([TEXT, "", "\0 \ufeff 東京 🙂"]):
        assert max(ids.tolist(), default=0) < tokenizer.vocabulary
        tokenizer.decode(ids)


TARGETS = {
    **{f"corpus-{kind}": Target(text_files, f"{kind}.*", preparing) for kind in "abcdef"},
    "store": Target(a_store, "data/*", reading_store),
    "newest-step": Target(a_run, "run/step-0000002/*", resuming),
    "step-with-checksums": Target(a_run, "run/step-0000002/*", reading_step),
    "journal": Target(a_run, "run/journal.jsonl", reporting),
    "journal-resumed": Target(a_run, "run/journal.jsonl", going_on),
    "export": Target(an_export, "hf/*", loading),
    "export-without-checksums": Target(an_export_without_checksums, "hf/*", loading),
    "glue": Target(tasks, "*/*.tsv", reading_tasks),
    "squad": Target(questions, "train.json", reading_questions),
    "blimp": Target(minimal_pairs, "*.jsonl", read_pairs),
    "tokenizer": Target(a_tokenizer, "tokenizer.json", tokenizing),
}
MOST_BYTES, MOST_SECONDS = 6 << 30, 60


def fuzz(target: Target, folder: Path, numbers: range) -> dict[str, int]:
    """Damage and use; how many were used and refused. Raises what a user would see as a traceback."""
    faulthandler.cancel_dump_traceback_later()  # a thousand take longer, and a dump may crash what it looks at
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    met = {"used": 0, "refused": 0}
    for number in numbers:
        chance = random.Random(number)
        example = folder / str(number)
        shutil.copytree(folder / "whole", example)
        path = chance.choice(sorted(filter(Path.is_file, example.glob(target.files))))
        spoil(path, chance)
        if target.make is text_files:
            for other in example.glob("*"):
                if other != path:
                    other.unlink()
        began, told = time.monotonic(), ""
        try:
            target.use(example)
            met["used"] += 1
        except Refusal as refusal:
            met["refused"] += 1
            told = str(refusal)
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            raise AssertionError(f"example {number} ({path.name}): {type(error).__name__}: {error}") from error
        assert "\n" not in told, f"example {number} ({path.name}): {told}"
        assert time.monotonic() - began < MOST_SECONDS, f"example {number} ({path.name})"
        shutil.rmtree(example)
    return met


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_used_or_refused(name: str, count: int, tmp_path: Path) -> None:
    target = TARGETS[name]
    (tmp_path / "whole").mkdir()
    target.make(tmp_path / "whole")
    met = Process(lambda: fuzz(target, tmp_path, range(count))).join(7000)
    assert sum(met.values()) == count
    if name in ("newest-step", "journal-resumed"):
        assert met["used"] == count
    elif count > 100:
        assert met["refused"] > 0


FLAGS = ["--training.steps", "--training.learning-rate", "--masking.rate", "--masking.joins", "--shape.depth",
         "--shape.width", "--training.max-tokens", "--training.micro-rows", "--training.precision", "--data", "--out",
         "--resume", "--overwrite", "--tracker", "--shape.positions", "--masking.filler", "--help", "--training.seed",
         "--shape.row-tokens", "--", "-", "--=", "--training", "--x=1"]  # fmt: skip
VALUES = ["d", "o", "1", "0", "-1", "1e400", "nan", "0x10", "None", "True", "0:0:1", "12:.5:.1", "1,2", "absolute", "="]
WORDS = st.one_of(
    st.sampled_from(FLAGS + VALUES),
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.tuples(st.sampled_from(FLAGS), st.sampled_from(VALUES) | st.text(max_size=4)).map("=".join),
)


def assert_parsed_or_refused(arguments: list[str]) -> None:
    status = None
    try:
        pretrain_command.read(arguments)
    except Refusal:
        status = 2
    except SystemExit as stop:
        status = stop.code
    assert status in (0, 2, None)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=6), name=st.sampled_from(["mae_lm_tiny", "mlm_tiny", "three_ml_base"]))
def test_command_lines_are_read_or_refused(words: list[str], name: str, capsys: Any) -> None:
    assert_parsed_or_refused([name, *words])


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=8), name=st.sampled_from(["mae_lm_tiny", "mlm_tiny", "delta_tiny"]))
def test_many_command_lines_are_read_or_refused(words: list[str], name: str, capsys: Any) -> None:
    assert_parsed_or_refused([name, *words])


def bounded_prepare(path: Path, out: Path, **reading: Any) -> tuple[int, int]:
    """In 4 GB of address space: documents and tokens."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    (counts,) = prepare([path], byte_level(), out, valid_share=0, workers=1, reading=Reading(**reading))
    return counts.read.documents, counts.train_tokens


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fill", [b"\0", b"a", b" ", b"\n", b"a\n"], ids=repr)
def test_a_gzip_bomb(fill: bytes, tmp_path: Path) -> None:
    """1 GB of one byte in 1 MB: as bounded as 1 GB of text."""
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(1024 if len(fill) == 1 else 20):
            file.write(fill * (1 << 20) if len(fill) == 1 else fill * (1 << 19))
    process = Process(lambda: bounded_prepare(path, tmp_path / "out", documents="line", longest_document_mb=4))
    if fill in (b"\0", b" ", b"\n"):
        assert process.error(900)[0] == "Refusal"
        assert [item.name for item in tmp_path.iterdir()] == [path.name]
    else:
        assert process.join(900)[1] > 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_million_documents_of_one_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\n" * 10_000_000)
    process = Process(lambda: bounded_prepare(tmp_path / "a.txt", tmp_path / "out", documents="line"))
    assert process.join(900) == (10_000_000, 20_000_000)

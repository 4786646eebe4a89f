"""Text to token store: nothing lost, the same for any number of workers, and no output where something is wrong."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latemask.cards import recipe_for_here
from latemask.errors import Refusal
from latemask.text import blocks as blocks_module
from latemask.text import prepare as prepare_module
from latemask.text.blocks import Reading
from latemask.text.prepare import FileCounts, PrepareOptions, prepare, run_prepare
from latemask.text.store import open_store
from latemask.text.tokenizer import Tokenizer, train_tokenizer
from training_support import of_session, wait_until


@pytest.fixture(scope="module")
def paragraphs() -> list[str]:
    from pydoc_data.topics import topics

    texts = [part.strip("\n") for topic in topics.values() for part in topic.split("\n\n")]
    return list(dict.fromkeys(text for text in texts if text.strip() and "\n \n" not in text))


@pytest.fixture(scope="module")
def tokenizer(paragraphs, tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "prose.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return train_tokenizer([path], 1000)


def write_lines(path: Path, texts: list[str], **fields: list[str]) -> Path:
    rows = [{"text": text} | {name: values[i] for name, values in fields.items()} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents_of(split) -> list[list[int]]:
    return [split.tokens[start:stop].tolist() for start, stop in zip(split.starts[:-1], split.starts[1:], strict=True)]


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """By the library alone, told in its own way to take special tokens for text."""
    library = tokenizers.Tokenizer.from_str(tokenizer.library.to_str())
    library.encode_special_tokens = True
    return [
        [*encoding.ids, tokenizer.specials.eos] for encoding in library.encode_batch(texts, add_special_tokens=False)
    ]


def held_out(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest()[:8], "big") < share * 2**64


def check_sums(counts: list[FileCounts], folder: Path) -> None:
    store = open_store(folder)
    for one in counts:
        assert one.read.documents == one.train + one.held_out + one.duplicates + one.read.empty + one.read.left_out
    assert sum(one.train_tokens for one in counts) == len(store.train.tokens)
    assert sum(one.held_out_tokens for one in counts) == len(store.valid.tokens)
    assert sum(one.train for one in counts) == len(store.train.starts) - 1
    assert sum(one.held_out for one in counts) == len(store.valid.starts) - 1


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\0\ufeff"), max_size=40)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT.filter(lambda text: text and not text.isspace()), min_size=1))
def test_tokens_in_are_tokens_out(tokenizer, tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("texts")
    prepare([write_lines(folder / "a.jsonl", texts)], tokenizer, folder / "out", valid_share=0)
    store = open_store(folder / "out")
    assert documents_of(store.train) == encoded(tokenizer, texts)
    assert len(store.valid.tokens) == 0
    assert store.tokenizer_fingerprint == tokenizer.fingerprint
    assert store.vocabulary == tokenizer.vocabulary


def test_the_same_store_for_any_number_of_workers(tokenizer, paragraphs, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 1 << 14)
    write_lines(tmp_path / "a.jsonl", paragraphs[::2], source=[f"source {i % 3}" for i in range(len(paragraphs[::2]))])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(paragraphs[1::2]).encode()))
    made = []
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        inputs = [tmp_path / "b.txt.gz", tmp_path / "a.jsonl"]
        counts = prepare(inputs, tokenizer, out, valid_share=0.1, workers=workers, deduplicate=True)
        check_sums(counts, out)
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert made[0] == made[1] == made[2]
    store = open_store(out)
    order = [*paragraphs[1::2], *paragraphs[::2]]
    train = [text for text in order if not held_out(text, 0.1)]
    assert documents_of(store.train) == encoded(tokenizer, train)
    assert documents_of(store.valid) == encoded(tokenizer, [text for text in order if held_out(text, 0.1)])
    assert 0.05 < len(store.valid.starts) / len(order) < 0.15
    assert store.source_names == ("(unnamed)", "source 0", "source 1", "source 2")
    names = {text: f"source {i % 3}" for i, text in enumerate(paragraphs[::2])}
    assert [store.source_names[i] for i in store.train.sources] == [names.get(text, "(unnamed)") for text in train]


def test_the_split_does_not_depend_on_order_or_tokenizer(tokenizer, paragraphs, tmp_path):
    shuffled = random.Random(0).sample(paragraphs, len(paragraphs))
    other = train_tokenizer([write_lines(tmp_path / "t.jsonl", paragraphs[:300])], 400)
    prepare([write_lines(tmp_path / "a.jsonl", paragraphs)], tokenizer, tmp_path / "a", valid_share=0.05)
    prepare([write_lines(tmp_path / "b.jsonl", shuffled)], other, tmp_path / "b", valid_share=0.05)
    valid = [open_store(tmp_path / name).valid for name in "ab"]
    held = [text for text in paragraphs if held_out(text, 0.05)]
    assert sorted(documents_of(valid[0])) == sorted(encoded(tokenizer, held))
    assert sorted(documents_of(valid[1])) == sorted(encoded(other, held))


def test_literals_are_text(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["[MASK] </s> <pad> <mask> <s> <unk>", "plain"])
    prepare([path], tokenizer, tmp_path / "out", valid_share=0)
    store = open_store(tmp_path / "out")
    assert np.isin(store.train.tokens, store.specials.ids).sum() == 2
    assert np.flatnonzero(store.train.tokens == store.specials.eos).tolist() == (store.train.starts[1:] - 1).tolist()
    assert tokenizer.decode(documents_of(store.train)[0][:-1]) == "[mask] </s> <pad> <mask> <s> <unk>"


def test_duplicates_and_validation_files(tokenizer, tmp_path, capsys):
    train = write_lines(tmp_path / "train.jsonl", ["one", "two", "one", "three", "two", " "])
    valid = write_lines(tmp_path / "valid.jsonl", ["three", "four"])
    (counts,) = prepare([train], tokenizer, tmp_path / "a", valid_share=0, deduplicate=True)
    assert (counts.read.documents, counts.train, counts.duplicates, counts.read.empty) == (6, 3, 2, 1)
    assert documents_of(open_store(tmp_path / "a").train) == encoded(tokenizer, ["one", "two", "three"])
    counts = prepare([train], tokenizer, tmp_path / "b", valid_share=0.9, valid_files=[valid])
    check_sums(counts, tmp_path / "b")
    assert [one.held_out for one in counts] == [2, 0]
    assert "1 documents are also in the validation files; --deduplicate" in capsys.readouterr().err
    counts = prepare([train], tokenizer, tmp_path / "c", valid_files=[valid], deduplicate=True)
    assert [(one.train, one.held_out, one.duplicates) for one in counts] == [(0, 2, 0), (2, 0, 3)]


def test_validation_files_among_the_input_are_not_trained_on(tokenizer, tmp_path, capsys):
    (texts := tmp_path / "texts").mkdir()
    for name in ("one", "two", "three"):
        write_lines(texts / f"{name}.jsonl", [name, f"more of {name}"])
    (linked := tmp_path / "linked.jsonl").symlink_to(texts / "two.jsonl")
    apart = prepare([texts / "one.jsonl", texts / "three.jsonl"], tokenizer, tmp_path / "apart", valid_files=[linked])
    for number, inputs in enumerate(
        ([texts], [texts / "*.jsonl"], [texts / "one.jsonl", linked, texts / "three.jsonl"])
    ):
        counts = prepare(inputs, tokenizer, tmp_path / str(number), valid_files=[texts / "two.jsonl"])
        assert "1 of 3 input files are validation text and left out of training" in capsys.readouterr().out
        assert [(one.train, one.held_out) for one in counts] == [(0, 2), (2, 0), (2, 0)]
        assert documents_of(open_store(tmp_path / str(number)).valid) == documents_of(
            open_store(tmp_path / "apart").valid
        )
    assert len(apart) == 3
    with pytest.raises(Refusal, match=r"^--valid-files: found all of the input; wanted some of it left to train on"):
        prepare([texts / "two.jsonl"], tokenizer, tmp_path / "none", valid_files=[linked])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("rows", "invalid", "found"), [
    ("", "refuse", "0 documents of white space, 0 left out as invalid"),
    ('{"text": " "}\n', "refuse", "1 documents of white space, 0 left out as invalid"),
    ('{"id": 1}\n{"text": null}\n', "skip", "0 documents of white space, 2 left out as invalid, the first: .*:1: the"),
])  # fmt: skip
def test_validation_files_without_a_document_are_refused(
    tokenizer, tmp_path, monkeypatch, rows, invalid, found, workers
):
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 0)
    reading = Reading(invalid=invalid)
    train = write_lines(tmp_path / "train.jsonl", ["one", "two"])
    full = write_lines(tmp_path / "full.jsonl", ["three"])
    (empty := tmp_path / "empty.jsonl").write_text(rows)
    with pytest.raises(Refusal, match=rf"^--valid-files: found no text \({found}.*\) in {empty}; wanted some text"):
        prepare([train], tokenizer, tmp_path / "out", valid_files=[empty], reading=reading, workers=workers)
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "full.jsonl", "empty.jsonl"}
    counts = prepare([train], tokenizer, tmp_path / "out", valid_files=[empty, full], reading=reading, workers=workers)
    assert [one.held_out for one in counts] == [0, 1, 0], "one file with text is enough"


def test_bytes_per_duplicate_are_as_stated():
    code = (
        "import os, tracemalloc; tracemalloc.start(); seen = set()\n"
        "for _ in range(175_000): seen.add(os.urandom(16))\n"
        "print(tracemalloc.get_traced_memory()[0] / len(seen))"
    )
    measured = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 0.6 * prepare_module.BYTES_PER_DUPLICATE < measured < 1.1 * prepare_module.BYTES_PER_DUPLICATE


def test_command_prints_counts_that_add_up(tokenizer, paragraphs, tmp_path, capsys):
    tokenizer.save(tmp_path / "tok")
    folder = tmp_path / "my texts"
    folder.mkdir()
    write_lines(folder / "a b.jsonl", paragraphs)
    (folder / "empty.txt").write_text("")
    (folder / "bad.txt").write_bytes(b"\xef\xbb\xbffine\n\nnot \xff fine\n\nfine\0 too")
    out = tmp_path / "out"
    run_prepare(PrepareOptions(files=(str(folder),), tokenizer=str(tmp_path / "tok"), out=str(out), invalid="skip"))
    printed = capsys.readouterr()
    store = open_store(out)
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.out.splitlines()]
    (head,) = (row for row in rows if row[0] == "file")
    table = {row[0]: dict(zip(head[1:], (int(cell.replace(",", "")) for cell in row[1:]), strict=True))
             for row in rows if len(row) == len(head) and row != head}  # fmt: skip
    assert len(table) == 4
    for row in table.values():
        parts = ("train", "held out", "duplicates")
        assert row["documents"] == sum(row[name] for name in parts)
    assert table["total"]["documents"] == len(paragraphs) + 2
    assert table["total"]["train tokens"] == len(store.train.tokens)
    bad = table[str(folder / "bad.txt")]
    assert (bad["documents"], bad["left out"], bad["repaired bytes"], bad["left-out bytes"]) == (2, 1, 4, 10)
    assert "bad.txt:3: byte 0xff" in printed.err
    assert "empty.txt: no text" in printed.err
    assert "kB on disk" in printed.out
    name, flags = recipe_for_here()
    assert f"Next: latemask pretrain {name} --data {out} --out runs/{name}{flags}\n" in printed.out
    tokens = len(store.train.tokens)
    assert f"{tokens // 127:,} rows of 128 ({tokens % 127:,} tokens left over)" in printed.out
    summary = json.loads((out / "store.json").read_text())
    assert summary["options"]["invalid"] == "skip"
    assert summary["latemask"] == importlib.metadata.version("latemask")
    assert summary["files"][1]["read"]["left_out"] == 1


def test_disk_and_leftovers(tokenizer, paragraphs, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", paragraphs)
    prepare([path], tokenizer, tmp_path / "data" / "en")
    store = open_store(tmp_path / "data" / "en")
    tokens = len(store.train.tokens) + len(store.valid.tokens)
    documents = len(store.train.starts) + len(store.valid.starts)
    used = {item.name: item.stat().st_size for item in (tmp_path / "data" / "en").iterdir()}
    pages = [-(-size * len(part) // 4096) for split in (store.train, store.valid)
             for size, part in ((2, split.tokens), (8, split.starts))]  # fmt: skip
    assert used["train.tokens"] + used["valid.tokens"] == 2 * tokens + 256 + 4 * (pages[0] + pages[2])
    assert used["train.documents"] + used["valid.documents"] == 8 * documents + 256 + 4 * (pages[1] + pages[3])
    assert "train.sources" not in used
    assert [item.name for item in (tmp_path / "data").iterdir()] == ["en"]


BAD = {
    "empty": (b"", "a.txt: found no text"),
    "white space": (b" \n\n\t\n", "a.txt: found no text"),
    "invalid": (b"fine\n\n\xff", r"a.txt:3: found byte 0xff at byte 6, which is not UTF-8"),
    "utf-16": ("some words".encode("utf-16"), "a.txt: found UTF-16"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_input_leaves_nothing(tokenizer, tmp_path, monkeypatch, name, workers):
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 0)
    data, message = BAD[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(data)
    with pytest.raises(Refusal, match=message):
        prepare([tmp_path / "in"], tokenizer, tmp_path / "out", workers=workers)
    assert [item.name for item in tmp_path.iterdir()] == ["in"]


def test_settings_and_places_are_checked(tokenizer, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", ["one"])
    for change, message in (
        ({"valid_share": 1.0}, "--valid-share: found 1.0"),
        ({"valid_share": -0.1}, "--valid-share"),
        ({"workers": 0}, "--workers: found 0"),
    ):
        with pytest.raises(Refusal, match=message):
            prepare([path], tokenizer, tmp_path / "out", **change)
    with pytest.raises(Refusal, match="no such file"):
        prepare([tmp_path / "*.parquet"], tokenizer, tmp_path / "out")
    copied = shutil.copy(path, tmp_path / "copy.jsonl")
    with pytest.raises(Refusal, match="no training document"):
        prepare([path], tokenizer, tmp_path / "out", valid_files=[copied], deduplicate=True)
    prepare([path], tokenizer, tmp_path / "out")
    with pytest.raises(Refusal, match=r"something already there.*--overwrite"):
        prepare([path], tokenizer, tmp_path / "out")
    prepare([write_lines(tmp_path / "b.jsonl", ["two", "three"])], tokenizer, tmp_path / "out", overwrite=True)
    assert len(open_store(tmp_path / "out").train.starts) == 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(Refusal, match="found 1 bytes free"):
        prepare([path], tokenizer, tmp_path / "new")


def test_a_tokenizer_that_does_not_know_the_text_is_named(paragraphs, tmp_path, capsys):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "the": 1}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    prepare([write_lines(tmp_path / "a.jsonl", paragraphs)], Tokenizer(made), tmp_path / "out")
    assert "of the training tokens are unknown to the tokenizer" in capsys.readouterr().err
    split = open_store(tmp_path / "out").train
    assert split.unknown_tokens == (split.tokens == 0).sum() > 0.5 * len(split.tokens)


def test_corpus_of_a_few_tokens_says_so(tokenizer, tmp_path, capsys):
    tokenizer.save(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", ["x y"])
    run_prepare(PrepareOptions(files=(str(path),), tokenizer=str(tmp_path), out=str(tmp_path / "out"), valid_share=0))
    printed = capsys.readouterr()
    assert re.search(r"Training text: (\d+) tokens: 0 rows of 128 \(\1 tokens left over\)", printed.out)
    assert "no document is held out" in printed.err
    assert "latemask pretrain" not in printed.out, "it would be refused"
    assert "Next: the same with more text" in printed.out
    assert len(open_store(tmp_path / "out").train.tokens) < 127


def start(tmp_path: Path, megabytes: int, *, repeat: str) -> subprocess.Popen:
    """``prepare`` in a process of its own, on this much text."""
    code = (
        "import sys; from latemask.text.prepare import *\n"
        "if __name__ == '__main__':\n"
        "    run_prepare(PrepareOptions(files=('in.txt',), tokenizer='tok', out='out', workers=2))\n"
    )
    (tmp_path / "run.py").write_text(code)
    with open(tmp_path / "in.txt", "w") as file:
        for _ in range(megabytes * 1_000_000 // len(repeat)):
            file.write(repeat)
    return subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle_leaves_nothing_under_the_name(tokenizer, tmp_path, paragraphs, kill):
    tokenizer.save(tmp_path / "tok")
    running = start(tmp_path, 30, repeat="\n\n".join(paragraphs[:500]) + "\n\n")
    deadline = time.monotonic() + 60
    while not (aside := list(tmp_path.glob(".out.partial/train.tokens"))) or aside[0].stat().st_size < 10_000:
        assert time.monotonic() < deadline
        assert running.poll() is None, running.stderr.read().decode()
        time.sleep(0.02)
    os.kill(running.pid, kill)
    assert running.wait(30) != 0
    assert not (tmp_path / "out").exists()
    left = {".out.partial", ".out.lock"} if kill == signal.SIGKILL else set()
    assert {path.name for path in tmp_path.glob(".*")} == left
    wait_until(lambda: not of_session(running.pid), 20)  # workers end with their parent
    (tmp_path / "in.txt").write_text("\n\n".join(paragraphs[:50]))
    prepare([tmp_path / "in.txt"], tokenizer, tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_one_line_without_spaces_of_20_mb(tokenizer, tmp_path):
    (tmp_path / "in.txt").write_text("".join(random.choices("ACGT", k=20_000_000)))
    begun = time.monotonic()
    prepare([tmp_path / "in.txt"], tokenizer, tmp_path / "out", valid_share=0)
    assert time.monotonic() - begun < 200
    assert (
        tokenizer.decode(open_store(tmp_path / "out").train.tokens[:1000])
        .upper()
        .startswith((tmp_path / "in.txt").read_text()[:1000])
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", ["documents", "one line", "one JSON line"])
def test_memory_is_bounded(tmp_path, shape):
    """2 GB of documents, or one line of 1 GB: both commands, in 4 GB of address space for each process."""
    words = " ".join(
        random.Random(0).choices(
            ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "other", "animals"], k=180
        )
    )
    with open(tmp_path / "in", "w") as file:
        if shape == "documents":
            for i in range(2_000_000):
                file.write(f"{i} {words}\n\n")
        else:
            file.write('{"text": "' if shape == "one JSON line" else "")
            for i in range(1_000_000):
                file.write(f"{i} {words} ")
            file.write('"}\n{"text": "the end"}\n' if shape == "one JSON line" else "")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from latemask.text.prepare import *\n"
        "from latemask.text.tokenizer import *\n"
        "if __name__ == '__main__':\n"
        f"    how = dict(files=('in',), invalid='skip', format={'jsonl' if shape == 'one JSON line' else 'text'!r})\n"
        "    run_tokenizer(TokenizerOptions(out='tok', vocab_size=1000, **how))\n"
        "    run_prepare(PrepareOptions(tokenizer='tok', out='out', workers=2, **how))\n"
    )
    (tmp_path / "run.py").write_text(code)
    subprocess.run([sys.executable, "run.py"], cwd=tmp_path, check=True)
    store = open_store(tmp_path / "out")
    assert len(store.train.tokens) > (0 if shape == "one JSON line" else 100_000_000)


def test_a_file_name_that_is_not_utf8(tokenizer, paragraphs, tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("\n\n".join(paragraphs))
    counts = prepare([path], tokenizer, tmp_path / "out")
    assert open_store(tmp_path / "out").summary["files"][0]["path"] == counts[0].path == str(path)


def test_a_tokenizer_that_gives_no_id_is_refused(paragraphs, tmp_path):
    nothing = tokenizers.Tokenizer(tokenizers.models.BPE())
    nothing.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    with pytest.raises(Refusal, match="mine: found no id for any of the text"):
        prepare([write_lines(tmp_path / "a.jsonl", paragraphs)], Tokenizer(nothing, "mine"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_of_little_text_are_not_nothing(tmp_path, tokenizer, capsys):
    (tmp_path / "a.txt").write_text("A cat sat. " * 20)
    prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "out", valid_share=0)
    said = capsys.readouterr().out
    about, tokens, disk = re.search(r"About (\d+) bytes of text, (\d+) tokens, (\d+) bytes on disk", said).groups()
    assert int(about) == 220
    assert int(disk) == 2 * int(tokens) > 0

"""benchmarks/twice.py: texts of one passage twice and of two, which differ in nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmark_files import load
from latemask.errors import Refusal

twice = load("twice")


def texts(path: Path) -> list[list[str]]:
    return [json.loads(line)["text"].split("\n\n") for line in path.read_text().splitlines()]


def write(folder: Path, *documents: list[str], **settings: int) -> None:
    lines = (json.dumps({"text": " ".join(words)}) for words in documents)
    (folder / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
    twice.write(twice.Options((str(folder / "text.jsonl"),), folder / "out", **settings))


def test_every_passage_stands_once_first_and_once_second_beside_itself_or_beside_another(tmp_path: Path) -> None:
    long, short = [f"a{i}" for i in range(35)], [f"b{i}" for i in range(6)]
    write(tmp_path, long, short, ["c"] * 5, words=5, every=10)
    passages = {" ".join(long[start : start + 5]) for start in (0, 10, 20)} | {" ".join(short[:5])}
    repeated, apart = texts(tmp_path / "out" / "repeated.jsonl"), texts(tmp_path / "out" / "apart.jsonl")
    assert all(one == other for one, other in repeated)
    assert all(one != other for one, other in apart)
    for pairs in (repeated, apart):
        for side in (0, 1):
            assert Counter(pair[side] for pair in pairs) == Counter(passages)
    assert [pair[0] for pair in repeated] == [pair[0] for pair in apart]


def test_a_passage_alone_has_no_other(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="passages of 5 words: 1; wanted two or more"):
        write(tmp_path, ["a"] * 9, words=5, every=10)
    assert not (tmp_path / "out").exists()


def test_passages_do_not_overlap() -> None:
    with pytest.raises(Refusal, match="no more than --every"):
        twice.Options(("text.jsonl",), words=11, every=10)

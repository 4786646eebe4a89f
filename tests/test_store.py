"""The token store on disk: what is written is read, and every other file is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latemask.config import Specials
from latemask.errors import Refusal
from latemask.text.output import check_free, written_aside
from latemask.text.store import HEADER, ArrayWriter, SplitWriter, open_store, read_array, token_kind, write_summary
from latemask.text.tokenizer import Tokenizer
from samples import words_tokenizer

TOKENIZER = Tokenizer(words_tokenizer())
PRINT = TOKENIZER.fingerprint


def write(folder: Path, splits: dict[str, list[list[int]]], vocabulary: int = 300, sources: bool = False) -> Path:
    """A store of these documents, each with its end id; the source of document i is i % 3."""
    folder.mkdir(exist_ok=True)
    summary = {
        "version": 1,
        "tokenizer_fingerprint": PRINT,
        "vocabulary": vocabulary,
        "specials": {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 4},
        "source_names": ["a", "b", "c"] if sources else [],
        "splits": {},
    }
    for name, documents in splits.items():
        writer = SplitWriter(folder, name, token_kind(vocabulary), PRINT, 3)
        for first in range(0, len(documents), 2):
            some = documents[first : first + 2]
            ids = np.array([number for document in some for number in document], np.uint32)
            writer.write(ids, np.array([len(document) for document in some]), np.arange(first, first + len(some)) % 3)
        writer.close()
        summary["splits"][name] = writer.summary
        if not sources:
            (folder / f"{name}.sources").unlink()
    write_summary(folder, summary)
    TOKENIZER.save(folder)
    return folder


DOCUMENTS = st.lists(st.lists(st.integers(3, 299), max_size=5).map(lambda ids: [*ids, 2]), max_size=7)


@given(train=DOCUMENTS, valid=DOCUMENTS, sources=st.booleans(), row_tokens=st.integers(2, 9))
def test_what_is_written_is_read(tmp_path_factory, train, valid, sources, row_tokens):
    store = open_store(write(tmp_path_factory.mktemp("store"), {"train": train, "valid": valid}, sources=sources))
    assert store.specials == Specials()
    for documents, split in ((train, store.train), (valid, store.valid)):
        bounds = zip(split.starts[:-1], split.starts[1:], strict=True)
        assert [split.tokens[start:stop].tolist() for start, stop in bounds] == documents
        assert split.unknown_tokens == sum(document.count(3) for document in documents)
        assert split.rows(row_tokens) * (row_tokens - 1) + split.dropped(row_tokens) == sum(map(len, documents))
        assert 0 <= split.dropped(row_tokens) < row_tokens - 1 or row_tokens == 2
        if sources:
            assert split.sources.tolist() == [i % 3 for i in range(len(documents))]
        else:
            assert split.sources is None


def test_two_bytes_up_to_65536_ids_and_then_four(tmp_path):
    documents = [[65535, 7, 2]]
    small = open_store(write(tmp_path / "a", {"train": documents, "valid": []}, 65536))
    large = open_store(write(tmp_path / "b", {"train": [[65536, 2]], "valid": []}, 65537))
    assert (small.train.tokens.dtype, large.train.tokens.dtype) == (np.uint16, np.uint32)
    assert small.train.tokens.tolist() == documents[0]
    assert large.train.tokens.tolist() == [65536, 2]
    assert os.path.getsize(tmp_path / "a" / "train.tokens") == HEADER.size + 3 * 2
    assert not small.train.tokens.flags.writeable
    assert HEADER.size == 128


@pytest.fixture
def store(tmp_path) -> Path:
    return write(tmp_path / "store", {"train": [[5, 6, 2], [7, 2]], "valid": [[8, 2]]}, sources=True)


def test_damaged_files_are_refused_with_what_was_found(store):
    tokens = store / "train.tokens"
    whole = tokens.read_bytes()
    for data, message in (
        (whole[:-2], "found 136 bytes; wanted 138 bytes for 5 numbers"),
        (whole + b"\0\0", "found 140 bytes; wanted 138 bytes"),
        (whole[:60], "found 60 bytes that do not begin with a store's header"),
        (b"", "found 0 bytes that do not begin"),
        (b"x" * 200, "found 200 bytes that do not begin"),
        (whole[:8] + b"\x02" + whole[9:], "found store version 2; wanted version 1"),
        (whole.replace(b"<u2", b"<u4"), "found numbers of kind <u4; wanted kind <u2"),
        (whole.replace(bytes.fromhex(PRINT), bytes.fromhex("cd" * 32)), "found ids of tokenizer cdcdcdcdcdcd; wanted"),
    ):
        tokens.write_bytes(data)
        with pytest.raises(Refusal, match=f"train.tokens: {message}"):
            open_store(store)
    tokens.unlink()
    with pytest.raises(Refusal, match=r"train.tokens: found no such file"):
        open_store(store)
    tokens.write_bytes(whole)
    open_store(store)


def test_mixed_files_are_refused(store, tmp_path):
    other = write(tmp_path / "other", {"train": [[5, 2]], "valid": [[8, 2]]}, sources=True)
    for name in ("train.tokens", "train.documents", "train.sources", "store.json"):
        whole = (store / name).read_bytes()
        (store / name).write_bytes((other / name).read_bytes())
        with pytest.raises(Refusal, match=r"train\.\*: found files for .* tokens of .* documents"):
            open_store(store)
        (store / name).write_bytes(whole)
    open_store(store)


def test_summaries(store, tmp_path):
    with pytest.raises(Refusal, match=r"nowhere: found no store.json.*latemask prepare"):
        open_store(tmp_path / "nowhere")
    summary = json.loads((store / "store.json").read_text())
    for change, message in (
        ({"version": 2}, "found store version 2"),
        ({"splits": {}}, "broken summary"),
        ({"specials": {"bos": 0}}, "train|broken summary|specials"),
        ({"tokenizer_fingerprint": "cd" * 32}, f"ids of tokenizer {PRINT[:12]}; wanted ids of cdcdcdcdcdcd"),
        ({"vocabulary": 70000}, "found numbers of kind <u2; wanted kind <u4"),
    ):
        if change == {"specials": {"bos": 0}}:
            change = {"specials": {"begin": 0}}
        (store / "store.json").write_text(json.dumps(summary | change))
        with pytest.raises(Refusal, match=message):
            open_store(store)
    (store / "store.json").write_text("{")
    with pytest.raises(Refusal, match="broken summary"):
        open_store(store)


def test_an_unfinished_array_is_no_array(tmp_path):
    writer = ArrayWriter(tmp_path / "a", "<u2", PRINT)
    writer.write(np.arange(10))
    writer._file.flush()
    with pytest.raises(Refusal, match="do not begin with a store's header"):
        read_array(tmp_path / "a", "<u2", PRINT)
    writer.close()
    assert read_array(tmp_path / "a", "<u2", PRINT).tolist() == list(range(10))


def test_output_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"

    def interrupted() -> None:
        with written_aside(out) as aside:
            (aside / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "deep").iterdir()) == []
    for content in ("one", "two"):
        with written_aside(out) as aside:
            (aside / content).write_text(content)
        assert [path.name for path in out.iterdir()] == [content]
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in out.iterdir()] == ["two"]
    assert list((tmp_path / "deep").iterdir()) == [out]


def test_where_output_may_go(tmp_path):
    check_free(tmp_path / "new", False, "store.json")
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", False, "store.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(Refusal, match="something already there"):
            check_free(tmp_path / name, False, "store.json")
        with pytest.raises(Refusal, match=r"other things \(no store.json\)"):
            check_free(tmp_path / name, True, "store.json")
    (tmp_path / "full" / "store.json").write_text("{}")
    check_free(tmp_path / "full", True, "store.json")


def test_another_tokenizer_in_the_folder_is_refused(store):
    whole = (store / "tokenizer.json").read_bytes()
    Tokenizer(words_tokenizer(6)).save(store)
    with pytest.raises(Refusal, match=rf"tokenizer.json: found tokenizer .*wanted {PRINT[:12]}"):
        open_store(store)
    (store / "tokenizer.json").write_bytes(whole[:-9])
    with pytest.raises(Refusal, match=r"tokenizer\.json: found a file that tokenizers cannot read"):
        open_store(store)
    (store / "tokenizer.json").unlink()
    with pytest.raises(Refusal, match=r"found no tokenizer\.json"):
        open_store(store)
    (store / "tokenizer.json").write_bytes(whole)
    summary = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps(summary | {"specials": {}}))
    open_store(store)  # the defaults are these ids
    (store / "store.json").write_text(json.dumps(summary | {"specials": {"mask": 5}}))
    with pytest.raises(Refusal, match=r"special ids \(0, 1, 2, 3, 4\); wanted"):
        open_store(store)


@pytest.mark.parametrize("offsets", [[0, 4, 3, 5], [0, -1, 3, 5], [1, 3, 4, 5], [0, 3, 3, 5], [0, 9, 4, 5]])
def test_offsets_that_do_not_rise_are_refused(offsets, tmp_path):
    store = write(tmp_path / "store", {"train": [[5, 6, 2], [2], [2]], "valid": []})
    path = store / "train.documents"
    path.write_bytes(path.read_bytes()[: HEADER.size] + np.array(offsets, "<i8").tobytes())
    with pytest.raises(Refusal, match=r"train\.documents: found offsets that do not rise"):
        open_store(store)


def test_a_file_name_that_is_not_utf8_is_noted_and_read_back(store):
    summary = json.loads((store / "store.json").read_text())
    name = os.fsdecode(b"caf\xe9.txt")
    write_summary(store, summary | {"files": [{"path": name}]})
    assert open_store(store).summary["files"][0]["path"] == name

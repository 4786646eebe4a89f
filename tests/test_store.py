"""The token store on disk: what is written is read, and every other file is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latemask.cli.doctor import DoctorOptions, run_doctor
from latemask.config import Specials
from latemask.errors import Refusal
from latemask.text.array import HEADER, PAGE_BYTES, VERSION, ArrayFile, ArrayWriter
from latemask.text.store import SplitWriter, open_store, token_kind, write_summary
from latemask.text.tokenizer import Tokenizer
from latemask.training import checkpoint
from latemask.training.loop import pretrain
from latemask.writing import check_free, written_aside
from samples import words_tokenizer
from training_support import tiny_run, write_store

TOKENIZER = Tokenizer(words_tokenizer())
PRINT = TOKENIZER.fingerprint


def write(folder: Path, splits: dict[str, list[list[int]]], vocabulary: int = 300, sources: bool = False) -> Path:
    """A store of these documents, each with its end id; the source of document i is i % 3."""
    folder.mkdir(exist_ok=True)
    summary = {
        "version": VERSION,
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


@given(train=DOCUMENTS, valid=DOCUMENTS, sources=st.booleans())
def test_what_is_written_is_read(tmp_path_factory, train, valid, sources):
    store = open_store(write(tmp_path_factory.mktemp("store"), {"train": train, "valid": valid}, sources=sources))
    assert store.specials == Specials()
    for documents, split in ((train, store.train), (valid, store.valid)):
        bounds = zip(split.starts[:-1], split.starts[1:], strict=True)
        assert [split.tokens[start:stop].tolist() for start, stop in bounds] == documents
        assert split.unknown_tokens == sum(document.count(3) for document in documents)
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
    assert os.path.getsize(tmp_path / "a" / "train.tokens") == HEADER.size + 3 * 2 + 4
    assert not small.train.tokens.flags.writeable
    assert HEADER.size == 128


def summary_of(store: Path) -> dict:
    """What ``write_summary`` was given."""
    summary = json.loads((store / "store.json").read_text())
    del summary["checksum"]
    return summary


@pytest.fixture
def store(tmp_path) -> Path:
    return write(tmp_path / "store", {"train": [[5, 6, 2], [7, 2]], "valid": [[8, 2]]}, sources=True)


def array_of(path: Path, kind: str, fingerprint: str) -> bytes:
    writer = ArrayWriter(path, kind, fingerprint)
    writer.write(np.arange(5))
    writer.close()
    return path.read_bytes()


def test_damaged_files_are_refused_with_what_was_found(store):
    tokens = store / "train.tokens"
    whole = tokens.read_bytes()
    for data, message in (
        (whole[:-2], "found 140 bytes; wanted 142 bytes for 5 numbers"),
        (whole + b"\0\0", "found 144 bytes; wanted 142 bytes"),
        (whole[:60], "found 60 bytes that do not begin with a store's header"),
        (b"", "found 0 bytes that do not begin"),
        (b"x" * 200, "found 200 bytes that do not begin"),
        (whole[:8] + b"\x01" + whole[9:], "found store version 1; wanted version 2"),
        (whole.replace(b"<u2", b"<u4"), "found a header that differs from its checksum"),
        (array_of(store / "other", "<u4", PRINT), "found numbers of kind <u4; wanted kind <u2"),
        (array_of(store / "other", "<u2", "cd" * 32), "found ids of tokenizer cdcdcdcdcdcd; wanted"),
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
    summary = summary_of(store)
    for change, message in (
        ({"version": 3}, "found store version 3"),
        (
            {"version": 1, "files": [{"path": "my text.txt"}]},
            r"found store version 1, whose files have no checksums; .*"
            r"prepare 'my text.txt' --tokenizer \S+/store --out \S+/store --overwrite",
        ),
        ({"splits": {}}, "broken summary"),
        ({"specials": {"bos": 0}}, "train|broken summary|specials"),
        ({"tokenizer_fingerprint": "cd" * 32}, f"ids of tokenizer {PRINT[:12]}; wanted ids of cdcdcdcdcdcd"),
        ({"vocabulary": 70000}, "found numbers of kind <u2; wanted kind <u4"),
    ):
        if change == {"specials": {"bos": 0}}:
            change = {"specials": {"begin": 0}}
        write_summary(store, summary | change)
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
        ArrayFile(tmp_path / "a", "<u2", PRINT)
    writer.close()
    assert ArrayFile(tmp_path / "a", "<u2", PRINT).numbers.tolist() == list(range(10))


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
    summary = summary_of(store)
    write_summary(store, summary | {"specials": {}})
    open_store(store)  # the defaults are these ids
    write_summary(store, summary | {"specials": {"mask": 5}})
    with pytest.raises(Refusal, match=r"special ids \(0, 1, 2, 3, 4\); wanted"):
        open_store(store)


@pytest.mark.parametrize("offsets", [[0, 4, 3, 5], [0, -1, 3, 5], [1, 3, 4, 5], [0, 3, 3, 5], [0, 9, 4, 5]])
def test_offsets_that_do_not_rise_are_refused(offsets, tmp_path):
    store = write(tmp_path / "store", {"train": [[5, 6, 2], [2], [2]], "valid": []})
    path = store / "train.documents"
    writer = ArrayWriter(path, "<i8", PRINT)
    writer.write(np.array(offsets))
    writer.close()
    with pytest.raises(Refusal, match=r"train\.documents: found offsets that do not rise"):
        open_store(store)


def test_a_file_name_that_is_not_utf8_is_noted_and_read_back(store):
    summary = summary_of(store)
    name = os.fsdecode(b"caf\xe9.txt")
    write_summary(store, summary | {"files": [{"path": name}]})
    assert open_store(store).summary["files"][0]["path"] == name


def flip(path: Path, place: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@given(pieces=st.lists(st.integers(0, 5000), max_size=6), kind=st.sampled_from(["<u2", "<u4", "<i8"]))
def test_rows_are_read_as_they_were_written_across_pages(tmp_path_factory, pieces, kind):
    path = tmp_path_factory.mktemp("array") / "a"
    numbers = np.random.default_rng(0).integers(0, 1 << 15, sum(pieces)).astype(kind)
    writer = ArrayWriter(path, kind, PRINT)
    for piece in np.split(numbers, np.cumsum(pieces)[:-1]) if pieces else []:
        writer.write(piece)
    writer.close()
    file = ArrayFile(path, kind, PRINT)
    assert np.array_equal(file.numbers, numbers)
    for length in (1, 7, 511, 6000):
        if length <= len(numbers):
            begins = np.random.default_rng(1).integers(0, len(numbers) - length + 1, 5)
            begins = np.append(begins, [0, len(numbers) - length])
            assert np.array_equal(file.read(begins, length), numbers[begins[:, None] + np.arange(length)])
    assert list(file.broken(lambda _: None)) == []


def large(folder: Path) -> Path:
    """A store of some pages, the last one part full."""
    random = np.random.default_rng(0)
    documents = [[*random.integers(5, 300, 800).tolist(), 2] for _ in range(12)]
    return write(folder, {"train": documents, "valid": documents[:1]}, sources=True)


def test_no_flipped_bit_of_a_store_is_used(tmp_path):
    """Whatever file, whatever place: refused at opening, or when the row that it is in is read; other rows are read."""
    folder = large(tmp_path / "store")
    clean = open_store(folder)
    begins = np.arange(len(clean.train.tokens) // 128) * 128
    rows = clean.train.read(begins, 128)
    random = np.random.default_rng(0)
    found_by_reading = 0
    for path in sorted(folder.iterdir()):
        for place in {0, path.stat().st_size - 1, *random.integers(0, path.stat().st_size, 25).tolist()}:
            whole = path.read_bytes()
            flip(path, place, int(random.integers(8)))
            try:
                store = open_store(folder)
            except Refusal as refusal:
                told = str(refusal)
            else:
                told = ""
                differs = np.zeros(len(begins), bool)
                for row, begin in enumerate(begins.tolist()):
                    try:
                        assert np.array_equal(store.train.read(np.array([begin]), 128)[0], rows[row])
                    except Refusal as refusal:
                        differs[row] = str(refusal).startswith(f"{path}: bytes ")
                if path.suffix == ".tokens":
                    first, last = (int(part.replace(",", "")) for part in _bytes_named(store))
                    assert first <= place < last
                    assert last - first <= PAGE_BYTES
                    if path.stem == "train":
                        hit = np.flatnonzero(
                            (begins * 2 < last - HEADER.size) & (begins * 2 + 256 > first - HEADER.size)
                        )
                        assert np.flatnonzero(differs).tolist() == hit.tolist()
                        found_by_reading += 1
                else:
                    assert path.name == "tokenizer.json"  # what decides no id: white space, the decoder
                    assert not differs.any()
            assert not told or path.stem.split(".")[0] in told
            path.write_bytes(whole)
    assert found_by_reading > 20
    open_store(folder).check()


def _bytes_named(store) -> list[str]:
    with pytest.raises(Refusal) as raised:
        store.check()
    assert raised.value.found.endswith(" that differ from their checksum")
    place = raised.value.found.partition(": bytes ")[2].partition(" that")[0]
    return place.split(" to ")


def test_every_broken_place_is_listed_and_progress_is_told(tmp_path):
    folder = large(tmp_path / "store")
    done = []
    store = open_store(folder)
    store.check(done.append)
    assert sum(done) == sum(file.path.stat().st_size - HEADER.size - 4 * len(file._checksums)
                            for name in ("train", "valid") for file in store.files(name))  # fmt: skip
    flip(folder / "train.tokens", HEADER.size)
    flip(folder / "train.tokens", HEADER.size + 2 * PAGE_BYTES + 5)
    flip(folder / "valid.tokens", HEADER.size + 7)
    with pytest.raises(Refusal) as raised:
        store.check()
    found = raised.value.found
    assert f"{folder / 'train.tokens'}: bytes 128 to 4,224, {folder / 'train.tokens'}: bytes 8,320 to 12,416" in found
    assert f"{folder / 'valid.tokens'}: bytes 128 to " in found


def test_a_file_cut_while_it_is_open(tmp_path):
    """A refusal, and not a bus error."""
    folder = large(tmp_path / "store")
    store = open_store(folder)
    os.truncate(folder / "train.tokens", HEADER.size + PAGE_BYTES + 10)
    assert store.train.read(np.array([0]), 128).shape == (1, 128)
    with pytest.raises(Refusal, match=r"train\.tokens: found an end before byte 19,352; wanted"):
        store.train.read(np.array([9000]), 128)


def test_doctor_says_whether_a_store_is_whole(tmp_path, capsys):
    folder = large(tmp_path / "store")
    run_doctor(DoctorOptions(data=str(folder)))
    assert "9,612 tokens to train on and 801 held out, all as they were written" in capsys.readouterr().out
    flip(folder / "train.tokens", 5000)
    with pytest.raises(Refusal, match=r"train\.tokens: bytes 4,224 to 8,320 that differ from their checksum"):
        run_doctor(DoctorOptions(data=str(folder)))


def test_nothing_is_trained_on_a_shard_that_has_changed(tmp_path):
    """Flipped before the run begins or while it runs: refused by file and place, and the last checkpoint stays."""
    data = write_store(tmp_path / "data")
    run = tiny_run(steps=20, save_every=1, validate_every=0)
    place = HEADER.size + 301
    pretrain(tiny_run(steps=2, save_every=1, validate_every=0), data, tmp_path / "run")
    flip(data / "train.tokens", place)
    for out, resume in ((tmp_path / "run", "if-present"), (tmp_path / "new", "never")):
        with pytest.raises(Refusal, match=r"train\.tokens: bytes 128 to 1,0\d\d: found numbers that differ"):
            pretrain(run, data, out, resume=resume)
    assert checkpoint.newest(tmp_path / "run").name == "step-0000002"
    flip(data / "train.tokens", place)
    assert pretrain(run, data, tmp_path / "run", resume="if-present").step.name == "step-0000020"


@pytest.mark.parametrize("name", ["train.tokens", "train.documents", "valid.tokens", "store.json", "tokenizer.json"])
def test_a_vanished_or_cut_file_stops_a_run_by_name(name, tmp_path):
    data = write_store(tmp_path / "data")
    path = data / name
    whole = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(whole[:-3]), lambda: path.write_bytes(b"")):
        damage()
        with pytest.raises(Refusal, match=name.replace(".", r"\.")):
            pretrain(tiny_run(), data, tmp_path / "run")
        path.write_bytes(whole)
    assert not (tmp_path / "run" / "step-0000000").exists()

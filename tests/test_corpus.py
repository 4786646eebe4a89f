"""Files to clean documents: every format and compression, any line end, and every fault with its place."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from latemask.errors import Refusal
from latemask.text import blocks as blocks_module
from latemask.text.blocks import Reading, ReadingFlags, blocks, estimated_text_bytes
from latemask.text.corpus import Counts, read_block, refuse_without_text
from latemask.text.files import File, find

TEXTS = ["A first one.\nWith two lines.", "Ein zweites: Äpfel, œufs, 日本語 🙂", "third"]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".xz": lzma.compress,
}


def read(files: list[File], reading: Reading | None = None) -> tuple[list[str], Counts]:
    reading, texts, counts = reading or Reading(), [], Counts()
    for file in files:
        for block in blocks(file, reading):
            documents, met = read_block(block, reading)
            texts += [document.text for document in documents]
            counts.add(met)
    assert counts.documents == len(texts) + counts.empty + counts.left_out
    return texts, counts


def read_bytes(folder: Path, name: str, data: bytes, **reading) -> tuple[list[str], Counts]:
    (folder / name).write_bytes(data)
    return read(find([folder / name]), Reading(**reading))


def json_lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def parquet(columns: dict[str, object], **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


# What a file is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("format", ["txt", "jsonl", "parquet"])
def test_every_format_plain_and_compressed(tmp_path, format, suffix):
    data = {
        "txt": "\n\n".join(TEXTS).encode(),
        "jsonl": json_lines(*({"text": text} for text in TEXTS)),
        "parquet": parquet({"text": TEXTS}),
    }[format]
    texts, counts = read_bytes(tmp_path, f"a.{format}{suffix}", COMPRESS[suffix](data))
    assert texts == TEXTS
    assert counts.text_bytes == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_compressed_members_one_after_the_other_are_all_read(tmp_path, suffix):
    data = COMPRESS[suffix](b"one\n\n") + COMPRESS[suffix](b"two\n")
    assert read_bytes(tmp_path, f"a.txt{suffix}", data)[0] == ["one", "two"]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_cut_or_misnamed_compressed_files_are_refused(tmp_path, suffix):
    whole = COMPRESS[suffix](bytes(i * i % 251 for i in range(300_000)).hex().encode())
    with pytest.raises(Refusal, match=rf"a\.txt{suffix}: found unreadable data"):
        read_bytes(tmp_path, f"a.txt{suffix}", whole[:-20])
    with pytest.raises(Refusal, match=rf"b\.txt{suffix}: found other data; wanted {suffix} data. Name it b.txt if"):
        read_bytes(tmp_path, f"b.txt{suffix}", b"not compressed at all")
    other = ".xz" if suffix == ".gz" else ".gz"
    with pytest.raises(Refusal, match=rf"found {other} data; wanted {suffix} data. Name it d.txt{other}$"):
        read_bytes(tmp_path, f"d.txt{suffix}", COMPRESS[other](b"text"))
    assert len(read_bytes(tmp_path, "c.txt", whole)[0]) == 1  # recognised although the name does not say so


def test_standard_input(monkeypatch):
    for data in (b"one\n\ntwo", gzip.compress(b"one\n\ntwo")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
        assert read(find(["-"], Reading(format="text")))[0] == ["one", "two"]
    data = parquet({"text": TEXTS})
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
    assert read(find(["-"], Reading(format="parquet")))[0] == TEXTS
    with pytest.raises(Refusal, match=r"standard input.*--format"):
        find(["-"], ReadingFlags())


def test_folders_patterns_and_names(tmp_path, capsys):
    for name in ("b.txt", "a.jsonl.gz", "sub dir/c [1].parquet", "notes.md", ".hidden/d.txt", "sub dir/.e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    expected = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.txt", "sub dir/c [1].parquet")]
    assert [file.path for file in find([tmp_path])] == expected
    assert [file.format for file in find([tmp_path])] == ["jsonl", "text", "parquet"]
    assert [file.path for file in find([f"{tmp_path}/*.txt"])] == [expected[1]]
    assert [file.path for file in find([f"{tmp_path}/**/*.parquet"])] == [expected[2]]
    assert [file.path for file in find([expected[2]])] == [expected[2]]  # an existing name is no pattern
    assert [file.path for file in find([expected[1], expected[0], f"{tmp_path}/*.txt"])] == [expected[1], expected[0]]
    assert "b.txt: named twice, read once" in capsys.readouterr().err
    assert find([tmp_path / "notes.md"], Reading(format="text")) == [File(str(tmp_path / "notes.md"), "text")]
    for name, wanted in (
        ("notes.md", "--format"),
        ("none-*.txt", "matches as a pattern"),
        ("no such.txt", "no such file"),
    ):
        with pytest.raises(Refusal, match=re.escape(name) + ".*" + wanted):
            find([tmp_path / name], ReadingFlags())
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="empty: found a folder without"):
        find([tmp_path / "empty"])
    with pytest.raises(Refusal, match="files: found none"):
        find([])


# Documents ---------------------------------------------------------------------------------------------------------


def test_what_parts_the_documents_of_a_text_file(tmp_path):
    data = b"one\ntwo\n \t\nthree\n\n\n\nfour\n"
    assert read_bytes(tmp_path, "a.txt", data)[0] == ["one\ntwo", "three", "four"]
    assert read_bytes(tmp_path, "a.txt", data, documents="line")[0] == ["one", "two", "three", "four"]
    assert read_bytes(tmp_path, "a.txt", data, documents="file")[0] == [data.decode().strip("\n")]


lines = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0\ufeff"), max_size=12)
line_end = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(st.tuples(lines, line_end)), st.sampled_from(["blank-line", "line", "file"]), st.integers(4, 64))
def test_documents_do_not_depend_on_line_ends_or_on_where_blocks_end(tmp_path_factory, rows, mode, block_bytes):
    folder = tmp_path_factory.mktemp("lines")
    data = "".join(line + end for line, end in rows).encode()
    # By hand: lines first, documents from lines.
    whole, documents = [], [[]]
    for index, (line, end) in enumerate(rows):
        if line == "" and end == "\n" and index and rows[index - 1][1] == "\r":
            continue  # "\r" + "\n" is one line end
        whole.append(line)
    for line in whole:
        if mode == "line" or (mode == "blank-line" and not line.strip(" \t\v\f")):
            documents.append([])
        if mode != "blank-line" or line.strip(" \t\v\f"):
            documents[-1].append(line)
    expected = ["\n".join(document).strip("\n") for document in documents]
    expected = [text for text in expected if text and not text.isspace()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_BYTES", block_bytes)
        assert read_bytes(folder, "a.txt", data, documents=mode)[0] == expected


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30)), line_end, st.integers(4, 64))
def test_json_lines_of_any_line_end_and_block(tmp_path_factory, texts, end, block_bytes):
    folder = tmp_path_factory.mktemp("json")
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + end for text in texts).encode()
    clean = [re.sub("\r\n?", "\n", re.sub("[\0\ufeff]", "", text)) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "BLOCK_BYTES", block_bytes)
        got, counts = read_bytes(folder, "a.jsonl", data)
    assert got == [text for text in clean if text.strip()]
    assert counts.documents == len(texts)
    assert counts.nuls == sum(text.count("\0") for text in texts)


def test_fields_columns_and_sources(tmp_path):
    records = [{"body": "one", "from": "a"}, {"body": "two", "from": 5}, {"body": "three"}]
    reading = Reading(text_field="body", source_field="from")
    (tmp_path / "a.jsonl").write_bytes(json_lines(*records))
    (tmp_path / "a.parquet").write_bytes(parquet({"body": ["one", "two", "three"], "from": ["a", None, None]}))
    for name in ("a.jsonl", "a.parquet"):
        (block,) = blocks(find([tmp_path / name])[0], reading)
        documents, _ = read_block(block, reading)
        assert [(document.text, document.source) for document in documents] == [
            ("one", "a"),
            ("two", ""),
            ("three", ""),
        ]


def test_parquet_row_groups_and_kinds_of_string(tmp_path):
    texts = [f"document {i} " + "x" * 1000 for i in range(5000)]
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(texts).cast(kind) if not pa.types.is_dictionary(kind) else pa.array(texts).dictionary_encode()
        (tmp_path / "a.parquet").write_bytes(parquet({"text": column}, row_group_size=700))
        found = find([tmp_path / "a.parquet"])
        assert read(found)[0] == texts
        assert len(list(blocks(found[0], Reading()))) > 2
    with pytest.raises(Refusal, match=r"column text: found values of type int64; wanted strings"):
        read_bytes(tmp_path, "b.parquet", parquet({"text": [1, 2]}))
    with pytest.raises(Refusal, match=r"found the columns body, n; wanted a column text"):
        read_bytes(tmp_path, "c.parquet", parquet({"body": ["x"], "n": [1]}))
    with pytest.raises(Refusal, match=r"d.parquet: found unreadable parquet"):
        read_bytes(tmp_path, "d.parquet", b"PAR1 but nothing else")


def test_estimated_size(tmp_path):
    data = b"\n\n".join(random.randbytes(40).hex().encode() for _ in range(120_000))
    (tmp_path / "a.txt").write_bytes(data)
    for name in "bcdefg":
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(data, 1))
    (tmp_path / "h.parquet").write_bytes(parquet({"text": data.decode().split("\n\n")}))
    (tmp_path / "i.txt").write_bytes(b"")
    estimated = estimated_text_bytes(find([tmp_path]), Reading())
    assert estimated[:8] == [pytest.approx(len(data), rel=0.1)] * 8
    assert estimated[8] == 0


# Faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_invalid_utf8_names_file_line_and_byte(tmp_path, suffix):
    data = COMPRESS[suffix]("Äone\n\ntwo\nth".encode() + b"\xffree\n\nfour\n")
    place = rf"a\.txt{suffix}:4: found byte 0xff at byte 13, which is not UTF-8"
    with pytest.raises(Refusal, match=place):
        read_bytes(tmp_path, f"a.txt{suffix}", data)
    texts, counts = read_bytes(tmp_path, f"a.txt{suffix}", data, invalid="replace")
    assert texts == ["Äone", "two\nth\ufffdree", "four"]
    assert (counts.replaced_bytes, counts.repaired_bytes, counts.left_out) == (1, 1, 0)
    texts, counts = read_bytes(tmp_path, f"a.txt{suffix}", data, invalid="skip")
    assert texts == ["Äone", "four"]
    assert (counts.left_out, counts.left_out_bytes, counts.replaced_bytes) == (1, len(b"two\nth\xffree"), 0)
    assert re.search(r"a\.txt.*:3: byte 0xff", counts.places[0])


def test_invalid_utf8_in_later_blocks_and_other_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", 16)
    with pytest.raises(Refusal, match=r"a\.txt:7: found byte 0xe9 at byte 32,"):
        read_bytes(tmp_path, "a.txt", b"first line\n\nsecond\r\n\r\nthird\r\rcaf\xe9")
    good = json_lines({"text": "fine"}, {"text": "fine"})
    bad = b'{"text": "caf\xe9"}\n'
    with pytest.raises(Refusal, match=rf"a\.jsonl:3: found byte 0xe9 at byte {len(good) + 13},"):
        read_bytes(tmp_path, "a.jsonl", good + bad)
    assert read_bytes(tmp_path, "a.jsonl", good + bad, invalid="replace")[0] == ["fine", "fine", "caf\ufffd"]
    assert read_bytes(tmp_path, "a.jsonl", bad + good, invalid="skip")[0] == ["fine", "fine"]
    column = pa.array([b"fine", b"caf\xe9"])
    with pytest.raises(Refusal, match=r"a\.parquet:row 2: found byte 0xe9"):
        read_bytes(tmp_path, "a.parquet", parquet({"text": column}))
    assert read_bytes(tmp_path, "a.parquet", parquet({"text": column}), invalid="replace")[0] == ["fine", "caf\ufffd"]


@pytest.mark.parametrize("invalid", ["refuse", "replace", "skip"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_recognised(tmp_path, encoding, invalid):
    name = "UTF-32" if encoding == "utf-32" else "UTF-16"
    with pytest.raises(Refusal, match=rf"a\.txt: found {name}.*wanted UTF-8.*iconv -f {name}"):
        read_bytes(tmp_path, "a.txt", "Plain words, twice over.".encode(encoding), invalid=invalid)


SEQUENCE = b"MKVLAAGIVGLLLAQWERTYPMKV"


@pytest.mark.parametrize(("content", "is_fasta"), [
    (b">sp|P1|ONE a protein\n" + SEQUENCE + b"\nMK*\n>two\n" + SEQUENCE, True),
    (b"\xef\xbb\xbf>one\r\n" + SEQUENCE + b"\r\n", True),
    (b">one\n" + SEQUENCE * 100_000, True),
    (b"> a quote\nThe answer to it, in some words.\n", False),
    (b"> a quote\nthanks\n", False),
    (b"> a quote\n--------------------------\n", False),
    (SEQUENCE + b"\n>one\n" + SEQUENCE, False),
])  # fmt: skip
def test_fasta_is_not_taken_for_text(content, is_fasta, tmp_path):
    says = pytest.raises(Refusal, match=r'a\.txt: found FASTA.*one {"text": "MKVLA\.\.\."} a line')
    with says if is_fasta else nullcontext():
        read_bytes(tmp_path, "a.txt", content)


def test_marks_nul_and_carriage_returns(tmp_path):
    mark = "\ufeff".encode()
    texts, counts = read_bytes(tmp_path, "a.txt", mark + b"one\r\ntwo\0\r\rthree" + mark)
    assert texts == ["one\ntwo", "three"]
    assert (counts.byte_order_marks, counts.nuls, counts.carriage_returns, counts.repaired_bytes) == (2, 1, 3, 7)
    record = json.dumps({"text": "a\0b\r\nc\ufeffd"}).encode()
    texts, counts = read_bytes(tmp_path, "a.jsonl", mark + record + b"\n\0" + mark + record)
    assert texts == ["ab\ncd"] * 2
    assert (counts.byte_order_marks, counts.nuls, counts.carriage_returns) == (4, 3, 2)
    texts, counts = read_bytes(tmp_path, "a.parquet", parquet({"text": ["\ufeffa\0b\rc"]}))
    assert texts == ["ab\nc"]
    assert (counts.byte_order_marks, counts.nuls) == (1, 1)


BAD_RECORDS = {
    b'{"text": null}': "text = null",
    b'{"text": 5}': "text = 5",
    b'{"body": "x", "n": 1}': "the fields body, n",
    b'["text"]': "JSON that is a list",
    b'"text"': "JSON that is a text",
    b'{"text": "cut': "broken JSON",
    b'{"text": "a"} {"text": "b"}': "broken JSON",
    b"plain words": "broken JSON",
    b'{"text": "lone \\ud800 half"}': "a lone surrogate",
    b"[" * 100_000: "JSON nested too deeply",
}


@pytest.mark.parametrize("record", BAD_RECORDS, ids=lambda record: record[:30].decode())
def test_bad_records_are_refused_or_counted_by_line(tmp_path, record):
    data = b'{"text": "one"}\n\n' + record + b'\n{"text": "two"}\n'
    with pytest.raises(Refusal, match=r"a\.jsonl:3: found " + re.escape(BAD_RECORDS[record])):
        read_bytes(tmp_path, "a.jsonl", data)
    texts, counts = read_bytes(tmp_path, "a.jsonl", data, invalid="skip")
    assert texts == ["one", "two"]
    assert counts.left_out == 1
    assert f"a.jsonl:3: {BAD_RECORDS[record]}" in counts.places[0]
    texts, counts = read_bytes(tmp_path, "a.jsonl", data, invalid="replace")
    if BAD_RECORDS[record] == "a lone surrogate":
        assert texts == ["one", "lone \ufffd half", "two"]
        assert counts.replaced_surrogates == 1
    else:
        assert texts == ["one", "two"]
        assert counts.left_out == 1


def test_null_in_parquet(tmp_path):
    data = parquet({"text": ["one", None, "two"]})
    with pytest.raises(Refusal, match=r"a\.parquet:row 2: found text = null"):
        read_bytes(tmp_path, "a.parquet", data)
    texts, counts = read_bytes(tmp_path, "a.parquet", data, invalid="skip")
    assert (texts, counts.left_out) == (["one", "two"], 1)


FAULTS = {
    "bytes.txt": (b"caf\xe9", "--invalid"),
    "null.jsonl": (b'{"text": null}', "--invalid"),
    "long.jsonl": (json_lines({"text": "x" * (1 << 20)}), "--longest-document-mb"),
    "column.parquet": (parquet({"body": ["one"]}), "--text-field"),
    "notes.md": (b"some text", "--format"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_flags_are_advised_where_the_command_has_them(tmp_path, name):
    data, flag = FAULTS[name]
    (tmp_path / name).write_bytes(data)
    said = []
    for kind in (ReadingFlags, Reading):
        reading = kind(longest_document_mb=1)
        with pytest.raises(Refusal, match=name) as refused:
            read(find([tmp_path / name], reading), reading)
        said.append(str(refused.value))
    assert flag in said[0]
    assert "--" not in said[1]
    assert said[1].endswith("Mend the file") or flag in ("--text-field", "--format")


def test_a_field_that_the_first_record_lacks_is_advised_by_name(tmp_path):
    rows = json_lines({"id": "7", "n": 12, "note": " " * 99, "the text": "some words", "made": "1999"})
    (tmp_path / "a.jsonl").write_bytes(b"\n" + rows + json_lines({"body": "more"}))

    def advice(**reading) -> str:
        with pytest.raises(Refusal) as refused:
            read(find([tmp_path / "a.jsonl"]), ReadingFlags(**reading))
        return refused.value.do

    assert advice() == "Give --text-field 'the text', where every file has it"
    assert advice(text_field="n").startswith("Mend the file"), "it is there, but no text"
    assert advice(text_field="the text").startswith("Mend the file"), "the first record has it"
    (tmp_path / "a.jsonl").write_bytes(json_lines({"id": 1, "n": 2}))
    assert advice().startswith("Mend the file"), "no field holds text"
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "cut\n' + json_lines({"body": "more"}))
    assert advice().startswith("Mend the file")


def test_surrogate_pairs_are_characters(tmp_path):
    assert read_bytes(tmp_path, "a.jsonl", b'{"text": "\\ud83d\\ude42"}')[0] == ["🙂"]


def test_a_text_longer_than_the_longest_document_is_parted_at_white_space(tmp_path):
    words = " ".join(f"word{i}" for i in range(300_000))
    texts, counts = read_bytes(tmp_path, "a.txt", words.encode(), longest_document_mb=1)
    assert "".join(texts) == words
    assert len(texts) == counts.parted + 1 == 4
    assert all(text.endswith(" ") for text in texts[:-1])
    texts, counts = read_bytes(tmp_path, "a.txt", "日本".encode() * 400_000, longest_document_mb=1)
    assert "".join(texts) == "日本" * 400_000
    assert max(len(text.encode()) for text in texts) <= 1 << 20


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r", b""])
def test_a_json_line_longer_than_the_longest_document_is_passed_over(tmp_path, end):
    long = json_lines({"text": "x" * 3_500_000}).rstrip()
    data = b'{"text": "one"}\n' + long + end
    if end:
        data += b'{"text": "two"}\n' + b"oops"
    with pytest.raises(Refusal, match=r"a\.jsonl:2: found a line of .* at most 1 MB"):
        read_bytes(tmp_path, "a.jsonl", data, longest_document_mb=1)
    texts, counts = read_bytes(tmp_path, "a.jsonl", data, longest_document_mb=1, invalid="skip")
    assert texts == (["one", "two"] if end else ["one"])
    assert counts.left_out_bytes == pytest.approx(len(long) + len(end) + 4 * bool(end), abs=1)
    if end:
        assert any("a.jsonl:4: broken JSON" in place for place in counts.places)
    assert len(read_bytes(tmp_path, "a.jsonl", long, longest_document_mb=4)[0][0]) == 3_500_000


def test_files_without_text(tmp_path, capsys):
    good, empty, blank = Counts(documents=2), Counts(), Counts(documents=3, empty=3)
    refuse_without_text({"good": good, "empty.txt": empty, "blank.txt": blank})
    warned = capsys.readouterr().err
    assert "empty.txt: no text" in warned
    assert "blank.txt: no text (3 documents of white space" in warned
    with pytest.raises(Refusal, match=r"empty.txt, blank.txt: found no text"):
        refuse_without_text({"empty.txt": empty, "blank.txt": blank})


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b" \n\t\n\n  ", b"\0\0\0"])
def test_empty_and_white_space_files_give_nothing(tmp_path, data):
    for suffix in ("", ".zst", ".gz", ".xz"):
        texts, counts = read_bytes(tmp_path, f"a.txt{suffix}", COMPRESS[suffix](data))
        assert texts == []
        assert counts.empty == counts.documents


def test_settings_are_checked():
    for field, value in (("documents", "paragraph"), ("invalid", "ignore"), ("longest_document_mb", 0)):
        with pytest.raises(Refusal, match="--" + field.replace("_", "-")):
            Reading(**{field: value})


def test_a_folder_below_that_cannot_be_read_is_refused_and_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "locked").mkdir()
    (tmp_path / "open" / "a.txt").write_text("text")
    scan = os.scandir

    def denied(folder):
        if str(folder).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    assert [file.path for file in find([tmp_path])] == [str(tmp_path / "open" / "a.txt")]
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(Refusal, match=r"locked: found Permission denied; wanted a readable folder"):
        find([tmp_path])


def test_files_of_a_folder_that_are_left_out_are_counted_and_named(tmp_path, capsys):
    (tmp_path / "below").mkdir()
    for name in ("a.txt", "below/b.md", "c.html", "d", "e.doc", ".hidden"):
        (tmp_path / name).write_text("some text")
    assert [file.path for file in find([tmp_path])] == [str(tmp_path / "a.txt")]
    said = capsys.readouterr().err
    assert "left out 4 files" in said
    assert "(below/b.md, c.html, d, ...)" in said
    find([tmp_path])
    assert not capsys.readouterr().err, "who checks the data before reading them says it for both"
    (tmp_path / "a.txt").unlink()
    with pytest.raises(Refusal, match=r"4 files whose names tell no format \(below/b.md, c.html"):
        find([tmp_path])


@pytest.mark.parametrize(("file", "says"), [
    ("a.CSV.gz", r"Of a \.csv or \.tsv make \.jsonl"), ("a.faa", r"Of FASTA make \.jsonl"),
    ("a.fasta.gz", r"Of FASTA make \.jsonl"),
])  # fmt: skip
def test_what_is_no_running_text_is_told_to_become_json_lines(file, says, tmp_path, capsys):
    """A table is not to be read as text, with its commas and quotes, nor are sequences with their headers."""
    (tmp_path / file).write_text("id,text")
    for name in (tmp_path, tmp_path / file):
        with pytest.raises(Refusal, match=says) as refused:
            find([name])
        assert "--format" not in str(refused.value)
    (tmp_path / "b.txt").write_text("some text")
    assert [file.path for file in find([tmp_path])] == [str(tmp_path / "b.txt")]
    assert "make .jsonl" in capsys.readouterr().err

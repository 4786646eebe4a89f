"""The journal tells what happened: whole lines, once each, in JSON that any reader takes."""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from latemask.errors import Refusal
from latemask.training import journal
from latemask.training.journal import Journal
from latemask.training.loop import pretrain
from training_support import tiny_run, write_store

FIELDS = {
    "start": {"run", "card", "world", "versions", "micro_rows", "rows", "refused_rows", "dropped_tokens",
              "masked_tokens", "parameters", "encoder_parameters", "flops_per_token", "plain_flops_per_token",
              "unigram_loss", "validation_text"},
    "train": {"tokens", "seconds", "epoch", "loss", "masking_rate", "learning_rate", "gradient_norm",
              "tokens_per_second", "flops_per_second", "mfu", "memory_bytes"},
    "validation": {"loss", "by_source", "rate", "rows", "seconds"},
    "plateau": {"loss", "unigram_loss", "seconds"},
    "save": {"folder", "seconds"},
    "end": {"reason", "seconds", "tokens", "word_frequencies_only"},
}  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 6; logged at 2, 4, 6, saved and validated at 3 and 6. Of random words nothing can be learned."""
    folder = tmp_path_factory.mktemp("run")
    pretrain(tiny_run(log_every=2), write_store(folder / "data"), folder / "run")
    return folder / "run"


def test_every_line_has_its_fields_and_its_place(run_folder: Path) -> None:
    lines = journal.read(run_folder / "journal.jsonl")
    assert all(line.keys() == FIELDS[line["kind"]] | {"kind", "step"} for line in lines)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("start", 0), ("validation", 0), ("save", 0), ("train", 2), ("validation", 3), ("save", 3), ("train", 4),
        ("train", 6), ("validation", 6), ("plateau", 6), ("save", 6), ("end", 6),
    ]  # fmt: skip


def test_the_numbers_agree_with_each_other(run_folder: Path) -> None:
    start, *lines = journal.read(run_folder / "journal.jsonl")
    assert start["run"] == json.loads(tiny_run(log_every=2).to_json())
    for line in lines:
        if line["kind"] == "train":
            assert line["tokens"] == line["step"] * 7 * 16
            assert line["epoch"] == pytest.approx(line["step"] * 7 / 30)
            assert line["flops_per_second"] == pytest.approx(line["tokens_per_second"] * start["flops_per_token"])
            assert line["mfu"] is None, "no peak is known for a CPU"
            assert 0 < line["gradient_norm"] < 1e3
            assert line["memory_bytes"] > 1e7
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    trained = [line for line in lines if line["kind"] == "train"]
    speeds = [2 * 7 * 16 / (after["seconds"] - before["seconds"]) for before, after in itertools.pairwise(trained)]
    assert [line["tokens_per_second"] for line in trained[1:]] == pytest.approx(speeds)
    assert trained[0]["tokens_per_second"] == pytest.approx(2 * 7 * 16 / trained[0]["seconds"], rel=0.1)


def test_the_logged_loss_is_the_mean_of_its_steps(run_folder: Path, tmp_path: Path) -> None:
    pretrain(tiny_run(log_every=1), write_store(tmp_path / "data"), tmp_path / "run")
    each = [line["loss"] for line in journal.read(tmp_path / "run" / "journal.jsonl") if line["kind"] == "train"]
    pairs = [line["loss"] for line in journal.read(run_folder / "journal.jsonl") if line["kind"] == "train"]
    assert pairs == pytest.approx([(a + b) / 2 for a, b in zip(each[::2], each[1::2], strict=True)], rel=1e-6)
    assert len(set(each)) == 6


def test_reading_leaves_out_a_last_line_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = [{"kind": "train", "step": step, "loss": 4.25} for step in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in whole)
    first = len(text) // 2
    for cut in range(first, len(text) + 1):
        path.write_text(text[:cut])
        assert journal.read(path) == (whole if cut >= len(text) - 1 else whole[:1])
    path.write_bytes(text.encode() + b'{"kind": "tr\xff\x00')
    assert journal.read(path) == whole


def test_every_reader_counts_the_lines_that_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    start = '{"kind": "start", "step": 0, "run": {}}'
    path.write_text("\n".join([start, "", "", '{"kind": "save", "step": 1}', '{"kind": "end", "step": 3}', ""]))
    with pytest.raises(Refusal, match=r"line 5, of kind end, without reason"):
        journal.read_checked(path)
    lines, problem = journal.salvaged(path)
    assert [line["kind"] for line in lines] == ["start", "save"]
    assert "line 5, of kind end, without reason" in str(problem)


@pytest.mark.parametrize(("field", "value"), [
    ("plain_flops_per_token", 0), ("plain_flops_per_token", -6e6), ("flops_per_token", True), ("world", 0),
    ("seconds", -1.0), ("tokens", -5), ("loss", False), ("rate", "0.15"), ("masked_tokens", [1]),
])  # fmt: skip
def test_a_number_that_counts_nothing_is_no_number(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    line = {"kind": "train", "step": 1, "tokens": 2, "seconds": 0.0, "loss": None}
    path.write_text("".join(json.dumps(one) + "\n" for one in (line, line | {"step": 2, field: value})))
    with pytest.raises(Refusal, match=rf"line 2, of kind train, whose {field} is .*; wanted a number") as refused:
        journal.read_checked(path)
    assert json.dumps(value) in str(refused.value)
    assert journal.salvaged(path)[0] == [line]


@pytest.mark.parametrize("value", [7, "", [], False])
def test_a_text_is_named_by_a_text(value: object, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps({"kind": "start", "step": 0, "run": {}, "validation_text": value}) + "\n")
    said = rf"line 1, of kind start, whose validation_text is {re.escape(json.dumps(value))}; wanted a text or null"
    with pytest.raises(Refusal, match=said):
        journal.read_checked(path)


@pytest.mark.parametrize("field", ["training.batch_rows", "shape.row_tokens", "masking.rate"])
@pytest.mark.parametrize("value", ["64", [1], True, {}])
def test_a_setting_that_readers_count_with_is_a_number(field: str, value: object, tmp_path: Path) -> None:
    path, (part, name) = tmp_path / "journal.jsonl", field.split(".")
    path.write_text(json.dumps({"kind": "start", "step": 0, "run": {part: {name: value}}}) + "\n")
    with pytest.raises(Refusal, match=f"line 1, of kind start, whose run.{field} is .*; wanted a number"):
        journal.read_checked(path)


@pytest.mark.parametrize("bad", [b"{", b"5", b'"text"', b"[1]", b"\xff\xfe", b"\0\0\0", b"[" * 100_000,
                                 b'{"step": "3"}', b'{"step": null}', b'{"batch": 1.5}'])  # fmt: skip
def test_any_other_bad_line_is_refused_by_number(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"kind": "start", "step": 0}\n' + bad + b'\n{"kind": "end", "step": 3}\n')
    with pytest.raises(Refusal, match=r"journal.jsonl:2.*JSON object"):
        journal.read(path)


def test_what_is_made_again_at_the_resumed_step_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    book = Journal(path)
    for step in (0, 3):
        for kind in ("train", "validation", "save"):
            book.add(kind, step=step)
    book.close()
    Journal(path, (3, 3), again=("validation",)).close()
    kept = [(line["kind"], line["step"]) for line in journal.read(path)]
    assert kept == [("train", 0), ("validation", 0), ("save", 0), ("train", 3), ("save", 3)]


def test_going_on_takes_out_what_is_met_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    book = Journal(path)
    for kind, values in [
        ("start", {"step": 0}), ("train", {"step": 3}), ("skip", {"step": 3, "batch": 3}), ("save", {"step": 3}),
        ("skip", {"step": 3, "batch": 4}), ("train", {"step": 4}),
    ]:  # fmt: skip
        book.add(kind, **values)
    book.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 5, "lo')
    for _ in range(2):
        Journal(path, resumed=(3, 4)).close()
        kept = [(line["kind"], line.get("batch")) for line in journal.read(path)]
        assert kept == [("start", None), ("train", None), ("skip", 3), ("save", None)]
    Journal(path).close()
    assert journal.read(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_run_goes_on_with_the_whole_lines_of_a_broken_journal(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was there stays under another name, each time under one of its own."""
    out = tmp_path / "run"
    shutil.copytree(run_folder, out)
    path = out / "journal.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    for number, name in enumerate(["broken-journal.jsonl", "broken-journal-2.jsonl"]):
        spoilt = [whole[0], b"\xff{\0\n", *whole[1:3], b'{"kind": "train", "step": 2.5}\n', *whole[4:]]
        path.write_bytes(b"".join(spoilt))
        with pytest.raises(Refusal, match=r"journal.jsonl:2: .*go on with the run"):
            journal.read(path)
        assert pretrain(None, None, out, resume="always").reason == "steps"
        told = capfd.readouterr().err
        assert "line 2, 5: no JSON object" in told
        assert name in told
        assert (out / name).read_bytes() == b"".join(spoilt)
        lines = path.read_bytes().splitlines(keepends=True)
        assert lines[: len(whole) - 1] == [*whole[:3], *whole[4:]]
        assert [line["kind"] for line in journal.read(path)[len(whole) - 1 :]] == ["resume", "end"]
        assert len(list(out.glob("broken-*"))) == number + 1
    assert pretrain(None, None, out, resume="if-present").reason == "steps"
    assert len(list(out.glob("broken-*"))) == 2


def test_what_is_not_finite_is_null_and_listeners_hear_every_line(tmp_path: Path) -> None:
    class Ears:
        name = "ears"

        def __init__(self) -> None:
            self.heard: list[dict[str, Any]] = []
            self.is_closed = False

        def hear(self, line: dict[str, Any]) -> None:
            self.heard.append(line)

        def close(self) -> None:
            self.is_closed = True

    ears = Ears()
    book = Journal(tmp_path / "journal.jsonl", listeners=[ears])
    book.add("validation", step=1, loss=math.nan, by_source={"books": math.inf, "news": 1.5}, rows=3)
    book.close()

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "journal.jsonl").read_text()
    line = json.loads(text, parse_constant=no_constants)
    assert line == {"kind": "validation", "step": 1, "loss": None, "by_source": {"books": None, "news": 1.5}, "rows": 3}
    assert ears.heard == [line]
    assert ears.is_closed


@pytest.mark.parametrize("when", ["made", "hear", "close"])
def test_an_error_of_the_system_in_a_tracker_is_the_tracker_s_own(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the journal's, which is written nevertheless."""

    class Full:
        name = "tensorboard"

        def __init__(self, folder: Path):
            self.fails_at("made")

        def fails_at(self, moment: str) -> None:
            if moment == when:
                raise OSError(errno.ENOSPC, "No space left on device")

        def hear(self, line: dict[str, Any]) -> None:
            self.fails_at("hear")

        def close(self) -> None:
            self.fails_at("close")

    monkeypatch.setattr(journal, "TensorBoard", Full)
    with pytest.raises(Refusal, match=r"^--tracker tensorboard: found .*No space left") as refused:
        pretrain(tiny_run(), write_store(tmp_path / "data"), tmp_path / "run", trackers=["tensorboard"])
    assert "journal" not in str(refused.value)
    if when != "made":
        assert journal.read(tmp_path / "run" / "journal.jsonl")[0]["kind"] == "start"


def test_a_tracker_that_is_not_installed_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    data = write_store(tmp_path / "data")
    for name, module in (("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(Refusal, match=rf"pip install latemask\[{name}\]"):
            pretrain(tiny_run(), data, tmp_path / name, trackers=[name])

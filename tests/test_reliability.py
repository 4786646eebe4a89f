"""docs/reliability.md promises only what a test holds; and the faults of its table that have no other place."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from latemask.__main__ import dispatch
from latemask.downstream.heads import losses
from latemask.downstream.tasks import NO_LABEL
from latemask.errors import Refusal
from latemask.training.loop import pretrain
from training_support import lines_of, tiny_run, write_store

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[^`]*)`", PAGE)))


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    assert len(NAMED) > 80
    split = [named.partition("::") for named in NAMED if named != "tests/test_reliability.py"]  # itself, as a whole
    assert [f"{file}::{name}" for file, _, name in split if name not in functions_of(file)] == []


def test_every_figure_that_is_named_exists():
    figures = re.findall(r"`(results/[^`]*|benchmarks/[^`]*)`", PAGE)
    assert len(figures) >= 4
    assert [figure for figure in figures if not (ROOT / figure).is_file()] == []


def test_every_result_that_is_told_of_exists():
    texts = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.json")]
    named = re.compile(r"\bresults/[\w./-]+\.(?:json|svg|md)")
    told = {(text.name, result) for text in texts for result in named.findall(text.read_text(encoding="utf-8"))}
    assert len(told) > 50
    assert [each for each in sorted(told) if not (ROOT / each[1]).is_file()] == []


def test_every_known_fault_has_one_row_with_a_test():
    rows = re.findall(r"^\| (\d+) \|(.*)\|(.*)\|(.*)\|$", PAGE, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 39))
    for number, elsewhere, ours, held in rows:
        assert re.search(r"[\w.-]+/[\w.-]+#\d+", elsewhere) or number == "29", f"row {number} cites a public report"
        assert ours.strip(), number
        assert re.findall(r"`tests/test_\w+\.py::test_\w+`", held), f"row {number}"
        if "not offered" in ours.lower():
            assert "tests/test_reliability.py" in held, f"row {number}: the error a user gets"


def test_every_promise_has_a_test():
    table = PAGE.split("## Promises")[1].split("## Versions")[0]
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(rows) > 12
    for row in rows:
        assert row.count("|") == 4
        assert "`tests/test_" in row.rsplit("|", 2)[1], row[:60]


# --- what is not offered ----------------------------------------------------------------------------------------------


def latemask(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "latemask", *arguments], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"})  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--masking.mode", "bernoulli", "--masking.mode"),
        ("--masking.whole-word", "True", "--masking.whole-word"),
        ("--training.precision", "fp16", "fp16"),
        ("--training.loss-scale", "128", "--training.loss-scale"),
    ],
)
def test_what_is_not_offered_is_an_unknown_flag(flag, value, said, tmp_path):
    status, printed = latemask("pretrain", "mlm_tiny", "--data", "d", "--out", str(tmp_path / "out"), flag, value)
    assert status == 2
    assert said in printed
    assert not (tmp_path / "out").exists()


def test_raw_text_is_no_data_and_the_command_that_makes_it_is_named(tmp_path):
    (tmp_path / "text.txt").write_text("Some text.\n")
    for data in (tmp_path / "text.txt", tmp_path):
        with pytest.raises(Refusal, match=r"no store\.json; wanted .*\. Make one: latemask prepare"):
            pretrain(tiny_run(), data, tmp_path / "out")


def test_a_prepare_that_finds_nothing_fails(tmp_path, capsys):
    folder, tok = tmp_path / "a folder", str(tmp_path / "tok")
    folder.mkdir()
    for name, content in (("empty.txt", ""), ("blank.txt", " \n\n\t\n")):
        (folder / name).write_text(content)
        with pytest.raises(Refusal, match=rf"{name}: found (nothing|.*white space)"):
            dispatch(["tokenizer", str(folder / name), "--out", tok])
    with pytest.raises(Refusal, match=r"\*\.jsonl: found no such file"):
        dispatch(["tokenizer", f"{tmp_path}/*.jsonl", "--out", tok])
    (folder / "good text.txt").write_text("The cat sat on the mat. " * 40)
    assert not dispatch(["tokenizer", str(folder), "--out", tok, "--vocab-size", "300"])
    warned = capsys.readouterr().err
    assert "empty.txt" in warned
    assert "blank.txt" in warned
    assert (tmp_path / "tok" / "tokenizer.json").is_file()


# --- masks and labels -------------------------------------------------------------------------------------------------


def test_the_rate_in_use_is_printed_and_noted(tmp_path, capsys):
    pretrain(tiny_run(), write_store(tmp_path / "data"), tmp_path / "run")
    assert "5 of 16 tokens masked in every row (31.2%)" in capsys.readouterr().err
    [start] = lines_of(tmp_path / "run", "start")
    assert start["masked_tokens"] == 5
    assert {line["rate"] for line in lines_of(tmp_path / "run", "validation")} == {0.3}


def test_a_row_without_any_label_has_loss_0_and_no_gradient():
    scores = torch.randn(2, 5, 3, requires_grad=True)
    labels = torch.full((2, 5), NO_LABEL)
    labels[1, 2] = 1
    found = losses("tokens", scores, labels)
    found.sum().backward()
    assert found[0] == 0
    assert found[1] > 0
    assert not scores.grad[0].any()
    assert scores.grad.isfinite().all()


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_the_long_run_are_those_that_were_measured():
    found = json.loads((ROOT / "results" / "soak.json").read_text())
    assert found["faults"] == []
    assert found["seconds"] >= 3600
    grown = found["growth_after_warm_up"]["rss_bytes"] / 1e6
    said = f"{found['steps']:,} steps, {found['saves']} checkpoints, {grown:.1f} MB more memory"
    assert said in PAGE
    found = json.loads((ROOT / "results" / "soak_gpu.json").read_text())
    assert found["faults"] == []
    trained, saved = found["steps"] // 25, found["saves"]  # lines of each; the stop saves and does not validate
    assert found["journal_lines"] == 1 + trained + saved + (saved - 1) + 1
    grown = found["growth_after_warm_up"]
    assert max(grown["card_bytes"], grown["open_files"], grown["threads"], grown["journal_memory_bytes"]) <= 0
    said = (f"{found['seconds']:.0f} s on an {found['card']}: {found['steps']:,} steps, {found['saves']} checkpoints, "
            f"{grown['rss_bytes'] / 1e6:.1f} MB more memory")  # fmt: skip
    assert said in PAGE


def test_the_figures_of_the_kills_are_those_that_were_measured():
    found = json.loads((ROOT / "results" / "kill_pretraining.json").read_text())
    kills, while_saving = found["kills"], found["killed"]["while a checkpoint was written"]
    assert (
        f"{kills} kills, {while_saving} of them while saving: {found['equal_bit_for_bit']} times the same bits" in PAGE
    )
    for command in ("prepare", "export", "finetune"):
        found = json.loads((ROOT / "results" / f"kill_{command}.json").read_text())
        assert found["kills"] == found["whole_after_the_kill"] == found["equal_byte_for_byte"] == 200
        assert found["killed"]["while writing"] > 100

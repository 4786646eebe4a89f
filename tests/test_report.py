"""The report: what the journals say, side by side, on one page that needs nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from latemask.errors import Refusal
from latemask.recipes import recipe
from latemask.report.page import ReportOptions, run_report
from latemask.report.tables import Table, read_journals, runs_table, settings_table, shown, sources_table


def write_journal(folder: Path, name: str = "mlm_tiny", rate: float = 0.15, **training: int) -> Path:
    run = json.loads(recipe(name).to_json())
    run["training"] |= training
    train = {"kind": "train", "loss": 4.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "flops_per_second": 1e9,
             "memory_bytes": 1}  # fmt: skip
    lines = [
        {"kind": "start", "step": 0, "run": run, "card": "cpu", "world": 1, "plain_flops_per_token": 6e6,
         "flops_per_token": 5e6, "encoder_parameters": 1_500_000, "parameters": 1_600_000},
        {"kind": "validation", "step": 0, "loss": 8.3, "by_source": {}, "rate": rate, "rows": 8},
        {**train, "step": 10, "tokens": 1000, "seconds": 1.0, "tokens_per_second": 900.0, "mfu": None},
        {**train, "step": 20, "tokens": 2000, "seconds": 2.0, "tokens_per_second": 1100.0, "mfu": 0.25},
        {**train, "step": 30, "tokens": 3000, "seconds": 3.0, "tokens_per_second": 1000.0, "mfu": 0.35},
        {"kind": "skip", "step": 25, "batch": 24, "rows": [1], "skips_in_a_row": 1},
        {"kind": "validation", "step": 30, "loss": 5.25, "by_source": {"law": 5.0, "prose": 5.5}, "rate": rate},
        {"kind": "end", "step": 30, "reason": "steps", "seconds": 3.0},
    ]  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_stand_side_by_side_with_the_settings_that_differ(tmp_path):
    one = write_journal(tmp_path / "one", steps=30)
    two = write_journal(tmp_path / "two", "mae_lm_tiny", steps=40)
    runs = read_journals([one, two])
    table = runs_table(runs)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["run"], row["recipe"], row["masked"], row["steps"]) == ("one", "mlm_tiny", "15%", 30)
    assert (row["million tokens"], row["seconds"], row["validation loss"]) == (0.003, 3.0, 5.25)
    assert (row["tokens/s"], row["MFU"], row["MFLOP/token"], row["million parameters kept"]) == (1000, 0.3, 6.0, 1.5)
    assert "do not compare" not in table.note
    differing = {row[0]: row[1:] for row in settings_table(runs).rows}
    assert differing["training.steps"] == ("30", "40")
    assert differing["masking.joins"] == ("0:0.0:1.0", "decoder:0.0:1.0")
    assert differing["decoder.depth"] == (None, "1")
    assert "masking.rate" not in differing
    assert sources_table(runs).rows == (("law", 5.0, 5.0), ("prose", 5.5, 5.5))


def test_losses_at_different_rates_are_said_not_to_compare(tmp_path):
    runs = read_journals([write_journal(tmp_path / "a"), write_journal(tmp_path / "b", rate=0.5)])
    assert "do not compare" in runs_table(runs).note


def test_folders_of_one_name_are_told_apart(tmp_path):
    runs = read_journals([write_journal(tmp_path / "a" / "x"), write_journal(tmp_path / "b" / "x")])
    assert len({run.name for run in runs}) == 2


class Page(HTMLParser):
    """Collects what a page would load, and what is on it."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text += data


def test_page_needs_nothing_else_and_markdown_says_the_same(tmp_path):
    odd = "<b>run & co"
    folders = [str(write_journal(tmp_path / odd)), str(write_journal(tmp_path / "two", "three_ml_tiny"))]
    out = tmp_path / "out" / "report.html"
    run_report(ReportOptions(tuple(folders), out))
    page = Page(out.read_text())
    assert page.tags.count("svg") == 3
    assert page.tags.count("table") == 4
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert all(str(place).startswith("#") for place in page.loaded)
    assert odd in page.text
    markdown = out.with_suffix(".md").read_text()
    for against in ("step", "seconds", "flops"):
        assert out.with_suffix(f".{against}.svg").read_text().startswith("<svg")
        assert f"(report.{against}.svg)" in markdown
    for value in ("5.25", "three_ml_tiny", "masking.rate", "prose"):
        assert value in page.text
        assert value in markdown


def test_refusals(tmp_path):
    with pytest.raises(Refusal, match="journal"):
        read_journals([tmp_path])
    (tmp_path / "journal.jsonl").write_text('{"kind": "train"}\n')
    with pytest.raises(Refusal, match="kind start"):
        read_journals([tmp_path])
    with pytest.raises(Refusal, match="no run folder"):
        run_report(ReportOptions(()))


def test_cells_and_tables():
    assert [shown(value) for value in (None, 12345, 0.123456, 12345.6, "x")] == ["", "12,345", "0.1235", "12,346", "x"]
    table = Table("T", ("a", "b"), (("x|y", 1), ("z", None)), "note")
    assert table.markdown() == "## T\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n| z |  |\n\nnote\n"
    assert Table("T", ("a",), (), "none").markdown() == "## T\n\nnone\n"


def test_report_runs_without_torch(tmp_path):
    folder = write_journal(tmp_path / "run")
    program = (
        "import sys; from latemask.report.page import ReportOptions, run_report\n"
        f"run_report(ReportOptions(({str(folder)!r},), __import__('pathlib').Path({str(tmp_path / 'r.html')!r})))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

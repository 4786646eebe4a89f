"""What a person sees: text as it is, numbers to the right, and plain lines where nobody watches a terminal."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys

import pytest

from latemask import console


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs something on a terminal, and gives what it shows without colours and movements."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    def shown(act) -> str:
        made = Terminal()
        with monkeypatch.context() as patch:  # inside the test: pytest sets both streams when it begins
            patch.setattr(sys, "stdout", made)
            patch.setattr(sys, "stderr", made)
            act()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", made.getvalue())

    return shown


def test_table_in_a_log_is_plain_unwrapped_and_literal(capsys):
    long = "a/very/long/" * 30 + "[MASK].txt"
    console.table(
        "Counts of [bold]", ("file", "tokens", "loss", "note"), [(long, 1234567, 2.5, "x"), ("[/b]", 5, 12345.0, None)]
    )
    out = capsys.readouterr().out
    assert "Counts of [bold]" in out
    assert "\x1b" not in out
    (row,) = (line for line in out.splitlines() if "1,234,567" in line)
    assert long in row
    (other,) = (line for line in out.splitlines() if "[/b]" in line)
    assert "12,345" in other
    assert row.index("1,234,567") + len("1,234,567") == other.rindex(" 5 ") + 2  # numbers end in the same column


def test_an_empty_table_is_its_head(capsys):
    console.table("Nothing", ("a", "b"), [])
    assert re.search(r"a +b", capsys.readouterr().out)


def test_table_on_a_terminal_fits_it(on_terminal):
    shown = on_terminal(lambda: console.table("Wide", ("file", "n"), [("x" * 200, 1)]))
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("x") == 200


def test_warnings_on_a_terminal_do_not_read_markup(on_terminal):
    assert "[MASK] is [red]text[/red]" in on_terminal(lambda: console.warn("[MASK] is [red]text[/red]"))


def test_warnings_stand_above_a_bar_on_lines_of_their_own(monkeypatch):
    """Between two drawings of a bar, after the first is erased: not at its end."""
    from rich.console import Console
    from rich.progress import Progress

    monkeypatch.setenv("TERM", "xterm")
    made = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", made)
        with Progress(console=Console(stderr=True, width=80, force_terminal=True), auto_refresh=False) as bar:
            bar.add_task("training", total=9)
            bar.refresh()
            console.warn("[MASK] is [red]text[/red]")
    before, _, after = made.getvalue().partition("warning: ")
    assert "training" in before
    assert re.search(r"\x1b\[2K(\x1b\[[0-9;]*m)*$", before), "the bar's line is empty again"
    assert re.match(r"(\x1b\[[0-9;]*m)*\[MASK\] is \[red\]text\[/red\](\x1b\[[0-9;]*m)*\r?\n", after)
    assert "training" in after


def test_say_and_warn_in_a_log(capsys):
    console.say("[MASK] done")
    console.warn("[/oops]")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("[MASK] done\n", "warning: [/oops]\n")


def test_progress_in_a_log_is_a_line_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress("reading", 100, "MB") as advance:
        for _ in range(10):
            advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading: 30/100 MB, 2.5 MB/s, 28 s left"
    assert len(lines) == 3
    with console.progress("reading", None, "MB") as advance:
        for _ in range(4):
            advance(10)
    assert capsys.readouterr().err.splitlines() == ["reading: 30 MB, 2.5 MB/s"]
    with console.progress("scoring", 1e6, "tokens") as advance:
        for _ in range(4):
            advance(4938)
    assert capsys.readouterr().err.splitlines() == ["scoring: 14,814/1,000,000 tokens, 1,234 tokens/s, 798 s left"]


def test_progress_on_a_terminal_shows_rate_and_time(on_terminal):
    def act() -> None:
        with console.progress("reading [MASK]", 100, "MB") as advance:
            advance(50)
            advance(50)

    shown = on_terminal(act)
    assert "reading [MASK]" in shown
    assert re.search(r"100/100 MB, [\d,.]+ MB/s", shown)
    assert "left" in shown


@pytest.mark.parametrize(("logger", "text", "about", "is_told"), [
    ("torchao", "Failed to load _C.so: no", None, False),
    ("torchao", "this will be removed", None, True),
    ("torch.utils._pytree", "%s is an Enum subclass and is now ...", ("torchao.quantization", "A"), False),
    ("torch.utils._pytree", "%s is an Enum subclass and is now ...", ("of_the_user", "B"), True),
    ("torch.utils._pytree", "%s cannot be a leaf", ("torchao.quantization", "C"), True),
])  # fmt: skip
def test_of_torchao_only_what_means_nothing_here_is_left_out(logger, text, about, is_told):
    console.hush_torchao()
    arguments = () if about is None else (type(about[1], (), {"__module__": about[0]}),)
    record = logging.LogRecord(logger, logging.WARNING, "", 0, text, arguments, None)
    assert bool(logging.getLogger(logger).filter(record)) == is_told


def test_what_imports_torchao_is_silent():
    pytest.importorskip("torchao")
    code = "import latemask.hf.loading, torchao.float8"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

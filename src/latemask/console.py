"""What a person sees in a terminal: a progress line, a table, a note, a warning.

Tables and notes are results and go to standard output; progress and warnings go to standard error. Where that is not a
terminal (a job's log, a pipe) everything is plain lines, and progress is one line every ten seconds.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

LOG_EVERY_SECONDS = 10.0
PLAIN_COLUMNS = 1000
"""Characters a line may have where there is no terminal to ask."""


def say(text: str = "") -> None:
    """One line of result, as it is (``[MASK]`` is text, not markup)."""
    print(text, flush=True)


_hearer: Callable[[str], None] | None = None


def hand_warnings_to(hearer: Callable[[str], None]) -> None:
    """From now on this process tells ``hearer`` what it warns of: of several that meet the same, one is to say it."""
    global _hearer
    _hearer = hearer


def warn(text: str) -> None:
    """One line that a person should read although the work goes on; above a bar that moves."""
    if _hearer is not None:
        _hearer(text)
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        terminal = Console(stderr=True)
        with terminal.capture() as shown:
            terminal.print(Text.assemble(("warning: ", "bold yellow"), text), soft_wrap=True)
        print(shown.get(), end="", file=sys.stderr, flush=True)  # a live bar stands in for sys.stderr, and makes room
    else:
        print(f"warning: {text}", file=sys.stderr, flush=True)


@functools.cache
def warn_once(text: str) -> None:
    """``warn``, but of the same thing only once in this process."""
    warn(text)


def hush_torchao() -> None:
    """Before torchao is imported, which transformers does where it is installed: leave out its warnings that it does
    not load all of its shared libraries here, and that it registers enumerations in an old way. Nothing uses either."""
    for logger in ("torchao", "torch.utils._pytree"):
        logging.getLogger(logger).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if record.name == "torchao":
        return not text.startswith(("Failed to load ", "Skipping import of cpp extensions"))
    about = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (" is an Enum subclass" in text and getattr(about, "__module__", "").startswith("torchao."))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print ``rows`` under ``columns``; numbers stand to the right, with thousands separators for whole ones."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(cells) and all(right for _, right in column) for column in zip(*cells, strict=True)]
    printed = Table(title=Text(title), title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column, right in zip(columns, numeric or [False] * len(columns), strict=True):
        printed.add_column(Text(column), justify="right" if right else "left", overflow="fold")
    for row in cells:
        printed.add_row(*(Text(text) for text, _ in row))
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_COLUMNS)
    console.print(printed)


def number(value: float) -> str:
    """A number as people read it: whole ones and large ones with thousands separators, others with four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _cell(value: object) -> tuple[str, bool]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value), True
    return ("", True) if value is None else (str(value), False)


@contextmanager
def progress(description: str, total: float | None = None, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Show how much of ``total`` is done, the rate in ``unit`` per second and the remaining time.

    Yields ``advance(amount)``. ``total`` None: unknown, so that only the amount and the rate are shown.
    """
    shown = _live(description, total, unit) if sys.stderr.isatty() else _logged(description, total, unit)
    with shown as advance:
        yield advance


@contextmanager
def _live(description: str, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    begun = time.monotonic()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(description, total=total, state="")
        done = 0.0

        def advance(amount: float) -> None:
            nonlocal done
            done += amount
            state = _state(done, total, unit, time.monotonic() - begun)
            shown.update(task, completed=done, state=state)

        yield advance


@contextmanager
def _logged(description: str, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
    begun = last = time.monotonic()
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last >= LOG_EVERY_SECONDS:
            last = now
            left = f", {(now - begun) * (total / done - 1):.0f} s left" if total and 0 < done < total else ""
            print(f"{description}: {_state(done, total, unit, now - begun)}{left}", file=sys.stderr, flush=True)

    yield advance


def _state(done: float, total: float | None, unit: str, seconds: float) -> str:
    amount = f"{done:,.0f}/{total:,.0f}" if total else f"{done:,.0f}"
    rate = done / seconds if seconds > 0 else 0.0
    shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{amount} {unit}, {shown} {unit}/s".replace("  ", " ")


def percent(share: float | None) -> str | None:
    """With one decimal; None of None."""
    return None if share is None else f"{share:.1%}"

"""What a person sees while it trains, and the clock that display and schedule read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latemask.config import Run


class Stopwatch:
    """Training seconds: it runs on from an earlier run's, starts when all is compiled, and pauses while validating and
    saving."""

    def __init__(self, seconds: float = 0.0):
        self.before = seconds
        self.since: float | None = None

    @property
    def seconds(self) -> float:
        return self.before + (time.perf_counter() - self.since if self.since is not None else 0.0)

    def start(self) -> None:
        self.before, self.since = self.seconds, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        ran = self.since is not None
        self.before, self.since = self.seconds, None
        try:
            yield
        finally:
            if ran:
                self.start()


class Display:
    """A progress bar with loss, rate and remaining time on a terminal; a line for each journal line elsewhere."""

    def __init__(self, run: Run, steps: int, out: Path, enabled: bool):
        self.run, self.steps, self.out, self.enabled = run, steps, out, enabled
        self.bar, self.task = None, None
        self.seen: tuple[int, float] | None = None

    def __enter__(self) -> Display:
        from rich.console import Console

        self.console = Console(stderr=True)
        if self.enabled and self.console.is_terminal:
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[now]}"), progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
                console=self.console,
            )  # fmt: skip
            self.task = self.bar.add_task(self.run.recipe, total=self.steps, now="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def hear(self, kind: str, line: dict[str, Any]) -> None:
        if not self.enabled:
            return
        text = self._text(kind, line)
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=line["step"])
            if kind == "train":
                now = f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s"
                self.bar.update(self.task, now=now, total=self._last_step(line))
                return
            if kind == "save":
                return
        if text:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _last_step(self, line: dict[str, Any]) -> int:
        """The run's last step; where the clock ends it, judged by the steps made so far."""
        most = self.run.training.max_seconds
        return self.steps if most is None else min(self.steps, round(line["step"] * most / line["seconds"]))

    def _text(self, kind: str, line: dict[str, Any]) -> str:
        step = f"step {line['step']:,}/{self.steps:,}"
        match kind:
            case "start" | "resume":
                masked, row = line["masked_tokens"], self.run.shape.row_tokens
                later = f" at first; {self.run.masking.rates_text}" if self.run.masking.later_rates else ""
                return (
                    f"{self.run.recipe}: {line['encoder_parameters'] / 1e6:.1f} M parameters kept of "
                    f"{line['parameters'] / 1e6:.1f} M; {masked} of {row} tokens masked in every row "
                    f"({masked / row:.1%}{later}); {line['rows']:,} rows ({line['refused_rows']:,} refused, "
                    f"{line['dropped_tokens']:,} tokens dropped at the end); {line['world']} x {line['card']}, "
                    f"{line['micro_rows']} rows at once"
                    + (f"; resumed at step {line['step']:,}" if kind == "resume" else "")
                )
            case "train":
                left = ""
                if self.seen is not None and line["step"] > self.seen[0]:
                    a_step = (line["seconds"] - self.seen[1]) / (line["step"] - self.seen[0])
                    left = f"  {a_step * (self._last_step(line) - line['step']) / 60:.1f} min left"
                self.seen = (line["step"], line["seconds"])
                return f"{step}  loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tokens/s{left}"
            case "validation":
                return f"{step}  validation loss {line['loss']:.4f} nats per masked token (rate {line['rate']:g})"
            case "skip":
                return f"{step}  skipped: loss or gradient not finite in batch {line['batch']}"
            case "save":
                return f"{step}  saved {line['folder']}"
            case "end":
                return f"{step}  done ({line['reason']}) after {line['seconds']:.0f} s in {self.out}"
        return ""

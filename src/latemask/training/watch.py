"""What a person sees while it trains, and the clock that display and schedule read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latemask.config import Run
from latemask.console import LOG_EVERY_SECONDS, warn
from latemask.training import plateau
from latemask.training.journal import loss_unit

TERMINAL_EVERY_SECONDS = 1.0
"""How often the display on a terminal asks the device where it stands."""
UNSAVED_SECONDS = 1800.0
"""So much training is a loss, where it goes without a checkpoint."""


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
    """A progress bar with loss, rate and remaining time on a terminal; elsewhere a line for each journal line, for the
    first step, and where these are far apart, one every ten seconds."""

    def __init__(self, run: Run, steps: int, out: Path, enabled: bool):
        self.run, self.steps, self.out, self.enabled = run, steps, out, enabled
        self.bar, self.task = None, None
        self.seen: tuple[float, float] | None = None
        self.owes_loss, self.shown_at = True, time.perf_counter()
        self.step_began = self.shown_at
        self.loss: float | None = None
        self.unigram_loss: float | None = None
        self.began: tuple[float, float] | None = None

    def __enter__(self) -> Display:
        from rich.console import Console

        self.console = Console(stderr=True)
        if self.enabled and self.console.is_terminal:
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"), progress.BarColumn(),
                progress.TextColumn("{task.fields[place]}"), progress.TextColumn("{task.fields[now]}"),
                progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), console=self.console,
            )  # fmt: skip
            self.task = self.bar.add_task(self.run.recipe, total=self.steps, place="", now="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, step: int, seconds: float) -> None:
        """Training goes on from here: what rates are measured from."""
        self.seen = self.began = (step, seconds)
        self.shown_at = time.perf_counter()

    @property
    def is_due(self) -> bool:
        """Whether a person has waited long enough for a sign of life, which may cost the device a wait."""
        return self.enabled and time.perf_counter() - self.shown_at >= self._every_seconds

    @property
    def _every_seconds(self) -> float:
        return LOG_EVERY_SECONDS if self.bar is None else TERMINAL_EVERY_SECONDS

    def is_due_in_step(self, done_share: float) -> bool:
        """The same where the share ``done_share`` of a step is done: only a step that itself takes so long is shown
        before its end, when its loss is known. ``done_share`` 0: the step begins."""
        now = time.perf_counter()
        if done_share == 0:
            self.step_began = now
        return self.is_due and now - self.step_began >= self._every_seconds

    @property
    def is_due_after_step(self) -> bool:
        """The same at the end of a step: the first is always shown, and one that was shown without its loss."""
        return self.enabled and (self.owes_loss or self.is_due)

    def tick(self, step: float, seconds: float, loss: float | None = None) -> None:
        """Show where training stands between lines of the journal; ``step`` may be in the middle of one, and then there
        is no ``loss`` to tell."""
        line = {"step": step, "seconds": seconds, "loss": loss}
        if self.seen is not None and seconds > self.seen[1]:
            tokens = self.run.training.batch_rows * self.run.shape.row_tokens
            line["tokens_per_second"] = (step - self.seen[0]) * tokens / (seconds - self.seen[1])
        self.hear("train", line)

    def validating(self, step: int, done_share: float) -> None:
        """Show how far a long validation is."""
        if self.is_due:
            self.shown_at = time.perf_counter()
            text = f"validating, {done_share:.0%}"
            if self.bar is not None and self.task is not None:
                self.bar.update(self.task, now=text)
            else:
                self._print(f"{self._place({'step': step})}  {text}")

    def hear(self, kind: str, line: dict[str, Any]) -> None:
        """Show a line of the journal."""
        if not self.enabled:
            return
        self.shown_at = time.perf_counter()
        text = self._text(kind, line)
        if kind == "train":
            self._warn_where_unsaved(line)
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=line["step"], place=self._place(line))
            if kind == "train":
                self.loss = self.loss if line["loss"] is None else line["loss"]
                self.bar.update(self.task, now=_progress({**line, "loss": self.loss}), total=self._last_step(line))
                return
            if kind == "save":
                return
        if text:
            self._print(text)

    def _warn_where_unsaved(self, line: dict[str, Any]) -> None:
        """Once, after ten seconds of training: where no checkpoint comes before the end and that is far."""
        if self.began is None or line["seconds"] - self.began[1] < LOG_EVERY_SECONDS or line["step"] <= self.began[0]:
            return
        left = self._seconds_left(self.began, line)
        self.began = None
        every, last = self.run.training.save_every, self._last_step(line)
        if every >= last and left > UNSAVED_SECONDS:
            warn(f"saved at the end alone, in {_duration(left)}, and by SIGTERM or Ctrl-C: --training.save-every "
                 f"{every:,} of {last:,} steps")  # fmt: skip

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _last_step(self, line: dict[str, Any]) -> int:
        """The run's last step; where the clock ends it, judged by the steps made so far."""
        most = self.run.training.max_seconds
        if most is None or not line["seconds"]:
            return self.steps
        return min(self.steps, round(line["step"] * most / line["seconds"]))

    def _seconds_left(self, since: tuple[float, float], line: dict[str, Any]) -> float:
        """Until the run's last step, at the pace since an earlier step and its seconds."""
        a_step = (line["seconds"] - since[1]) / (line["step"] - since[0])
        return a_step * max(0, self._last_step(line) - line["step"])

    def _place(self, line: dict[str, Any]) -> str:
        """The step, and of how much: of all steps, or where the clock ends the run before them, of its seconds."""
        step, seconds, most = line["step"], line.get("seconds"), self.run.training.max_seconds
        text = f"step {int(step):,}"
        by_clock = most is not None and (seconds is None or seconds / most >= step / self.steps)
        if not by_clock:
            text += f"/{self.steps:,}"
        if step > int(step):
            text += f" and {step - int(step):.0%} of the next"
        return text + (f", {seconds:,.0f} of {most:,.10g} s" if by_clock and seconds is not None else "")

    def _text(self, kind: str, line: dict[str, Any]) -> str:
        place = self._place(line)
        match kind:
            case "start" | "resume":
                self.unigram_loss = line["unigram_loss"]
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
                    left = f"  {_duration(self._seconds_left(self.seen, line))} left"
                self.seen, self.owes_loss = (line["step"], line["seconds"]), line["loss"] is None
                return f"{place}  {_progress(line)}{left}"
            case "validation":
                alone, self.unigram_loss = self.unigram_loss, None
                beside = f"; {plateau.NAME}: {alone:.2f}" if alone is not None else ""
                unit = loss_unit(self.run.rewrites)
                return f"{place}  validation loss {line['loss']:.4f} {unit} (rate {line['rate']:g}){beside}"
            case "skip":
                return f"{place}  skipped: loss or gradient not finite in batch {line['batch']}"
            case "save":
                return f"{place}  saved {line['folder']}"
            case "end":
                frequencies = "; no better than word frequencies" if line["word_frequencies_only"] else ""
                ended = "stopped" if line["reason"] in ("signal", "plateau") else "done"
                return f"{place}  {ended} ({line['reason']}) after {line['seconds']:.0f} s in {self.out}{frequencies}"
        return ""


def _progress(line: dict[str, Any]) -> str:
    loss, speed = line["loss"], line.get("tokens_per_second")
    told = (None if loss is None else f"loss {loss:.4f}", None if speed is None else f"{speed:,.0f} tokens/s")
    return "  ".join(filter(None, told))


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

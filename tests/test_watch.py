"""What a person sees while it trains."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from latemask.training import watch
from latemask.training.loop import pretrain
from latemask.training.watch import Display
from training_support import lines_of, tiny_run, write_store


@pytest.mark.parametrize(("max_seconds", "of_all", "left"), [
    (None, "/960", "15.0"), (120.0, ", {} of 120 s", "1.0"), (10_000.0, "/960", "15.0"),
])  # fmt: skip
def test_remaining_time_is_that_of_what_ends_the_run_first(
    max_seconds: float | None, of_all: str, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step takes a second; 960 steps, or the clock."""
    with Display(tiny_run(steps=960, max_seconds=max_seconds), 960, Path("run"), enabled=True) as display:
        for step in (30, 60):
            line = {"step": step, "seconds": float(step), "loss": 2.5, "tokens_per_second": 1234.5}
            display.hear("train", line)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"step 30{of_all.format(30)}  loss 2.5000  1,234 tokens/s"
    assert second == f"step 60{of_all.format(60)}  loss 2.5000  1,234 tokens/s  {left} min left"


def test_where_the_clock_ends_the_run_its_seconds_are_the_measure(capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 steps are never made: no line counts by them, whatever it tells."""
    with Display(tiny_run(steps=2000, max_seconds=60.0), 2000, Path("run"), enabled=True) as display:
        display.hear("validation", {"step": 0, "seconds": 0.0, "loss": 4.25, "rate": 0.3})
        display.begin(0, 0.0)
        display.tick(19, 24.2, 2.5)
        display.tick(19.5, 25.0)
        display.hear("skip", {"step": 19, "batch": 19})
        display.hear("train", {"step": 50, "seconds": 59.4, "loss": 2.25})
        display.hear("save", {"step": 51, "seconds": 60.3, "folder": "step-0000051"})
        display.hear("end", {"step": 51, "seconds": 60.3, "reason": "seconds", "word_frequencies_only": False})
    told = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == ["step 0, 0 of 60 s", "step 19, 24 of 60 s", "step 19 and 50% of the next, 25 of 60 s", "step 19",
                    "step 50, 59 of 60 s", "step 51, 60 of 60 s", "step 51, 60 of 60 s"]  # fmt: skip


@pytest.mark.parametrize(("max_seconds", "place"), [(None, "step 30/960"), (60.0, "step 30, 24 of 60 s")])
def test_a_terminal_s_bar_has_the_same_measure(
    max_seconds: float | None, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with Display(tiny_run(steps=960, max_seconds=max_seconds), 960, Path("run"), enabled=True) as display:
        display.hear("train", {"step": 30, "seconds": 24.0, "loss": 2.5})
    assert display.bar is not None
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(rf"{place} +loss 2\.5000", text)


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(tiny_run(), 6, Path("run"), enabled=False) as display:
        display.hear("save", {"step": 6, "folder": "step-0000006"})
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("system", "unit"), [
    ("mae_lm", "nats per masked token"), ("decoder_causal_cross", "nats per token of the row"),
])  # fmt: skip
def test_a_validation_loss_says_what_it_is_a_mean_over(
    system: str, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display(tiny_run(system), 6, Path("run"), enabled=True) as display:
        display.hear("validation", {"step": 6, "loss": 2.5, "rate": 0.3})
    assert capsys.readouterr().err == f"step 6/6  validation loss 2.5000 {unit} (rate 0.3)\n"


@pytest.mark.parametrize(("changes", "a_step", "said"), [
    ({"steps": 1000, "save_every": 1000}, 2.0, "in 33.2 min, and by SIGTERM or Ctrl-C: --training.save-every 1,000 of "
     "1,000 steps"),
    ({"steps": 1000, "save_every": 1000}, 1.5, None),  # not long
    ({"steps": 1000, "save_every": 999}, 2.0, None),  # saved before
    ({"steps": 9000, "save_every": 2000, "max_seconds": 3600.0}, 2.0,
     "in 59.8 min, and by SIGTERM or Ctrl-C: --training.save-every 2,000 of 1,800 steps"),
    ({"steps": 9000, "save_every": 9000, "max_seconds": 60.0}, 2.0, None),  # the clock ends it
])  # fmt: skip
def test_a_long_run_without_a_checkpoint_is_warned_of_once_its_length_is_known(
    changes: dict[str, Any], a_step: float, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(**changes)
    with Display(run, run.updates, Path("run"), enabled=True) as display:
        display.begin(0, 0.0)
        for step in (1, 5, 10, 11, 20):
            display.hear("train", {"step": step, "seconds": a_step * step, "loss": 2.5})
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warnings == ([f"warning: saved at the end alone, {said}"] if said else [])


@pytest.mark.parametrize(("reason", "ended"), [
    ("steps", "done"), ("seconds", "done"), ("signal", "stopped"), ("plateau", "stopped"),
])  # fmt: skip
def test_a_run_that_was_stopped_is_not_called_done(reason: str, ended: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Display(tiny_run(), 6, Path("run"), enabled=True) as display:
        display.hear("end", {"step": 4, "seconds": 2.0, "reason": reason, "word_frequencies_only": False})
    assert capsys.readouterr().err == f"step 4/6  {ended} ({reason}) after 2 s in run\n"


class Clock:
    """Of the display's module, moved by hand."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 0.0
        patch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_the_first_step_and_then_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes four seconds, and the journal has nothing to say for long."""
    clock = Clock(monkeypatch)
    with Display(tiny_run(), 100, Path("run"), enabled=True) as display:
        display.begin(0, 0.0)
        asked = []
        for step in range(1, 10):
            clock.now += 4
            if display.is_due_after_step:
                asked.append(step)
                display.tick(step, clock.now, 2.5)
    assert asked == [1, 4, 7], "the device is asked no more often"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"step {step}/100  loss 2.5000  28 tokens/s  {(100 - step) * 4 / 60:.1f} min left"
                     for step in asked]  # fmt: skip


def test_a_step_that_takes_minutes_shows_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with Display(tiny_run(), 100, Path("run"), enabled=True) as display:
        display.begin(0, 0.0)
        walk(display, clock, 1, 8)
        display.validating(0, 0.5)
        clock.now += 10
        display.validating(0, 0.6)
    half, whole, validating = capsys.readouterr().err.splitlines()
    assert half == "step 0/100 and 50% of the next  4 tokens/s  53.1 min left"
    assert whole.startswith("step 1/100  loss 2.5000  4 tokens/s")
    assert validating == "step 0/100  validating, 60%"


def walk(display: Display, clock: Clock, steps: int, part_seconds: float) -> None:
    """Steps of four micro-batches, as the loop makes them, whose loss falls."""
    for step in range(steps):
        for share in (0.0, 0.25, 0.5, 0.75):
            if display.is_due_in_step(share):
                display.tick(step + share, clock.now)
            clock.now += part_seconds
        if display.is_due_after_step:
            display.tick(step + 1, clock.now, 2.5 - step / 100)


@pytest.mark.parametrize(("part_seconds", "told"), [
    (1, ["1", "4", "7", "10", "13", "16", "19"]),
    (2, ["1", "3", "5", "7", "9", "11", "13", "15", "17", "19"]),
    (9, [one for step in range(20) for one in (f"{step} and 50% of the next", f"{step + 1}")]),
])  # fmt: skip
def test_a_loss_is_told_once_and_only_with_the_step_that_had_it(
    part_seconds: float, told: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line repeats an older loss, and no step that is shown in its middle ends unshown."""
    clock = Clock(monkeypatch)
    with Display(tiny_run(), 100, Path("run"), enabled=True) as display:
        display.begin(0, 0.0)
        walk(display, clock, 20, part_seconds)
    lines = capsys.readouterr().err.splitlines()
    shown = [line.split("/100")[0].removeprefix("step ") + line.split("/100")[1].split("  ")[0] for line in lines]
    assert all(("loss" in line) == ("of the next" not in line) for line in lines)
    losses = [line.split("loss ")[1].split()[0] for line in lines if "loss" in line]
    assert len(set(losses)) == len(losses)
    assert shown == told


def test_a_slow_run_is_shown_before_the_journal_has_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole loop, whose journal logs at step 6 alone."""
    pretrain(tiny_run(log_every=6), write_store(tmp_path / "data"), tmp_path / "run")
    assert "step 1/6  loss" in capfd.readouterr().err
    assert [line["step"] for line in lines_of(tmp_path / "run", "train")] == [6]

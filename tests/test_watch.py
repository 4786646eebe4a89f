"""What a person sees while it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from latemask.training.watch import Display
from training_support import tiny_run


@pytest.mark.parametrize(("max_seconds", "left"), [(None, "15.0"), (120.0, "1.0"), (10_000.0, "15.0")])
def test_remaining_time_is_that_of_what_ends_the_run_first(
    max_seconds: float | None, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step takes a second; 960 steps, or the clock."""
    with Display(tiny_run(steps=960, max_seconds=max_seconds), 960, Path("run"), enabled=True) as display:
        for step in (30, 60):
            line = {"step": step, "seconds": float(step), "loss": 2.5, "tokens_per_second": 1234.5}
            display.hear("train", line)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 30/960  loss 2.5000  1,234 tokens/s"
    assert second == f"step 60/960  loss 2.5000  1,234 tokens/s  {left} min left"


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(tiny_run(), 6, Path("run"), enabled=False) as display:
        display.hear("save", {"step": 6, "folder": "step-0000006"})
    assert capsys.readouterr() == ("", "")

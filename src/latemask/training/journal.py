"""What happened, one JSON object a line: loss, speed, validations, saves. The report reads it; nothing else does.

Lines have a ``kind``: start, resume, train, validation, skip, save, end. Units stand in the names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from latemask.errors import Refusal

Tracker = Literal["tensorboard", "wandb"]


class Listener(Protocol):
    """Something beside the file that hears every line."""

    def hear(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Appends to ``journal.jsonl``. After a resume the lines of steps that are run again are taken out first."""

    def __init__(self, path: Path, resume_step: int | None = None, listeners: Sequence[Listener] = ()):
        if path.exists():
            lines = [] if resume_step is None else [line for line in read(path) if line.get("step", 0) <= resume_step]
            aside = path.with_suffix(".partial")
            aside.write_text("".join(json.dumps(line) + "\n" for line in lines))
            os.replace(aside, path)
        self.file = path.open("a")
        self.listeners = listeners

    def add(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, **values}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for listener in self.listeners:
            listener.hear(line)

    def close(self) -> None:
        self.file.close()
        for listener in self.listeners:
            listener.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a last line cut short by a kill is left out. Raises ``Refusal`` on any other bad line."""
    lines = []
    texts = path.read_text().split("\n")
    for number, text in enumerate(texts, 1):
        if text:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                if number != len(texts):
                    raise Refusal(f"{path}:{number}", repr(text[:80]), "a JSON object") from None
    return lines


class TensorBoard:
    """Scalars for TensorBoard (extra ``tensorboard``)."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise Refusal(
                "--tracker", "tensorboard, which is not installed", "pip install latemask[tensorboard]"
            ) from None
        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def hear(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self.writer.add_scalar(f"{line['kind']}/{name}", value, line.get("step", 0))

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Scalars for Weights & Biases (extra ``wandb``); offline unless the user has logged in, and it never asks."""

    def __init__(self, folder: Path, run: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise Refusal("--tracker", "wandb, which is not installed", "pip install latemask[wandb]") from None
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self.run = wandb.init(project="latemask", name=folder.name, dir=str(folder), config=run, mode=mode)  # type: ignore[arg-type]

    def hear(self, line: dict[str, Any]) -> None:
        numbers = {f"{line['kind']}/{k}": v for k, v in line.items() if isinstance(v, int | float) and k != "step"}
        if numbers:
            self.run.log(numbers, step=line.get("step", 0))

    def close(self) -> None:
        self.run.finish()


def listeners(trackers: Sequence[Tracker], folder: Path, run: dict[str, Any]) -> list[Listener]:
    """The trackers a user asked for, by name."""
    made = {"tensorboard": lambda: TensorBoard(folder), "wandb": lambda: WeightsAndBiases(folder, run)}
    return [made[tracker]() for tracker in trackers]

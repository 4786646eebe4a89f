"""What happened, one JSON object a line: loss, speed, validations, saves. For reading: no run depends on a number here.

Lines have a ``kind``: start, resume, train, validation, plateau, skip, save, end. Units stand in the names. A number
that is not finite is null.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any, Literal, Protocol

from latemask.console import warn
from latemask.errors import Refusal, unreadable
from latemask.writing import write_whole

JOURNAL = "journal.jsonl"
"""Of a run folder."""
Tracker = Literal["tensorboard", "wandb"]

PER_MASKED, PER_TOKEN = "nats per masked token", "nats per token of the row"
"""What a loss is counted in: the second where the decoder rewrites whole rows, which compares with no other."""


def loss_unit(rewrites: bool) -> str:
    """The unit of the losses of a run whose decoder rewrites whole rows, or of any other."""
    return PER_TOKEN if rewrites else PER_MASKED


class Listener(Protocol):
    """Something beside the file that hears every line."""

    name: str

    def hear(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Appends to ``journal.jsonl``.

    A run resumed at ``(step, batch index)`` first takes out the lines of later steps, of skips that it meets again, and
    of the kinds ``again`` at its own step, which it makes again; any other run begins anew. A journal with lines that
    are not whole is kept as ``broken-journal.jsonl``, said on stderr, and goes on with those that are.
    """

    def __init__(
        self,
        path: Path,
        resumed: tuple[int, int] | None = None,
        listeners: Sequence[Listener] = (),
        again: Sequence[str] = (),
    ):
        self.taken_out: list[dict[str, Any]] = []
        if path.exists():
            step, batch = resumed or (-1, -1)
            lines, bad = ({}, {}) if resumed is None else _parsed(path)[:2]
            if bad:
                _keep_broken(path, bad)
            kept = []
            for line in lines.values():
                if line.get("step", 0) <= step and line.get("batch", -1) < batch:
                    is_again = line.get("step", 0) == step and line.get("kind") in again
                    (self.taken_out if is_again else kept).append(line)
            aside = path.with_name(f".{path.name}.partial")
            try:
                with aside.open("wb", buffering=0) as file:
                    _write(file, "".join(json.dumps(line) + "\n" for line in kept))
                    os.fsync(file.fileno())
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)
        self.file = path.open("ab", buffering=0)
        self.listeners = listeners

    def add(self, kind: str, **values: Any) -> None:
        line = _finite({"kind": kind, **values})
        _write(self.file, json.dumps(line) + "\n")
        for listener in self.listeners:
            with _errors_are_the_tracker_s(listener.name):
                listener.hear(line)

    def put_back(self, kind: str) -> None:
        """Write again what ``again`` took out of this kind: nothing came in its place."""
        lines = [line for line in self.taken_out if line.get("kind") == kind]
        _write(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def close(self) -> None:
        self.file.close()
        for listener in self.listeners:
            with _errors_are_the_tracker_s(listener.name):
                listener.close()


@contextmanager
def _errors_are_the_tracker_s(name: str) -> Iterator[None]:
    """An error of the system while a tracker works, as a ``Refusal`` that names the tracker, not the journal."""
    try:
        yield
    except OSError as error:
        do = "The run needs no tracker: it also goes on without this flag"
        raise Refusal(f"--tracker {name}", str(error), "a tracker that can do its work", do) from error


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a last line cut short by a kill is left out. Raises ``Refusal`` on any other bad line."""
    return list(_whole(path).values())


def _whole(path: Path) -> dict[int, dict[str, Any]]:
    """Every whole line by its number in the file. Raises ``Refusal`` on any other but a last one cut short."""
    lines, bad, _ = _parsed(path)
    for number, text in bad.items():
        raise _not_whole(path, number, text)
    return lines


def _not_whole(path: Path, number: int, text: bytes) -> Refusal:
    found = repr(text[:80].decode(errors="replace"))
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"{unreadable(error)}: {found}"
    return Refusal(f"{path}:{number}", found, "a JSON object whose step is a whole number",
                   "Delete this line, or go on with the run: it sets it aside")  # fmt: skip


def _parsed(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, bytes], dict[int, bytes]]:
    """By number: every whole line, those that are not whole, and the last one where a kill cut it short."""
    lines, bad, cut = {}, {}, {}
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and all(isinstance(line.get(name, 0), int) for name in ("step", "batch")):
            lines |= {number: line} if line else {}
        else:
            (cut if number == len(texts) else bad)[number] = text
    return lines, bad, cut


def _keep_broken(path: Path, bad: Mapping[int, bytes]) -> None:
    names = (f"broken-journal{f'-{number}' * (number > 1)}.jsonl" for number in itertools.count(1))
    kept = write_whole(next(place for name in names if not (place := path.with_name(name)).exists()), path.read_bytes())
    where = ", ".join(map(str, list(bad)[:5])) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    warn(f"{path}: line {where}: no JSON object whose step is a whole number; left out (all of it is in {kept.name})")


WHOLE, NUMBER, TEXT, FIELDS = (int,), (int, float), (str,), (dict,)
MAYBE = (*NUMBER, type(None))
NEEDED: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {"run": FIELDS},
    "resume": {"step": WHOLE},
    "train": {"step": WHOLE, "tokens": NUMBER, "seconds": NUMBER, "loss": MAYBE},
    "validation": {"step": WHOLE, "loss": MAYBE},
    "plateau": {"step": WHOLE, "loss": NUMBER},
    "skip": {"step": WHOLE},
    "save": {"step": WHOLE},
    "end": {"step": WHOLE, "reason": TEXT},
}
"""What a line of each kind cannot be read without."""
MEASURED = {
    "step", "batch", "tokens", "seconds", "loss", "epoch", "rate", "rows", "learning_rate", "gradient_norm", "mfu",
    "tokens_per_second", "flops_per_second", "memory_bytes", "skips_in_a_row", "world", "micro_rows", "parameters",
    "encoder_parameters", "flops_per_token", "plain_flops_per_token", "refused_rows", "dropped_tokens", "masked_tokens",
    "unigram_loss",
}  # fmt: skip
"""Numbers wherever they stand, none below 0, but the ``rows`` of a skip."""
COUNTED_WITH = (("training", "batch_rows"), ("training", "steps"), ("training", "max_skips"), ("shape", "row_tokens"),
                ("masking", "rate"))  # fmt: skip
"""Settings in a ``run`` that readers count with."""
TEXTS = {"validation_text"}
"""Texts, or null, wherever they stand."""
ABOVE_0 = {"flops_per_token", "plain_flops_per_token", "world"}
"""What others are divided by or multiplied with."""
NAMES = {WHOLE: "a whole number", NUMBER: "a number", MAYBE: "a number or null", TEXT: "a text", FIELDS: "an object"}


def read_checked(path: Path) -> list[dict[str, Any]]:
    """The same, for readers of the numbers. Raises ``Refusal`` naming a line and the field of it that is missing or
    ill-typed."""
    lines = _whole(path)
    for number, line in lines.items():
        if (problem := _problem(path, number, line)) is not None:
            raise problem
    return list(lines.values())


def salvaged(path: Path) -> tuple[list[dict[str, Any]], Refusal | None]:
    """The lines whose numbers can be read, and what is wrong with the others, a last one cut short too: how many they
    are, and the first."""
    lines, bad, cut = _parsed(path)
    found = {number: _problem(path, number, line) for number, line in lines.items()}
    found |= {number: _not_whole(path, number, text) for number, text in (bad | cut).items()}
    problems = [problem for _, problem in sorted(found.items()) if problem is not None]
    return [line for number, line in lines.items() if found[number] is None], _counted(problems)


def _counted(problems: Sequence[Refusal]) -> Refusal | None:
    """Of several the first, with how many there are."""
    if not problems:
        return None
    first, count = problems[0], len(problems)
    found = first.found if count == 1 else f"{count:,} damaged lines, the first: {first.found}"
    return Refusal(first.where, found, first.wanted, first.do)


def _problem(path: Path, number: int, line: dict[str, Any]) -> Refusal | None:
    """What keeps a reader from the numbers of a line; it gets a ``kind`` where it has none."""
    kind = line.setdefault("kind", "")
    for name, wanted in NEEDED.get(str(kind), {}).items():
        value = line.get(name)
        if name not in line or not isinstance(value, wanted) or isinstance(value, bool):
            found = f"whose {name} is {json.dumps(value)[:60]}" if name in line else f"without {name}"
            return Refusal(path, f"line {number}, of kind {kind}, {found}", f"{NAMES[wanted]} there")
    parts = run if isinstance(run := line.get("run"), dict) else {}
    for part, name in COUNTED_WITH if parts else ():
        value = settings.get(name) if isinstance(settings := parts.get(part), dict) else None
        if not isinstance(value, MAYBE) or isinstance(value, bool):
            found = f"line {number}, of kind {kind}, whose run.{part}.{name} is {json.dumps(value)[:60]}"
            return Refusal(path, found, "a number there")
    for name in (MEASURED - {"rows"} if kind == "skip" else MEASURED) & line.keys():
        value = line[name]
        if not isinstance(value, MAYBE) or isinstance(value, bool) or not _is_count(value, name in ABOVE_0):
            found = f"line {number}, of kind {kind}, whose {name} is {json.dumps(value)[:60]}"
            return Refusal(path, found, f"a number {'above 0' if name in ABOVE_0 else 'of 0 or more'}, or null, there")
    for name in TEXTS & line.keys():
        if not isinstance(value := line[name], str | None) or value == "":
            found = f"line {number}, of kind {kind}, whose {name} is {json.dumps(value)[:60]}"
            return Refusal(path, found, "a text or null there")
    return None


def _is_count(value: float | None, is_above: bool) -> bool:
    return value is None or (math.isfinite(value) and (value > 0 if is_above else value >= 0))


def _write(file: RawIOBase, text: str) -> None:
    """All of it: what a full disk cuts short raises at the next attempt."""
    rest = text.encode()
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Scalars for TensorBoard (extra ``tensorboard``)."""

    name = "tensorboard"

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

    name = "wandb"

    def __init__(self, folder: Path, run: dict[str, Any]):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise Refusal("--tracker", "wandb, which is not installed", "pip install latemask[wandb]") from None
        is_known = wandb.login(prompt=False, verify=False)
        mode = os.environ.get("WANDB_MODE") or ("online" if is_known else "offline")
        if mode == "online" and not is_known:  # it would ask for a key
            raise Refusal("--tracker", "wandb in mode online, without a login", "wandb login, or WANDB_MODE=offline")
        try:
            self.run = wandb.init(project="latemask", name=folder.name, dir=str(folder), config=run, mode=mode)
        except wandb.errors.Error as error:
            raise Refusal("--tracker", f"wandb, which says: {error}", "a run that it begins") from error

    def hear(self, line: dict[str, Any]) -> None:
        numbers = {f"{line['kind']}/{k}": v for k, v in line.items() if isinstance(v, int | float) and k != "step"}
        if numbers:
            self.run.log(numbers, step=line.get("step", 0))

    def close(self) -> None:
        self.run.finish()


def listeners(trackers: Sequence[Tracker], folder: Path, run: dict[str, Any]) -> list[Listener]:
    """The trackers a user asked for, by name."""
    made = {"tensorboard": lambda: TensorBoard(folder), "wandb": lambda: WeightsAndBiases(folder, run)}
    found: list[Listener] = []
    for tracker in trackers:
        with _errors_are_the_tracker_s(tracker):
            found.append(made[tracker]())
    return found

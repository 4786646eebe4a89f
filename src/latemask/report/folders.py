"""What run folders hold, read as JSON: journals, studies of their layers, fine-tunings, evaluations.

A folder without a journal counts too, where it holds results of another model (``runs/NAME/downstream``); so does the
JSON file of one study. A folder of run folders stands for all of them; ``sweep.json`` in it says which fields its runs
vary. What is damaged is left out and told, a file or a journal's line: the rest is read all the same. A copy of a run
folder is the same run: one run with the results of both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from latemask import console
from latemask.config import newer_fields
from latemask.errors import Refusal, unreadable
from latemask.fields import dotted
from latemask.report.checked import FORMS, check
from latemask.report.flops import last_start, plain_flops
from latemask.report.looks import MOST_RUNS, Look
from latemask.report.price import PRICES, Cost
from latemask.training import journal
from latemask.training.journal import JOURNAL
from latemask.training.plateau import FAR_NATS, standing
from latemask.writing import folder_of

SWEEP = "sweep.json"
KINDS = tuple(FORMS)
PAGES = (".html", ".htm", ".md", ".svg")
"""Endings of what a report writes, which ``runs/*`` names too: not looked into."""


@dataclass(frozen=True)
class RunFolder:
    """One folder; ``lines`` of its journal, or none, and its ``results`` of each kind of ``KINDS``."""

    name: str
    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    varied: tuple[str, ...] = ()
    """The fields that the sweep which this run is part of varies."""
    left_out: tuple[Refusal, ...] = ()
    """What is wrong with each of its files, or lines of its journal, that cannot be read."""
    copies: tuple[str, ...] = ()
    """Names of the other folders that hold the same run."""
    text: str | None = None
    """Which text its last validation was of, as far as it is known."""
    number: int = 0
    """Its place on the page: what figures choose its colour and marker by."""
    line: int = 0
    """Its place among those of one number: what figures choose its dash by."""

    @property
    def has_something(self) -> bool:
        return bool(self.lines or self.results)

    @property
    def look(self) -> Look:
        return Look(self.number, self.line)

    def last(self, kind: str) -> dict[str, Any]:
        """The last line of a kind; empty where there is none."""
        return next((line for line in reversed(self.lines) if line["kind"] == kind), {})

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The results of a kind."""
        return [result for result in self.results if result["kind"] == kind]

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """Settings and facts of the run since it began or was last resumed; empty without a journal."""
        return last_start(self.lines)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Every field of the run by its dotted name, a default for what it may lack; empty without a journal."""
        run = self.start.get("run", {})
        return dotted(run) | newer_fields(run)

    @cached_property
    def saved_at(self) -> dict[int | None, float | None]:
        """Seconds of training when each step was saved, as far as the journal says."""
        return {line["step"]: line.get("seconds") for line in self.lines if line["kind"] == "save"}

    @property
    def training(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "train"]

    @property
    def reached(self) -> dict[str, Any]:
        """How far the run is known to have come: the most ``step``, ``tokens`` and ``seconds`` that any line says."""
        return {name: max((line[name] for line in self.lines if line.get(name) is not None), default=0)
                for name in ("step", "tokens", "seconds")}  # fmt: skip

    @property
    def text_tokens(self) -> int | None:
        """How long the text is that it trained on; None where the journal does not say."""
        count, refused, dropped = (self.start.get(name) for name in ("rows", "refused_rows", "dropped_tokens"))
        row_tokens = self.fields.get("shape.row_tokens")
        if count is None or refused is None or dropped is None or row_tokens is None:
            return None
        return int((count + refused) * (row_tokens - 1) + dropped)

    @property
    def cards(self) -> str | None:
        """The card it ran on, with their number where it is more than one."""
        world, card = self.start.get("world") or 1, self.start.get("card")
        return f"{world} x {card}" if world > 1 else card

    @property
    def card_seconds(self) -> float:
        """Seconds of training times the cards it ran on."""
        return float(self.reached["seconds"]) * (self.start.get("world") or 1)

    def flops_at(self, step: int) -> float | None:
        """FLOPs of the plain objective until ``step``; None without a journal."""
        rows, row_tokens = self.fields.get("training.batch_rows"), self.fields.get("shape.row_tokens")
        if rows is None or row_tokens is None or self.start.get("plain_flops_per_token") is None:
            return None
        return plain_flops(self.start)(step * rows * row_tokens)

    def cost(self, by: Cost) -> float | None:
        """Card-seconds, or PFLOP of the plain objective, so far; None where the journal does not say it."""
        if by == "seconds":
            return self.card_seconds
        flops = self.flops_at(self.reached["step"])
        return None if flops is None else flops / PRICES[by].size

    @property
    def ending(self) -> str:
        """Why the run ended; "diverged" where too many updates in a row were skipped; "not ended" while it has not, or
        has gone on since."""
        last = self.lines[-1] if self.lines else {"kind": ""}
        if last["kind"] == "skip" and last.get("skips_in_a_row", 0) >= self.fields.get("training.max_skips", 1):
            return "diverged"
        return str(last["reason"]) if last["kind"] == "end" else "not ended"

    @property
    def has_ended(self) -> bool:
        """Whether all of it was run: by its steps, tokens or seconds."""
        return self.ending in ("steps", "seconds")

    @property
    def validation(self) -> dict[str, Any]:
        """The last validation whose loss is a number; empty where there is none, or only that of step 0 although the
        run went on: the untrained weights' is no result."""
        found = (line for line in reversed(self.lines) if line["kind"] == "validation" and line["loss"] is not None)
        last = next(found, {})
        return last if last.get("step") or not self.reached["step"] else {}

    @property
    def text_of_validation(self) -> str | None:
        """Which held-out rows that was of, as the journal said before it; None where it did not."""
        if not (valid := self.validation):
            return None
        before = itertools.takewhile(lambda line: line is not valid, self.lines)
        told = [line.get("validation_text") for line in before if line["kind"] in ("start", "resume")]
        return told[-1] if told else None

    @property
    def rewrites(self) -> bool:
        """Whether its losses are means over whole rows, which its decoder rewrites, and not over masked tokens."""
        return bool(self.fields.get("decoder.rewrites"))

    @property
    def name_by_loss(self) -> str:
        """Its name where losses of both kinds stand side by side."""
        return f"{self.name} (per token of the row)" if self.rewrites else self.name

    @property
    def unigram_loss(self) -> float | None:
        """The loss of word frequencies alone on the validation's tokens, to nine places, beyond which machines sum one
        text differently; None where the journal does not say it."""
        told = (line["unigram_loss"] for line in reversed(self.lines) if line.get("unigram_loss") is not None)
        return next((round(loss, 9) for loss in told), None)

    @cached_property
    def learned(self) -> str:
        """What the run had not got beyond after its warm-up, where its journal says that it stood still; else empty."""
        if (found := standing(self.lines)) is None:
            return ""
        loss, alone = found
        return "word frequencies only" if loss <= alone + FAR_NATS else "less than word frequencies"


def read_folders(places: Sequence[Path | str]) -> list[RunFolder]:
    """Everything in ``places`` (run folders, folders of run folders, folders of results, JSON files), named after them.

    What cannot be read, and a folder that holds nothing to report, is warned of. Raises ``Refusal`` for a place that
    does not exist, and where nothing at all can be read.
    """
    given: dict[Path, Path] = {}
    for found in (found for place in places for found in _expanded(Path(place))):
        given.setdefault(found.resolve(), found)
    paths = [path for path in given if not (path.suffix in PAGES and path.is_file())]
    is_one_folder = len({path.parent for path in paths}) == 1
    ends = [path.stem if path.is_file() else path.name if is_one_folder else _of_sweep(path) for path in paths]
    apart = [end if ends.count(end) == 1 else _apart(path, paths) for path, end in zip(paths, ends, strict=True)]
    names = [readable(name) for name in apart]
    found = [_read(given[path], name) for path, name in zip(paths, names, strict=True)]
    folders = once([folder for folder in found if folder.has_something or folder.left_out])
    folders = _as_one_tokenizer(_with_texts(folders))
    left_out = left_out_of(found)
    nothing = [_nothing(given[folder.path]) for folder in found if not (folder.has_something or folder.left_out)]
    if not any(folder.has_something for folder in folders):
        left_out += nothing or [Refusal("report", "no run folder", "one or more, such as runs/*")]
        raise left_out[0]
    for problem in [*left_out, *(one for one in nothing if not _is_empty(Path(one.where)))]:
        console.warn(f"left out: {problem}")
    for folder in folders:
        for copy in folder.copies:
            console.warn(f"counted once: {copy} is a copy of {folder.name}")
    # Where there are more than looks, those of which most is drawn come first.
    order = sorted(range(len(folders)), key=lambda place: -len({one["kind"] for one in folders[place].results}))
    numbers = order if len(folders) > MOST_RUNS else range(len(folders))
    of = {place: number for number, place in enumerate(numbers)}
    return [dataclasses.replace(folder, number=of[place]) for place, folder in enumerate(folders)]


def once(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Copies of a run, of which one's journal has every line of the other's, as one run: the one with the longest
    journal, at the place of the first, with the results of all."""
    groups: list[list[RunFolder]] = []
    for folder in folders:
        group = next((group for group in groups if folder.lines and _is_same_run(folder, group[0])), None)
        if group is None:
            groups.append([folder])
        else:
            group.insert(0 if len(folder.lines) > len(group[0].lines) else len(group), folder)
    return [_as_one(group) for group in groups]


def _is_same_run(one: RunFolder, other: RunFolder) -> bool:
    """A line that was timed has to be among those that both have: how they start repeats of a run say alike."""
    if one.lines[0] != (other.lines or [None])[0]:
        return False
    fewer, more = sorted(([json.dumps(line, sort_keys=True) for line in run.lines] for run in (one, other)), key=len)
    return set(more).issuperset(fewer) and any(line.get("seconds") for line in min(one.lines, other.lines, key=len))


def _as_one(group: Sequence[RunFolder]) -> RunFolder:
    first, *copies = group
    if not copies:
        return first
    results = list(first.results)
    for copy in copies:
        results += [result for result in copy.results if result not in results]
    left_out = tuple(problem for folder in group for problem in folder.left_out)
    return dataclasses.replace(first, results=results, left_out=left_out, copies=tuple(copy.name for copy in copies))


def _with_texts(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """With the text that each was validated on: of an older journal, which does not say it, that of a run with equal
    word frequencies."""
    told = [folder.text_of_validation for folder in folders]
    known = {folder.unigram_loss: text for folder, text in zip(folders, told, strict=True) if text}
    return [dataclasses.replace(folder, text=text or known.get(folder.unigram_loss))
            for folder, text in zip(folders, told, strict=True)]  # fmt: skip


def _as_one_tokenizer(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Tokenizers that made the same rows of a text are one, whatever their fingerprints (an export declares its special
    tokens otherwise than its run does): in the results each is called by the name of the first."""
    first: dict[str, str] = {}
    same: dict[str, str] = {}

    def name(tokenizer: str) -> str:
        while tokenizer in same:
            tokenizer = same[tokenizer]
        return tokenizer

    for result in (result for folder in folders for result in folder.results if _has_scored(result)):
        one, other = name(first.setdefault(result["fingerprint"], result["tokenizer"])), name(result["tokenizer"])
        same |= {other: one} if other != one else {}

    def called(result: dict[str, Any]) -> dict[str, Any]:
        return result | {"tokenizer": name(result["tokenizer"])} if _has_scored(result) else result

    return [dataclasses.replace(folder, results=list(map(called, folder.results))) for folder in folders]


def _has_scored(result: dict[str, Any]) -> bool:
    """Whether it says which rows were scored, and by whose ids."""
    return bool(result.get("suite") == "masked-loss" and result.get("tokenizer") and result.get("fingerprint"))


def left_out_of(folders: Sequence[RunFolder]) -> list[Refusal]:
    """What is left out of these folders, each once: runs may share a file."""
    return list({str(problem): problem for folder in folders for problem in folder.left_out}.values())


def _is_empty(folder: Path) -> bool:
    """Whether nothing that a person sees is in it: what is left of a run that was refused, such as its lock file."""
    return folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())


def readable(name: str) -> str:
    """A file's name as text that every file and terminal can hold."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "\ufffd", name.encode("utf-8", "replace").decode("utf-8"))


def in_order(path: Path) -> list[Any]:
    """A key that sorts names with numbers in them by the numbers."""
    parts = re.split(r"(\d+(?:\.\d+)?)", path.name)
    return [(1, float(part), "") if number % 2 else (0, 0.0, part) for number, part in enumerate(parts)]


def _expanded(place: Path) -> list[Path]:
    if not place.exists():
        raise Refusal(place, "no such folder", "a run folder of `latemask pretrain`")
    if place.is_file() or (place / JOURNAL).is_file():
        return [place]
    inside = sorted((path for path in place.iterdir() if (path / JOURNAL).is_file()), key=in_order)
    return [*inside, place] if not inside or _results(place)[0] else inside


def _results(folder: Path) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """The results in a folder and in its ``downstream``, and what is wrong with the files that cannot be read."""
    results, problems = [], []
    for file in sorted([*folder.glob("*.json"), *folder.glob("downstream/*.json")]):
        try:
            results += [result] if (result := _result(file)) and file.name != SWEEP else []
        except Refusal as refusal:
            problems.append(refusal)
    return results, problems


def _result(file: Path) -> dict[str, Any]:
    """The result that a file holds; empty for any other JSON. Raises ``Refusal`` for one that cannot be read."""
    value = _json(file, "a result in JSON")
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        return {}
    check(file, value)
    return value


def _json(file: Path, wanted: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(file, unreadable(error), wanted) from None


def _read(place: Path, name: str) -> RunFolder:
    """What a folder or a file holds; nothing where that is nothing to report. What is wrong is told of the place as it
    was given."""
    path = place.resolve()
    if path.is_file():
        try:
            result = _result(place)
        except Refusal as refusal:
            return RunFolder(name, path, left_out=(refusal,))
        return RunFolder(name, path, results=[result] if result else [])
    results, problems = _results(place)
    lines, damaged = _journal(place / JOURNAL)
    varied, odd = _varied(folder_of(place) / SWEEP)
    return RunFolder(name, path, lines, results, varied, (*damaged, *problems, *odd))


def _nothing(path: Path) -> Refusal:
    """What is said of a folder or a file that holds nothing to report."""
    if path.is_file():
        return Refusal(path, "no result of latemask", f"a run folder, or JSON of kind {', '.join(KINDS)}")
    has_lines = (path / JOURNAL).is_file() and (path / JOURNAL).stat().st_size
    found = "a journal without a line of kind start" if has_lines else f"no {JOURNAL} (or an empty one), no results"
    return Refusal(path, found, "a run folder of `latemask pretrain`")


def _journal(file: Path) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Its lines that can be read, none without that of its start; and what is wrong with the others."""
    try:
        lines, problem = journal.salvaged(file) if file.is_file() else ([], None)
    except OSError as error:
        return [], [Refusal(file, unreadable(error), "the journal of a run")]
    return lines if any(line["kind"] == "start" for line in lines) else [], [problem] if problem else []


def _varied(file: Path) -> tuple[tuple[str, ...], list[Refusal]]:
    """The fields that a sweep varies; none where there is no sweep, or what is wrong with its file."""
    if not file.is_file():
        return (), []
    wanted = "what `latemask sweep` wrote"
    try:
        found = _json(file, wanted)
    except Refusal as refusal:
        return (), [refusal]
    if not isinstance(found, dict) or not isinstance(found.get("vary"), dict):
        return (), [Refusal(file, "no fields under vary", wanted)]
    return tuple(found["vary"]), []


def _of_sweep(path: Path) -> str:
    """A folder's name; of a sweep's run, which is called after its values alone, with the sweep's before it."""
    return f"{path.parent.name}/{path.name}" if (path.parent / SWEEP).is_file() else path.name


def _apart(path: Path, others: Sequence[Path]) -> str:
    """As much of the end of a path as it takes to tell it apart from every other."""
    for count in range(1, len(path.parts)):
        if sum(other.parts[-count:] == path.parts[-count:] for other in others) == 1:
            return Path(*path.parts[-count:]).as_posix()
    return path.as_posix()

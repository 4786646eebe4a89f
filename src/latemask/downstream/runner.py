"""`latemask finetune`: points from the queue, in this process or in several; then the table."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing.connection
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from latemask import console
from latemask.downstream.claims import ANEW, is_done, read_results, who_is_at
from latemask.downstream.glue import HUB, HUB_SPLITS, paths_of
from latemask.downstream.grid import NEEDED, base_settings, entry_of, majority_said, said, summarize
from latemask.downstream.metrics import METRICS
from latemask.downstream.options import FinetuneOptions, refuse_unread
from latemask.downstream.tasks import GLUE, SQUAD, Task, glue_average, own_task, shown
from latemask.errors import Refusal
from latemask.hf.card import warn_of_frequencies
from latemask.hf.places import refuse_no_place
from latemask.hf.source import Source
from latemask.measurement import say_next
from latemask.out_of_memory import lower, out_of_memory_is_refused
from latemask.workers import deaf_to_interrupts, end, end_with_parent, exit_when_told
from latemask.writing import check_folder, folder_of, write_json

SUMMARY = "summary.json"
STOPPED = 128 + signal.SIGTERM
"""Exit status of a process that was told to end."""
SHOWN = {*METRICS, "span_f1", "exact", "best_exact", "best_f1"}
"""Metrics that the printed table has room for."""


def run_finetune(options: FinetuneOptions) -> int:
    """What ``latemask finetune`` does: see ``finetune``; the exit status: 0, or that of what can go on where others are
    still at some of the points. Told to end (SIGTERM), it gives up its claims as it goes."""
    exit_when_told(STOPPED)
    if _finetuned(options)[1]:
        return os.EX_TEMPFAIL
    say_next(output_folder(options.out, options.model))
    return 0


def finetune(options: FinetuneOptions) -> list[dict[str, Any]]:
    """Run every point that is not done, print the table of the tasks asked for on these data, and return its rows
    (``grid.summarize``); ``summary.json`` has those of all results in the folder.

    Points that other processes are at are left to them: a warning names each that the table lacks. Raises ``Refusal``
    for unusable options, models or data, and, after the other points, where a process failed or results are gone.
    """
    return _finetuned(options)[0]


def _finetuned(options: FinetuneOptions) -> tuple[list[dict[str, Any]], list[str]]:
    """The table's rows, and the points that it lacks since other processes are still at them."""
    for name in ("seeds", "parallel", "together"):
        if getattr(options, name) < 1:
            raise Refusal(f"--{name}", str(getattr(options, name)), "at least 1")
    tasks = tasks_of(options)
    refuse_unread(options)
    base_settings(options)
    if not math.isfinite(options.null_threshold):
        raise Refusal("--null-threshold", str(options.null_threshold), "a finite number")
    refuse_no_place(options.model)
    for task in tasks:
        if task.kind == "span" or not options.data.startswith(HUB):
            paths_of(task, Path(options.data))
    source, out = Source.of(options.model), output_folder(options.out, options.model)
    check_folder(out)
    warn_of_frequencies(source.step)
    work = _work if options.parallel == 1 else _work_in_processes
    names = work(options, source, out)
    unfinished = {name: who_is_at(out, name) for name in names if not is_done(out, name)}
    for flag, is_asked, ending in (("--save", options.save, "model"), ("--predictions", options.predictions, "files")):
        lacking = [
            name for name in names if is_asked and is_done(out, name) and not (out / f"{name}.{ending}").is_dir()
        ]
        if lacking:
            console.warn(f"{flag}: {len(lacking)} of {len(names)} points were done before without it; delete their "
                         f"JSON, such as {lacking[0]}.json, to have them done anew")  # fmt: skip
    results = read_results(out, needed=NEEDED)
    if broken := [name for name in names if name not in results | unfinished and is_done(out, name)]:
        raise Refusal(out / f"{broken[0]}.json", "no result of a fine-tuning", "one, for it is named as one", ANEW)
    write_json(out / SUMMARY, {"kind": "finetune-summary", "tasks": summarize(results.values())})
    asked = {entry_of(results[name]) for name in names if name in results}
    summary = summarize(result for result in results.values() if entry_of(result) in asked)
    print_summary(summary, out)
    missing = [name for name in names if name not in results]
    if lost := [name for name in missing if not unfinished.get(name)]:
        raise Refusal(out, f"{len(lost)} of {len(names)} points without a result, such as {lost[0]}",
                      "each one's file, as it was written", "Start again to have them done anew")  # fmt: skip
    for name in missing:
        console.warn(f"{name}: not in the table, for {unfinished[name]} is at it. The same command again adds it")
    return summary, missing


def tasks_of(options: FinetuneOptions) -> list[Task]:
    """The tasks that ``--task`` names, with ``--train`` and ``--dev`` in them."""
    tasks: list[Task] = []
    for name in options.task:
        if name == "own":
            if not (options.train and options.dev) and not options.data.startswith(HUB):
                raise Refusal("--task own", "no --train or no --dev", "the names of both files")
            tasks.append(own_task(options.kind, options.texts, options.label, options.train, options.dev,
                                  options.name, options.metrics))  # fmt: skip
        elif name == "glue":
            tasks += GLUE.values()
        elif name == SQUAD.name:
            tasks.append(SQUAD)
        elif name in GLUE:
            tasks.append(GLUE[name])
        else:
            raise Refusal("--task", repr(name), f"{', '.join(GLUE)}, glue, {SQUAD.name} or own")
    if not tasks:
        raise Refusal("--task", "nothing", f"{', '.join(GLUE)}, glue, {SQUAD.name} or own")
    return [_with_files(task, options) for task in tasks]


def _with_files(task: Task, options: FinetuneOptions) -> Task:
    if not (options.train or options.dev):
        return task
    if len(task.dev_splits) > 1 and options.dev:
        raise Refusal("--dev", f"one file for {task.name}", f"none: it has {', '.join(task.dev_splits)}")
    given = {"train": options.train} if options.train else {}
    if options.dev:
        given["".join(task.dev_splits)] = options.dev
    if options.data.startswith(HUB) and task.kind != "span":
        return dataclasses.replace(task, hub_splits={**(task.hub_splits or HUB_SPLITS), **given})
    return dataclasses.replace(task, files={**task.files, **given})


def output_folder(out: str, model: str) -> Path:
    """``out``, or ``downstream`` inside the run that ``model`` is, is a step of, or was exported or fine-tuned from and
    lies in, or ``runs/NAME/downstream``."""
    if out:
        return Path(out)
    path = Path(model)
    above = folder_of(path)
    if (path / "run.json").is_file() or (path.is_dir() and any(above.glob("step-*/run.json"))):
        return above / "downstream"
    if path.is_dir() and any(path.glob("step-*")):
        return path / "downstream"
    if path.is_dir() and above.resolve().name == "downstream":
        return above
    return Path("runs") / path.resolve().name / "downstream"


def _work_in_processes(options: FinetuneOptions, source: Source, out: Path) -> list[str]:
    """``_work`` in several processes. Each warns of the same model and data: that is said once."""
    context = multiprocessing.get_context("spawn")
    workers, names, said = [], set(), set()
    try:
        with deaf_to_interrupts():
            for place in range(options.parallel):
                reader, writer = context.Pipe(duplex=False)
                worker = context.Process(target=_worker, args=(options, source, out, place, writer))
                worker.start()
                writer.close()
                workers.append((worker, reader))
        for told in _told([reader for _, reader in workers]):
            if isinstance(told, list):
                names.update(told)
            elif told not in said:
                said.add(told)
                console.warn(told)
        for worker, _ in workers:
            worker.join()
    finally:
        end([worker for worker, _ in workers])
    failed = sum(worker.exitcode != 0 for worker, _ in workers)
    if failed:
        found = f"{failed} of {options.parallel} processes that ended with an error (see above)"
        raise Refusal("--parallel", found, "none", "Start again to go on")
    return sorted(names)


def _told(readers: list[Connection]) -> Iterator[list[str] | str]:
    """What workers send, as it comes, until each has ended: names of points, or a warning."""
    while readers:
        for reader in multiprocessing.connection.wait(readers):
            assert isinstance(reader, Connection)
            try:
                yield reader.recv()
            except (EOFError, OSError):  # OSError: killed in the middle of a message
                readers.remove(reader)


def _worker(options: FinetuneOptions, source: Source, out: Path, place: int, writer: Connection) -> None:
    """Told to end, by its parent or by that one's end, it gives up its claims as it goes."""
    exit_when_told(STOPPED)
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))

    def tell(what: list[str] | str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
            writer.send(what)

    console.hand_warnings_to(tell)
    try:
        tell(_work(options, source, out, place))
    except Refusal as refusal:
        console.warn(str(refusal))
        raise SystemExit(2) from None


def _work(options: FinetuneOptions, source: Source, out: Path, place: int = 0) -> list[str]:
    from latemask.downstream.data import read_data

    tasks = tasks_of(options)
    instead = lower(("--batch-rows", options.batch_rows, 1), ("--sequence-tokens", options.sequence_tokens, 8))
    if options.together * options.parallel > 1:
        instead = lower(("--together", options.together, 1), ("--parallel", options.parallel, 1))
        instead += "; finished points are kept, and the same command goes on with the rest"
    read = {0: read_data(tasks[0], options)}
    from latemask.downstream.worker import Worker  # what is wrong with the data is said before torch is loaded

    with out_of_memory_is_refused("finetune", instead):
        return Worker(options, tasks, source, read, out, place).work()


def columns(summary: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Rows of the printed table: values as Table 1 has them, times 100."""
    for row in summary:
        task, first = row["task"], next(iter(row["scores"]))
        others = {(split, name): value for split, values in row["scores"].items() for name, value in values.items()
                  if name in SHOWN and (split, name) != (first, row["metric"])}  # fmt: skip
        yield (
            row["title"] + (" (subset)" if row["subset"] else ""),
            row["metric"],
            shown(task, row["median"]),
            f"{shown(task, row['spread']['min'])} - {shown(task, row['spread']['max'])}",
            " ".join(shown(task, score) for score in row["seeds"].values()),
            ", ".join(f"{split} {name} {shown(task, value)}" for (split, name), value in others.items()),
            shown(task, row["majority"][first][row["metric"]]),
            f"{row['degenerate']} of {len(row['seeds'])}" if row["degenerate"] else "",
            said(row["settings"]),
            f"{row['runs']}",
        )


def print_summary(summary: list[dict[str, Any]], out: Path) -> None:
    """One row a task; a subset is marked in its name; the average of Table 1 where all eight tasks are there."""
    heads = ("task", "metric", "median", "spread", "seeds", "other scores", "majority", "degenerate", "best", "runs")
    for weights in dict.fromkeys(row["model"]["weights"] for row in summary):
        rows = [row for row in summary if row["model"]["weights"] == weights]
        console.table(f"{rows[0]['model']['folder']}, in {out}", heads, columns(rows))
        if told := majority_said(rows):
            console.say(told)
        marks = [f"{row['title']} {split}: {mark}" for row in rows for split, mark in row["subset"].items()]
        if marks:
            console.say(f"Subsets, not to be set beside published numbers: {'; '.join(marks)}")
        whole_last = sorted((row for row in rows if row["task"] in GLUE), key=lambda row: not row["subset"])
        chosen = {row["task"]: row for row in whole_last}  # a task's whole data go before a part of them
        average = glue_average({task: row["median"] for task, row in chosen.items()})
        if average is not None:
            notes = [name for name in ("subset", "degenerate") if any(row[name] for row in chosen.values())]
            note = f" (with {' and '.join(f'{name} results' for name in notes)})" if notes else ""
            console.say(f"GLUE average of eight tasks: {100 * average:.1f}{note}")

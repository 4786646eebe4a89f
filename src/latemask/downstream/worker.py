"""One process of `latemask finetune`: its lanes take free points from the queue, train them and write the results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from latemask import console
from latemask.downstream.claims import claimed
from latemask.downstream.data import Data, TextData, read_data
from latemask.downstream.finetune import Bench, Model, bench_key, result_of
from latemask.downstream.grid import LARGE_FROM_WIDTH, base_settings, point_name, points_of
from latemask.downstream.lanes import in_turn
from latemask.downstream.options import FinetuneOptions
from latemask.downstream.problem import Problem, TextProblem, cautions
from latemask.downstream.saving import save_finetuned
from latemask.downstream.settings import Settings
from latemask.downstream.squad import SquadProblem
from latemask.downstream.tasks import ALWAYS, GLUE, Task, shown
from latemask.hf.source import Source
from latemask.training.distributed import pick_device
from latemask.writing import write_json


class Worker:
    """The model on one device, and what is common to all points. ``read``: data by the number of their task, taken out
    once a problem is made of them; ``place``: which of the processes it is."""

    def __init__(
        self,
        options: FinetuneOptions,
        tasks: Sequence[Task],
        source: Source,
        read: dict[int, Data],
        out: Path,
        place: int,
    ):
        self.options, self.tasks, self.read, self.out = options, tasks, read, out
        self.device = pick_device(place)
        if options.parallel > 1 and self.device.type == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.parallel))
        self.model = Model.from_source(source)
        settings, self.fixed = base_settings(options)
        most_tokens = min(settings.sequence_tokens, self.model.row_tokens)
        is_own = self.model.step is not None and most_tokens == self.model.row_tokens
        self.asked_tokens = settings.sequence_tokens if is_own else None
        """Where rows as long as the run's own are the limit."""
        self.settings = dataclasses.replace(settings, sequence_tokens=most_tokens)
        self.has_compiled = False
        self.names: list[str] = []
        self.at = [0] * options.together
        """The task that each lane is at."""
        self.held: dict[int, tuple[Problem, dict[str, Settings]]] = {}
        """Data and points of the tasks that a lane is at."""

    def work(self) -> list[str]:
        """Do every point that is free. Returns the names of all points."""
        in_turn([self._lane(lane) for lane in range(self.options.together)], self.device)
        return self.names

    def _task(self, number: int) -> tuple[Problem, dict[str, Settings]]:
        """Read when the first lane comes to it, given up when the last one has left it."""
        self.held = {one: task for one, task in self.held.items() if one >= min(self.at)}
        if number not in self.held:
            data = self.read.pop(number, None) or read_data(self.tasks[number], self.options)
            problem = make_problem(data, self.options, self.model, self.settings)
            for line in cautions(problem.task, problem.facts["data"], self.asked_tokens):
                console.warn(line)
            self.held[number] = problem, self._points(problem)
            self.names += self.held[number][1]
        return self.held[number]

    def _points(self, problem: Problem) -> dict[str, Settings]:
        """By their names; those that share a bench come one after the other."""
        options, task = self.options, problem.task
        prints = {split: facts["fingerprint"] for split, facts in problem.facts["data"].items()}
        facts = self.model.facts
        identity = {"weights": facts["weights"], "tokenizer": facts["tokenizer"], "data": prints}
        if task.kind == "span":
            identity["null_threshold"] = options.null_threshold
        elif task.name not in GLUE:  # of a task of one's own the name says nothing
            identity |= {"kind": task.kind, "metrics": task.metrics, "labels": task.labels}
        size = options.size
        if size == "auto":
            width = int(self.model.encoder.shape.width)  # type: ignore[union-attr,arg-type]
            size = "large" if width >= LARGE_FROM_WIDTH else "base"
        found = points_of(task, options.grid, size, self.settings, self.fixed, options.seeds)
        return {point_name(task, point, identity): point for point in sorted(found, key=lambda point: point.batch_rows)}

    def _lane(self, lane: int) -> Generator[None, None, None]:
        """Take one free point after the other; it yields after every update."""
        for number in range(len(self.tasks)):
            self.at[lane] = number
            yield from self._train(*self._task(number))
        self.at[lane] = len(self.tasks)

    def _train(self, problem: Problem, points: Mapping[str, Settings]) -> Generator[None, None, None]:
        """Every free point of a task."""
        options, bench = self.options, None
        for name, settings in points.items():
            with claimed(self.out, name) as is_ours:
                if not is_ours:
                    continue
                if bench is None or bench.key != bench_key(settings):
                    bench = None  # its memory goes before the next one's comes
                    alike = sum(bench_key(point) == bench_key(settings) for point in points.values())
                    bench = Bench(self.model, problem, settings, self.device,
                                  math.inf if self.has_compiled else alike / options.parallel)  # fmt: skip
                    self.has_compiled |= bench.stepper.compiles
                is_alone = options.parallel * options.together == 1
                with _progress(name, bench.updates(settings), is_alone) as advance:
                    training = yield from bench.training(settings, advance)
                result = result_of(self.model, problem, settings, training, self.device)
                result["at_once"] = options.parallel * options.together
                if options.predictions or problem.task.kind == "span":
                    for file, value in training.evaluation.files.items():
                        write_json(self.out / f"{name}.files" / file, value)
                if options.save:
                    save_finetuned(bench.net, self.model, problem, result, self.out / f"{name}.model")
                write_json(self.out / f"{name}.json", result)
                console.say(_line(name, result))


@contextlib.contextmanager
def _progress(name: str, updates: int, is_alone: bool) -> Iterator[Callable[[float], None]]:
    """A progress line, unless several would write into each other's."""
    if is_alone:
        with console.progress(name, updates, "updates") as advance:
            yield advance
    else:
        yield lambda updates: None


def make_problem(data: Data, options: FinetuneOptions, model: Model, settings: Settings) -> Problem:
    """``data`` against the model's tokenizer."""
    inputs = model.inputs(settings)
    if isinstance(data, TextData):
        return TextProblem(data.task, data.examples, inputs, settings)
    return SquadProblem(data.train, data.dev, inputs, settings, options.null_threshold)


def _line(name: str, result: dict[str, Any]) -> str:
    flag = f"  DEGENERATE: {'; '.join(result['degenerate_because'])}" if result["degenerate"] else ""
    mark = " (subset)" if result["subset"] else ""
    beside = f", up to {result['at_once']} at once" if result["at_once"] > 1 else ""
    majority = next(iter(result["majority"].values()))[result["metric"]]
    score, always = (shown(result["task"], value) for value in (result["score"], majority))
    return (f"{name}{mark}: {result['metric']} {score} (always {ALWAYS[result['task_kind']]}: {always}), "
            f"{result['train_seconds']:.1f} s, {result['examples_per_second']:.0f} examples/s"
            f"{beside}{flag}")  # fmt: skip

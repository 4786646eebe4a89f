"""Which points are run: Tables 5 and 6 of MAE-LM as data, one sane point a task, and what a folder of results says."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from latemask.downstream.options import FinetuneOptions
from latemask.downstream.settings import Settings
from latemask.downstream.tasks import ALWAYS, Task

Size = Literal["base", "large"]
DIMENSIONS = ("epochs", "learning_rate", "batch_rows", "warmup_share")
"""Of a grid."""


@dataclass(frozen=True)
class Grid:
    """Every combination is a point."""

    epochs: tuple[int, ...]
    learning_rates: tuple[float, ...]
    batch_rows: tuple[int, ...]
    warmup_shares: tuple[float, ...]

    def points(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(self.epochs, self.learning_rates, self.batch_rows, self.warmup_shares):
            yield dict(zip(DIMENSIONS, values, strict=True))


SMALL_TASKS = ("cola", "rte", "mrpc", "stsb")
LARGE_TASKS = ("mnli", "qqp", "qnli", "sst2")

PAPER: dict[tuple[str, Size], Grid] = {
    ("small", "base"): Grid((2, 3, 5, 10), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.10)),
    ("small", "large"): Grid((2, 3, 5, 10), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.10)),
    ("large", "base"): Grid((2, 3, 5), (1e-5, 2e-5, 3e-5, 4e-5), (32,), (0.06,)),
    ("large", "large"): Grid((2, 3, 5), (5e-6, 7e-6, 1e-5, 2e-5), (32,), (0.06,)),
    ("squad", "base"): Grid((2, 3), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.10)),
    ("squad", "large"): Grid((2, 3), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.10)),
}
"""MAE-LM Table 5 (GLUE's small and large tasks) and Table 6 (SQuAD 2.0); "large" is the paper's large++."""

QUICK: dict[tuple[str, Size], Grid] = {
    ("small", "base"): Grid((10,), (3e-5,), (16,), (0.06,)),
    ("small", "large"): Grid((10,), (1e-5,), (16,), (0.06,)),
    ("large", "base"): Grid((3,), (2e-5,), (32,), (0.06,)),
    ("large", "large"): Grid((3,), (1e-5,), (32,), (0.06,)),
    ("squad", "base"): Grid((3,), (3e-5,), (32,), (0.06,)),
    ("squad", "large"): Grid((3,), (1e-5,), (32,), (0.06,)),
}
"""One point out of the paper's grid for each kind of task."""

LARGE_FROM_WIDTH = 1024
"""Encoders this wide take the large++ columns."""


def space_of(task: Task) -> str:
    """Which column of Tables 5 and 6 a task is searched in; tasks of the user's own as the small ones."""
    return "squad" if task.kind == "span" else "large" if task.name in LARGE_TASKS else "small"


def base_settings(options: FinetuneOptions) -> tuple[Settings, dict[str, Any]]:
    """Settings that all points share, and the dimensions of the grid that the options fix. Raises ``Refusal`` for a
    value that cannot be."""
    names = {field.name for field in dataclasses.fields(Settings)}
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    free = {name: given.pop(name) for name in DIMENSIONS}
    fixed = {name: value for name, value in free.items() if value is not None}
    return Settings(**given, **fixed), fixed


def points_of(
    task: Task, grid: Literal["paper", "quick"], size: Size, base: Settings, fixed: Mapping[str, Any], seeds: int
) -> list[Settings]:
    """The settings of every point: the grid's, but ``fixed`` where given, each with ``seeds`` seeds from ``base.seed``
    on. Points that come out equal are one."""
    table = PAPER if grid == "paper" else QUICK
    points = [
        dataclasses.replace(base, **(point | dict(fixed)), seed=base.seed + seed)
        for point in table[space_of(task), size].points()
        for seed in range(seeds)
    ]
    return list(dict.fromkeys(points))


def point_name(task: Task, settings: Settings, identity: Mapping[str, Any]) -> str:
    """File name of a point, without ending: what a person looks for, and a hash of all settings and ``identity`` (the
    fingerprints of model and data)."""
    whole = json.dumps({"task": task.name, "settings": settings.to_dict(), **identity}, sort_keys=True)
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return (f"{task.name}-e{settings.epochs}-lr{settings.learning_rate:g}-b{settings.batch_rows}"
            f"-w{settings.warmup_share:g}-s{settings.seed}-{digest}")  # fmt: skip


def said(settings: Mapping[str, Any]) -> str:
    """A setting in a table: the grid's dimensions, and whatever else is not the default."""
    usual = {**Settings().to_dict(), "null_threshold": 0.0}
    others = [
        f", {name.replace('_', ' ')} {value}"
        for name, value in settings.items()
        if name in usual and name not in (*DIMENSIONS, "seed") and value != usual[name]
    ]
    epochs = f"{settings['epochs']} epoch{'' if settings['epochs'] == 1 else 's'}"
    return (f"{epochs}, rate {settings['learning_rate']:g}, batch {settings['batch_rows']}, "
            f"warm-up {settings['warmup_share']:g}") + "".join(others)  # fmt: skip


NEEDED = ("model", "task", "data", "title", "metric", "subset", "settings", "scores", "score", "seed", "majority",
          "degenerate", "train_seconds", "versions", "card")  # fmt: skip
"""Fields of a result that ``summarize`` reads."""


def summarize(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each model, task, data and metrics: its best setting by the median over seeds, with all that stands
    beside it.

    Keys: model, task, data (fingerprint of each split), title, metric, subset, settings (of the best point), seeds
    {seed: score}, median, spread (min, max, deviation), scores (split -> metric -> median), task_kind, majority (as
    ``majority_said``), degenerate (how many of the seeds), degenerate_because, points (settings tried), runs, seconds.
    A setting with fewer seeds than the most any has is not chosen.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        groups[entry_of(result)].append(result)
    return [_summary(group) for _, group in sorted(groups.items(), key=lambda item: item[0])]


def majority_said(summary: Iterable[Mapping[str, Any]]) -> str:
    """What the scores called majority in a summary are, as a sentence; "" where older results do not say the kind of
    their task."""
    answers = dict.fromkeys(ALWAYS[row["task_kind"]] for row in summary if row["task_kind"] in ALWAYS)
    return f"Majority: the score of always answering {' or '.join(answers)}." if answers else ""


def entry_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Model, task, data and metrics of a result: those that have these in common are one entry of ``summarize``."""
    data = json.dumps({split: facts["fingerprint"] for split, facts in result["data"].items()}, sort_keys=True)
    asked = json.dumps([result.get("task_kind"), result["metric"], *map(sorted, result["scores"].values())])
    return result["model"]["weights"], result["task"], data, asked


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """All that was chosen for a point: of SQuAD the threshold too."""
    return {**result["settings"], **{name: result[name] for name in ("null_threshold",) if name in result}}


def _summary(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    by_setting: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for result in group:
        by_setting[json.dumps({**_settings(result), "seed": None}, sort_keys=True)].append(result)
    most_seeds = max(map(len, by_setting.values()))
    full = [runs for runs in by_setting.values() if len(runs) == most_seeds]
    best = max(full, key=lambda runs: statistics.median(run["score"] for run in runs))
    scores = [run["score"] for run in best]
    first = best[0]
    medians = {
        split: {name: statistics.median(run["scores"][split][name] for run in best) for name in values}
        for split, values in first["scores"].items()
    }
    return {
        "model": first["model"],
        "task": first["task"],
        "data": {split: facts["fingerprint"] for split, facts in first["data"].items()},
        "title": first["title"],
        "metric": first["metric"],
        "subset": first["subset"],
        "settings": {name: value for name, value in _settings(first).items() if name != "seed"},
        "seeds": {str(run["seed"]): run["score"] for run in sorted(best, key=lambda run: run["seed"])},
        "median": statistics.median(scores),
        "spread": {
            "min": min(scores),
            "max": max(scores),
            "deviation": statistics.stdev(scores) if scores[1:] else 0.0,
        },
        "scores": medians,
        "task_kind": first.get("task_kind"),
        "majority": first["majority"],
        "degenerate": sum(run["degenerate"] for run in best),
        "degenerate_because": sorted({why for run in best for why in run.get("degenerate_because", ())}),
        "points": len(by_setting),
        "runs": len(group),
        "seconds": sum(run["train_seconds"] for run in group),
        "versions": first["versions"],
        "card": first["card"],
    }

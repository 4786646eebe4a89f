"""Many processes beside one: tokens a second on 1, 2, 4 cards, and whether all of them train the same.

    python benchmarks/processes.py --data data/en --out results/processes.json

Every run is ``torchrun -m latemask pretrain``; DDP ("replicate") and FSDP2 ("shard") alike. ``speed`` runs have the
recipe's dropout and the same rows per card and update, so that each card does what one does alone, and are judged by
the median of the journal's intervals after the first steps. ``losses`` runs are short, have the same rows per update
over all processes, and no dropout (which depends on the rank by design): their losses are compared with those of one
card step by step, beside one card run a second time, the spread of equal runs. Without GPUs the processes are gloo's.
The JSON is written again after each run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from asked import asked, counts, read, words
from children import ended, said
from disk import emptied
from refusals import program
from torch.cuda import nccl

from latemask import console
from latemask.recipes import recipe
from latemask.training import journal
from latemask.writing import write_json

Way = Literal["replicate", "shard"]
Purpose = Literal["speed", "losses"]

GOAL_RATIO, GOAL_CARDS = 0.97, 4
"""Tokens a second over cards x one card, with DDP."""
LAST_LINES = 25
TORCHRUN_REPORTS = re.compile(r"[EW]\d{4} .*torch/distributed/elastic/")
PATIENCE_SECONDS = 45.0
"""torchrun gives its processes 30 seconds after SIGTERM."""


@dataclass(frozen=True)
class Options:
    """Compare worlds of several processes with one."""

    data: Path
    """Folder of prepared text."""
    out: Path = Path("results/processes.json")
    """The JSON."""
    runs: Path = Path("local/processes")
    """Run folders (journals; weights are deleted) and logs; emptied first."""
    recipe: str = "mlm_base"
    """What is trained."""
    flags: str = "--shape.positions absolute"
    """Its flags."""
    cards_list: tuple[int, ...] = (1, 2, 4)
    """Processes of each world; those beyond the cards at hand are left out."""
    ways: tuple[Way, ...] = ("replicate", "shard")
    """How several processes train one model; one process is always "replicate"."""
    purposes: tuple[Purpose, ...] = ("speed", "losses")
    """What is measured."""
    batch_rows: int = 512
    """Rows per update of a losses run, over all processes."""
    micro_rows: int = 128
    """Most rows per forward pass and process; of a speed run rows per update and process."""
    steps: int = 60
    """Of a speed run."""
    log_every: int = 5
    """Steps of an interval whose speed is measured."""
    skipped_steps: int = 20
    """First steps whose speed does not count."""
    loss_steps: int = 20
    """Of a losses run; each one is compared."""
    most_seconds: float = 150.0
    """A run that takes longer has failed."""
    stop_after: float = 530.0
    """Seconds after which no further run begins, and the one in work ends."""

    def __post_init__(self) -> None:
        counts(self, "cards_list", "batch_rows", "micro_rows", "steps", "log_every", "loss_steps")
        words(self, "flags")
        recipe(self.recipe)


@dataclass(frozen=True)
class Trial:
    """One run; ``repeat`` is 1 for the second run of the same."""

    purpose: Purpose
    way: Way
    cards: int
    repeat: int = 0

    @property
    def name(self) -> str:
        return f"{self.purpose}-{self.way}-{self.cards}" + ("-again" if self.repeat else "")


def trials_of(options: Options, most_cards: int | None) -> tuple[list[Trial], list[str]]:
    """The runs in turn, and what is left out since there are only ``most_cards`` (None: as many as wanted)."""
    here = [cards for cards in options.cards_list if most_cards is None or cards <= most_cards]
    left_out = [f"{cards} cards: only {most_cards} here" for cards in options.cards_list if cards not in here]
    found = []
    for purpose in options.purposes:
        found += [Trial(purpose, "replicate", 1)] if 1 in here else []
        found += [Trial(purpose, way, cards) for way in options.ways for cards in here if cards > 1]
        found += [Trial(purpose, "replicate", 1, repeat=1)] if purpose == "losses" and 1 in here else []
    return found, left_out


def command_of(options: Options, trial: Trial) -> list[str]:
    """torchrun's command line for a trial."""
    batch_rows = options.micro_rows * trial.cards if trial.purpose == "speed" else options.batch_rows
    rows = ["--training.batch-rows", str(batch_rows), "--training.micro-rows", str(options.micro_rows)]
    rows += ["--training.data-parallel", trial.way, "--training.validate-every", "0", "--training.warmup-share", "0.5"]
    if trial.purpose == "speed":
        rows += ["--training.steps", str(options.steps), "--training.log-every", str(options.log_every)]
    else:
        rows += ["--training.steps", str(options.loss_steps), "--training.log-every", "1", "--shape.dropout", "0"]
        rows += ["--decoder.dropout", "0"] if recipe(options.recipe).decoder is not None else []
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(trial.cards)]
    folders = ["--data", str(options.data), "--out", str(options.runs / trial.name)]
    return [*launch, "-m", "latemask", "pretrain", options.recipe, *folders, *rows, *shlex.split(options.flags)]


def ran(command: Sequence[str], log: Path, most_seconds: float) -> str:
    """Run to the end; empty, or why it failed: the exit status and the log's last lines."""
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=written,
                                   start_new_session=True)  # fmt: skip
        try:
            status = process.wait(most_seconds)
            reason = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"not done after {most_seconds:.0f} s"
        finally:
            ended(process, PATIENCE_SECONDS, partial(_kill_group, process))
    if not reason:
        return ""
    return "\n".join([reason, *last_words(said(log))])


def last_words(log: str) -> list[str]:
    """The last lines that the processes wrote themselves, before torchrun's report of how they ended."""
    lines = log.splitlines()
    own = list(itertools.takewhile(lambda line: not TORCHRUN_REPORTS.match(line), lines))
    return (own or lines)[-LAST_LINES:]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its own processes when told; where it does not, all of them are killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def measured(lines: Sequence[Mapping[str, Any]], trial: Trial, options: Options) -> dict[str, Any]:
    """What a journal says of a run."""
    train = [line for line in lines if line["kind"] == "train"]
    found = dataclasses.asdict(trial) | {
        "micro_rows": lines[0]["micro_rows"],
        "world": lines[0]["world"],
        "memory_bytes": max(line["memory_bytes"] for line in train),
        "skips": sum(line["kind"] == "skip" for line in lines),
        "losses": [[line["step"], line["loss"]] for line in train],
    }
    if trial.purpose == "losses":
        return found
    steady = [line for line in train if line["step"] - options.log_every >= options.skipped_steps]
    if not steady:
        return found | {"tokens_per_second": None, "mfu": None, "intervals": []}
    shares = [line["mfu"] for line in steady if line["mfu"] is not None]
    return found | {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steady),
        "mfu": statistics.median(shares) if shares else None,
        "intervals": [line["tokens_per_second"] for line in steady],
    }


def with_ratios(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run beside that of one card: speed runs with ``ratio``, their tokens a second over cards x one card's;
    losses runs with the relative difference of the loss at equal steps."""
    found = []
    for run in runs:
        alone = [one for one in runs if one["cards"] == 1 and one["purpose"] == run["purpose"] and not one["repeat"]]
        if run["purpose"] == "losses":
            is_other = bool(alone) and run is not alone[0]
            apart = difference(run["losses"], alone[0]["losses"]) if is_other else None
            run = run | {"beside_one_card": apart}
        else:
            one = alone[0]["tokens_per_second"] if alone else None
            mine = run["tokens_per_second"]
            run = run | {"ratio": mine / (run["cards"] * one) if mine and one else None}
        found.append(run)
    return found


def difference(losses: Sequence[Sequence[Any]], beside: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """|loss - beside| / beside over the steps that both have: the largest, where, and the mean. A loss that was not
    finite (None) on one side alone counts as infinitely far, which JSON has as None."""
    other = dict(map(tuple, beside))
    pairs = [(step, loss, other[step]) for step, loss in losses if step in other]
    uneven = [step for step, loss, wanted in pairs if (loss is None) != (wanted is None)]
    apart = {step: abs(loss - wanted) / wanted for step, loss, wanted in pairs
             if loss is not None and wanted is not None}  # fmt: skip
    if uneven or not apart:
        return {"steps": len(pairs), "largest": None, "at_step": uneven[0] if uneven else None, "mean": None}
    at = max(apart, key=lambda step: apart[step])
    return {"steps": len(pairs), "largest": apart[at], "at_step": at, "mean": statistics.mean(apart.values())}


def goal_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The goal and what was found; None where it was not measured."""
    ratios = [run["ratio"] for run in runs
              if (run["purpose"], run["way"], run["cards"]) == ("speed", "replicate", GOAL_CARDS)]  # fmt: skip
    found = ratios[0] if ratios else None
    return {"cards": GOAL_CARDS, "wanted": GOAL_RATIO, "found": found,
            "is_met": None if found is None else found >= GOAL_RATIO}  # fmt: skip


def write(options: Options, runs: Sequence[dict[str, Any]], failed: Mapping[str, str], left_out: Sequence[str],
          start: Mapping[str, Any]) -> list[dict[str, Any]]:  # fmt: skip
    """The JSON of what is known so far; the runs with their ratios."""
    compared = with_ratios(runs)
    versions = dict(start.get("versions", {}))
    if torch.cuda.is_available():
        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
    write_json(options.out, {"kind": "benchmark", "what": "many processes beside one", "goal": goal_of(compared),
                             "runs": compared, "failed": failed, "left_out": left_out, "settings": asked(options),
                             "card": start.get("card"), "versions": versions})  # fmt: skip
    return compared


def show(runs: Sequence[Mapping[str, Any]], card: object) -> None:
    """Two short tables."""
    speed = [run for run in runs if run["purpose"] == "speed"]
    if speed:
        console.table(f"Speed on {card}", ("way", "cards", "tokens/s", "over cards x one", "MFU", "GB"),
                      [(run["way"], run["cards"], run["tokens_per_second"], run["ratio"], run["mfu"],
                        run["memory_bytes"] / 1e9) for run in speed])  # fmt: skip
    beside = [(run, run["beside_one_card"]) for run in runs if run["purpose"] == "losses"]
    rows = [(run["way"] + (" again" if run["repeat"] else ""), run["cards"], run["losses"][-1][1], apart["largest"],
             apart["at_step"], apart["mean"]) for run, apart in beside if apart is not None]  # fmt: skip
    if rows:
        columns = ("way", "cards", "last loss", "largest relative difference", "at step", "mean")
        console.table("Losses beside one card, without dropout", columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Every trial in turn; 1 where one failed."""
    options = read(Options, arguments)
    trials, left_out = trials_of(options, torch.cuda.device_count() if torch.cuda.is_available() else None)
    emptied(options.runs)
    begun, runs, failed, start = time.monotonic(), [], {}, {}
    for trial in trials:
        left = options.stop_after - (time.monotonic() - begun)
        if left <= 0:
            left_out.append(f"{trial.name}: the time is over")
            continue
        run, started = options.runs / trial.name, time.monotonic()
        reason = ran(command_of(options, trial), options.runs / f"{trial.name}.log", min(options.most_seconds, left))
        for step in run.glob("step-*"):
            shutil.rmtree(step)
        if reason:
            failed[trial.name] = reason
        else:
            lines = journal.read(run / "journal.jsonl")
            start = {"card": lines[0]["card"], "versions": lines[0]["versions"]}
            runs.append(measured(lines, trial, options) | {"seconds": time.monotonic() - started})
        print(f"{trial.name}: {reason or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
        write(options, runs, failed, left_out, start)
    compared = write(options, runs, failed, left_out, start)
    for line in left_out:
        print(f"left out: {line}")
    show(compared, start.get("card"))
    return 1 if failed else 0


if __name__ == "__main__":
    program(main)

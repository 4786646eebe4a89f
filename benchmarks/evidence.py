"""The runs behind docs/evidence.md: which recipes with which flags, and what is measured of each, over any cards.

    python benchmarks/evidence.py real-text --data data/full --out evidence --cards 0 1 2 3
    python benchmarks/evidence.py objectives --data data/full --glue glue_data --squad squad --blimp blimp \
        --out evidence --cards 0 1 2 3 --stop-after 540

The studies are in studies.py. Every job is a ``latemask`` command in a process of its own on one card; its log lies in
``OUT/logs/STUDY``. A job that is done is not done again, and each command goes on where it was stopped: the same line
again after ``--stop-after`` seconds, a kill or a reboot continues, once what a killed one left running has ended.
``OUT/evidence.tar.gz`` always holds every journal, score and figure so far, without weights.

A study in slices, also on several machines: ``--trials 4`` are its first four, ``--only NAME...`` those of these names;
unpack what came of one slice in the ``OUT`` of the next, or all of them in one folder for ``latemask report``. A trial
all of whose jobs are done needs no weights; one that lacks some is trained again where its weights are not there. On a
CPU ``--size tiny --tokens 32768 --rows 4 --tasks cola --finetuning-seeds 1 --parallel 1 --first 2`` tries a study out.

Fine-tuned models are ranked on the held-out texts of their task, as in MAE-LM Table 3, a pair as one text
(``OUT/held-out-TASK.jsonl``).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import roberta
import tyro
from asked import counts, each_once, words
from cards import Queue
from jobs import SAVED, Job, Runner, collect
from refusals import program
from studies import READ_FOR, TAKEN_BY, Measure, Study, named, trials_of

from latemask.cli import pretrain
from latemask.cli.options import parse
from latemask.downstream.blimp import read_pairs
from latemask.downstream.glue import read_task
from latemask.downstream.options import FinetuneOptions
from latemask.downstream.runner import tasks_of
from latemask.downstream.squad import read_squad
from latemask.downstream.tasks import GLUE, Task
from latemask.errors import Refusal
from latemask.recipes import recipe
from latemask.text.store import open_store
from latemask.training.checkpoint import step_name
from latemask.writing import check_folder, write_whole

SQUAD_TRAIN, SQUAD_DEV = "mini-train-v2.0.json", "mini-dev-v2.0.json"
TUNED_AGAIN: Mapping[Measure, str] = {"glue": "mnli", "squad": "squad2"}
"""Measures that find a fine-tuning of this task done where its model was to be saved; at the same time they would take
it from there."""


@dataclass(frozen=True)
class Options:
    """Run a study of docs/evidence.md."""

    study: tyro.conf.Positional[Study]
    """Which one."""
    data: Path
    """The corpus as `latemask prepare` left it."""
    out: Path
    """Runs, logs and evidence.tar.gz."""
    glue: Path | None = None
    """Folder of GLUE's tasks; none: not measured. The same for the next two."""
    squad: Path | None = None
    """Folder with mini-train-v2.0.json and mini-dev-v2.0.json."""
    blimp: Path | None = None
    """Folder of minimal pairs."""
    cards: tuple[int, ...] = (0,)
    """Those to use."""
    at_once: int = 1
    """Measurements at the same time on each; a pretraining has its card to itself."""
    shared: bool = False
    """Pretrainings share their cards, and checkpoints are measured as they come: their seconds say little."""
    seeds: tuple[int, ...] | None = None
    """Of pretraining, each of them also of the order of the data, alike for all systems: every trial once for each; by
    default 1 2 3 in `objectives`, elsewhere the seed that the recipes have."""
    seconds: float | None = None
    """`objectives`: the clock ends a run in place of its tokens, as for MAE-LM in the time that MLM took."""
    finetuning_seeds: int = 5
    """A task."""
    parallel: int = 4
    """Processes at once that fine-tune on a card."""
    together: int = 1
    """Fine-tunings in each of them."""
    finetuning: str = ""
    """Added to every fine-tuning, such as --finetuning="--epochs 3 --batch-rows 32"."""
    trials: int | None = None
    """Only the first so many, the most telling ones; none: all."""
    only: tuple[str, ...] = ()
    """Names of trials to run, such as mae_lm,seed=1; none given: all."""
    tasks: tuple[str, ...] = ("cola", "sst2", "mrpc", "rte", "stsb", "qnli", "qqp", "mnli")
    """Of GLUE."""
    tokens: int | None = None
    """Tokens a run, where it should not be the study's own number; `real-text` goes by its own clock."""
    rows: int | None = None
    """Of 512 tokens, an update: 64 by default; `real-text`, `tuning` and `collapse` have their own rows and rates."""
    rate: str | None = None
    """Peak learning rate: by default 4e-4, in ablations and with a decoder and short warm-up 2e-4, of RoBERTa 1e-4."""
    first: int | None = None
    """Of each field of minimal pairs only so many; none: all."""
    size: str | None = None
    """Of the recipes, where it should not be the study's own: tiny tries a study out on a CPU."""
    flags: str = ""
    """Added to every pretraining, such as --flags="--training.batch-rows 8"."""
    stop_after: float | None = None
    """Seconds until every command is told to stop; the same line again goes on."""

    def __post_init__(self) -> None:
        for name in ("data", "glue", "squad", "blimp"):
            folder = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise Refusal(f"--{name}", f"{folder}, which is no folder", "a folder")
        counts(self, "finetuning_seeds", "parallel", "together", "at_once", "tokens", "rows", "first", "trials")
        words(self, "flags", "finetuning")
        for name in ("cards", "seeds", "tasks"):
            if getattr(self, name) == ():
                raise Refusal(f"--{name}", "nothing", "one or more")
        if min(self.cards) < 0:
            raise Refusal("--cards", str(min(self.cards)), "0 or more")
        self.glue_tasks()  # an unknown flag ends the program here, not after the pretraining
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for name, studies in TAKEN_BY.items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value == usual[name]:
                continue
            found = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            if self.study not in studies:
                raise Refusal(flag, f"{found}, of which {self.study} makes nothing",
                              f"it with one of: {', '.join(studies)}")  # fmt: skip
            data = READ_FOR.get(name, ())
            if data and all(getattr(self, one) is None for one in data):
                raise Refusal(flag, f"{found}, but no data that it is for",
                              f"it with {' or '.join(f'--{one}' for one in data)}")  # fmt: skip
        if self.shared and (self.seconds is not None or self.study not in TAKEN_BY["tokens"]):
            raise Refusal(
                "--shared", "runs that the clock ends, or whose seconds are compared", "runs of so many tokens"
            )

    def glue_tasks(self) -> list[Task]:
        """Those of ``--tasks``, as ``--finetuning`` says."""
        given = shlex.split(self.finetuning)
        return tasks_of(parse(FinetuneOptions, ["MODEL", "--task", *self.tasks, "--data", "DATA", *given],
                              prog="--finetuning", positional=("model",)))  # fmt: skip

    def held_out(self, task: str) -> Path:
        return self.out / f"held-out-{task}.jsonl"


def jobs_of(options: Options) -> list[Job]:
    """Each pretraining, then what is measured of it, the cheap things before the dear: what a slice ends is whole."""
    trials, measures = trials_of(options)
    first = trials[: options.trials]
    trials = [trial for trial in named(trials, options.only) if trial in first]
    if not trials:
        raise Refusal("--only", f"none of the first {options.trials}", "some of them, or no --trials")
    latemask = (sys.executable, "-m", "latemask")
    jobs = []
    for trial in trials:
        run = options.out / options.study / trial.name
        program = (*latemask, "pretrain", trial.recipe, "--resume-if-present")
        if trial.is_peer:
            program = (sys.executable, str(Path(__file__).with_name("roberta.py")), trial.recipe, "--overwrite")
        flags = (*trial.flags, *shlex.split(options.flags))
        pretrain = (*program, "--data", str(options.data), "--out", str(run), *flags)
        jobs.append(Job(trial.name, pretrain, stop_at_seconds=trial.stop_at_seconds, run=run,
                        is_alone=not options.shared))  # fmt: skip
        models = [(f",step={step}", run / step_name(step)) for step in trial.steps] or [("", run)]
        for (label, model), measure in itertools.product(models, measures):
            if measure == "blimp" and recipe(trial.recipe).rewrites:
                continue  # it has no distribution for one masked token
            saved = f"{trial.name}{label}/save-{TUNED_AGAIN.get(measure)}"
            after = saved if any(job.name == saved for job in jobs) else trial.name
            for name, command in _commands(measure, str(model), options):
                saved_early = model if options.shared and label and after == trial.name else None
                jobs.append(Job(f"{trial.name}{label}/{name}", (*latemask, *command), after, checkpoint=saved_early))
                after = jobs[-1].name
    return jobs


def _commands(measure: Measure, model: str, options: Options) -> list[tuple[str, tuple[str, ...]]]:
    """The commands of a measure, each after the one before; none where its data is not given."""
    tuned = ("--seeds", str(options.finetuning_seeds), "--parallel", str(options.parallel),
             "--together", str(options.together))  # fmt: skip
    flags = tuple(shlex.split(options.finetuning))
    squad = ("--task", "squad2", "--data", str(options.squad), "--train", SQUAD_TRAIN, "--dev", SQUAD_DEV)
    if measure == "blimp" and options.blimp:
        first = () if options.first is None else ("--first", str(options.first))
        return [
            (
                measure,
                ("evaluate", model, "--suite", "blimp", "--data", str(options.blimp), "--precision", "bf16", *first),
            )
        ]
    if measure in ("rank", "theory"):
        return [(measure, (measure, model, "--data", str(options.data)))]
    if measure == "glue" and options.glue:
        return [(measure, ("finetune", model, "--task", *options.tasks, "--data", str(options.glue), *tuned, *flags))]
    if measure == "squad" and options.squad:
        return [(measure, ("finetune", model, *squad, *tuned, *flags))]
    if measure == "rank-mnli" and options.glue:
        return _ranked("mnli", model, ("--task", "mnli", "--data", str(options.glue), *flags), options)
    if measure == "rank-squad2" and options.squad:
        return _ranked("squad2", model, (*squad, *flags), options)
    return []


def _ranked(task: str, model: str, flags: tuple[str, ...], options: Options) -> list[tuple[str, tuple[str, ...]]]:
    """Fine-tune with ``flags``, the first of its seeds, and rank what came of it."""
    saved, out = f"{model}/downstream/{task}-{SAVED}", f"{model}/rank-{task}.json"
    return [
        (f"save-{task}", ("finetune", model, *flags, "--save")),
        (f"rank-{task}", ("rank", saved, "--data", str(options.held_out(task)), "--out", out)),
    ]


def write_texts(options: Options) -> None:
    """The held-out texts of MNLI (matched) and of SQuAD, a pair as one text, where the study ranks what learnt them."""
    _, measures = trials_of(options)
    texts: dict[str, list[str]] = {}
    if "rank-mnli" in measures and options.glue:
        _, splits = read_task(GLUE["mnli"], options.glue)
        matched = next(held for split, held in splits.items() if split != "train")
        texts["mnli"] = [" ".join(pair) for pair in matched.texts]
    if "rank-squad2" in measures and options.squad:
        squad = read_squad(options.squad / SQUAD_DEV)
        texts["squad2"] = [f"{one.text} {squad.paragraphs[one.paragraph]}" for one in squad.questions]
    for task, lines in texts.items():
        write_whole(options.held_out(task), "".join(json.dumps({"text": line}) + "\n" for line in lines))


def check(options: Options) -> None:
    """Raise ``Refusal`` for what a pretraining would refuse: before the first of them, not after the others; and for
    folders that lack what is read of them when it has ended."""
    trials, _ = trials_of(options)
    for trial in trials:
        read = roberta.read if trial.is_peer else pretrain.read
        read([trial.recipe, "--data", "DATA", "--out", "OUT", *trial.flags, *shlex.split(options.flags)])
    if options.blimp:
        read_pairs(options.blimp, first=options.first)
    if options.squad:
        for name in (SQUAD_TRAIN, SQUAD_DEV):
            read_squad(options.squad / name)
    if options.glue:
        for task in options.glue_tasks():
            if task.kind != "span":
                read_task(task, options.glue)


def main() -> None:
    """Run the jobs of a study that are not done."""
    options = tyro.cli(Options)
    each_once(options)
    check(options)
    open_store(options.data)
    check_folder(options.out)
    begun = time.monotonic()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())

    def is_over() -> bool:
        return stopped.is_set() or (options.stop_after is not None and time.monotonic() - begun > options.stop_after)

    jobs = jobs_of(options)
    runner = Runner(jobs, options.out, options.study, is_over)
    write_texts(options)
    queue = Queue(jobs, runner.run, is_over)
    queue.work(options.cards, options.at_once)
    collect(options.out)
    ended = "stopped or failed" if is_over() else "failed"
    print(f"{len(queue.done)} of {len(jobs)} jobs done, {ended}: {', '.join(sorted(queue.failed)) or 'none'}")
    sys.exit(0 if len(queue.done) == len(jobs) else 1)


if __name__ == "__main__":
    program(main)

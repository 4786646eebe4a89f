"""The runs behind docs/evidence.md: which recipes with which flags, and what is measured of each, over any cards.

    python benchmarks/evidence.py real-text --data data/full --out evidence --cards 0 1 2 3
    python benchmarks/evidence.py objectives --data data/full --glue glue_data --squad squad --blimp blimp \
        --out evidence --cards 0 1 2 3 --stop-after 540

A study is data: trials (a recipe and flags), the most telling first, and measures (commands on a trained run), which
follow their trial. Every job is a ``latemask`` command in a process of its own on one card; its log lies in
``OUT/logs/STUDY``. A job that is done is not done again, and each command goes on where it was stopped: the same line
again after ``--stop-after`` seconds, a kill or a reboot continues, once what a killed one left running has ended.
``OUT/evidence.tar.gz`` always holds every journal, score and figure so far, without weights.

A study in slices, also on several machines: ``--trials 4`` are its first four, ``--only NAME...`` those of these names;
unpack what came of one slice in the ``OUT`` of the next, or all of them in one folder for ``latemask report``. A trial
all of whose jobs are done needs no weights; one that lacks some is trained again where its weights are not there. What
`tuning` found best of one system goes into `time` by a call of its own: ``--only roberta --rows 32 --rate 4e-4``. On a
CPU ``--size tiny --tokens 32768 --rows 4 --tasks cola --finetuning-seeds 1 --parallel 1 --first 2`` tries a study out.

Fine-tuned models are ranked on the held-out texts of their task, as in MAE-LM Table 3, a pair as one text
(``OUT/held-out-TASK.jsonl``).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

import roberta
import tyro
from asked import counts, each_once, words
from cards import Queue
from refusals import program

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
from latemask.training.checkpoint import step_name
from latemask.writing import write_json, write_whole

KEPT = (".json", ".jsonl", ".svg", ".log", ".html", ".md")
"""What comes home of a run folder."""
LEFT = ("tokenizer.json", "nbest", "predictions", "held-out")
"""What does not, by a part of its name."""
MOST_BYTES = 8_000_000
SQUAD_TRAIN, SQUAD_DEV = "mini-train-v2.0.json", "mini-dev-v2.0.json"
SAVED = "*.model"
"""The fine-tuned model in a folder of results."""
WARMUP_SHARE = 0.3
LONG_WARMUP = 2_000
"""Updates: a stack with a decoder bore 4e-4 after 2,289 of them, and not after 915 (docs/evidence.md)."""
FASTER = ("--parallel", "--together")
"""Flags that change no result."""
STOPPED = 75
"""Exit status of a command that was told to stop and can go on."""

Study = Literal[
    "real-text", "real-text-rotary", "objectives", "masks", "delta", "three-ml", "tuning", "collapse", "time"
]
BY_TOKENS: tuple[Study, ...] = ("objectives", "masks", "delta", "three-ml", "time")
TAKEN_BY: Mapping[str, tuple[Study, ...]] = {
    "seconds": ("objectives",), "seeds": BY_TOKENS, "tokens": (*BY_TOKENS, "tuning", "collapse"),
    "rows": BY_TOKENS, "rate": BY_TOKENS,
}  # fmt: skip
"""The studies that a flag is for."""
Measure = Literal["blimp", "rank", "theory", "glue", "squad", "rank-mnli", "rank-squad2"]
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
    """Peak learning rate, by default 4e-4, with a decoder and a short warm-up 2e-4, of transformers' RoBERTa 1e-4."""
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
        for name, studies in TAKEN_BY.items():
            value = getattr(self, name)
            if value is not None and self.study not in studies:
                found = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                raise Refusal(f"--{name}", f"{found}, of which {self.study} makes nothing",
                              f"it with one of: {', '.join(studies)}")  # fmt: skip
        self.glue_tasks()  # an unknown flag ends the program here, not after the pretraining

    def glue_tasks(self) -> list[Task]:
        """Those of ``--tasks``, as ``--finetuning`` says."""
        given = shlex.split(self.finetuning)
        return tasks_of(parse(FinetuneOptions, ["MODEL", "--task", *self.tasks, "--data", "DATA", *given],
                              prog="--finetuning", positional=("model",)))  # fmt: skip

    def held_out(self, task: str) -> Path:
        return self.out / f"held-out-{task}.jsonl"


@dataclass(frozen=True)
class Trial:
    """One pretraining."""

    name: str
    recipe: str
    flags: tuple[str, ...]
    stop_at_seconds: float | None = None
    """It is told to stop after so many seconds and then gone on with: a resume in the middle."""
    is_peer: bool = False
    """Whether it is transformers' RoBERTa (roberta.py beside this file), not a recipe."""
    steps: tuple[int, ...] = ()
    """Checkpoints that are measured, in this order; none: the last one."""


@dataclass(frozen=True)
class Job:
    """One command; ``after`` is the job that must be done before."""

    name: str
    command: tuple[str, ...]
    """A word that ends in ``SAVED`` stands for what is there when the job begins."""
    after: str | None = None
    stop_at_seconds: float | None = None
    run: Path | None = None
    """The run folder, of a pretraining."""

    @property
    def file_name(self) -> str:
        """Of its log and note, less the suffix."""
        return self.name.replace("/", "-")

    @property
    def is_alone(self) -> bool:
        """Its seconds are a result."""
        return self.run is not None


def short_run(
    tokens: int, name: str, rows: int = 64, rate: str | None = None, row_tokens: int = 512, dropout: str = "0"
) -> tuple[str, ...]:
    """Flags of recipe ``name`` for some hundred million tokens, ``rows`` an update, all validated at one rate.

    Rotary positions in encoder and decoder, for only so does a decoder's self-attention find the words beside a mask in
    so short a time; a long warm-up to a low rate, for a fast one ends where every vector points the same way
    (results/real-text); no dropout, many updates, and a decoder at half the rate where the warm-up is short
    (results/evidence). The ablation of positions keeps its own.
    """
    steps = max(1, tokens // (row_tokens * rows))
    bears_4e_4 = recipe(name).decoder is None or WARMUP_SHARE * steps >= LONG_WARMUP
    rate = rate or ("4e-4" if bears_4e_4 else "2e-4")
    flags = ("--training.batch-rows", str(rows), "--training.steps", str(steps),
             "--training.learning-rate", rate, "--training.warmup-share", str(WARMUP_SHARE),
             "--training.log-every", str(max(1, steps // 100)), "--training.validate-every", str(max(1, steps // 12)),
             "--training.validation-rate", "0.15", "--training.save-every", "1000000",
             "--shape.dropout", dropout)  # fmt: skip
    if row_tokens != recipe(name).shape.row_tokens:
        flags += ("--shape.row-tokens", str(row_tokens))
    if name.startswith("no_relative"):
        return flags
    decoder = recipe(name).decoder
    rotates = decoder is not None and "self" in decoder.sublayers
    rotary = ("--decoder.positions", "absolute+rotary") if rotates else ()
    return (*flags, "--shape.positions", "rotary", *rotary)


MLM_RATES, THREE_ML_RATES = (0.15, 0.5, 0.4, 0.3, 0.6), (0.5, 0.4, 0.3, 0.6, 0.15)
"""Of `three-ml`, the most telling first."""
THREE_ML_SYSTEMS = ("k=0", "self", "cross", "k={1}", "k={2}", "k={0}")
"""Likewise; k counts quarters of the depth."""

MORE_MASKED = ("--masking.rate", "0.3")
TUNED_ALIKE = (
    ("128x512", 128, 512, "4e-4", ()),
    ("64x512", 64, 512, "4e-4", ()),
    ("32x512", 32, 512, "2e-4", ()),
    ("32x512", 32, 512, "4e-4", ()),
    ("32x512,masked=.3", 32, 512, "2e-4", MORE_MASKED),
    ("128x128", 128, 128, "2e-4", ()),
)
"""What `tuning` tries of every system: a label, rows an update, tokens a row, peak rate, and flags."""
TUNED = {
    "mlm": (*TUNED_ALIKE, ("32x512,masked=.3", 32, 512, "4e-4", MORE_MASKED), ("32x512", 32, 512, "8e-4", ())),
    "mae_lm": (*TUNED_ALIKE, ("64x512", 64, 512, "2e-4", ()), ("32x512", 32, 512, "1e-4", ())),
    "roberta": (*TUNED_ALIKE, ("32x512", 32, 512, "1e-4", ()), ("32x512", 32, 512, "5e-5", ())),
}
"""Two more for each, on the side where its six pointed: MLM's best rate was the highest, the others stayed at word
frequencies at it (results/evidence/tuning)."""

DELTA_ENDS = {"mae_lm": ("--masking.delta", "0"), "mask_in_encoder": ("--masking.delta", "1")}
"""The same runs by another name: in a report of `masks` and `delta` they are the ends of MAE-LM's Figure 4."""
OF_ABLATIONS: tuple[Measure, ...] = ("blimp", "rank", "glue")
"""What `masks` and `delta` measure."""

SMALL = ("--shape.initial-deviation", "0.01")
AT_HIGH_RATES = (
    ("mae_lm", "", "4e-4", ()),
    ("mae_lm", "centred", "4e-4", ("--decoder.centred", "True")),
    ("mae_lm", "centred", "2e-4", ("--decoder.centred", "True")),
    ("mae_lm", "", "2e-4", ()),
    ("mae_lm", "small", "4e-4", SMALL),
    ("mlm", "", "4e-4", ()),
    ("mlm", "small", "4e-4", SMALL),
    ("mlm", "small", "8e-4", SMALL),
    ("roberta", "small", "4e-4", SMALL),
    ("roberta", "", "1e-4", ()),
)
"""What `collapse` tries against the fall of deep stacks to word frequencies: system, label, peak rate, and flags."""


def trials_of(options: Options) -> tuple[list[Trial], tuple[Measure, ...]]:
    """The trials of a study, one seed after the other, and what is measured of each."""
    trials, measures = _trials(options)
    seeds = options.seeds or ((1, 2, 3) if options.study == "objectives" else None)
    if seeds is None:
        return trials, measures
    return [
        replace(trial, name=f"{trial.name},seed={seed}", flags=(*trial.flags, "--training.seed", str(seed)))
        for seed in seeds
        for trial in trials
    ], measures


def _trials(options: Options) -> tuple[list[Trial], tuple[Measure, ...]]:
    """The trials of one seed."""
    study = options.study
    if study in ("real-text", "real-text-rotary"):
        size = options.size or "small"
        flags = ("--training.validation-rate", "0.15", "--training.log-every", "100", "--training.max-seconds", "310")
        if study == "real-text":
            flags += ("--shape.positions", "absolute", "--training.learning-rate", "5e-4",
                      "--training.warmup-share", "0.1")  # fmt: skip
            decoder: tuple[str, ...] = ()
        else:  # half the rate, twice the warm-up: at 5e-4 the deeper stacks had collapsed within 300 updates
            flags += ("--shape.positions", "rotary", "--training.learning-rate", "2.5e-4",
                      "--training.warmup-share", "0.2")  # fmt: skip
            decoder = ("--decoder.positions", "absolute+rotary")
        return [
            Trial(f"mlm_{size}", f"mlm_{size}", flags),
            Trial(f"three_ml_self_{size}", f"three_ml_self_{size}", flags + decoder),
            Trial(f"mae_lm_{size}", f"mae_lm_{size}", flags + decoder, stop_at_seconds=170),
        ], ("blimp", "rank", "theory")
    tokens = options.tokens or {
        "objectives": 250_000_000,
        "time": 250_000_000,
        "tuning": 60_000_000,
        "collapse": 20_000_000,
    }.get(study, 100_000_000)
    size = options.size or ("small" if study in ("masks", "delta") else "base")

    update_rows = options.rows or 64

    def short(name: str, rate: str | None = None) -> tuple[str, ...]:
        return short_run(tokens, name, update_rows, options.rate or rate)

    if study == "objectives":
        clock = () if options.seconds is None else ("--training.max-seconds", f"{options.seconds:g}")
        return [
            Trial(system + (f",seconds={options.seconds:g}" if clock else ""), name, (*short(name), *clock))
            for system in ("mlm", "mae_lm", "three_ml_self")
            for name in (f"{system}_{size}",)
        ], ("blimp", "rank", "rank-mnli", "rank-squad2", "glue", "squad")  # fmt: skip
    if study == "masks":
        ways = ("mlm", "mask_in_encoder", "decoder_resets_mask", "random_replace", "mae_lm", "misaligned_positions",
                "no_relative", "decoder_self_cross", "decoder_causal_cross", "decoder_cross")  # fmt: skip
        return [
            Trial(way, name, (*short(name), *DELTA_ENDS.get(way, ()))) for way in ways for name in (f"{way}_{size}",)
        ], OF_ABLATIONS
    if study == "delta":
        return [
            Trial(f"delta={delta}", f"delta_{size}", (*short(f"delta_{size}"), "--masking.delta", str(delta)))
            for delta in (0.5, 0.25, 0.75)
        ], OF_ABLATIONS
    if study == "three-ml":
        depth = recipe(f"mlm_{size}").shape.depth
        systems: dict[str, tuple[str, tuple[str, ...]]] = {
            "k=0": (f"mlm_{size}", ()),
            "self": (f"three_ml_self_{size}", ()),
            "cross": (f"three_ml_cross_{size}", ()),
        }
        quarters = (depth // 4, depth // 2, 3 * depth // 4)
        for layer in quarters:
            systems[f"k={layer}"] = (f"three_ml_{size}", ("--masking.joins", f"{layer}:0:1"))
        # The most telling first: 15 % MLM and 50 % joining late, then by turns further down both lists.
        order = sorted(itertools.product(range(len(systems)), range(5)), key=lambda place: (sum(place), place))
        trials = []
        for one, other in order:
            system = THREE_ML_SYSTEMS[one].format(*quarters)
            rate = (THREE_ML_RATES if one else MLM_RATES)[other]
            name, joins = systems[system]
            trials.append(Trial(f"{system},rate={rate}", name, (*short(name), "--masking.rate", str(rate), *joins)))
        return trials, ("blimp", "glue")
    if study == "tuning":  # as many of the peer's as of ours; what is best then goes into the other studies
        trials = []
        for system, tried in TUNED.items():
            is_peer = system == "roberta"
            name, kept = (f"{part}_{size}" for part in (("mlm", "no_relative") if is_peer else (system, system)))
            for label, rows, row_tokens, rate, more in tried:
                flags = short_run(tokens, kept, rows, rate, row_tokens, dropout="0.1")
                trials.append(Trial(f"{system},{label},rate={rate}", name, (*flags, *more), is_peer=is_peer))
        return trials, ("blimp",)
    if study == "collapse":
        trials = []
        for system, way, rate, more in AT_HIGH_RATES:
            is_peer = system == "roberta"
            name, kept = (f"{part}_{size}" for part in (("mlm", "no_relative") if is_peer else (system, system)))
            label = ",".join(filter(None, (system, way, f"rate={rate}")))
            trials.append(Trial(label, name, (*short_run(tokens, kept, 64, rate), *more), is_peer=is_peer))
        return trials, ()
    last = max(1, tokens // (512 * update_rows))
    every = max(1, last // 8)
    often = ("--training.save-every", str(every), "--training.keep", "0")
    eighths = (every * number for number in (4, 2, 6, 1, 3))
    steps = tuple(dict.fromkeys(step for step in (last, *eighths) if step <= last))
    found = [
        Trial(system, name, (*short(name), *often), steps=steps)
        for system in ("mlm", "three_ml_self", "mae_lm")
        for name in (f"{system}_{size}",)
    ]
    # transformers' RoBERTa has no rotary positions: it keeps its own, with the flags of a run that keeps them too
    return [*found, Trial("roberta", f"mlm_{size}", (*short(f"no_relative_{size}", "1e-4"), *often), steps=steps,
                          is_peer=True)], ("blimp", "glue")  # fmt: skip


def jobs_of(options: Options) -> list[Job]:
    """Each pretraining, then what is measured of it, the cheap things before the dear: what a slice ends is whole."""
    trials, measures = trials_of(options)
    if unknown := set(options.only) - {trial.name for trial in trials}:
        raise Refusal("--only", ", ".join(sorted(unknown)), f"some of: {' '.join(trial.name for trial in trials)}")
    trials = [trial for trial in trials[: options.trials] if not options.only or trial.name in options.only]
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
        jobs.append(Job(trial.name, pretrain, stop_at_seconds=trial.stop_at_seconds, run=run))
        models = [(f",step={step}", run / step_name(step)) for step in trial.steps] or [("", run)]
        for (label, model), measure in itertools.product(models, measures):
            if measure == "blimp" and recipe(trial.recipe).rewrites:
                continue  # it has no distribution for one masked token
            saved = f"{trial.name}{label}/save-{TUNED_AGAIN.get(measure)}"
            after = saved if any(job.name == saved for job in jobs) else trial.name
            for name, command in _commands(measure, str(model), options):
                jobs.append(Job(f"{trial.name}{label}/{name}", (*latemask, *command), after))
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
    trials, measures = trials_of(options)
    for trial in trials:
        read = roberta.read if trial.is_peer else pretrain.read
        read([trial.recipe, "--data", "DATA", "--out", "OUT", *trial.flags, *shlex.split(options.flags)])
    if options.blimp and "blimp" in measures:
        read_pairs(options.blimp, first=options.first)
    if options.squad and "squad" in measures:
        for name in (SQUAD_TRAIN, SQUAD_DEV):
            read_squad(options.squad / name)
    if options.glue and "glue" in measures:
        for task in options.glue_tasks():
            if task.kind != "span":
                read_task(task, options.glue)


class Runner:
    """Runs a job's command, once: what it did is noted in ``OUT/jobs/STUDY``."""

    def __init__(self, jobs: Sequence[Job], out: Path, study: str, is_over: Callable[[], bool]):
        self.jobs, self.out, self.is_over = jobs, out, is_over
        self.notes, self.logs = (out / name / study for name in ("jobs", "logs"))
        self.collecting = threading.Lock()
        for folder in (self.notes, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job, card: int) -> bool:
        """Whether it is done; at once where it was before."""
        path = self.logs / f"{job.file_name}.log"
        with open(path, "ab") as log:
            is_alone, is_done = self._is_alone(job, log), self._is_done(job)
            if is_done or not is_alone:
                return is_done
            started = time.monotonic()
            print(f"card {card}: {job.name}", flush=True)
            status = self._status(job, card, log)
        seconds = time.monotonic() - started
        found = "" if status == 0 else f": {path}"
        print(f"card {card}: {job.name} ended with {status} after {seconds:.0f} s{found}", flush=True)
        if status == 0:
            write_json(self._note(job), {"kind": "job", "name": job.name, "command": list(job.command[1:]),
                                         "card": card, "seconds": seconds})  # fmt: skip
        with self.collecting:
            collect(self.out)
        return status == 0

    def _is_alone(self, job: Job, log: IO[bytes]) -> bool:
        """Wait until nobody else holds the job's log, which a command and all that it starts hold until they end, also
        where the program that began them was killed. False: it is over before."""
        waits = False
        while not self.is_over():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if not waits:
                print(f"{job.name}: waiting for its command that still runs, begun by another process", flush=True)
            waits = True
            time.sleep(0.2)
        return False

    def _is_done(self, job: Job) -> bool:
        """A pretraining whose weights are not here is, where all that was to be measured of it is done."""
        note = self._note(job)
        if not note.is_file() or asked(json.loads(note.read_text(encoding="utf-8"))["command"]) != asked(
            job.command[1:]
        ):
            return False
        has_weights = job.run is None or any(job.run.glob("step-*/*.safetensors"))
        return has_weights or all(self._is_done(other) for other in self.jobs if other.after == job.name)

    def _note(self, job: Job) -> Path:
        return self.notes / f"{job.file_name}.json"

    def _status(self, job: Job, card: int, log: IO[bytes]) -> int:
        """The exit status of its command."""
        started, stops_at, command = time.monotonic(), job.stop_at_seconds, said_in_full(job.command)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(card), "PYTHONUNBUFFERED": "1"}
        while True:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            told = False
            while process.poll() is None:
                if self.is_over() and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
                if stops_at is not None and time.monotonic() - started > stops_at:
                    process.send_signal(signal.SIGTERM)
                    stops_at = None
                time.sleep(0.2)
            if process.returncode != STOPPED or self.is_over():
                return process.returncode


def asked(command: Sequence[str]) -> list[str]:
    """A command without the flags that only say how fast it goes."""
    words = list(command)
    for flag in FASTER:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    return words


def said_in_full(command: Sequence[str]) -> list[str]:
    """The command with what is there now in place of ``SAVED``."""
    return [found for word in command for found in (glob.glob(word) if word.endswith(SAVED) else [word])]


def collect(out: Path) -> Path:
    """Pack what is known so far, without weights."""
    aside, kept = out / f".evidence-{os.getpid()}.tar.gz", out / "evidence.tar.gz"
    with tarfile.open(aside, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            is_wanted = path.is_file() and path.suffix in KEPT and not any(part in path.name for part in LEFT)
            if is_wanted and path.stat().st_size <= MOST_BYTES:
                archive.add(path, path.relative_to(out))
    aside.replace(kept)
    return kept


def main() -> None:
    """Run the jobs of a study that are not done."""
    options = tyro.cli(Options)
    each_once(options)
    check(options)
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

"""Fine-tuning against transformers' Trainer: examples a second, and whether equal settings give equal scores.

    python benchmarks/finetune.py speed --data glue/ --out results/finetune-speed.json
    python benchmarks/finetune.py agreement --data glue/ --task sst2 qqp --out results/finetune-agreement.json

``speed`` trains the same model on the same rows of MNLI for the same epochs three times, each in a fresh process:
ours; Trainer as the stock run_glue script runs it (fp32, padded to 128); Trainer at its best (bf16, batches grouped
by length, padded to their longest row, compiled). The first epoch holds compiling and capturing, the last one is the
steady rate.
``agreement`` fine-tunes a stock model with both, at the same settings, over several seeds and tasks.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
import tyro
from asked import asked, each_once
from refusals import program
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from latemask.downstream.examples import Examples
from latemask.downstream.finetune import Bench, Model, card_name, versions
from latemask.downstream.glue import read_task
from latemask.downstream.metrics import METRICS
from latemask.downstream.problem import TextProblem, score_of
from latemask.downstream.settings import Settings
from latemask.downstream.tasks import GLUE, Task
from latemask.errors import Refusal
from latemask.text.tokenizer import train_tokenizer
from latemask.training.distributed import pick_device
from latemask.writing import check_file, write_json

SIZES = {"tiny": (2, 128, 2, 512), "base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)}
"""Depth, width, heads, feed-forward of a RoBERTa with random weights, for speed."""
SYSTEMS = ("latemask", "trainer-stock", "trainer-best")
System = Literal["latemask", "trainer-stock", "trainer-best"]


@dataclass(frozen=True)
class Speed:
    """Examples a second on MNLI-length data."""

    data: Path
    """Folder with GLUE's TSV folders."""
    out: Path = Path("results/finetune-speed.json")
    """The JSON."""
    model: str = ""
    """A Hugging Face encoder folder; by default a RoBERTa of --size with random weights."""
    size: Literal["tiny", "base", "large"] = "base"
    """Of the random model."""
    task: str = "mnli"
    """A classification task of GLUE."""
    rows: int = 20_000
    """Training examples, the first of the file."""
    dev_rows: int = 1_000
    """Examples the score is of, likewise."""
    epochs: int = 3
    """Passes; the last one is timed as the steady rate."""
    batch_rows: int = 32
    """Examples an update."""
    learning_rate: float = 2e-5
    """Peak."""
    compile: Literal["auto", "on", "off"] = "on"
    """Ours and Trainer's best alike."""
    systems: tuple[System, ...] = SYSTEMS
    """Which are measured."""
    only: System | None = None
    """Measure this one, here, and print its JSON (what the fresh processes do)."""


@dataclass(frozen=True)
class Agreement:
    """The same scores within seed noise."""

    data: Path
    """Folder with GLUE's TSV folders."""
    model: str = ""
    """A stock Hugging Face encoder folder; by default a RoBERTa of --size with random weights, which learns from the
    tasks alone: they need enough rows, and a rate that is right for that."""
    size: Literal["tiny", "base", "large"] = "tiny"
    """Of the random model."""
    task: tuple[str, ...] = ("sst2", "qqp")
    """Classification tasks of GLUE."""
    out: Path = Path("results/finetune-agreement.json")
    """The JSON."""
    seeds: int = 5
    """Of each system and task."""
    rows: int | None = None
    """Training examples; none: all."""
    dev_rows: int | None = None
    """Examples the scores are of; none: all."""
    epochs: int = 5
    """Passes."""
    batch_rows: int = 16
    """Examples an update."""
    learning_rate: float = 3e-5
    """Peak."""


class EpochClock(TrainerCallback):
    """Seconds since training began, at the end of each epoch."""

    def __init__(self) -> None:
        self.begun, self.ends = 0.0, []

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.begun = time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter() - self.begun)


class Rows(torch.utils.data.Dataset):
    """Tokenized examples as Trainer takes them."""

    def __init__(self, encoded: dict[str, list[list[int]]], labels: Sequence[int]):
        self.encoded, self.labels = encoded, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = {name: values[number] for name, values in self.encoded.items()}
        return row | {"labels": self.labels[number], "length": len(row["input_ids"])}


def trained_by_trainer(folder: str, task: Task, examples: dict[str, Examples], settings: Settings, *, best: bool,
                       compiles: bool, pads: bool, groups: bool) -> tuple[dict[str, float], list[float]]:  # fmt: skip
    """Scores on the first development set, and seconds at each epoch's end. ``groups``: batches of like lengths, in
    Trainer's way: long to short, over and over, which is no random order."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    most = min(settings.sequence_tokens, 128 if pads else tokenizer.model_max_length)

    def rows_of(held: Examples) -> Rows:
        columns = [list(column) for column in zip(*held.texts, strict=True)]
        encoded = tokenizer(*columns, truncation=True, max_length=most, padding="max_length" if pads else False)
        return Rows(dict(encoded), held.labels)

    is_cuda, v5 = torch.cuda.is_available(), int(transformers.__version__.split(".")[0]) >= 5
    options: dict[str, Any] = {
        "per_device_train_batch_size": settings.batch_rows, "per_device_eval_batch_size": 128,
        "learning_rate": settings.learning_rate, "num_train_epochs": settings.epochs, "lr_scheduler_type": "linear",
        "adam_beta1": settings.betas[0], "adam_beta2": settings.betas[1], "adam_epsilon": settings.epsilon,
        "weight_decay": settings.weight_decay, "max_grad_norm": settings.clip_norm or 0.0, "seed": settings.seed,
        "save_strategy": "no", "logging_strategy": "epoch", "report_to": [], "disable_tqdm": True,
        "remove_unused_columns": True, "use_cpu": not is_cuda,
        "warmup_steps" if v5 else "warmup_ratio": settings.warmup_share,
    }  # fmt: skip
    if best:
        options |= {"bf16": is_cuda, "torch_compile": compiles, "optim": "adamw_torch_fused"}
        options |= {"dataloader_num_workers": 4, "dataloader_persistent_workers": True} if is_cuda else {}
    if groups:
        options |= {"train_sampling_strategy": "group_by_length"} if v5 else {"group_by_length": True}
    transformers.set_seed(settings.seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(task.labels))
    clock = EpochClock()
    with tempfile.TemporaryDirectory() as aside:
        arguments, rows = TrainingArguments(aside, **options), rows_of(examples["train"])
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[clock]
        )
        trainer.train()
        held = next(held for split, held in examples.items() if split != "train")
        logits = trainer.predict(rows_of(held)).predictions  # type: ignore[arg-type]
    found = np.asarray(logits).argmax(-1)
    return {name: METRICS[name](found, held.labels) for name in task.metrics}, clock.ends


def trained_by_us(
    folder: str, task: Task, examples: dict[str, Examples], settings: Settings
) -> tuple[dict[str, float], list[float]]:
    model = Model.load(folder)
    problem = TextProblem(task, examples, model.inputs(settings), settings)
    training = Bench(model, problem, settings, pick_device()).train(settings)
    scores = next(iter(training.evaluation.scores.values()))
    return scores, [entry["seconds_so_far"] for entry in training.history]


def speed(options: Speed) -> None:
    """Measure every system in a process of its own, and write the table."""
    if options.only is not None:
        print(json.dumps(measured(options, options.only)))
        return
    with tempfile.TemporaryDirectory() as aside:
        folder = options.model or random_roberta(Path(aside), options.task, options)
        found = {}
        for system in options.systems:
            command = [sys.executable, __file__, "speed", "--only", system, "--model", folder]
            for field in (
                "data",
                "task",
                "rows",
                "dev_rows",
                "epochs",
                "batch_rows",
                "learning_rate",
                "compile",
                "size",
            ):
                command += [f"--{field.replace('_', '-')}", str(getattr(options, field))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise Refusal(system, f"exit status {done.returncode}", "a measurement")
            found[system] = json.loads(done.stdout.splitlines()[-1])
            print(f"{system}: {found[system]['steady_examples_per_second']:.0f} examples/s steady, "
                  f"{found[system]['examples_per_second']:.0f} with the start")  # fmt: skip
    ours = found.get("latemask", {})
    ratios = {system: {name: ours[name] / value[name] for name in ("examples_per_second", "steady_examples_per_second")}
              for system, value in found.items() if ours and system != "latemask"}  # fmt: skip
    write_json(options.out, {"kind": "benchmark", "what": "fine-tuning speed", "systems": found, "ratios": ratios,
                                   "settings": settings_of(options), "card": card_name(pick_device()),
                                   "versions": versions()})  # fmt: skip


def settings_of(options: Speed | Agreement) -> dict[str, Any]:
    """Settings as a result keeps them."""
    settings = {name: value for name, value in asked(options).items() if name not in ("out", "only")}
    return settings | {"model": Path(options.model).name if options.model else f"random weights, {options.size}"}


def some_examples(name: str, options: Speed | Agreement) -> tuple[Task, dict[str, Examples]]:
    """Training and the first development set, cut to the rows asked for."""
    task, examples = read_task(GLUE[name], options.data)
    dev = task.dev_splits[0]
    return task, {"train": examples["train"].first(options.rows), dev: examples[dev].first(options.dev_rows)}


def measured(options: Speed, system: System) -> dict[str, Any]:
    task, examples = some_examples(options.task, options)
    settings = Settings(epochs=options.epochs, learning_rate=options.learning_rate, batch_rows=options.batch_rows,
                        compile=options.compile, sequence_tokens=128)  # fmt: skip
    if system == "latemask":
        scores, ends = trained_by_us(options.model, task, examples, settings)
    else:
        best = system == "trainer-best"
        scores, ends = trained_by_trainer(options.model, task, examples, settings, best=best,
                                          compiles=options.compile != "off", pads=not best, groups=best)  # fmt: skip
    rows = len(examples["train"])
    last = ends[-1] - (ends[-2] if len(ends) > 1 else 0.0)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"examples_per_second": rows * options.epochs / ends[-1], "steady_examples_per_second": rows / last,
            "epoch_end_seconds": ends, "scores": scores, "rows": rows, "peak_memory_bytes": memory}  # fmt: skip


def random_roberta(folder: Path, task: str, options: Speed | Agreement) -> str:
    """A RoBERTa of --size with random weights, and a tokenizer of the task's own texts."""
    _, examples = read_task(GLUE[task], options.data)
    text = folder / "text.txt"
    text.write_text("\n\n".join(" ".join(texts) for texts in examples["train"].texts), encoding="utf-8")
    tokenizer = train_tokenizer([str(text)], 32_768 if options.size != "tiny" else 4_096)
    depth, width, heads, inner = SIZES[options.size]
    config = transformers.RobertaConfig(
        vocab_size=tokenizer.vocabulary, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=514, type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.RobertaModel(config).save_pretrained(folder)
    names = {f"{role}_token": name for role, name in tokenizer.special_names.items()}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.library, model_max_length=512, **names
    ).save_pretrained(folder)
    return str(folder)


def agreement(options: Agreement) -> None:
    """Both systems over all seeds and tasks: scores, medians, and the difference against its standard error. Tasks that
    --out holds already and that are not done again stay in it."""
    for name in options.task:
        if name not in GLUE or GLUE[name].kind != "classification":
            raise Refusal("--task", name, "a classification task of GLUE")
    with tempfile.TemporaryDirectory() as aside:
        folder = options.model or random_roberta(Path(aside), options.task[0], options)
        found = {name: agreement_on(name, folder, options) for name in options.task}
    facts = {"settings": settings_of(options), "card": card_name(pick_device()), "versions": versions()}
    held = json.loads(options.out.read_text(encoding="utf-8"))["tasks"] if options.out.is_file() else {}
    tasks = held | {name: {**one, **facts} for name, one in found.items()}
    write_json(options.out, {"kind": "benchmark", "what": "agreement with Trainer", "tasks": tasks})


def agreement_on(name: str, folder: str, options: Agreement) -> dict[str, Any]:
    """Both systems on one task."""
    task, examples = some_examples(name, options)
    majority = Counter(examples["train"].labels).most_common(1)[0][0]
    held = next(held for split, held in examples.items() if split != "train").labels
    baseline = METRICS[task.metrics[0]]([majority] * len(held), held)
    scores: dict[str, list[float]] = {"latemask": [], "trainer": []}
    for seed in range(options.seeds):
        settings = Settings(epochs=options.epochs, learning_rate=options.learning_rate, batch_rows=options.batch_rows,
                            seed=seed, sequence_tokens=256)  # fmt: skip
        ours, _ = trained_by_us(folder, task, examples, settings)
        theirs, _ = trained_by_trainer(folder, task, examples, settings, best=torch.cuda.is_available(),
                                       compiles=False, pads=False, groups=False)  # fmt: skip
        scores["latemask"].append(score_of(task, {"dev": ours}))
        scores["trainer"].append(score_of(task, {"dev": theirs}))
        print(
            f"{name}, seed {seed}: ours {scores['latemask'][-1]:.4f}, Trainer {scores['trainer'][-1]:.4f}", flush=True
        )
    found = compared(scores) | {"metric": task.metrics[0], "majority": baseline, "rows": len(examples["train"])}
    print(f"{name}: {json.dumps(found['difference'])}")
    return found


def compared(scores: dict[str, list[float]]) -> dict[str, Any]:
    """Seeds and medians of both, and the difference of means: within noise where it is at most two standard errors (or,
    with one seed, equal)."""
    ours, theirs = scores["latemask"], scores["trainer"]
    difference = statistics.mean(ours) - statistics.mean(theirs)
    variance = sum(statistics.variance(side) / len(side) for side in (ours, theirs)) if len(ours) > 1 else 0.0
    error = math.sqrt(variance)
    within = abs(difference) <= 2 * error + 1e-12
    return {
        "seeds": scores,
        "median": {name: statistics.median(side) for name, side in scores.items()},
        "difference": {"mean": difference, "standard_error": error, "within_noise": within},
        "says_nothing": len({*ours, *theirs}) == 1,  # every run gave the same score, as untrained models do
    }


def main() -> None:
    chosen: Any = tyro.extras.subcommand_cli_from_dict({"speed": Speed, "agreement": Agreement})
    each_once(chosen)
    check_file(chosen.out)
    transformers.utils.logging.set_verbosity_error()
    speed(chosen) if isinstance(chosen, Speed) else agreement(chosen)


if __name__ == "__main__":
    program(main)

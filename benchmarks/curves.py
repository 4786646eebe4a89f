"""The fast path trains as the plain one does: loss curves of both on a real corpus, laid on each other.

    python benchmarks/curves.py --data data/en --recipe mae_lm_base --cards 0 1 2 3
    python benchmarks/curves.py --data data/en --recipe mlm_base --flags="--shape.positions absolute" --cards 0 1 2 3

All variants see the same rows and masks in the same order, and have no dropout (whose masks the paths draw each in
their own way). ``fast``: as it runs, in bf16, compiled, with the kernels. ``plain``: bf16, nothing compiled, every
kernel replaced by its plain twin. ``fp32``: plain, in float32 (TF32 products). ``fp8``: fast with FP8 linears, where
the card has them. ``seed``: fast with other initial weights, the yardstick: what chance alone makes of the curve.

The learning rate rises linearly over the warm-up and stays, so that a variant with fewer steps has the same rate at
each step. Every variant is a process of its own, one at a time on each card. Written: curves_RECIPE.json, anew after
each of them, and at the end the curves and their differences from the plain one as SVG.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro
from asked import asked, counts, each_once, words
from cards import Queue
from children import ended, said
from refusals import program

import latemask
from latemask import console
from latemask.cli.pretrain import read
from latemask.config import Run
from latemask.errors import Refusal
from latemask.kernels import linear_cross_entropy, relative_attention
from latemask.recipes import recipe
from latemask.training import float8, journal
from latemask.training.distributed import pick_device
from latemask.writing import check_file, write_json

Variant = Literal["plain", "fp32", "fast", "fp8", "seed"]
"""The slow ones first, so that they do not come last on the cards."""

IMPOSSIBLE = 3
"""Exit status of a variant that this device does not compute."""
LAST_LINES = 25
PATIENCE_SECONDS = 90.0
"""For a variant that was told to stop, to save and end."""


@dataclass(frozen=True)
class Options:
    """Lay the loss curves of the fast and the plain path on each other."""

    data: Path
    """Folder of prepared text."""
    recipe: str = "mae_lm_base"
    """What is trained."""
    flags: str = ""
    """Its flags, such as --flags="--shape.positions absolute"."""
    out: Path = Path("results")
    """Folder of the JSON and the figures."""
    runs: Path = Path("local/curves")
    """Run folders (journals; weights are deleted) and logs, in a folder of the recipe's name."""
    variants: tuple[Variant, ...] = get_args(Variant)
    """Which are trained."""
    cards: tuple[int, ...] = (0,)
    """One variant at a time on each."""
    steps: int = 300
    """Of every variant but fp32."""
    fp32_steps: int = 150
    """Of fp32."""
    warmup_steps: int = 100
    """Until the learning rate stands at the recipe's peak."""
    batch_rows: int = 128
    """Rows per update."""
    log_every: int = 10
    """Steps whose mean loss is a point."""
    smoothed_steps: int = 50
    """Steps whose mean loss is compared."""
    seed: int = 0
    """Of weights, order and masks; the variant `seed` has the next one for its weights alone."""
    stop_after: float = 500.0
    """Seconds until every variant is told to stop; its curve then counts as far as it went."""
    only: Variant | None = None
    """Train this one, here (what the fresh processes do)."""

    def __post_init__(self) -> None:
        counts(self, "steps", "fp32_steps", "batch_rows", "log_every", "smoothed_steps")
        words(self, "flags")
        if not self.cards:
            raise Refusal("--cards", "nothing", "one or more")
        for name in ("steps", "fp32_steps"):
            if getattr(self, name) < self.warmup_steps:
                raise Refusal(f"--{name.replace('_', '-')}", str(getattr(self, name)),
                              f"--warmup-steps {self.warmup_steps} or more")  # fmt: skip
        if self.smoothed_steps % self.log_every:
            raise Refusal("--smoothed-steps", str(self.smoothed_steps), f"a multiple of --log-every {self.log_every}")

    @property
    def json(self) -> Path:
        return self.out / f"curves_{self.recipe}.json"

    def run_of(self, variant: Variant) -> Path:
        return self.runs / self.recipe / variant


def settings_of(options: Options, variant: Variant) -> Run:
    """The run of a variant."""
    steps = options.fp32_steps if variant == "fp32" else options.steps
    fields = {
        "training.steps": steps, "training.batch-rows": options.batch_rows, "training.log-every": options.log_every,
        "training.warmup-share": options.warmup_steps / steps, "training.decay": "constant",
        "training.validate-every": 0, "shape.dropout": 0, "training.data-seed": options.seed,
        "training.seed": options.seed + (variant == "seed"),
    }  # fmt: skip
    if recipe(options.recipe).decoder is not None:
        fields["decoder.dropout"] = 0
    if variant in ("plain", "fp32"):
        fields["training.compile"] = "off"
    if variant in ("fp32", "fp8"):
        fields["training.precision"] = variant
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    folders = ["--data", str(options.data), "--out", str(options.run_of(variant))]
    _, run = read([options.recipe, *folders, *shlex.split(options.flags), *flags])
    assert run is not None
    return run


def train(options: Options, variant: Variant) -> int:
    """Train a variant in this process, whose kernels stay switched off afterwards where they were; the exit status."""
    if variant == "fp8" and not float8.is_possible(pick_device()):
        return IMPOSSIBLE
    if variant in ("plain", "fp32"):
        for kernel in (relative_attention, linear_cross_entropy):
            kernel.is_supported = lambda *_: False  # type: ignore[assignment]
    if variant == "fp32":
        torch.set_float32_matmul_precision("high")
    latemask.pretrain(settings_of(options, variant), options.data, options.run_of(variant))
    return 0


@dataclass(frozen=True)
class Training:
    """The training of a variant: a job (``cards.Job``)."""

    name: Variant
    after: str | None = None
    is_alone: bool = True
    needs_no_more: bool = False


class Cards:
    """Variants over cards: the next one takes the card that comes free."""

    def __init__(self, options: Options, arguments: Sequence[str]):
        self.options, self.arguments, self.begun = options, list(arguments), time.monotonic()
        self.found: dict[Variant, dict[str, Any]] = {}
        self.failed: dict[Variant, str] = {}
        self.left_out: list[str] = []
        self.writing = threading.Lock()

    def work(self) -> None:
        """All variants, until none is left."""
        queue = Queue([Training(variant) for variant in self.options.variants], self._run, lambda: self._left() <= 0)
        queue.work(self.options.cards)
        self.left_out += [f"{training.name}: the time is over" for training in queue.left]

    def _left(self) -> float:
        """Seconds."""
        return self.options.stop_after - (time.monotonic() - self.begun)

    def _run(self, training: Training, card: int) -> bool:
        self._train(training.name, card)
        with self.writing:
            write(self.options, self)
        return training.name in self.found

    def _train(self, variant: Variant, card: int) -> None:
        options, started = self.options, time.monotonic()
        run, log = options.run_of(variant), options.run_of(variant).with_suffix(".log")
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        print(f"card {card}: {variant}", flush=True)
        command = [sys.executable, __file__, *self.arguments, "--only", variant]
        with log.open("wb") as written:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=written,
                                       env=os.environ | {"CUDA_VISIBLE_DEVICES": str(card)})  # fmt: skip
            was_stopped = False
            try:
                process.wait(max(0.0, self._left()))
            except subprocess.TimeoutExpired:
                was_stopped = True
            finally:
                status = ended(process, PATIENCE_SECONDS)
        for step in run.glob("step-*"):
            shutil.rmtree(step)
        lines = journal.read(run / "journal.jsonl") if (run / "journal.jsonl").exists() else []
        has_points = any(line["kind"] == "train" for line in lines)
        seconds = time.monotonic() - started
        print(f"card {card}: {variant} ended with {status} after {seconds:.0f} s", flush=True)
        if status == IMPOSSIBLE:
            self.left_out.append(f"{variant}: not on this device")
        elif has_points and (status == 0 or was_stopped):
            self.found[variant] = measured(lines) | {"seconds": seconds, "was_stopped": was_stopped}
        else:
            self.failed[variant] = "\n".join([f"exit status {status}", *said(log).splitlines()[-LAST_LINES:]])


def measured(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a journal says of a variant; its speed is the median of the second half."""
    train = [line for line in lines if line["kind"] == "train"]
    return {
        "losses": [[line["step"], line["loss"]] for line in train],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in train[len(train) // 2 :]),
        "memory_bytes": max(line["memory_bytes"] for line in train),
        "skips": sum(line["kind"] == "skip" for line in lines),
        **{name: lines[0][name] for name in ("micro_rows", "card", "versions")},
        "training": lines[0]["run"]["training"],
    }


def smoothed(losses: Sequence[Sequence[Any]], width: int) -> dict[int, float | None]:
    """Mean of the last ``width`` points by the step of the last; None where one of them was not finite."""
    found: dict[int, float | None] = {}
    for end in range(width, len(losses) + 1):
        values = [loss for _, loss in losses[end - width : end]]
        found[losses[end - 1][0]] = None if None in values else statistics.mean(values)
    return found


def apart(losses: Sequence[Sequence[Any]], plain: Sequence[Sequence[Any]], width: int) -> dict[str, Any]:
    """How far a curve lies from the plain one, in nats, both smoothed over ``width`` points: at each step that both
    have, signed; the largest and the mean without sign. Where a loss was not finite: None."""
    mine, other = smoothed(losses, width), smoothed(plain, width)
    points: list[list[Any]] = []
    for step, loss in mine.items():
        if step in other:
            wanted = other[step]
            points.append([step, None if loss is None or wanted is None else loss - wanted])
    sizes = [abs(far) for _, far in points if far is not None]
    whole = bool(points) and len(sizes) == len(points)
    return {"points": points, "mean": statistics.mean(sizes) if whole else None,
            "largest": max(sizes) if whole else None}  # fmt: skip


def figures(out: Path, found: Mapping[str, Mapping[str, Any]], beside: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """``out`` with the curves, and beside it their differences from the plain one."""
    from latemask.report import plots

    losses = {name: [(step, loss) for step, loss in one["losses"] if loss is not None] for name, one in found.items()}
    drawn = [plots.save(plots.lines(losses, "steps", "training loss, nats per masked token"), out)]
    differences = {name: [(step, far) for step, far in one["points"] if far is not None]
                   for name, one in beside.items()}  # fmt: skip
    if any(differences.values()):
        figure = plots.lines(differences, "steps", "loss less the plain path's, nats")
        drawn.append(plots.save(figure, out.with_name(f"{out.stem}_difference{out.suffix}")))
    return drawn


Found = dict[str, dict[str, Any]]


def compared(options: Options, cards: Cards) -> tuple[Found, Found]:
    """What was measured so far, in a fixed order, and how far each curve lies from the plain one."""
    found: Found = {name: cards.found[name] for name in get_args(Variant) if name in cards.found}
    plain, width = found.get("plain"), options.smoothed_steps // options.log_every
    beside: Found = {} if plain is None else {name: apart(one["losses"], plain["losses"], width)
                                              for name, one in found.items() if name != "plain"}  # fmt: skip
    return found, beside


def write(options: Options, cards: Cards) -> Path:
    """The JSON of what was measured so far."""
    found, beside = compared(options, cards)
    settings = {name: value for name, value in asked(options).items() if name != "only"}
    shared = {name: next((one[name] for one in found.values()), None) for name in ("card", "versions")}
    variants = {name: {key: value for key, value in one.items() if key not in shared} for name, one in found.items()}
    found_here = {"variants": variants, "beside_plain": beside, "failed": cards.failed, "left_out": cards.left_out}
    head = {"kind": "benchmark", "what": "loss curves of the fast path beside the plain one"}
    result = head | found_here | {"settings": settings} | shared
    return write_json(options.json, result)


def show(options: Options, cards: Cards, found: Found, beside: Found) -> None:
    """A short table, after what is missing from it."""
    for line in cards.left_out:
        print(f"left out: {line}")
    for name, reason in cards.failed.items():
        print(f"{name} failed: {reason}")
    rows = [(name, *one["losses"][-1], beside.get(name, {}).get("mean"), beside.get(name, {}).get("largest"),
             one["tokens_per_second"], one["micro_rows"]) for name, one in found.items()]  # fmt: skip
    columns = ("variant", "steps", "last loss", "mean difference", "largest", "tokens/s", "rows a pass")
    console.table(f"{options.recipe}: nats beside the plain path, means of {options.smoothed_steps} steps", columns,
                  rows)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Train every variant, compare, draw; 1 where one failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = tyro.cli(Options, args=arguments)
    each_once(options)
    if options.only is not None:
        return train(options, options.only)
    check_file(options.json)
    for variant in options.variants:
        settings_of(options, variant)
    cards = Cards(options, arguments)
    cards.work()
    found, beside = compared(options, cards)
    written = write(options, cards)
    show(options, cards, found, beside)
    if found:
        drawn = figures(written.with_suffix(".svg"), found, beside)
        print(f"Written: {', '.join(map(str, (written, *drawn)))}")
    return 1 if cards.failed else 0


if __name__ == "__main__":
    program(main)

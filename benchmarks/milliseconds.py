"""Where the milliseconds of a training step go: its GPU kernels by class, beside what the arithmetic needs.

    python benchmarks/milliseconds.py --only "mlm" "mlm, dropout" mae_lm --out results/milliseconds.json

Entries are those of `latemask bench`, built and freed one after the other. Steps are timed first; then some are run
under torch's profiler, and each kernel is put into a class by its name. ``idle`` is when no kernel runs,
from the first to the last of the profiled steps, whose kernels may take another time than the timed ones. The floor of
matrix products and attention is the count of executed FLOPs at the rate of one large product, measured in the same run.
The kernels that take the most time stand beside their class, so that a wrong one can be seen.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from asked import asked, counts, read
from refusals import check_gpu, program
from tiles import milliseconds
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from latemask import console
from latemask.bench import BenchOptions, Stepper, built, entries_of
from latemask.cards import card_of_device
from latemask.machine import machine_of
from latemask.training.distributed import pick_device
from latemask.training.float8 import is_possible
from latemask.writing import write_json

CLASSES = {
    "attention": r"cudnn|sdpa|fmha|flash|^(forward|keys|queries|distances|turn)_kernel",
    "cross-entropy": r"^cross_entropy",
    "optimizer and clipping": r"multi_tensor|adam|lpnorm|_foreach",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitk|cublas",
    "LayerNorm, residual, dropout": r"layer_norm",
    "GELU": r"gelu|erf|exp2",
    "embeddings and gathers": r"embedding|index|gather|scatter|compute_grad_weight|radix",
    "bias gradients and sums": r"_sum|reduce",
    "copies, casts, fills": r"copy|cat|fill|memcpy|memset|cast|clone|_to_|elementwise",
}
"""A pattern of the names of each class; the first that is found in a kernel's name counts."""
OTHER = "other"
NAMED = 4
"""Kernels that are named of each class."""
SIDE = 8_192
"""Of the product whose rate is the floor's."""


@dataclass(frozen=True)
class Options:
    """Put the kernels of training steps into classes."""

    out: Path = Path("results/milliseconds.json")
    """The JSON."""
    size: Literal["tiny", "base", "large"] = "base"
    """Of the models."""
    only: tuple[str, ...] = ("plain mlm", "mlm", "mlm, dropout", "mlm, rotary", "mae_lm", "3ml_self .5, 2 layers")
    """Entries of `latemask bench`."""
    rows: int | None = None
    """A step; none given: as `latemask bench` has them."""
    steps: int = 8
    """That are timed, and of which the median counts."""
    profiled: int = 4
    """Steps under the profiler, of which the mean counts."""

    def __post_init__(self) -> None:
        counts(self, "rows", "steps", "profiled")


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


class Launch(NamedTuple):
    """A kernel that ran, and when, in milliseconds."""

    kernel: str
    start: float
    end: float


def by_class(launches: Iterable[Launch], steps: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and launches a step of each class, the longest first, from the launches of ``steps`` steps; with
    the kernels of it that take the most."""
    times: dict[str, list[float]] = defaultdict(list)
    for kernel, start, end in launches:
        times[kernel].append(end - start)
    members: dict[str, list[str]] = defaultdict(list)
    for kernel in sorted(times, key=lambda kernel: -sum(times[kernel])):
        members[class_of(kernel)].append(kernel)

    def told(kernels: list[str]) -> dict[str, float]:
        return {"milliseconds": sum(sum(times[kernel]) for kernel in kernels) / steps,
                "launches": sum(len(times[kernel]) for kernel in kernels) / steps}  # fmt: skip

    found = {name: {**told(kernels), "longest": [{"kernel": kernel[:120], **told([kernel])}
                                                 for kernel in kernels[:NAMED]]}
             for name, kernels in members.items()}  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: -item[1]["milliseconds"]))


def idle(launches: Iterable[Launch]) -> float:
    """Milliseconds in which none of them runs, from the first start to the last end."""
    in_order = sorted(launches, key=lambda launch: launch.start)
    ends = itertools.accumulate((launch.end for launch in in_order), max)
    return sum(max(0.0, launch.start - end) for launch, end in zip(in_order[1:], ends, strict=False))


def profiled(stepper: Stepper, steps: int) -> list[Launch]:
    """Every kernel of ``steps`` steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            stepper.step()
        torch.cuda.synchronize(stepper.device)
    return [Launch(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
            for event in found.events() if event.device_type == DeviceType.CUDA]  # fmt: skip


def product_rate(device: torch.device) -> float:
    """FLOPs a second of a product of ``SIDE`` cubed in bf16."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / (milliseconds(lambda: a @ b) / 1e3)


def measure(options: Options) -> dict[str, Any]:
    """All entries. Raises ``Refusal`` without a GPU."""
    device = pick_device()
    check_gpu(device, "milliseconds")
    bench = BenchOptions(size=options.size, only=options.only, against="none", rows=options.rows)
    machine = machine_of(device)
    card, rate = card_of_device(machine["card"]), product_rate(device)
    found: dict[str, Any] = {"kind": "benchmark", "what": "GPU kernels of a training step by class",
                             "product_flops_per_second": rate, "entries": [], "settings": asked(options),
                             **machine}  # fmt: skip
    for entry in entries_of(options.size, bench, compiles=True, has_float8=is_possible(device)):
        console.say(f"building {entry.name}")
        stepper = built(entry, device)
        if stepper is None:
            continue
        stepper.time(options.steps)
        timed = stepper.result(card.peak if card else None)
        launches = profiled(stepper, options.profiled)
        classes = by_class(launches, options.profiled)
        tokens = entry.rows * entry.run.shape.row_tokens
        floor = timed.executed_flops and 1e3 * tokens * timed.executed_flops / rate
        found["entries"].append({
            "name": entry.name, "rows": entry.rows, "milliseconds": timed.milliseconds,
            "idle_milliseconds": idle(launches) / options.profiled, "arithmetic_floor_milliseconds": floor,
            "plain_mfu": timed.plain_mfu, "classes": classes,
        })  # fmt: skip
        write_json(options.out, found)
        del stepper
    return found


def rows_of_table(entries: list[dict[str, Any]]) -> tuple[list[str], list[tuple[object, ...]]]:
    """Head and rows: a class a row, an entry a column."""
    names = dict.fromkeys(name for entry in entries for name in entry["classes"])
    rows: list[tuple[object, ...]] = [
        (name, *(entry["classes"].get(name, {}).get("milliseconds") for entry in entries)) for name in names
    ]
    for label, key in (("idle", "idle_milliseconds"), ("step", "milliseconds"),
                       ("its arithmetic", "arithmetic_floor_milliseconds")):  # fmt: skip
        rows.append((label, *(entry[key] for entry in entries)))
    return ["ms", *(entry["name"] for entry in entries)], rows


def main() -> None:
    options = read(Options)
    found = measure(options)
    head, rows = rows_of_table(found["entries"])
    console.table(f"Where the milliseconds go: {options.size}, {found['card']}", head, rows)


if __name__ == "__main__":
    program(main)

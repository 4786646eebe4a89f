"""Where the milliseconds of a training step go: its GPU kernels by class, beside what the arithmetic needs.

    python benchmarks/milliseconds.py --only "mlm" "mlm, dropout" mae_lm --out results/milliseconds.json

Entries are those of `latemask bench`, built and freed one after the other. Steps are timed first; then some are run
under torch's profiler, and each kernel is put into a class by its name. ``idle`` is what of a timed step no kernel
fills. The floor of matrix products and attention is the count of executed FLOPs at the rate of one large product,
measured in the same run. The kernels that take the most time stand beside their class, so that a wrong one can be
seen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from asked import asked, counts, read
from refusals import program
from tiles import milliseconds
from torch.profiler import ProfilerActivity, profile

from latemask import console
from latemask.bench import BenchOptions, Stepper, built, entries_of, machine_of
from latemask.cards import card_of_device
from latemask.errors import Refusal
from latemask.training.distributed import pick_device
from latemask.training.float8 import is_possible
from latemask.writing import write_json

CLASSES = {
    "attention": r"sdpa|fmha|flash|^(forward|keys|queries|distances|turn)_kernel",
    "cross-entropy": r"^cross_entropy",
    "optimizer and clipping": r"multi_tensor|adam|lpnorm|_foreach",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitk|cublas",
    "LayerNorm, residual, dropout": r"layer_norm",
    "GELU": r"gelu|erf",
    "embeddings and gathers": r"embedding|index|gather|scatter",
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


def by_class(kernels: Iterable[tuple[str, float, int]], steps: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and launches a step of each class, the longest first, from (name, milliseconds, launches) of
    ``steps`` steps; with the kernels of it that take the most."""
    members: dict[str, list[tuple[str, float, int]]] = defaultdict(list)
    for kernel in kernels:
        members[class_of(kernel[0])].append(kernel)
    found = {
        name: {
            "milliseconds": sum(milliseconds for _, milliseconds, _ in some) / steps,
            "launches": sum(launches for *_, launches in some) / steps,
            "longest": [
                {"kernel": kernel[:120], "milliseconds": milliseconds / steps, "launches": launches / steps}
                for kernel, milliseconds, launches in sorted(some, key=lambda kernel: -kernel[1])[:NAMED]
            ],
        }
        for name, some in members.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]["milliseconds"]))


def profiled(stepper: Stepper, steps: int) -> list[tuple[str, float, int]]:
    """Name, milliseconds in all and launches of every kernel of ``steps`` steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            stepper.step()
        torch.cuda.synchronize(stepper.device)
    return [(kernel.key, kernel.self_device_time_total / 1e3, kernel.count)
            for kernel in found.key_averages() if kernel.self_device_time_total > 0]  # fmt: skip


def product_rate(device: torch.device) -> float:
    """FLOPs a second of a product of ``SIDE`` cubed in bf16."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / (milliseconds(lambda: a @ b) / 1e3)


def measure(options: Options) -> dict[str, Any]:
    """All entries. Raises ``Refusal`` without a GPU."""
    device = pick_device()
    if device.type != "cuda":
        raise Refusal("benchmarks/milliseconds.py", f"a {device.type}", "a GPU (CUDA)")
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
        classes = by_class(profiled(stepper, options.profiled), options.profiled)
        kernels = sum(each["milliseconds"] for each in classes.values())
        tokens = entry.rows * entry.run.shape.row_tokens
        floor = timed.executed_flops and 1e3 * tokens * timed.executed_flops / rate
        found["entries"].append({
            "name": entry.name, "rows": entry.rows, "milliseconds": timed.milliseconds, "kernel_milliseconds": kernels,
            "idle_milliseconds": timed.milliseconds - kernels, "arithmetic_floor_milliseconds": floor,
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

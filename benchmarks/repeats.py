"""Whether a pass over a batch repeats itself: gradients whose bits differ between passes, and by which look-ups.

    python benchmarks/repeats.py --out results/repeats.json

Of each recipe the same batch of random ids goes forward and back some times, dropout and all, from the same weights and
seeds, with compiled blocks and without: what differs is added up in an order that changes from pass to pass. Beside it
stands what looking up a table of few vectors takes and whether its gradient repeats itself, in each way that torch has.
The JSON is written anew after each recipe and each number of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch.nn.functional as F
from asked import asked, counts, read
from gpu_time import gpu_milliseconds
from refusals import program
from torch import Tensor
from updates import Updates, run_of

from latemask import console
from latemask.config import replace
from latemask.errors import Refusal
from latemask.machine import machine_of
from latemask.recipes import Size, recipe
from latemask.training.distributed import pick_device
from latemask.training.loop import _accumulate
from latemask.writing import write_json

Gradients = dict[str, Tensor]

LOOK_UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, seats: F.embedding(seats, table),
    "index": lambda table, seats: table[seats],
    "index_select": lambda table, seats: table.index_select(0, seats.flatten()).unflatten(0, seats.shape),
    "gather": lambda table, seats: table.expand(len(seats), -1, -1).gather(
        1, seats[..., None].expand(-1, -1, table.shape[1])
    ),
}
"""Ways to read rows of a table."""


@dataclass(frozen=True)
class Options:
    """Count gradients that differ between passes over one batch."""

    out: Path = Path("results/repeats.json")
    """The JSON."""
    size: Size = "base"
    """Of the recipes."""
    systems: tuple[str, ...] = ("mae_lm", "three_ml_self", "mlm", "no_relative")
    """Their names without the size; no_relative is MAE-LM with absolute positions in its encoder, too."""
    rows: tuple[int, ...] = (64, 128)
    """Of a batch."""
    compiled: tuple[Literal["on", "off"], ...] = ("on", "off")
    """Blocks."""
    passes: int = 6
    """Over each batch, and each table."""

    def __post_init__(self) -> None:
        counts(self, "rows", "passes")
        for name in ("systems", "compiled"):
            if not getattr(self, name):
                raise Refusal(f"--{name}", "nothing", "one or more")
        if self.passes < 2:
            raise Refusal("--passes", str(self.passes), "two or more to compare")
        for system in self.systems:
            recipe(f"{system}_{self.size}")


def differing(passes: list[Gradients]) -> dict[str, dict[str, int]]:
    """Of each gradient that is not the same in every pass: its elements, and how many differ from the first pass in any
    one other, at most."""
    first, *others = passes
    counted = {name: max(int((other[name] != given).sum()) for other in others) for name, given in first.items()}
    return {name: {"elements": first[name].numel(), "differ": count} for name, count in counted.items() if count}


def of_recipe(options: Options, system: str, rows: int, compiled: str, device: torch.device) -> dict[str, Any]:
    """What the JSON says of ``rows`` of a recipe."""
    torch._dynamo.reset()  # else shapes of all that went before would count as recompilations
    run = run_of(f"{system}_{options.size}", rows, "off")
    if system == "no_relative":
        run = replace(run, {"shape.positions": "absolute"})
    run = replace(run, {"training.compile": compiled})
    passes: list[Gradients] = []
    with ExitStack() as stack:
        updates = Updates(run, None, device, stack)
        index = next(updates.indices)
        batch, model = updates.prefetch.take(index), updates.parts.model
        for _ in range(options.passes):
            model.zero_grad(set_to_none=True)
            _accumulate(updates.parts, batch, index, updates.world)
            passes.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return {"recipe": f"{system}_{options.size}", "rows": rows, "compiled": compiled, "gradients": len(passes[0]),
            "differ": differing(passes)}  # fmt: skip


def of_table(options: Options, way: str, rows: int, device: torch.device) -> dict[str, Any]:
    """What the JSON says of a look-up: a table of positions, read by ``rows`` once each, in an order of their own."""
    shape = recipe(f"mlm_{options.size}").shape
    torch.manual_seed(0)
    table = torch.randn(shape.row_tokens, shape.width, device=device, requires_grad=True)
    seats = torch.stack([torch.randperm(shape.row_tokens, device=device) for _ in range(rows)])
    above = torch.randn(*seats.shape, shape.width, device=device)
    passes: list[Gradients] = []

    def there_and_back() -> None:
        table.grad = None
        LOOK_UPS[way](table, seats).backward(above)

    for _ in range(options.passes):
        there_and_back()
        assert table.grad is not None
        passes.append({"table": table.grad.clone()})
    found: dict[str, Any] = {"look_up": way, "rows": rows, "differ": differing(passes)}
    if device.type == "cuda":
        found["milliseconds"] = statistics.median(gpu_milliseconds(there_and_back) for _ in range(options.passes))
    return found


def measure(options: Options) -> dict[str, Any]:
    """All look-ups, then all recipes."""
    device = pick_device()
    found: dict[str, Any] = {"kind": "benchmark", "what": "gradients that differ between passes over one batch",
                             "tables": [], "recipes": [], "settings": asked(options),
                             **machine_of(device)}  # fmt: skip
    for rows in options.rows:
        found["tables"] += [of_table(options, way, rows, device) for way in LOOK_UPS]
        write_json(options.out, found)
    for compiled in options.compiled:
        for system in options.systems:
            for rows in options.rows:
                found["recipes"].append(of_recipe(options, system, rows, compiled, device))
                write_json(options.out, found)
                console.say(f"{system}, {rows} rows, compiled {compiled}: {len(found['recipes'][-1]['differ'])} differ")
    return found


def main() -> None:
    found = measure(read(Options))
    console.table(f"Look-ups: {found['card']}", ("look-up", "rows", "differ", "ms"),
                  [(one["look_up"], one["rows"], one["differ"].get("table", {}).get("differ", 0),
                    one.get("milliseconds")) for one in found["tables"]])  # fmt: skip
    console.table("Gradients that differ", ("recipe", "rows", "compiled", "gradients", "differ", "which"),
                  [(one["recipe"], one["rows"], one["compiled"], one["gradients"], len(one["differ"]),
                    " ".join(list(one["differ"])[:3])) for one in found["recipes"]])  # fmt: skip


if __name__ == "__main__":
    program(main)

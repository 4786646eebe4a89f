"""Whether a deep stack falls to where every vector points one way: mean cosine of the encoder's outputs in training.

    python benchmarks/one_way.py --data data/en --out results/one_way.json

Narrow stacks of twelve blocks, a decoder of four on top, fall as those of base size do, and on a CPU in minutes. Each
way is trained on the same batches of ``tiny`` rows; now and then the mean cosine between any two visible tokens
of a batch that stays is taken before the first block, after half of them and after the last: 0, all ways; 1, one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from asked import asked, counts, read
from refusals import program
from torch import Tensor

from latemask import console
from latemask.batch import Batch
from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.machine import machine_of
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import recipe
from latemask.text.store import open_store
from latemask.training.distributed import pick_device
from latemask.training.optimizer import make_optimizer, update
from latemask.training.schedules import learning_rate, share_of_updates
from latemask.writing import write_json

LOOKED_AT_ROWS, LOOKED_AT = 16, 10_000
"""Rows of the batch that is looked at, and its number: one that is not trained on."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlm": ("mlm", {}),
    "mae_lm": ("mae_lm", {}),
    "mae_lm, centred decoder": ("mae_lm", {"decoder.centred": True}),
    "mae_lm, pre-norm": ("mae_lm", {"shape.norm": "pre"}),
    "mae_lm, epsilon 1e-9": ("mae_lm", {"training.epsilon": 1e-9}),
}
"""A recipe without its size, and what is changed."""


@dataclass(frozen=True)
class Options:
    """Train narrow deep stacks and watch the angles between the encoder's outputs."""

    data: Path
    """Folder of prepared text."""
    out: Path = Path("results/one_way.json")
    """The JSON."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which."""
    updates: int = 301
    """Of each."""
    every: int = 50
    """Updates from look to look."""
    rows: int = 8
    """An update."""
    depth: int = 12
    """Of the encoder."""
    rate: float = 2e-3
    """Peak, after three tenths of the updates."""

    def __post_init__(self) -> None:
        counts(self, "updates", "every", "rows", "depth")
        if unknown := set(self.ways) - set(WAYS):
            raise Refusal("--ways", ", ".join(sorted(unknown)), f"some of: {'; '.join(WAYS)}")


def run_of(way: str, options: Options) -> Run:
    """Rotary positions, no dropout."""
    system, changes = WAYS[way]
    run = recipe(f"{system}_tiny")
    if run.decoder is not None:
        changes = changes | {"decoder.positions": "absolute+rotary", "decoder.depth": 4}
    return replace(run, {
        "shape.depth": options.depth, "shape.positions": "rotary", "shape.dropout": 0.0,
        "training.batch_rows": options.rows, "training.steps": options.updates, "training.learning_rate": options.rate,
        "training.warmup_share": 0.3, **changes,
    })  # fmt: skip


def mean_cosine(vectors: Tensor) -> float:
    """Of any two of ``vectors`` [..., D]."""
    unit = F.normalize(vectors.flatten(0, -2).double(), dim=-1)
    count = len(unit)
    return float((unit.sum(0).square().sum() - count) / (count * (count - 1)))


@torch.no_grad()
def looked_at(model: Pretrainer, batch: Batch) -> dict[str, Any]:
    """Loss, and the cosines."""
    model.eval()
    states = model.encoder.states(batch.ids[:, : batch.n_visible])
    found = {"loss": float(model(batch).mean()),
             "cosines": [mean_cosine(states[layer]) for layer in (0, len(states) // 2, -1)]}  # fmt: skip
    model.train()
    return found


def trained(way: str, options: Options, device: torch.device) -> list[dict[str, Any]]:
    """What was seen at each look."""
    store = open_store(options.data)
    run = store.fitted(run_of(way, options))
    rows = Rows(store.train, run.shape, run.masked_tokens, str(store.folder))
    batches = TrainingBatches(rows, run.masking, options.rows, 0)
    batch = TrainingBatches(rows, run.masking, LOOKED_AT_ROWS, 0).batch_at(LOOKED_AT).to(device)
    torch.manual_seed(0)
    model = Pretrainer(run).to(device)
    optimizer = make_optimizer(model, run.training)
    seen = []
    for step in range(options.updates):
        if step % options.every == 0:
            seen.append({"step": step} | looked_at(model, batch))
            console.say(f"{way}, {step}: {seen[-1]}")
        loss = model(batches.batch_at(step).to(device)).mean()
        loss.backward()
        rate = learning_rate(run.training, share_of_updates(step, options.updates))
        update(model, optimizer, rate, run.training.clip_norm, loss.detach())
    return [*seen, {"step": options.updates} | looked_at(model, batch)]


def main() -> None:
    options, device = read(Options), pick_device()
    found: dict[str, Any] = {"kind": "benchmark", "what": "mean cosine of the encoder's outputs in training",
                             "ways": {}, "settings": asked(options), **machine_of(device)}  # fmt: skip
    for way in options.ways:
        found["ways"][way] = trained(way, options, device)
        write_json(options.out, found)
    console.table("Mean cosine of two outputs of the encoder, by update", ("way", *(
        str(look["step"]) for look in next(iter(found["ways"].values())))),
        [(way, *(f"{look['cosines'][-1]:.3f}" for look in looks)) for way, looks in found["ways"].items()])  # fmt: skip


if __name__ == "__main__":
    program(main)

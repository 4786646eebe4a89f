"""Pretrain text encoders with [MASK] kept out of the encoder until late.

A recipe is a whole Run; a variant is the Run with fields changed. Pretraining reads a folder made by ``latemask
prepare`` and writes a run folder, from which encoder, encoder + decoder, and vectors of texts come:

>>> import latemask
>>> from latemask.config import replace
>>> run = replace(latemask.recipe("mae_lm_tiny"), {"training.steps": 2, "training.batch_rows": 8})
>>> isinstance(run, latemask.Run)
True
>>> latemask.pretrain(run, "data/en", "runs/x").reason
'steps'
>>> encoder = latemask.load_encoder("runs/x")
>>> pretrained = latemask.load_pretrained("runs/x")
>>> latemask.encode(["Paris is a city.", "So is Rome."], "runs/x").shape
torch.Size([2, 128])

``latemask.finetune(latemask.FinetuneOptions("runs/x", ("rte",), "glue/"))`` and ``latemask.evaluate`` are the commands
of those names: they write the same JSON, and return what they print.

Names are imported when they are asked for: ``import latemask`` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latemask.config import Run
    from latemask.downstream.evaluation import evaluate
    from latemask.downstream.options import EvaluateOptions, FinetuneOptions
    from latemask.downstream.runner import finetune
    from latemask.hf.loading import load_encoder, load_pretrained
    from latemask.hf.vectors import encode
    from latemask.recipes import recipe
    from latemask.training.loop import pretrain

_HOMES = {
    "EvaluateOptions": "latemask.downstream.options",
    "FinetuneOptions": "latemask.downstream.options",
    "Run": "latemask.config",
    "encode": "latemask.hf.vectors",
    "evaluate": "latemask.downstream.evaluation",
    "finetune": "latemask.downstream.runner",
    "load_encoder": "latemask.hf.loading",
    "load_pretrained": "latemask.hf.loading",
    "pretrain": "latemask.training.loop",
    "recipe": "latemask.recipes",
}

__all__ = [
    "EvaluateOptions", "FinetuneOptions", "Run", "encode", "evaluate", "finetune", "load_encoder", "load_pretrained",
    "pretrain", "recipe",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'latemask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Pretrain text encoders with [MASK] kept out of the encoder until late.

>>> from latemask import load_encoder, load_pretrained, encode, pretrain, recipe, Run

Names are imported when they are asked for: ``import latemask`` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latemask.config import Run
    from latemask.hf.loading import load_encoder, load_pretrained
    from latemask.hf.vectors import encode
    from latemask.recipes import recipe
    from latemask.training.loop import pretrain

_HOMES = {
    "Run": "latemask.config",
    "encode": "latemask.hf.vectors",
    "load_encoder": "latemask.hf.loading",
    "load_pretrained": "latemask.hf.loading",
    "pretrain": "latemask.training.loop",
    "recipe": "latemask.recipes",
}

__all__ = ["Run", "encode", "load_encoder", "load_pretrained", "pretrain", "recipe"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'latemask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""What `latemask export` and `latemask fill` are told: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["encoder", "masked-lm"]


@dataclass(frozen=True)
class ExportOptions:
    """Write a run as a folder that transformers loads, checked in a fresh process."""

    model: str
    """A run folder (its newest checkpoint) or a step folder."""
    out: str
    """The folder to make."""
    kind: Kind = "encoder"
    """encoder: what is kept after pretraining, for fine-tuning and for vectors of texts. masked-lm: with decoder and
    head, for fill-mask and pseudo-log-likelihoods."""
    overwrite: bool = False
    """Replace an export that is already there."""


@dataclass(frozen=True)
class FillOptions:
    """Predict what stands behind each <mask> of a text."""

    text: str
    """Text with one <mask> or more."""
    model: str
    """A run folder, a step folder, an export with --kind masked-lm, or a Hugging Face masked language model."""
    top: int = 5
    """Predictions for each mask."""

"""Every number of one fine-tuning, frozen and checked: with model and data it names a point of a grid. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from latemask.fields import Typed, require


@dataclass(frozen=True)
class Settings(Typed):
    """One fine-tuning. Defaults: MAE-LM Tables 5 and 6 where they have one value."""

    epochs: int = 3
    """Passes over the training examples."""
    learning_rate: float = 3e-5
    """Peak, reached after the warm-up; it then falls linearly to 0."""
    batch_rows: int = 32
    """Examples an update."""
    warmup_share: float = 0.06
    """Share of all updates in which the learning rate rises from 0."""
    sequence_tokens: int = 512
    """Longest input, special tokens included (at most the encoder's); longer ones are cut, or windowed (SQuAD)."""
    dropout: float = 0.1
    """In encoder and head."""
    weight_decay: float = 0.01
    """AdamW's, on matrices and tables; not on biases, LayerNorms and single vectors."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    epsilon: float = 1e-6
    """AdamW's."""
    clip_norm: float | None = None
    """Largest gradient norm; None: no clipping (Tables 5 and 6)."""
    patience: int | None = None
    """Stop after this many evaluations in a row (one an epoch) without a better score, and keep the best weights;
    None: train all epochs and keep the last."""
    train_rows: int | None = None
    """Use only the first so many training examples; None: all."""
    stride_tokens: int = 128
    """SQuAD: tokens that the window over a long paragraph moves on; less than the room it has for the paragraph."""
    query_tokens: int = 64
    """SQuAD: longest question; the rest is cut."""
    answer_tokens: int = 30
    """SQuAD: longest answer that is predicted."""
    seed: int = 0
    """Of the head's first weights, the order of examples and dropout."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 products over fp32 weights on GPUs that have it, fp32 elsewhere."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the encoder; auto: on CUDA, for 4,000 updates or more (compiling costs half a minute)."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs: one launch an update, captured once for each width of batch; auto: on CUDA."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_rows", "query_tokens", "answer_tokens", "stride_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.sequence_tokens >= 8, "sequence_tokens", self.sequence_tokens, "at least 8")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "more than 0")
        require(0 <= self.warmup_share < 1, "warmup_share", self.warmup_share, "0 <= share < 1")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "0 <= dropout < 1")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "0 <= beta < 1")
        require(self.epsilon > 0, "epsilon", self.epsilon, "more than 0")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 or more, less than 2^63")
        for name in ("clip_norm", "patience", "train_rows"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "more than 0, or none")

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in dataclasses.asdict(self).items()}  # fmt: skip

    def rate_at(self, update: int, updates: int) -> float:
        """Learning rate of ``update`` (from 0) of ``updates``: linear warm-up and decay; no update has a rate of 0."""
        warmup = int(self.warmup_share * updates + 0.5)
        if update < warmup:
            return self.learning_rate * (update + 1) / warmup
        return self.learning_rate * (updates - update) / max(updates - warmup, 1)

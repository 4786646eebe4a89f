"""Batch: the contract between data and model. A row is [ visible tokens in order | masked tokens shuffled ]."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B rows of N = V + M tokens; M is the same for every row, and so is the number P of them that is predicted.

    All tensors share one device. ``seats`` differs from ``positions`` only where positions are misaligned
    (MAE-LM Table 2); ``real`` is None where no visible token is padding, as in all pretraining.
    """

    ids: Int[Tensor, "B N"]
    """Token ids: V visible in their order, then the M masked ones in random order; the last P are the targets."""
    positions: Int[Tensor, "B N"]
    """True position of each token in its row, from 0."""
    seats: Int[Tensor, "B N"]
    """Position the encoder is told."""
    filler: Int[Tensor, "B M"]
    """Id that each masked token shows when it joins the encoder: `<mask>`, a random token, or itself."""
    document: Int[Tensor, "B N"]
    """Which document of the row each token belongs to, from 0."""
    real: Bool[Tensor, "B V"] | None = None
    """Which visible tokens are not padding."""
    n_unpredicted: int = 0
    """M - P: this many masked tokens, the first to join, give no loss."""

    @property
    def rows(self) -> int:
        """B."""
        return self.ids.shape[0]

    @property
    def n_visible(self) -> int:
        """V."""
        return self.ids.shape[1] - self.filler.shape[1]

    @property
    def n_masked(self) -> int:
        """M."""
        return self.filler.shape[1]

    @property
    def first_predicted(self) -> int:
        """Place in the row of the first predicted token; all after it are predicted too."""
        return self.n_visible + self.n_unpredicted

    @property
    def targets(self) -> Int[Tensor, "B P"]:
        """True ids of the predicted tokens."""
        return self.ids[:, self.first_predicted :]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by the field's name."""
        values = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with ``change`` applied to every tensor."""
        return dataclasses.replace(self, **{name: change(value) for name, value in self.tensors.items()})

    def to(self, device: torch.device | str) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def slice(self, start: int, stop: int) -> Batch:
        """Rows ``start..stop``."""
        return self.map(lambda tensor: tensor[start:stop])

"""Encoder and decoder as one thing that fills masks: it takes the masks out of the encoder's input first."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Shape
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer


class MaskedModel(nn.Module):
    """Predicts the tokens behind ``<mask>`` in ordinary rows, padded or not, with any number of masks a row.

    Where only a part of the masked tokens joins early, it is the first ones of the row (pretraining: random ones).
    Raises ``Refusal`` for a run whose decoder rewrites whole rows: it has no distribution for one masked position.
    """

    def __init__(self, pretrainer: Pretrainer):
        super().__init__()
        if pretrainer.run.rewrites:
            found = f"{pretrainer.run.recipe}, whose decoder rewrites the row"
            raise Refusal("model", found, "a model that fills masks")
        self.pretrainer = pretrainer

    @property
    def shape(self) -> Shape:
        return self.pretrainer.run.shape

    def forward(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "K T"]:
        """Logits at the K masks of ``ids``, in the order of ``(ids == mask).nonzero()``. Raises ``Refusal`` where a row
        is longer than the model's."""
        shape = self.shape
        if ids.shape[1] > shape.row_tokens:
            wanted = f"at most {shape.row_tokens}"
            raise Refusal("input", f"{ids.shape[1]} tokens", wanted, "Truncate or split the text")
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
        is_mask = (ids == shape.specials.mask) & real
        masks = is_mask.sum(1)
        logits = self.pretrainer.encoder.tokens.weight.new_empty(int(masks.sum()), shape.vocabulary)
        owner = torch.arange(len(ids), device=ids.device).repeat_interleave(masks)
        for masked in masks.unique().tolist():
            if masked:
                rows = (masks == masked).nonzero().squeeze(1)
                batch = self._without_masks(ids[rows], real[rows], is_mask[rows], masked)
                hidden = self.pretrainer.predict(batch).hidden.flatten(0, 1)
                scores = self.pretrainer.head.logits(hidden, self.pretrainer.encoder.tokens.weight)
                logits[torch.isin(owner, rows)] = scores[:, : shape.vocabulary].to(logits.dtype)
        return logits

    def _without_masks(self, ids: Tensor, real: Tensor, is_mask: Tensor, masked: int) -> Batch:
        """Rows with the same number of masks, laid out [ visible in order, padding | masked in order ]."""
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        kind = torch.where(is_mask, 2, torch.where(real, 0, 1))
        order = kind.argsort(dim=1, stable=True)
        visible = ids.shape[1] - masked
        laid_real = real.gather(1, order)[:, :visible]
        positions = positions.gather(1, order)
        seats = positions
        if not self.pretrainer.run.masking.aligned:
            seats = (real.gather(1, order).long().cumsum(1) - 1).clamp(min=0)
        mask = self.shape.specials.mask
        return Batch(
            ids=ids.gather(1, order),
            positions=positions,
            seats=seats,
            filler=torch.full_like(ids[:, :masked], mask),
            document=torch.zeros_like(ids),
            real=None if bool(laid_real.all()) else laid_real,
        )

"""Encoder and decoder as one thing that fills masks: it takes the masks out of the encoder's input first."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Shape, refuse_rewriting
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer


class MaskedModel(nn.Module):
    """Predicts the tokens behind ``<mask>`` in ordinary rows, padded or not, with any number of masks a row.

    Where only a part of the masked tokens joins early, it is the first ones of the row (pretraining: random ones).
    Raises ``Refusal`` for a run whose decoder rewrites whole rows: it has no distribution for one masked position.
    """

    def __init__(self, pretrainer: Pretrainer):
        super().__init__()
        refuse_rewriting(pretrainer.run)
        self.pretrainer = pretrainer

    @property
    def shape(self) -> Shape:
        return self.pretrainer.run.shape

    def forward(
        self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None, masked: int | None = None
    ) -> Float[Tensor, "K T"]:
        """Logits at the K masks of ``ids``, in the order of ``(ids == mask).nonzero()``.

        Where ``masked`` says how many masks each row has (and no token is padding), nothing waits for the device.
        Raises ``Refusal`` where a row is longer than the model's.
        """
        shape = self.shape
        if ids.shape[1] > shape.row_tokens:
            wanted = f"at most {shape.row_tokens}"
            raise Refusal("input", f"{ids.shape[1]} tokens", wanted, "Truncate or split the text")
        if real is None and masked is not None:
            return self._logits(self._laid_out(ids, None, ids == shape.specials.mask, masked))
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
        is_mask = (ids == shape.specials.mask) & real
        masks = is_mask.sum(1)
        logits = self.pretrainer.encoder.tokens.weight.new_empty(int(masks.sum()), shape.vocabulary)
        owner = torch.arange(len(ids), device=ids.device).repeat_interleave(masks)
        for masked in masks.unique().tolist():
            if masked:
                rows = (masks == masked).nonzero().squeeze(1)
                scores = self._logits(self._laid_out(ids[rows], real[rows], is_mask[rows], masked))
                logits[torch.isin(owner, rows)] = scores.to(logits.dtype)
        return logits

    def _logits(self, batch: Batch) -> Float[Tensor, "BM T"]:
        hidden = self.pretrainer.predict(batch).hidden.flatten(0, 1)
        scores = self.pretrainer.head.logits(hidden, self.pretrainer.encoder.tokens.weight)
        return scores[:, : self.shape.vocabulary]

    def _laid_out(self, ids: Tensor, real: Tensor | None, is_mask: Tensor, masked: int) -> Batch:
        """Rows with the same number of masks, laid out [ visible in order, padding | masked in order ]."""
        mask = self.shape.specials.mask
        document, filler = torch.zeros_like(ids), torch.full_like(ids[:, :masked], mask)
        if real is None:
            order = is_mask.long().argsort(dim=1, stable=True)
            seats = order if self.pretrainer.run.masking.aligned else torch.arange(ids.shape[1], device=ids.device)
            return Batch(ids=ids.gather(1, order), positions=order, seats=seats.expand_as(ids), filler=filler,
                         document=document)  # fmt: skip
        kind = torch.where(is_mask, 2, torch.where(real, 0, 1))
        order = kind.argsort(dim=1, stable=True)
        laid_real = real.gather(1, order)
        positions = (real.long().cumsum(1) - 1).clamp(min=0).gather(1, order)
        seats = positions
        if not self.pretrainer.run.masking.aligned:
            seats = (laid_real.long().cumsum(1) - 1).clamp(min=0)
        laid_real = laid_real[:, : ids.shape[1] - masked]
        return Batch(
            ids=ids.gather(1, order),
            positions=positions,
            seats=seats,
            filler=filler,
            document=document,
            real=None if bool(laid_real.all()) else laid_real,
        )

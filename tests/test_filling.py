"""Filling masks in ordinary text, padded or not, is what pretraining learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import reference
from latemask.batch import Batch
from latemask.config import Run
from latemask.errors import Refusal
from latemask.model.masked_model import MaskedModel
from latemask.model.pretrainer import Pretrainer
from samples import (
    EXACT,
    FILLING,
    POSITIONS,
    batch_of,
    in_place,
    pretrainer_of,
    ragged,
    small,
    with_masking,
)

PADDED = ["mlm", "mae_lm", "three_ml", "three_ml_cross", "decoder_cross", "decoder_resets_mask", "mask_in_encoder",
          "delta", "gradual", "misaligned_positions"]  # fmt: skip


def laid_out(run: Run, ids: list[int], targets: list[int]) -> Batch:
    """A text with its masks in place as a batch of one row, masks appended in order."""
    mask = run.shape.specials.mask
    masked = [p for p, token in enumerate(ids) if token == mask]
    positions = torch.tensor([[p for p in range(len(ids)) if p not in masked] + masked])
    natural = list(ids)
    for p, target in zip(masked, targets, strict=True):
        natural[p] = target
    seats = positions if run.masking.aligned else torch.arange(len(ids))[None]
    return Batch(torch.tensor([natural]).gather(1, positions), positions, seats, torch.full((1, len(masked)), mask),
                 torch.zeros_like(positions))  # fmt: skip


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("system", PADDED)
def test_masks_in_padded_text_are_filled_as_the_reference_fills_each_text_alone(system, positions, left):
    run = small(system, positions=positions)
    model = pretrainer_of(run)
    ids, real = ragged([36, 9, 2, 0, 20], left)
    mask = run.shape.specials.mask
    for b, places in enumerate([[3, 4, 30], [8], [1], [], [0, 5, 6, 19]]):
        row = ids[b]
        row[real[b].nonzero().flatten()[places]] = mask
    logits = MaskedModel(model)(ids, real)
    assert logits.shape == (9, run.shape.vocabulary)
    where = (ids == mask).nonzero().tolist()
    targets = torch.arange(20, 29)
    losses = F.cross_entropy(logits, targets, reduction="none")
    # The reference takes the number of masked tokens from the rate: give it the text's own.
    for b in (0, 1, 2, 4):
        mine = [k for k, (row, _) in enumerate(where) if row == b]
        text = ids[b][real[b]].tolist()
        batch = laid_out(run, text, targets[mine].tolist())
        alone = model(batch)[0]
        torch.testing.assert_close(losses[mine], alone, **EXACT)


@pytest.mark.parametrize("system", FILLING)
def test_a_full_text_is_filled_as_the_reference_fills_it(system):
    run = with_masking(small(system), filler=(1.0, 0.0, 0.0))
    model, batch = pretrainer_of(run), batch_of(run)
    ascending = batch.positions[:, batch.n_visible :].argsort(1) + batch.n_visible
    order = torch.cat([torch.arange(batch.n_visible).expand(batch.rows, -1), ascending], 1)
    ids, positions, document = (part.gather(1, order) for part in (batch.ids, batch.positions, batch.document))
    seats = positions if run.masking.aligned else batch.seats
    ordered = replace(batch, ids=ids, positions=positions, document=document, seats=seats, n_unpredicted=0)
    wanted = reference.losses(with_masking(run, predicted_share=1.0), model.state_dict(), ordered)
    logits = MaskedModel(model)(in_place(batch, run.shape.specials.mask))
    found = F.cross_entropy(logits, ordered.targets.flatten(), reduction="none").view_as(wanted)
    torch.testing.assert_close(found, wanted, **EXACT)


def test_a_text_of_masks_alone_gives_finite_numbers():
    for system in ("mlm", "mae_lm", "three_ml_cross", "decoder_cross"):
        run = small(system)
        logits = MaskedModel(pretrainer_of(run))(torch.full((2, 4), run.shape.specials.mask))
        assert logits.shape == (8, 70)
        assert torch.isfinite(logits).all()


def test_a_rewriting_model_is_refused_as_one_that_fills_masks():
    with pytest.raises(Refusal, match="decoder_causal_cross_tiny"):
        MaskedModel(Pretrainer(small("decoder_causal_cross")))


def test_masks_in_too_long_a_text_are_refused():
    with pytest.raises(Refusal, match="found 37 tokens"):
        MaskedModel(Pretrainer(small("mlm")))(torch.full((1, 37), 5))

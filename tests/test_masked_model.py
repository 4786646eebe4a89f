"""The model that fills masks is the pretrained one: the same numbers on the same masks, for every recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from transformers import MPNetForMaskedLM, RobertaForMaskedLM, RoFormerForMaskedLM

from latemask.batch import Batch
from latemask.config import Specials
from latemask.hf import stock
from latemask.hf.modeling_latemask import LatemaskForMaskedLM
from latemask.joins import DECODER, Join
from latemask.model.masked_model import MaskedModel
from samples import EXACT, FILLING, batch_of, in_place, pretrainer_of, ragged, small, with_masking, with_shape


def as_shown(batch: Batch, mask: int) -> Batch:
    """The batch whose masked tokens all show ``<mask>`` and stand in the order of their positions."""
    visible = batch.n_visible
    order = batch.positions[:, visible:].argsort(1)

    def sorted_masks(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, :visible], tensor[:, visible:].gather(1, order)], 1)

    return dataclasses.replace(
        batch,
        ids=sorted_masks(batch.ids),
        positions=sorted_masks(batch.positions),
        document=sorted_masks(batch.document),
        seats=batch.seats if not torch.equal(batch.seats, batch.positions) else sorted_masks(batch.positions),
        filler=torch.full_like(batch.filler, mask),
    )


@pytest.mark.parametrize("system", FILLING)
def test_logits_at_masks_give_the_losses_of_pretraining(system):
    run = small(system)
    model, mask = pretrainer_of(run).eval(), run.shape.specials.mask
    batch = dataclasses.replace(as_shown(batch_of(run), mask), n_unpredicted=0)
    ids = in_place(batch, mask)
    with torch.no_grad():
        logits = MaskedModel(model)(ids)
        losses = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        torch.testing.assert_close(losses.view_as(batch.targets), model(batch), **EXACT)


@pytest.mark.parametrize("joins", [("0:0:.5", "decoder:.5:1"), ("0", "decoder"), ("0:0:.3", "2:.1:.6", "decoder:.6:1")])
def test_joins_in_parts_and_resets_give_the_losses_of_pretraining(joins):
    run = with_masking(small("mae_lm"), joins=tuple(map(Join.parse, joins)), vector="own")
    model, mask = pretrainer_of(run).eval(), run.shape.specials.mask
    batch = as_shown(batch_of(run), mask)
    with torch.no_grad():
        logits = MaskedModel(model)(in_place(batch, mask))
        losses = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="none")
        torch.testing.assert_close(losses.view_as(batch.targets), model(batch), **EXACT)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("system", ["mae_lm", "misaligned_positions", "three_ml", "decoder_cross"])
def test_padding_changes_nothing(system, left):
    run = small(system)
    if system in ("mae_lm", "misaligned_positions"):
        run = with_masking(run, joins=(Join(0, 0, 0.5), Join(DECODER, 0.5, 1)))
    model, specials = MaskedModel(pretrainer_of(run).eval()), run.shape.specials
    row = torch.randint(10, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    row[0, [3, 4, 11, 18]] = specials.mask
    pad = torch.full((1, 6), specials.pad)
    ids = torch.cat([pad, row] if left else [row, pad], 1)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, ids != specials.pad), model(row), **EXACT)


@pytest.mark.parametrize(
    ("positions", "stock_class"),
    [("absolute", RobertaForMaskedLM), ("absolute+relative", MPNetForMaskedLM), ("rotary", RoFormerForMaskedLM)],
)
def test_mlm_fills_masks_as_transformers_does(positions, stock_class):
    run = with_shape(small("mlm"), positions=positions, specials=Specials(bos=3, pad=1, eos=7, unk=0, mask=5))
    model = pretrainer_of(run).eval()
    kind = stock.family(run.shape)
    assert kind != "latemask"
    theirs = stock_class(stock.config_of(run, kind, fills_masks=True)).double().eval()
    left_over = theirs.load_state_dict(stock.tensors_of(model, kind, fills_masks=True), strict=False)
    assert not left_over.unexpected_keys
    assert all(name.startswith(("lm_head.decoder", "cls.predictions.decoder")) for name in left_over.missing_keys)
    theirs.tie_weights()
    ids = torch.randint(10, 60, (3, 36), generator=torch.Generator().manual_seed(0))
    ids[0, [2, 9]], ids[1, 20:30], ids[2, 0] = 5, 5, 5
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits[ids == 5]
        torch.testing.assert_close(MaskedModel(model)(ids), expected, **EXACT)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre"},
        {"positions": "rotary"},
        {"positions": "absolute+relative", "relative_buckets": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("system", [*FILLING, "joins in parts, centred"])
def test_the_class_that_travels_with_exports_fills_masks_as_ours(system, changes, left):
    run = small("misaligned_positions" if system == "joins in parts, centred" else system, **changes)
    if system == "joins in parts, centred":
        run = replace(run, decoder=replace(run.decoder, centred=True))
        run = with_masking(run, joins=(Join(0, 0, 0.4), Join(2, 0.2, 0.7), Join(DECODER, 0.7, 1)), vector="own")
    model, specials = pretrainer_of(run).eval(), run.shape.specials
    travels = LatemaskForMaskedLM(stock.config_of(run, "latemask", fills_masks=True)).double().eval()
    travels.load_state_dict(stock.tensors_of(model, "latemask", fills_masks=True))
    ids, real = ragged([36, 20, 9, 4, 3], left)
    ids = ids.masked_fill(
        real & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3), specials.mask
    )
    ids[3] = torch.where(real[3], specials.mask, specials.pad)
    with torch.no_grad():
        found = travels(input_ids=ids, attention_mask=real.long()).logits[real & (ids == specials.mask)]
        torch.testing.assert_close(found, MaskedModel(model)(ids, real), **EXACT)


@pytest.mark.parametrize("system", ["mae_lm", "three_ml_self", "three_ml_cross"])
def test_what_is_masked_changes_no_output_of_an_encoder_that_masks_join_late(system):
    run = small(system)
    model, visible = pretrainer_of(run).eval(), batch_of(run).n_visible
    seen = []
    model.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].x))
    batch = batch_of(run)
    ids = batch.ids.clone()
    ids[:, visible:] = torch.where(ids[:, visible:] == 60, 61, 60)
    with torch.no_grad():
        first = model.predict(batch)
        second = model.predict(dataclasses.replace(batch, ids=ids))
    assert torch.equal(seen[0], seen[1])
    assert seen[0].shape[1] == visible
    assert torch.equal(first.hidden, second.hidden)
    assert not torch.equal(first.targets, second.targets)

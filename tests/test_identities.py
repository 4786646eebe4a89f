"""The identities the layout stands on: appended equals in place, and what joins late leaves the encoder alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from latemask.batch import Batch
from latemask.config import Run
from latemask.feed.batches import Rows, TrainingBatches
from latemask.joins import Join
from latemask.model.attention import Geometry
from latemask.model.decoders import FillingDecoder
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Stack
from samples import (
    EXACT,
    FILLING,
    POSITIONS,
    batch_of,
    in_place,
    losses_and_gradients,
    pretrainer_of,
    prose,
    small,
    with_masking,
)

LATE = ["three_ml_self", "three_ml_cross", "mae_lm", "misaligned_positions", "no_relative", "decoder_self_cross",
        "decoder_causal_cross", "decoder_cross", "decoder_2_layers", "decoder_6_layers", "decoder_512_wide",
        "decoder_1024_wide", "falling_rate", "predict_subset"]  # fmt: skip


def encoded_alone(model: Pretrainer, batch: Batch) -> Tensor:
    """The encoder's output for the visible tokens, no mask anywhere."""
    ids, seats, document = (part[:, : batch.n_visible] for part in (batch.ids, batch.seats, batch.document))
    return model.encoder.run(model.encoder.enter(model.encoder.tokens(ids), seats, document)).x


@pytest.mark.parametrize("positions", POSITIONS)
def test_mlm_appended_equals_mlm_in_place(positions):
    run = small("mlm", positions=positions)
    model, batch = pretrainer_of(run), batch_of(run)
    hidden = model.encoder(in_place(batch, run.shape.specials.mask))
    masked = batch.positions[:, batch.n_visible :, None].expand(-1, -1, run.shape.width)
    torch.testing.assert_close(model.predict(batch).hidden, hidden.gather(1, masked), **EXACT)


@pytest.mark.parametrize("system", ["mae_lm", "three_ml_self", "decoder_512_wide"])
def test_mae_lm_appended_equals_mae_lm_scattered_back(system):
    run = small(system)
    model, batch = pretrainer_of(run), batch_of(run)
    visible, decoder = batch.n_visible, model.decoder
    assert isinstance(decoder, FillingDecoder)
    encoded = encoded_alone(model, batch)
    places = batch.positions[:, :, None].expand(-1, -1, run.shape.width)
    row = model.mask().expand(batch.rows, run.shape.row_tokens, -1).scatter(1, places[:, :visible], encoded)
    order = torch.arange(run.shape.row_tokens).expand(batch.rows, -1)
    hidden = decoder.stack(decoder.enter(row, order), Geometry())
    masked = batch.positions[:, visible:, None].expand(-1, -1, decoder.width)
    torch.testing.assert_close(model.predict(batch).hidden, hidden.gather(1, masked), **EXACT)


def test_a_causal_decoder_sees_nothing_ahead():
    run = small("decoder_causal_cross")
    model, batch = pretrainer_of(run), batch_of(run, rows=1)
    changed = replace(
        batch, ids=torch.cat([batch.ids[:, : batch.n_visible], batch.ids[:, batch.n_visible :].roll(1, 1)], 1)
    )
    first = int(batch.positions[0, batch.n_visible :].min())
    before, after = model.predict(batch), model.predict(changed)
    assert torch.equal(before.hidden[:, :first], after.hidden[:, :first])
    assert not torch.equal(before.hidden[:, first:], after.hidden[:, first:])
    natural = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
    assert torch.equal(before.targets, natural[:, 1:])


@pytest.mark.parametrize("positions", ["absolute", "absolute+relative"])
def test_visible_queries_change_nothing_in_a_cross_only_decoder(positions):
    run = small("decoder_cross", positions=positions)
    run = replace(run, decoder=replace(run.decoder, depth=3))
    model, batch = pretrainer_of(run), batch_of(run)
    decoder, visible = model.decoder, batch.n_visible
    assert isinstance(decoder, FillingDecoder)
    encoded = encoded_alone(model, batch)
    row = torch.cat([encoded, model.mask().expand(batch.rows, batch.n_masked, -1)], 1)
    hidden = decoder.stack(decoder.enter(row, batch.positions), Geometry(), memory=encoded, memory_geometry=Geometry())
    torch.testing.assert_close(model.predict(batch).hidden, hidden[:, visible:], **EXACT)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("system", FILLING)
def test_the_last_block_computes_only_what_is_predicted_without_a_difference(system, norm, monkeypatch):
    run = small(system, norm=norm)
    model, batch = pretrainer_of(run), batch_of(run)
    loss, gradients = losses_and_gradients(model, batch)
    saved: list[int] = []
    as_written = Stack.forward

    def in_full(self: Stack, x, geometry, *, predict_from=0, last=None, **others):
        saved.append(predict_from)
        x = as_written(self, x, geometry, last=last, **others)
        return x[:, predict_from:] if last in (None, len(self.blocks)) else x

    monkeypatch.setattr(Stack, "forward", in_full)
    full_loss, full_gradients = losses_and_gradients(model, batch)
    assert any(saved) or run.decoder.sublayers == ("cross",)
    torch.testing.assert_close(loss, full_loss, **EXACT)
    assert gradients.keys() == full_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, full_gradients[name], **EXACT, msg=name)


@pytest.mark.parametrize("micro", [1, 4, 8])
@pytest.mark.parametrize("system", ["mlm", "mae_lm", "decoder_causal_cross"])
def test_the_mean_of_means_is_the_global_mean(system, micro):
    run = small(system)
    model, batch = pretrainer_of(run), batch_of(run, rows=16)
    _, whole = losses_and_gradients(model, batch)
    model.zero_grad()
    for start in range(0, 16, micro):
        (model(batch.slice(start, start + micro)).mean() * micro / 16).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], **EXACT, msg=name)


# --- what the encoder sees --------------------------------------------------------------------------------------------


def encoded_visible(model: Pretrainer, batch: Batch) -> list[Tensor]:
    """What each block of the encoder gives for the visible tokens."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, output: outputs.append(output[:, : batch.n_visible]))
             for block in model.encoder.stack.blocks]  # fmt: skip
    model.predict(batch)
    for hook in hooks:
        hook.remove()
    return outputs


def with_other_targets(run: Run, batch: Batch) -> Batch:
    """Every masked token replaced by another ordinary one, in the row and in what it shows."""
    other = torch.where(batch.ids[:, batch.n_visible :] == 20, 21, 20)
    shows = torch.where(batch.filler == run.shape.specials.mask, batch.filler, other)
    return replace(batch, ids=torch.cat([batch.ids[:, : batch.n_visible], other], 1), filler=shows)


@pytest.mark.parametrize("system", LATE)
def test_a_masked_id_changes_nothing_in_the_encoder_where_it_joins_late(system):
    run = small(system)
    model, batch = pretrainer_of(run), batch_of(run)
    changed = replace(with_other_targets(run, batch), filler=batch.filler * 0 + 30)
    for before, after in zip(encoded_visible(model, batch), encoded_visible(model, changed), strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(model(batch), model(changed))


def test_a_masked_id_changes_the_encoder_where_it_shows_itself():
    run = with_masking(small("mlm"), filler=(0.5, 0.0, 0.5))
    model, batch = pretrainer_of(run), batch_of(run)
    pairs = zip(encoded_visible(model, batch), encoded_visible(model, with_other_targets(run, batch)), strict=True)
    # The last block gives the predicted tokens alone.
    assert [torch.equal(before, after) for before, after in pairs][:-1] == [False] * 3


def test_masks_that_join_at_a_layer_change_nothing_before_it():
    run = with_masking(small("three_ml"), joins=(Join(2),), filler=(0.0, 0.0, 1.0), vector="token")
    model, batch = pretrainer_of(run), batch_of(run)
    pairs = zip(encoded_visible(model, batch), encoded_visible(model, with_other_targets(run, batch)), strict=True)
    assert [torch.equal(before, after) for before, after in pairs][:3] == [True, True, False]


@pytest.mark.parametrize("system", LATE)
def test_the_encoder_never_looks_up_the_mask_id_over_a_whole_epoch(system):
    run = small(system)
    model = pretrainer_of(run)
    looked_up: list[Tensor] = []
    model.encoder.tokens.register_forward_hook(lambda _, ids, __: looked_up.append(ids[0]))
    rows = Rows(prose(run.shape), run.shape, run.most_masked_tokens)
    with torch.no_grad():
        model.predict(TrainingBatches(rows, run.masking, rows.count, 0, run.updates).batch_at(0))
    assert looked_up
    assert not any((ids == run.shape.specials.mask).any() for ids in looked_up)


def test_early_masks_are_looked_up():
    run = small("mlm")
    model = pretrainer_of(run)
    looked_up: list[Tensor] = []
    model.encoder.tokens.register_forward_hook(lambda _, ids, __: looked_up.append(ids[0]))
    model.predict(batch_of(run))
    assert any((ids == run.shape.specials.mask).any() for ids in looked_up)

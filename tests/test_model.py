"""Every recipe against a second, plain implementation (``reference.py``), and one step of each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

import reference
from latemask.batch import Batch
from latemask.config import Run
from latemask.joins import DECODER, Join
from latemask.model.decoders import NoDecoder
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import recipe
from samples import (
    EXACT,
    SYSTEM_NAMES,
    batch_of,
    losses_and_gradients,
    pretrainer_of,
    small,
    with_a_hidden_document,
    with_masking,
    with_shape,
)


def with_other_vector(run: Run) -> Run:
    if run.rewrites or run.recipe.startswith("random_replace"):
        return run
    return with_masking(run, vector="own" if run.masking.vector == "token" else "token")


def with_rotary_decoder(run: Run) -> Run:
    if run.decoder is None or "self" not in run.decoder.sublayers:
        return run
    return replace(run, decoder=replace(run.decoder, positions="absolute+rotary"))


def with_centred_decoder(run: Run) -> Run:
    return run if run.decoder is None else replace(run, decoder=replace(run.decoder, centred=True))


VARIANTS = {
    "as it is": lambda run: run,
    "pre-norm, rotary, isolated": lambda run: with_shape(run, norm="pre", positions="rotary", isolate_documents=True),
    "pre-norm, relative": lambda run: with_shape(run, norm="pre", positions="absolute+relative"),
    "isolated, absolute": lambda run: with_shape(run, isolate_documents=True, positions="absolute"),
    "isolated, relative, other vector": lambda run: with_other_vector(
        with_shape(run, isolate_documents=True, positions="absolute+relative")
    ),
    "rotary decoder, isolated": lambda run: with_rotary_decoder(with_shape(run, isolate_documents=True)),
    "centred decoder": with_centred_decoder,
    "centred and rotary decoder, pre-norm": lambda run: with_centred_decoder(
        with_rotary_decoder(with_shape(run, norm="pre"))
    ),
    "misaligned, rotary": lambda run: with_masking(with_shape(run, positions="rotary"), aligned=False),
    "misaligned, relative, rate .5": lambda run: with_masking(
        with_shape(run, positions="absolute+relative"), aligned=False, rate=0.5
    ),
}


def assert_equals_the_reference(run: Run, batch: Batch) -> None:
    model = pretrainer_of(run)
    found, gradients = losses_and_gradients(model, batch)
    weights = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    wanted = reference.losses(run, weights, batch)
    wanted.mean().backward()
    torch.testing.assert_close(found, wanted.detach(), **EXACT)
    assert set(gradients) == {name for name, weight in weights.items() if weight.grad is not None} == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(gradients[name], weight.grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("system", ["mae_lm", "three_ml_cross", "decoder_self_cross", "decoder_causal_cross"])
def test_a_centred_decoder_does_not_see_what_all_outputs_of_the_encoder_have_in_common(system):
    """Nor does its loss change it: the gradients of a row's outputs add up to nothing."""
    run = with_centred_decoder(small(system))
    model, batch = pretrainer_of(run), batch_of(run)
    run_blocks, outputs = model.encoder.run, []

    def shifted(by):
        def encoded(*given, **named):
            row = run_blocks(*given, **named)
            outputs.append(row.x)
            row.x.retain_grad()
            return replace(row, x=row.x + by)

        return encoded

    losses = []
    for by in (0.0, 3 * torch.randn(run.shape.width, dtype=torch.float64)):
        model.encoder.run = shifted(by)
        losses.append(model(batch))
        losses[-1].mean().backward()
    torch.testing.assert_close(losses[0], losses[1], **EXACT)
    gradient = outputs[-1].grad
    assert gradient.abs().max() > 1e-6
    torch.testing.assert_close(gradient.sum(1), torch.zeros_like(gradient[:, 0]), **EXACT)


def test_shapes_and_types_are_checked_while_testing():
    batch = batch_of(small("mlm"))
    with pytest.raises(TypeCheckError):
        replace(batch, positions=batch.positions[:, 1:])
    with pytest.raises(TypeCheckError):
        Pretrainer(small("mlm")).encoder(batch.ids.float())


# --- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_loss_and_every_gradient_equal_the_reference(system, variant):
    run = VARIANTS[variant](small(system))
    assert_equals_the_reference(run, batch_of(run, rows=2))


@pytest.mark.parametrize(
    "joins",
    [
        (Join(0), Join(2, 0.5, 0.7), Join(DECODER, 0.7, 1)),
        (Join(1, 0, 0.6), Join(3, 0.2, 1), Join(DECODER, 0.4, 1)),
        (Join(3), Join(DECODER, 0.5, 1)),
        (Join(0, 0, 0.001), Join(DECODER, 0.001, 1)),
    ],
)
@pytest.mark.parametrize("sublayers", [("self",), ("self", "cross"), ("cross",)])
def test_joins_that_reset_equal_the_reference(joins, sublayers):
    run = small("three_ml_self")
    run = with_masking(replace(run, decoder=replace(run.decoder, sublayers=sublayers)), joins=joins)
    assert_equals_the_reference(run, batch_of(run))


def test_joins_that_reset_without_a_decoder_equal_the_reference():
    run = with_masking(
        small("mlm"), joins=(Join(0, 0, 0.8), Join(1, 0.2, 0.9), Join(3, 0.5, 1)), filler=(0.3, 0.4, 0.3)
    )
    assert_equals_the_reference(run, batch_of(run))


@pytest.mark.parametrize("system", ["three_ml_cross", "decoder_cross", "decoder_causal_cross", "mae_lm", "three_ml"])
def test_a_document_that_is_masked_whole_equals_the_reference(system):
    run = with_shape(with_masking(small(system), rate=0.5), isolate_documents=True)
    batch = with_a_hidden_document(run)
    assert torch.isfinite(pretrainer_of(run)(batch)).all()
    assert_equals_the_reference(run, batch.slice(0, 2))


@pytest.mark.parametrize("share", [0.06, 0.3, 0.77])
@pytest.mark.parametrize(
    "system", [name for name in SYSTEM_NAMES if name not in ("decoder_causal_cross", "falling_rate", "predict_subset")]
)
def test_a_predicted_share_equals_the_reference(system, share):
    run = with_masking(small(system), predicted_share=share, rate=0.5)
    batch = batch_of(run, rows=2)
    assert batch.targets.shape == (2, int(18 * share + 0.5)) == (2, run.predicted_tokens)
    assert_equals_the_reference(run, batch)


@pytest.mark.parametrize("system", ["three_ml", "decoder_self_cross", "decoder_cross"])
@pytest.mark.parametrize("variant", ["pre-norm, rotary, isolated", "misaligned, relative, rate .5"])
def test_a_predicted_share_of_other_shapes_equals_the_reference(system, variant):
    run = with_masking(VARIANTS[variant](small(system)), predicted_share=0.4)
    assert_equals_the_reference(run, batch_of(run, rows=2))


def test_a_predicted_share_is_the_loss_of_the_last_to_join():
    """The same rows and masks: the losses of the predicted tokens are the last ones of those that predicting all
    gives."""
    run = small("three_ml_random_kept")
    model, batch = pretrainer_of(run), batch_of(run)
    some = with_masking(run, predicted_share=0.4)
    subset = pretrainer_of(some)(batch_of(some))
    assert subset.shape == (3, 7)
    torch.testing.assert_close(subset, model(batch)[:, -7:], **EXACT)


@pytest.mark.parametrize("index", [0, 399, 400, 1200, 1600, 5000])
def test_every_stage_of_a_falling_rate_equals_the_reference(index):
    run = small("falling_rate")
    batch = batch_of(run, index=index)
    rate = next(rate for first, rate in [(1600, 0.15), (1200, 0.2), (800, 0.3), (400, 0.4), (0, 0.5)] if index >= first)
    assert batch.n_masked == int(rate * 36 + 0.5)
    assert_equals_the_reference(run, batch)


# --- every recipe -----------------------------------------------------------------------------------------------------


def fresh(system: str) -> tuple[Run, Pretrainer, Batch]:
    """The tiny recipe itself with its own initialisation, on a small vocabulary."""
    run = recipe(f"{system}_tiny")
    run = with_shape(run, vocabulary=500)
    torch.manual_seed(0)
    return run, Pretrainer(run), batch_of(run, rows=2)


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_every_parameter_receives_a_gradient(system):
    _, model, batch = fresh(system)
    losses, gradients = losses_and_gradients(model, batch)
    assert torch.isfinite(losses).all()
    for name, parameter in model.named_parameters():
        assert name in gradients, name
        assert torch.isfinite(gradients[name]).all(), name
        assert gradients[name].abs().max() > 0, name
        assert gradients[name].shape == parameter.shape


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_blocks_see_the_lengths_that_the_plan_states(system):
    run, model, batch = fresh(system)
    seen: list[tuple[int, int]] = []

    def look(block: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
        seen.append((inputs[0].shape[1], output.shape[1]))

    stacks = [model.encoder.stack] if run.decoder is None else [model.encoder.stack, model.decoder.stack]
    for block in (block for stack in stacks for block in stack.blocks):
        block.register_forward_hook(look)
    prediction = model.predict(batch)
    visible, masked, row = run.visible_tokens, run.masked_tokens, run.shape.row_tokens
    predicted = row - 1 if run.rewrites else int(run.masking.predicted_share * masked + 0.5)
    lengths = run.plan.lengths(visible, masked)
    encoder = [(length, length) for length in lengths]
    if run.decoder is None:
        encoder[-1] = (row, predicted)
        decoder = []
    else:
        width = row - 1 if run.rewrites else predicted if run.decoder.sublayers == ("cross",) else row
        decoder = [(width, width)] * run.decoder.depth
        if not run.rewrites:
            decoder[-1] = (width, predicted)
    assert seen == encoder + decoder
    assert prediction.hidden.shape == (2, predicted, model.decoder.width)
    assert prediction.targets.shape == prediction.hidden.shape[:2]


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_an_untrained_model_guesses_evenly(system):
    run, model, batch = fresh(system)
    assert abs(model(batch).mean().item() - math.log(run.shape.vocabulary)) < 0.15


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_mixed_precision_stays_near_full_precision(system):
    _, model, batch = fresh(system)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(batch)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, model(batch), rtol=0, atol=0.05)
    losses.mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("system", ["mlm", "mae_lm", "decoder_causal_cross"])
def test_dropout_acts_in_the_encoder_in_training_only(system):
    run, model, batch = fresh(system)
    assert not torch.equal(model(batch), model(batch))
    model.encoder.eval()
    assert torch.equal(model(batch), model(batch)), "the decoder has none (appendix C)"
    model.eval()
    assert torch.equal(model(batch), model(batch))
    assert run.shape.dropout == 0.1


def test_weights_start_as_roberta_s():
    _, model, _ = fresh("three_ml_self")
    for name, parameter in model.named_parameters():
        if name == "mask_vector" or (parameter.ndim == 2):
            assert 0.015 < parameter.std() < 0.025, name
        elif name.endswith("weight"):
            assert (parameter == 1).all(), name
        else:
            assert (parameter == 0).all(), name


# --- vocabulary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["mlm", "mae_lm", "decoder_512_wide"])
def test_the_padded_vocabulary_never_takes_probability(system):
    run = small(system)
    model, batch = pretrainer_of(run), batch_of(run)
    table = model.encoder.tokens.weight
    assert table.shape[0] == 128
    logits = model.head.logits(model.predict(batch).hidden, table)
    assert logits.shape[-1] == 128
    assert (logits[..., 70:] == -torch.inf).all()
    assert torch.isfinite(logits[..., :70]).all()
    torch.testing.assert_close(logits.softmax(-1)[..., :70].sum(-1), torch.ones(logits.shape[:2]).double(), **EXACT)
    _, gradients = losses_and_gradients(model, batch)
    assert (gradients["encoder.tokens.weight"][70:] == 0).all()
    assert (gradients["encoder.tokens.weight"][:70].abs().sum(1) > 0).all()


# --- what is saved ----------------------------------------------------------------------------------------------------


def test_the_state_holds_parameters_only():
    for system in SYSTEM_NAMES:
        model = Pretrainer(small(system))
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
        assert set(model.encoder.state_dict()) == {name.removeprefix("encoder.") for name in model.state_dict()
                                                   if name.startswith("encoder.")}  # fmt: skip
        is_3ml = system.startswith("three_ml") or system in ("falling_rate", "predict_subset")
        assert ("mask_vector" in model.state_dict()) == is_3ml
        assert isinstance(model.decoder, NoDecoder) == (small(system).decoder is None)

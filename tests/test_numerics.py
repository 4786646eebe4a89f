"""Numbers at their borders: precisions beside each other, extreme logits, rates, vocabularies and lengths."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latemask.config import Masking, Run, Shape
from latemask.errors import Refusal
from latemask.feed.batches import Rows, TrainingBatches
from latemask.feed.masking import lay_out
from latemask.kernels import linear_cross_entropy
from latemask.model.heads import Head, Prediction
from latemask.model.pretrainer import Pretrainer
from latemask.text.array import VERSION, ArrayWriter
from latemask.text.store import SPLITS, SplitWriter, open_store, token_kind, write_summary
from latemask.text.tokenizer import Tokenizer
from samples import POSITIONS, SYSTEM_NAMES, batch_of, small, stream_of, with_masking, words_tokenizer

TOLERANCE = {torch.float32: (2e-6, 5e-6), torch.bfloat16: (2e-2, 3e-2)}
"""Largest difference from float64: of a loss in nats, and of the whole gradient as a share of its length."""


def losses_and_gradient(run: Run, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the same weights and rows; bf16 as training has it: fp32 weights under autocast."""
    torch.manual_seed(0)
    model = Pretrainer(run).to(torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        losses = model(batch_of(run, rows=4))
    losses.mean().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return losses.detach().double(), gradient.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_each_precision_is_near_float64(system, dtype):
    run = small(system, initial_deviation=0.1)
    exact, exact_gradient = losses_and_gradient(run, torch.float64)
    losses, gradient = losses_and_gradient(run, dtype)
    apart, turned = TOLERANCE[dtype]
    assert losses.shape == exact.shape
    assert 0 < (losses - exact).abs().max() < apart
    assert 0 < (gradient - exact_gradient).norm() / exact_gradient.norm() < turned


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_extreme_logits_have_a_finite_loss_and_gradient(scale, dtype):
    """Logits of up to +-``scale`` times some 10: the loss is the distance from the largest, never inf - inf."""
    torch.manual_seed(0)
    head = Head(16, 16, 70, 1e-5).to(torch.float64 if dtype == torch.float64 else torch.float32)
    table = (torch.randn(128, 16) * scale).to(head.bias.dtype).requires_grad_()
    hidden, targets = torch.randn(2, 5, 16).to(head.bias.dtype).requires_grad_(), torch.randint(70, (2, 5))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = head(Prediction(hidden, targets), table)
    assert torch.isfinite(loss).all()
    assert (loss >= 0).all()
    with torch.no_grad():
        logits = copy.deepcopy(head).double().logits(hidden.double(), table.double())[..., :70]
    exact = logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(loss.double(), exact, rtol=0, atol=tolerance * float(logits.abs().max()))
    if scale < 1e30:  # there the true gradient itself is beyond fp32
        loss.mean().backward()
        assert torch.isfinite(hidden.grad).all()
        assert torch.isfinite(table.grad).all()


def test_an_infinite_logit_of_a_wrong_id_is_an_infinite_loss_and_not_nan_in_silence():
    """What training then does (skip, count, stop) is held in test_resume."""
    x, table = torch.ones(1, 4), torch.zeros(64, 4)
    table[9] = torch.inf
    loss = linear_cross_entropy.plain(x, table, torch.zeros(64), torch.tensor([3]))
    assert not torch.isfinite(loss).all()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 0.5)])
def test_extreme_attention_scores_are_a_choice_and_not_nan(dtype, tolerance, positions):
    """Queries and keys a thousand times their size: the softmax is nearly one-hot, and the median output is float64's
    (a tie within rounding may fall to the other side)."""
    torch.manual_seed(0)
    encoder = Pretrainer(small("mlm", positions=positions)).encoder
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "query_key_value.weight" in name:
                parameter[:64] *= 1e3
    ids = torch.randint(8, 70, (2, 36))
    exact = encoder.double()(ids)
    out = encoder.to(dtype)(ids)
    out.float().square().mean().backward()
    assert torch.isfinite(out).all()
    assert all(parameter.grad.isfinite().all() for parameter in encoder.parameters())
    assert (out - exact).abs().median() < tolerance


# --- rates and lengths ------------------------------------------------------------------------------------------------


@given(st.floats(-1, 2), st.integers(3, 8192))
def test_any_rate_at_any_length_masks_some_and_leaves_some_or_is_refused_with_the_number(rate, row_tokens):
    masked = int(rate * row_tokens + 0.5)
    if not 0 < rate < 1 or not 1 <= masked <= row_tokens - 2:
        with pytest.raises(Refusal) as refused:
            Run("r", Shape(row_tokens=row_tokens), masking=Masking(rate=rate))
        assert refused.value.where == "masking.rate"
        assert refused.value.found == repr(float(rate))
    else:
        run = Run("r", Shape(row_tokens=row_tokens), masking=Masking(rate=rate))
        assert run.masked_tokens == masked
        assert 1 <= run.masked_tokens <= row_tokens - 2
        assert run.visible_tokens + run.masked_tokens == row_tokens


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        (0.0, "more than 0 and less than 1"),
        (1.0, "more than 0 and less than 1"),
        (0.01, "at least one masked token in a row of 36"),
        (0.99, "at least one visible token besides `<s>` in a row of 36"),
    ],
)
def test_rates_at_the_border_are_refused_with_the_number(rate, wanted):
    with pytest.raises(Refusal) as refused:
        with_masking(small("mae_lm"), rate=rate)
    assert (refused.value.where, refused.value.found, refused.value.wanted) == ("masking.rate", str(rate), wanted)


@pytest.mark.parametrize("system", ["mlm", "mae_lm", "three_ml", "delta", "decoder_cross", "decoder_causal_cross"])
@pytest.mark.parametrize(("row_tokens", "rate"), [(3, 0.3), (4, 0.5), (5, 0.2), (5, 0.6), (36, 0.03), (36, 0.94)])
def test_the_shortest_rows_and_the_fewest_and_most_masks_train(system, row_tokens, rate):
    run = small(system)
    run = replace(run, shape=replace(run.shape, row_tokens=row_tokens), masking=replace(run.masking, rate=rate))
    model = Pretrainer(run)
    stream = stream_of([40] * 60, run.shape)
    batch = TrainingBatches(Rows(stream, run.shape, run.masked_tokens), run.masking, 4, seed=0).batch_at(0)
    losses = model(batch)
    assert losses.shape == (4, run.predicted_tokens)
    assert abs(losses.mean().item() - math.log(70)) < 0.3
    losses.mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    ("positions", "row_tokens"),
    [("absolute", 8192), ("rotary", 8192), ("absolute+relative", 1024),
     pytest.param("absolute+relative", 8192, marks=pytest.mark.slow)],
)  # fmt: skip
def test_long_rows_train(positions, row_tokens):
    run = small("mae_lm", positions=positions, row_tokens=row_tokens, depth=1, width=8, heads=1, feedforward=8)
    run = replace(run, decoder=replace(run.decoder, depth=1, width=8, heads=1, feedforward=8))
    stream = stream_of([500] * (2 * row_tokens // 500 + 1), run.shape)
    batch = TrainingBatches(Rows(stream, run.shape, run.masked_tokens), run.masking, 1, seed=0).batch_at(0)
    assert sorted(batch.positions[0].tolist()) == list(range(row_tokens))
    model = Pretrainer(run)
    losses = model(batch)
    assert losses.shape == (1, int(0.15 * row_tokens + 0.5))
    losses.mean().backward()
    assert abs(losses.mean().item() - math.log(70)) < 0.3
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in model.parameters())


# --- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 4, 5])
def test_a_vocabulary_of_special_tokens_alone_is_refused(vocabulary):
    with pytest.raises(Refusal, match=f"shape.vocabulary: found {vocabulary}; wanted"):
        Shape(vocabulary=vocabulary)


@pytest.mark.parametrize("vocabulary", [6, 7, 63, 64, 65, 128, 65_535, 65_536, 65_537])
def test_every_size_of_vocabulary_goes_from_disk_to_gradient(vocabulary, tmp_path):
    """The largest id comes through the file, the masks and the loss: two bytes up to 65,536 ids, then four."""
    run = small("random_replace", vocabulary=vocabulary, row_tokens=16, positions="absolute",
                specials=Shape().specials, width=8, heads=1, feedforward=8)  # fmt: skip
    run = replace(run, decoder=replace(run.decoder, depth=1, width=8, heads=1, feedforward=8))
    store = written(tmp_path, vocabulary, np.tile([vocabulary - 1] * 9 + [2], 12))
    assert store.train.tokens.dtype == (np.uint16 if vocabulary <= 65_536 else np.uint32)
    batch = TrainingBatches(Rows(store.train, run.shape, 2), run.masking, 4, seed=0).batch_at(0)
    assert (batch.targets == vocabulary - 1).all()
    assert batch.filler.min() >= 5
    assert batch.filler.max() < vocabulary
    model = Pretrainer(run)
    losses = model(batch)
    assert abs(losses.mean().item() - math.log(vocabulary)) < 0.2
    losses.mean().backward()
    table = model.encoder.tokens.weight.grad
    assert table.isfinite().all()
    assert table[vocabulary - 1].any()
    assert not table[vocabulary:].any()


def written(folder, vocabulary, tokens):
    """A prepared folder whose tokenizer says that it has ``vocabulary`` ids."""
    tokenizer = Tokenizer(words_tokenizer(vocabulary - 5))
    tokenizer.save(folder)
    splits = {}
    for name in SPLITS:
        writer = SplitWriter(folder, name, token_kind(vocabulary), tokenizer.fingerprint, 3)
        writer.write(tokens, np.diff(np.r_[-1, np.flatnonzero(tokens == 2)]), np.zeros((tokens == 2).sum(), np.int64))
        writer.close()
        splits[name] = writer.summary
    specials = {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 4}
    write_summary(folder, {"version": VERSION, "tokenizer_fingerprint": tokenizer.fingerprint,
                           "vocabulary": vocabulary, "specials": specials, "source_names": [],
                           "splits": splits})  # fmt: skip
    return open_store(folder)


# --- what is not finite -----------------------------------------------------------------------------------------------


def test_ids_hold_no_nan(tmp_path):
    """A file of floating-point numbers is no store, and masking takes whole numbers alone."""
    store = written(tmp_path, 70, np.tile([9] * 9 + [2], 12))
    writer = ArrayWriter(tmp_path / "train.tokens", "<f2", store.tokenizer_fingerprint)
    writer.write(np.full(len(store.train.tokens), np.nan))
    writer.close()
    with pytest.raises(Refusal, match=r"train\.tokens: found numbers of kind <f2; wanted kind <u2"):
        open_store(tmp_path)
    with pytest.raises(Exception, match="ids"):
        lay_out(torch.full((1, 36), math.nan), small("mlm").masking, Shape().specials, 70, seed=0,
                epoch=torch.zeros(1).long(), row=torch.zeros(1).long())  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_weight_that_is_not_finite_is_seen_in_loss_or_gradient(positions, value):
    """Wherever it is put: nothing swallows it, so the update that follows is skipped (test_resume)."""
    run = small("mae_lm", positions=positions)
    names = [name for name, _ in Pretrainer(run).named_parameters()]
    for name in names[:: max(1, len(names) // 12)]:
        torch.manual_seed(0)
        model = Pretrainer(run)
        with torch.no_grad():
            model.get_parameter(name).fill_(value)
        loss = model(batch_of(run)).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        assert not (torch.isfinite(loss) and torch.isfinite(norm)), name

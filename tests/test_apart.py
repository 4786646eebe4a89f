"""Rows of a batch, documents of a row and padding do not touch each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import reference
from latemask.batch import Batch
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from samples import (
    EXACT,
    POSITIONS,
    pretrainer_of,
    ragged,
    small,
    with_a_hidden_document,
    with_masking,
)


def with_another_first_document(batch: Batch) -> Batch:
    """The first document's tokens replaced, wherever they stand; everything else as it was."""

    def other(ids: Tensor, document: Tensor) -> Tensor:
        return torch.where((document == 0) & (ids > 10), 10 + (ids + 1) % 50, ids)

    masked = batch.document[:, batch.n_visible :]
    return replace(batch, ids=other(batch.ids, batch.document), filler=other(batch.filler, masked))


@pytest.mark.parametrize("positions", ["absolute", "absolute+relative", "rotary"])
@pytest.mark.parametrize("system", ["mlm", "mlm_80_10_10", "mae_lm", "three_ml", "three_ml_cross", "decoder_cross",
                                    "decoder_causal_cross", "gradual"])  # fmt: skip
def test_isolated_documents_do_not_see_each_other(system, positions):
    for isolates in (True, False):
        run = with_masking(small(system, isolate_documents=isolates, positions=positions), rate=0.5)
        model, batch = pretrainer_of(run), with_a_hidden_document(run)
        before, after = model.predict(batch).hidden, model.predict(with_another_first_document(batch)).hidden
        if run.rewrites:
            document = torch.empty_like(batch.document).scatter(1, batch.positions, batch.document)[:, :-1]
        else:
            document = batch.document[:, batch.n_visible :]
        assert torch.equal(before[document > 0], after[document > 0]) == isolates
        assert not torch.equal(before[document == 0], after[document == 0])


def test_an_isolated_document_equals_the_document_alone():
    run = small("mlm", isolate_documents=True, positions="absolute+relative")
    encoder = pretrainer_of(run).encoder
    ids = torch.randint(10, 60, (1, 30))
    document = torch.tensor([[0] * 12 + [1] * 18])
    seats = torch.cat([torch.arange(12), torch.arange(18)])[None]
    together = encoder.run(encoder.enter(encoder.tokens(ids), seats, document)).x
    torch.testing.assert_close(together[:, :12], encoder(ids[:, :12]), **EXACT)
    torch.testing.assert_close(together[:, 12:], encoder(ids[:, 12:]), **EXACT)


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("norm", "isolates"), [("post", False), ("pre", True)])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_padded_row_equals_the_reference_of_the_row_alone(positions, norm, isolates, left):
    run = small("mlm", positions=positions, norm=norm, isolate_documents=isolates)
    encoder = pretrainer_of(run).encoder
    ids, real = ragged([1, 36, 7, 0, 20], left)
    hidden = encoder(ids, real)
    assert torch.isfinite(hidden).all()
    for b in range(5):
        if real[b].any():
            alone = reference.encode(run.shape, encoder.state_dict(), ids[b][real[b]].tolist())
            torch.testing.assert_close(hidden[b][real[b]], alone, **EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_row_in_a_batch_equals_the_row_alone_in_any_precision(positions, dtype, tolerance):
    torch.manual_seed(0)
    encoder = Pretrainer(small("mlm", positions=positions)).encoder.to(dtype)
    ids, real = ragged([1, 36, 0])
    hidden = encoder(ids, real)
    assert torch.isfinite(hidden).all()
    hidden.float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in encoder.parameters())
    for b in (0, 1):
        alone = encoder(ids[b : b + 1, real[b]])
        torch.testing.assert_close(hidden[b : b + 1, real[b]], alone, rtol=0, atol=tolerance)


def test_states_are_those_before_and_after_each_block():
    run = small("mlm", positions="absolute+relative", norm="pre")
    encoder = pretrainer_of(run).encoder
    ids, real = ragged([36, 5])
    states = encoder.states(ids, real)
    assert len(states) == run.shape.depth + 1
    assert torch.equal(states[-1], encoder(ids, real))
    seats = torch.where(real, torch.arange(36), 4)
    seats[0] = torch.arange(36)
    torch.testing.assert_close(states[0], encoder.door(encoder.tokens(ids), seats), **EXACT)


def test_a_text_longer_than_the_row_is_refused():
    encoder = Pretrainer(small("mlm")).encoder
    encoder(torch.full((1, 36), 10))
    with pytest.raises(Refusal, match="found 37 tokens; wanted at most 36"):
        encoder(torch.full((1, 37), 10))

"""Effective rank: equal to the definition by singular values, whatever the batches, the scale and the precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latemask.errors import Refusal
from latemask.study.effective_rank import GramMatrix, rank_tau


def by_definition(vectors: np.ndarray, tau: float) -> int:
    """Section 2.2, by a loop over numpy's singular values."""
    sigma = np.linalg.svd(vectors.astype(np.float64), compute_uv=False)
    for k in range(1, len(sigma) + 1):
        if (sigma[:k] ** 2).sum() / (sigma**2).sum() >= tau:
            return k
    raise AssertionError


def gram(vectors: torch.Tensor, pieces: int = 1) -> GramMatrix:
    streamed = GramMatrix(vectors.shape[1])
    for piece in vectors.chunk(pieces):
        streamed.add(piece)
    return streamed


def spread(count: int, width: int, seed: int = 0, decay: float = 0.9, mean: float = 0.0) -> torch.Tensor:
    """Vectors whose dimensions fall off by ``decay``, turned, around a common mean."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    scale = decay ** torch.arange(width, dtype=torch.float64)
    return (torch.randn(count, width, generator=generator, dtype=torch.float64) * scale) @ turn + mean


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60),
    width=st.integers(1, 24),
    seed=st.integers(0, 10_000),
    decay=st.floats(0.3, 1),
    tau=st.sampled_from([0.5, 0.9, 0.99]),
    pieces=st.integers(1, 5),
)
def test_streamed_rank_is_the_definition(count, width, seed, decay, tau, pieces):
    vectors = spread(count, width, seed, decay)
    streamed = gram(vectors, pieces)
    assert streamed.count == count
    assert streamed.rank(tau) == by_definition(vectors.numpy(), tau)
    values = np.zeros(width)
    sigma = np.linalg.svd(vectors.numpy(), compute_uv=False)
    values[: len(sigma)] = sigma
    np.testing.assert_allclose(streamed.spectrum(), values, rtol=1e-6, atol=1e-6 * values[0])
    if count > 1:
        centred = (vectors - vectors.mean(0)).numpy()
        assert streamed.rank(tau, centred=True) == by_definition(centred, tau)


def test_definition_by_hand():
    assert rank_tau(torch.tensor([3.0, 1.0]), 0.9) == 1  # 9 of 10
    assert rank_tau(torch.tensor([1.0, 3.0]), 0.91) == 2  # in any order
    assert rank_tau(torch.ones(10), 0.9) == 9
    assert rank_tau(torch.full((10,), 0.1), 0.9) == 9  # tau met exactly, but for rounding
    assert rank_tau(torch.ones(10), 1.0) == 10


def test_rank_one_is_one():
    vectors = torch.outer(torch.randn(500), torch.randn(64))
    assert gram(vectors).rank() == 1
    assert gram(vectors).rank(1.0) <= 2
    assert gram(vectors.double()).rank(0.999999) == 1


def test_fewer_samples_than_dimensions_cap_the_rank_and_are_flagged():
    vectors = torch.randn(64, 768, generator=torch.Generator().manual_seed(0))
    few = gram(vectors)
    assert few.rank(1.0) == 64
    assert few.rank(1.0, centred=True) == 63
    assert few.rank() <= 64
    assert few.rank(centred=True) <= 63
    assert few.has_few_samples()
    assert few.has_few_samples(centred=True)


def test_the_flag_marks_ranks_that_more_samples_would_raise():
    """Isotropic, D = 100, rank_.9 of the distribution 90: at ten vectors a dimension it is some tenth too low."""
    generator = torch.Generator().manual_seed(0)
    flagged = gram(torch.randn(800, 100, generator=generator))
    enough = gram(torch.randn(20_000, 100, generator=generator))
    assert flagged.has_few_samples()
    assert flagged.rank() < 0.95 * 90
    assert not enough.has_few_samples()
    assert abs(enough.rank() - 90) <= 2


def test_scale_changes_nothing():
    vectors = spread(300, 48, mean=2.0)
    for centred in (False, True):
        assert gram(vectors * 10).rank(centred=centred) == gram(vectors).rank(centred=centred)
        assert gram(vectors * 1e-6).rank(centred=centred) == gram(vectors).rank(centred=centred)


def test_all_zero_and_nothing_are_rank_zero():
    assert gram(torch.zeros(10, 8)).rank() == 0
    assert GramMatrix(8).rank() == GramMatrix(8).rank(centred=True) == 0
    assert rank_tau(torch.zeros(4)) == 0
    assert rank_tau(torch.zeros(0)) == 0


def test_equal_vectors_are_rank_one_and_zero_centred():
    vectors = torch.randn(1, 32).expand(1000, -1)
    assert gram(vectors).rank() == 1
    assert gram(vectors).rank(centred=True) == 0


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_double_and_float_agree(mean):
    """Shares of energy to 1e-4, also where a common mean holds 99.9 % of it and centring takes it away."""
    vectors = spread(5000, 64, mean=mean)
    double, single = gram(vectors, 3), gram(vectors.float(), 7)
    for centred in (False, True):
        shares = [part.spectrum(centred).square().cumsum(0) / part.spectrum(centred).square().sum()
                  for part in (double, single)]  # fmt: skip
        assert float((shares[0] - shares[1]).abs().max()) < 1e-4
        assert double.rank(centred=centred) == single.rank(centred=centred)


def test_two_sets_add_up():
    first, second = spread(200, 16, 1), spread(300, 16, 2, mean=1.0)
    both = gram(first) + gram(second)
    together = gram(torch.cat([first, second]))
    assert both.count == together.count == 500
    for centred in (False, True):
        torch.testing.assert_close(both.matrix(centred), together.matrix(centred))


def test_directions_carry_their_energies():
    vectors = spread(400, 16, mean=0.5)
    energies, directions = gram(vectors).directions()
    torch.testing.assert_close(directions.T @ directions, torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close((vectors @ directions).square().sum(0), energies)
    assert (energies.diff() <= 0).all()


def test_bad_input_is_refused_by_name():
    with pytest.raises(Refusal, match="tau"):
        rank_tau(torch.ones(3), 1.5)
    with pytest.raises(Refusal, match="singular values"):
        rank_tau(torch.tensor([1.0, -1.0]))
    with pytest.raises(Refusal, match="singular values"):
        rank_tau(torch.tensor([1.0, torch.nan]))
    with pytest.raises(Refusal, match=r"\[n, 8\]"):
        GramMatrix(8).add(torch.zeros(3, 9))
    broken = gram(torch.full((3, 8), torch.nan))
    with pytest.raises(Refusal, match="not finite"):
        broken.rank()

"""The theory's measures by hand and by definition; its bounds where they hold, where not, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latemask import recipes
from latemask.cli.theory import TheoryOptions, run_theory
from latemask.errors import Refusal
from latemask.model.pretrainer import Pretrainer
from latemask.study.effective_rank import GramMatrix
from latemask.study.passes import Layer
from latemask.study.theory import Residuals, attention_ratios, bounds, norm, outside_shares
from latemask.text.tokenizer import load_tokenizer, train_tokenizer
from latemask.training import checkpoint


def gram(vectors: torch.Tensor) -> GramMatrix:
    streamed = GramMatrix(vectors.shape[1])
    streamed.add(vectors)
    return streamed


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_energy_outside_is_that_of_the_projection():
    """Against numpy: singular vectors of the real tokens, [MASK] rows less their projection on the first k."""
    real, mask = normal(200, 12, seed=1) * 0.7 ** torch.arange(12), normal(90, 12, seed=2)
    shares = outside_shares(gram(real), gram(mask))
    directions = np.linalg.svd(real.numpy(), full_matrices=False)[2].T
    for k in range(13):
        left = mask.numpy() - mask.numpy() @ directions[:, :k] @ directions[:, :k].T
        assert float(shares[k]) == pytest.approx((left**2).sum() / (mask.numpy() ** 2).sum(), abs=1e-9)


def test_energy_outside_known_cases():
    real = torch.zeros(50, 6, dtype=torch.float64)
    real[:, :3] = normal(50, 3)
    inside, across = torch.zeros_like(real), torch.zeros_like(real)
    inside[:, :3], across[:, 3:] = normal(50, 3, seed=3), normal(50, 3, seed=4)
    assert float(outside_shares(gram(real), gram(inside))[3]) == pytest.approx(0, abs=1e-12)
    assert float(outside_shares(gram(real), gram(across))[3]) == pytest.approx(1)
    shifted = across + torch.tensor([5.0, 0, 0, 0, 0, 0])
    assert float(outside_shares(gram(real), gram(shifted))[3]) < 0.2
    assert float(outside_shares(gram(real), gram(shifted), centred=True)[3]) == pytest.approx(1)
    assert float(outside_shares(gram(real), gram(shifted[:1].expand(9, -1)), centred=True)[3]) == 0
    own = outside_shares(gram(real), gram(real))
    rank = gram(real).rank(0.9)
    assert float(own[rank]) <= 0.1 < float(own[rank - 1])


def test_norm_by_hand():
    assert norm(torch.tensor([[1.0, -2.0], [3.0, 4.0]])) == pytest.approx((6 * 7) ** 0.5)


def test_residual_is_the_mean_over_rows_of_real_tokens_less_their_mean():
    x, is_real = normal(3, 7, 5) + 2, torch.ones(3, 7, dtype=torch.bool)
    is_real[0, 4:], is_real[1] = False, False
    measured = Residuals(0)
    measured.add([Layer(x, is_real, ~is_real)])
    parts = [x[0, :4], x[2]]
    residuals = [norm(part - part.mean(0)) for part in parts]
    means = measured.means(0)
    assert measured.rows == 2
    assert means["norm"] == pytest.approx(sum(residuals) / 2)
    assert means["share"] == pytest.approx(sum(r / norm(p) for r, p in zip(residuals, parts, strict=True)) / 2)
    equal = Residuals(0)
    equal.add([Layer(x[:, :1].expand(-1, 7, -1), torch.ones(3, 7, dtype=torch.bool), is_real)])
    assert equal.means(0)["norm"] == pytest.approx(0, abs=1e-12)
    assert Residuals(0).means(0) is None


def slow_left_side(residual, common, mixing, query_key, value_output, outside):
    """R' by loops over tokens, from appendix A: equation (4), and h' = r'R W_VO + h'W_VO below equation (8)."""
    n, m = len(residual), len(mixing)
    real = [residual[i] + common for i in range(n)]
    masks = [sum(mixing[k, i] * real[i] for i in range(n)) + outside[k] for k in range(m)]
    g = [common @ query_key @ residual[j] for j in range(n)]
    g_mask = [common @ query_key @ sum(mixing[k, j] * residual[j] for j in range(n)) for k in range(m)]
    total = sum(np.exp(value) for value in [*g, *g_mask])
    r = [(np.exp(g[j]) + sum(np.exp(g_mask[k]) * mixing[k, j] for k in range(m))) / total for j in range(n)]
    shift = (sum(r[j] * residual[j] for j in range(n)) + common) @ value_output
    rows = []
    for i in range(n):
        scores = [np.exp(real[i] @ query_key @ token) for token in [*real, *masks]]
        mixed = sum(s * token for s, token in zip(scores, [*real, *masks], strict=True)) / sum(scores)
        rows.append(mixed @ value_output - shift)
    return np.stack(rows)


def test_ratios_are_the_appendix_written_out():
    residual, common, mixing = normal(5, 4), normal(4, seed=1), normal(2, 5, seed=2).softmax(1)
    residual = residual - residual.mean(0)
    query_key, value_output, outside = normal(4, 4, seed=3) / 4, normal(4, 4, seed=4), normal(2, 4, seed=5)
    arguments = (residual, common, mixing, query_key, value_output, outside)
    found = attention_ratios(*arguments)
    left = slow_left_side(*(argument.numpy() for argument in arguments))
    one, infinity = (lambda a: np.abs(a).sum(0).max()), (lambda a: np.abs(a).sum(1).max())
    r, u, qk, vo = (part.numpy() for part in (residual, mixing, query_key, value_output))
    factor = 4 * one(qk) * infinity(u) * (1 + infinity(u))
    assert found.one == pytest.approx(one(left) / (factor * one(vo) * one(r) ** 2 * infinity(r)))
    assert found.infinity_printed == pytest.approx(infinity(left) / (factor * infinity(vo) * one(r) * infinity(r)))
    assert found.infinity_corrected == pytest.approx(found.infinity_printed / infinity(r))
    epsilon = one(qk) * np.sqrt(one(vo) * infinity(vo)) * infinity(u) * (1 + infinity(u))
    right = 4 * epsilon * np.sqrt(one(r) * infinity(r)) ** 3
    assert found.cubic == pytest.approx(np.sqrt(one(left) * infinity(left)) / right)


@settings(max_examples=150)
@given(
    n=st.integers(2, 6),
    m=st.integers(1, 3),
    width=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    logits=st.floats(-3, 3),
    size=st.floats(-3, 5),
    is_mean=st.booleans(),
)
def test_the_corrected_bound_holds_in_every_layer(n, m, width, seed, logits, size, is_mean):
    """And changing units, c H with W_QK / c^2, changes no ratio but that of the printed one."""
    residual, mixing = normal(n, width, seed=seed) * 10**size, normal(m, n, seed=seed + 1)
    residual = residual - residual.mean(0)
    mixing = mixing.softmax(1) if is_mean else mixing + (1 - mixing.sum(1, keepdim=True)) / n
    common, value_output = normal(width, seed=seed + 2), normal(width, width, seed=seed + 3)
    query_key = normal(width, width, seed=seed + 4) * 10**logits
    found = attention_ratios(residual, common, mixing, query_key, value_output)
    assert found.infinity_corrected <= 1
    assert found.one <= 1
    assert found.cubic <= 1
    c = 8.0
    scaled = attention_ratios(c * residual, c * common, mixing, query_key / c**2, value_output)
    for name in ("one", "infinity_corrected", "cubic"):
        assert getattr(scaled, name) == pytest.approx(getattr(found, name), rel=1e-6, abs=1e-12)
    assert scaled.infinity_printed == pytest.approx(c * found.infinity_printed, rel=1e-6, abs=1e-12)


def test_counterexample_correction_and_control():
    found = bounds(trials=20)
    broken = [row["infinity_printed"] for row in found["scaled"] if row["residual"] >= 1e4]
    assert min(broken) > 5
    for row in found["scaled"] + found["inside"]:
        assert max(row["one"], row["infinity_corrected"], row["cubic"]) < 1
    control = {row["residual"]: row for row in found["outside"]}
    assert min(control[1e-2]["one"], control[1e-2]["infinity_corrected"], control[1e-2]["cubic"]) > 1
    growth = control[1e-3]["cubic"] / control[1e-2]["cubic"]
    assert growth > 100


WORDS = "the river ran over old stones while tall trees bent low and small birds sang of rain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("theory")
    draw = np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choice(WORDS.split(), 40)) for _ in range(80)))
    train_tokenizer([folder / "text.txt"], 300, folder / "tok")
    return folder


def saved(system: str, folder: Path) -> Path:
    torch.manual_seed(0)
    run = recipes.recipe(f"{system}_tiny")
    shape = dataclasses.replace(run.shape, vocabulary=load_tokenizer(folder / "tok").vocabulary, row_tokens=32)
    run = dataclasses.replace(run, shape=shape)
    tokenizer = (folder / "tok" / "tokenizer.json").read_bytes()
    checkpoint.write(folder / system, run, checkpoint.State(updates=1), Pretrainer(run).state_dict(), {}, tokenizer)
    return folder / system


def test_theory_of_a_run(folder, capsys):
    model = saved("mlm", folder)
    run_theory(TheoryOptions(str(model), str(folder / "text.txt"), tokens=1500, device="cpu"))
    study = json.loads((model / "theory.json").read_text())
    for layer in study["layers"]:
        assert 0 <= layer["masks_outside"] <= 1
        assert 0 <= layer["masks_spread_outside"] <= 1
        assert layer["real_outside"] <= 0.1 + 1e-9
        swept = [part["masks"] for part in layer["sweep"]]
        assert swept == sorted(swept, reverse=True)
        assert 0 < layer["residual_masked_input"]["share"] <= 2
        assert layer["residual_clean_input"]["norm"] > 0
    # Before the first block [MASK] rows are one vector and their positions: little of them lies along real tokens.
    assert study["layers"][0]["masks_outside"] > 0.1
    assert (model / "theory-outside.svg").is_file()
    said = capsys.readouterr().out
    assert "(10) corrected" in said
    assert sum(line.strip().startswith("scale of R's entries") for line in said.splitlines()) == 3
    assert "negative control" in said
    legend = [line for line in said.splitlines() if ": " in line]
    for name in ("k = rank_0.9", "[MASK] outside", "its spread", "real outside", "|R|/|H_R|", "masked, clean",
                 "(9), (10)", "corrected", "cubic"):  # fmt: skip
        assert any(f"{name}: " in line for line in legend), name
    assert "of the real tokens' energy, [MASK] in the input" in said
    assert "90%" in said
    assert "equation (3)" in said


def test_theory_of_an_encoder_without_masks(folder, capsys):
    model = saved("mae_lm", folder)
    run_theory(TheoryOptions(str(model), str(folder / "text.txt"), tokens=500, device="cpu"))
    study = json.loads((model / "theory.json").read_text())
    for layer in study["layers"]:
        assert layer["masks_outside"] is layer["sweep"] is layer["residual_masked_input"] is None
        assert layer["residual_clean_input"]["share"] > 0
    assert "n/a" in capsys.readouterr().out
    with pytest.raises(Refusal, match="--tau"):
        run_theory(TheoryOptions(str(model), str(folder / "text.txt"), tau=0.0))

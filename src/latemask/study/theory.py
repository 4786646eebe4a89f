"""MAE-LM's theory, measured: section 2.2 and appendix A on a trained encoder, and their bounds on one attention layer.

On an encoder, by layer: how much of the [MASK] representations' energy lies outside the leading directions of the
real tokens of the same forward pass (Theorem 2.2: not none everywhere), and how far the real tokens of a row are from
all being the same vector (the residual R that the proof drives to zero).

On a single-head attention layer whose [MASK] rows are H_M = U H_R, U 1 = 1, the residual R' of the output obeys

    |R'|_1   <= 4 |W_QK|_1 |W_VO|_1   |U|_inf (1 + |U|_inf) |R|_1^2 |R|_inf       (9)
    |R'|_inf <= 4 |W_QK|_1 |W_VO|_inf |U|_inf (1 + |U|_inf) |R|_1   |R|_inf       (10) as printed
    |R'|_inf <= 4 |W_QK|_1 |W_VO|_inf |U|_inf (1 + |U|_inf) |R|_1   |R|_inf^2     (10) corrected

The printed (10) cannot hold: c H with W_QK / c^2 has the same attention, so the left side grows with c and the right
side does not; and the step to |R|^3 needs the square. The corrected one always holds. With A the attention folded onto
the real tokens, R'_i = sum_j (A_ij - r_j) (R W_VO)_j and sum_j |A_ij - r_j| <= 2 d_i (1 + |U|_inf), d_i the spread of
row i of [F, F']: for d_i <= 1 by (6) and (7), as exp x <= 1 + 2 x there; for d_i > 1 because A_i and r both sum to at
most 1 + |U|_inf in magnitude. And d_i <= 2 |W_QK|_1 |R|_1 |R|_inf |U|_inf as in the paper. For (9) the paper's proof
takes a maximum over rows where the norm sums them; it is tried here, not proven.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from latemask import console
from latemask.study.effective_rank import GramMatrix, is_capped, rank_tau
from latemask.study.energy import check_tau
from latemask.study.passes import Layer, open_subject
from latemask.study.rank_study import Moments, described, say_what_is_missing
from latemask.study.sample import Sample

SWEEP_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Of the width: numbers of leading directions for which the energy outside is stated."""
SCALES = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5)
RESIDUALS = (1.0, 1e-1, 1e-2, 1e-3)
TRIALS = 50


def outside_shares(real: GramMatrix, other: GramMatrix, centred: bool = False) -> Float[Tensor, " D+1"]:
    """Share of the energy of ``other`` (centred: of its spread around its own mean) outside the k leading directions of
    ``real``, for k = 0..D; 0 where there is no energy."""
    _, directions = real.directions()
    products = other.matrix(centred).to(directions.device)
    along = ((products @ directions) * directions).sum(0)
    inside = torch.cat([along.new_zeros(1), along.cumsum(0)])
    energy = products.trace()
    if energy <= other.width * torch.finfo(torch.float64).eps * other.matrix().trace():
        return torch.zeros(len(inside), dtype=torch.float64)
    return (1 - inside / energy).clamp(0, 1).cpu()


def norm(matrix: Float[Tensor, "n D"]) -> float:
    """Appendix A's |.|_{1,inf}: the geometric mean of the largest column sum and the largest row sum of magnitudes."""
    return (_one(matrix) * _infinity(matrix)) ** 0.5


def _one(matrix: Tensor) -> float:
    return float(matrix.abs().sum(0).max())


def _infinity(matrix: Tensor) -> float:
    return float(matrix.abs().sum(1).max())


class Residuals:
    """|R| = |H_R - 1 h'| by layer, h the mean of the row's real tokens (the least-squares h), averaged over rows."""

    def __init__(self, depth: int):
        self.rows = 0
        self._norm = [0.0] * (depth + 1)
        self._share = [0.0] * (depth + 1)

    def add(self, layers: list[Layer]) -> None:
        """Take in the rows of a pass. Rows without real tokens are left out."""
        filled = layers[0].is_real.any(1)
        self.rows += int(filled.sum())
        for number, layer in enumerate(layers):
            for x, is_real in zip(layer.x[filled].double(), layer.is_real[filled], strict=True):
                real = x[is_real]
                residual = norm(real - real.mean(0))
                self._norm[number] += residual
                self._share[number] += residual / max(norm(real), torch.finfo(torch.float64).tiny)

    def means(self, layer: int) -> dict[str, float] | None:
        """``norm`` in the paper's norm, and ``share``: over the norm of the real tokens themselves."""
        if not self.rows:
            return None
        return {"norm": self._norm[layer] / self.rows, "share": self._share[layer] / self.rows}


def by_layer(found: Moments, masked: Residuals, clean: Residuals, tau: float) -> list[dict[str, Any]]:
    """What section 2.2 says of each layer; None where the encoder sees no mask."""
    layers = []
    for number in range(found.depth + 1):
        real, mask = found.real[number], found.mask[number]
        layer: dict[str, Any] = {
            "layer": number,
            "residual_masked_input": masked.means(number),
            "residual_clean_input": clean.means(number),
            "real_rank": None,
            "masks_outside": None,
            "masks_spread_outside": None,
            "real_outside": None,
            "sweep": None,
            "few_vectors": False,
            "capped": [],
        }
        if mask.count:
            rank = real.rank(tau)
            outside, own = outside_shares(real, mask), outside_shares(real, real)
            found_from = {"real": (rank, real.count), "masks": (rank_tau(mask.spectrum(), tau), mask.count)}
            capped = [name for name, (one, count) in found_from.items() if is_capped(one, count, real.width)]
            sizes = sorted({max(1, round(share * real.width)) for share in SWEEP_SHARES})
            layer |= {
                "real_rank": rank,
                "masks_outside": float(outside[rank]),
                "masks_spread_outside": float(outside_shares(real, mask, centred=True)[rank]),
                "real_outside": float(own[rank]),
                "sweep": [{"k": k, "masks": float(outside[k]), "real": float(own[k])} for k in sizes],
                "few_vectors": bool(capped),
                "capped": capped,
            }
        layers.append(layer)
    return layers


class Ratios(NamedTuple):
    """Left side over right side of each bound; above 1 it is violated."""

    one: float
    """(9)."""
    infinity_printed: float
    """(10) as printed."""
    infinity_corrected: float
    """(10) with |R|_inf squared."""
    cubic: float
    """|R'|_{1,inf} <= 4 epsilon |R|_{1,inf}^3, which follows from (9) and the corrected (10)."""


def attention_ratios(
    residual: Float[Tensor, "n D"],
    common: Float[Tensor, " D"],
    mixing: Float[Tensor, "m n"],
    query_key: Float[Tensor, "D D"],
    value_output: Float[Tensor, "D D"],
    outside: Float[Tensor, "m D"] | float = 0.0,
) -> Ratios:
    """One attention layer over real rows H_R = R + 1 h' and [MASK] rows U H_R + ``outside`` (0: as the proof assumes).

    ``query_key`` holds the 1/sqrt(d). R' is taken to the paper's own h' (appendix A, below equation 8).
    """
    real = residual + common
    everything = torch.cat([real, mixing @ real + outside])
    attention = (real @ query_key @ everything.T).softmax(1)
    output = attention @ everything @ value_output
    weights = (common @ query_key @ torch.cat([residual, mixing @ residual]).T).softmax(0)
    gathered = weights[: len(real)] + weights[len(real) :] @ mixing
    left = output - (gathered @ residual + common) @ value_output
    spread, r_one, r_infinity = _infinity(mixing), _one(residual), _infinity(residual)
    factor = 4 * _one(query_key) * spread * (1 + spread)
    return Ratios(
        one=_one(left) / (factor * _one(value_output) * r_one**2 * r_infinity),
        infinity_printed=_infinity(left) / (factor * _infinity(value_output) * r_one * r_infinity),
        infinity_corrected=_infinity(left) / (factor * _infinity(value_output) * r_one * r_infinity**2),
        cubic=norm(left) / (factor * norm(value_output) * norm(residual) ** 3),
    )


def layer_at_random(seed: int, residual_scale: float, logit_scale: float, outside_scale: float = 0.0) -> Ratios:
    """A random layer: 6 real and 2 [MASK] rows (weighted means of the real ones) of 16 dimensions.

    ``outside_scale``: size of what the [MASK] rows have outside the row space of the real ones.
    """
    generator = torch.Generator().manual_seed(seed)
    n, m, width = 6, 2, 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    residual = normal(n, width)
    residual = (residual - residual.mean(0)) * residual_scale
    common = normal(width)
    mixing = normal(m, n).softmax(1)
    space = torch.linalg.qr(torch.cat([residual / residual_scale, common[None]]).T).Q
    foreign = normal(m, width)
    foreign = (foreign - foreign @ space @ space.T) * outside_scale
    query_key, value_output = normal(width, width) / width * logit_scale, normal(width, width) / width**0.5
    return attention_ratios(residual, common, mixing, query_key, value_output, foreign)


def bounds(trials: int = TRIALS) -> dict[str, list[dict[str, Any]]]:
    """The largest left over right of each bound in ``trials`` random layers, in three settings.

    ``residual`` is the scale of R's entries (normal numbers, less their column means). ``scaled``: it grows, W_QK
    shrinks with its square, so that the attention stays as sharp as it is: the printed (10) breaks. ``inside`` and
    ``outside``: it falls towards equal rows at one W_QK; the [MASK] rows inside the row space of the real ones, and
    (the negative control) with a part of size 1 outside of it.
    """

    def largest(residual: float, logits: float, outside: float = 0.0) -> dict[str, Any]:
        tried = [layer_at_random(seed, residual, logits, outside) for seed in range(trials)]
        return {"residual": residual, **{name: max(getattr(one, name) for one in tried) for name in Ratios._fields}}

    return {
        "scaled": [largest(scale, scale**-2) for scale in SCALES],
        "inside": [largest(size, 1.0) for size in RESIDUALS],
        "outside": [largest(size, 1.0, 1.0) for size in RESIDUALS],
    }


def theory(sample: Sample, tau: float = 0.9) -> dict[str, Any]:
    """What ``latemask theory`` says, as plain numbers. Raises ``Refusal`` where model or data cannot be read."""
    check_tau(tau)
    subject = open_subject(sample)
    found = Moments(subject.width, subject.depth)
    masked, clean = Residuals(subject.depth), Residuals(subject.depth)
    for both in subject.passes():
        found.add(both)
        clean.add(both.clean)
        if both.masked is not None:
            masked.add(both.masked)
    return {"kind": "theory", "tau": tau, **described(sample, subject), "layers": by_layer(found, masked, clean, tau),
            "bounds": bounds()}  # fmt: skip


def show(study: dict[str, Any]) -> None:
    """Print the tables of a study."""

    def share(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1%}"

    layers = study["layers"]
    sizes = next(([part["k"] for part in layer["sweep"]] for layer in layers if layer["sweep"]), [])
    rows = []
    for layer in layers:
        swept = [share(part["masks"]) for part in layer["sweep"] or []] or ["n/a"] * len(sizes)
        residuals = [layer[name] and layer[name]["share"] for name in ("residual_masked_input", "residual_clean_input")]
        rank = "n/a" if layer["real_rank"] is None else f"{layer['real_rank']}{'*' * ('real' in layer['capped'])}"
        outside = [share(layer[name]) for name in ("masks_outside", "masks_spread_outside", "real_outside")]
        outside[0] += "*" * ("masks" in layer["capped"])
        rows.append((str(layer["layer"]), rank, *outside, *swept, *map(share, residuals)))
    title = f"{study['model']}: energy of [MASK] outside the leading directions of real tokens (section 2.2)"
    columns = ("layer", f"k = rank_{study['tau']:g}", "[MASK] outside", "its spread", "real outside",
               *(f"k = {k}" for k in sizes), "|R|/|H_R| masked", "|R|/|H_R| clean")  # fmt: skip
    console.table(title, columns, rows)
    console.say(f"k = rank_{study['tau']:g}: how many directions carry {study['tau']:.0%} of the real tokens' energy, "
                "[MASK] in the input")  # fmt: skip
    console.say("[MASK] outside: share of its energy outside of these, or of the k of the other columns; "
                "0 in every layer would be equation (3), H_M = U H_R, which theorem 2.2 refutes")  # fmt: skip
    console.say("its spread: the same with the mean of [MASK] taken away; real outside: of the real tokens themselves")
    console.say("|R|/|H_R|: the real tokens H_R of a row less their mean, R, over H_R itself, in the norm |.|_1,inf of "
                "appendix A; 0: all one vector")  # fmt: skip
    console.say("masked, clean: with [MASK] in the input, and the same text without")
    if any(layer["few_vectors"] for layer in layers):
        console.say("* the rank of these vectors (at a share of [MASK]: its own) is more than a tenth of their number: "
                    "read more tokens")  # fmt: skip
    say_what_is_missing(study, [layer["residual_masked_input"] for layer in layers],
                        [layer["real_rank"] for layer in layers])  # fmt: skip
    names = ("scale of R's entries", "(9)", "(10) printed", "(10) corrected", "cubic")
    titles = {
        "scaled": "left over right, attention kept as sharp while R grows: the printed (10) breaks above 1",
        "inside": "[MASK] rows inside the row space of real tokens: every bound holds while R falls",
        "outside": "negative control, [MASK] rows partly outside: no cubic bound",
    }
    for setting, title in titles.items():
        rows = [tuple(f"{value:.2g}" for value in row.values()) for row in study["bounds"][setting]]
        console.table(f"appendix A, {title}", names, rows)
    console.say("each number: the largest left side over right side in random attention layers; above 1 the bound is "
                "violated")  # fmt: skip
    console.say("(9), (10): bounds of appendix A on |R'|_1 and |R'|_inf, R' the residual R one layer later; "
                "corrected: (10) with |R|_inf squared")  # fmt: skip
    console.say("cubic: appendix A's |R'|_1,inf <= 4 epsilon |R|_1,inf^3, from (9) and the corrected (10)")

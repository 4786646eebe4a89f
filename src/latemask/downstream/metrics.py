"""Scores of predictions: scikit-learn's and scipy's, with a defined value where those warn or give NaN.

A constant prediction scores 0 in Matthews, Spearman and Pearson; F1 without a positive anywhere is 0; empty or
non-finite input and lengths that differ are refused. Values are shares (0..1) or coefficients (-1..1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from latemask.errors import Refusal

Metric = Callable[[ArrayLike, ArrayLike], float]
"""``metric(predictions [n], labels [n])``."""


def _pair(predictions: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    found, wanted = np.asarray(predictions), np.asarray(labels)
    if found.shape != wanted.shape or found.ndim != 1:
        raise Refusal("predictions", f"shape {found.shape}", f"one for each of the {wanted.shape} labels")
    if len(wanted) == 0:
        raise Refusal("labels", "none", "at least one labelled example")
    for name, values in (("predictions", found), ("labels", wanted)):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise Refusal(name, f"{int((~np.isfinite(values)).sum())} values that are not finite", "finite numbers")
    return found, wanted


def accuracy(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Share of equal pairs."""
    found, wanted = _pair(predictions, labels)
    return float((found == wanted).mean())


def f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """F1 of class 1; 0 where neither predictions nor labels hold a 1."""
    from sklearn.metrics import f1_score

    found, wanted = _pair(predictions, labels)
    return float(f1_score(wanted == 1, found == 1, zero_division=0.0))  # type: ignore[arg-type]


def macro_f1(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Mean F1 of the classes that occur in labels or predictions."""
    from sklearn.metrics import f1_score

    found, wanted = _pair(predictions, labels)
    return float(f1_score(wanted, found, average="macro", zero_division=0.0))  # type: ignore[arg-type]


def matthews(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Matthews correlation; 0 where one side is constant."""
    found, wanted = _pair(predictions, labels)
    if _constant(found) or _constant(wanted):
        return 0.0
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(wanted, found))


def spearman(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Spearman rank correlation, ties at their mean rank; 0 where one side is constant."""
    from scipy.stats import rankdata

    found, wanted = _pair(predictions, labels)
    return _correlation(rankdata(found), rankdata(wanted))


def pearson(predictions: ArrayLike, labels: ArrayLike) -> float:
    """Pearson correlation; 0 where one side is constant."""
    found, wanted = _pair(predictions, labels)
    return _correlation(found.astype(np.float64), wanted.astype(np.float64))


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _correlation(found: np.ndarray, wanted: np.ndarray) -> float:
    if _constant(found) or _constant(wanted):
        return 0.0
    # Scaled to 1 first: squares of very small or very large numbers leave the range of doubles.
    found, wanted = (_unit(values) for values in (found, wanted))
    value = float(np.corrcoef(found, wanted)[0, 1])
    return max(-1.0, min(1.0, value)) if math.isfinite(value) else 0.0


def _unit(values: np.ndarray) -> np.ndarray:
    values = values / np.abs(values).max()
    centred = values - values.mean()
    largest = np.abs(centred).max()
    return centred / largest if largest > 0 else centred


def span_f1(predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]) -> float:
    """F1 of whole labelled spans (CoNLL-2000's), for labels like ``B-PER``, ``I-PER``, ``O``; 0 where there is none.

    A span begins at ``B-x``, or at ``I-x`` that does not continue an ``x``. Raises ``Refusal`` where lengths differ.
    """
    if len(predictions) != len(labels) or not labels:
        raise Refusal("predictions", f"{len(predictions)} sentences", f"{len(labels)}, at least one")
    found, wanted = set(), set()
    for row, (guess, truth) in enumerate(zip(predictions, labels, strict=True)):
        if len(guess) != len(truth):
            raise Refusal(f"predictions: sentence {row}", f"{len(guess)} labels", f"{len(truth)}")
        found |= {(row, *span) for span in spans(guess)}
        wanted |= {(row, *span) for span in spans(truth)}
    total = len(found) + len(wanted)
    return 2 * len(found & wanted) / total if total else 0.0


def spans(labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, start, stop) of each span in a sequence of B-/I-/O labels."""
    result: list[tuple[str, int, int]] = []
    kind, start = "", 0
    for place, label in enumerate([*labels, "O"]):
        prefix, _, name = label.partition("-")
        continues = prefix == "I" and name == kind
        if kind and not continues:
            result.append((kind, start, place))
            kind = ""
        if prefix in ("B", "I") and name and not continues:
            kind, start = name, place
    return result


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "spearman": spearman,
    "pearson": pearson,
}
"""By the name they have in results."""

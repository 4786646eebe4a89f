"""Exact match, F1 and best null thresholds of SQuAD 2.0, as its official evaluation script defines them.

All totals are in percent, as that script prints them. Rajpurkar et al. 2018, "Know What You Don't Know".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from latemask.errors import Refusal

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


def normalized(answer: str) -> str:
    """Lower case, ASCII punctuation taken out, articles replaced by a space, white space made single."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> int:
    """1 where both are equal once normalized, else 0."""
    return int(normalized(answer) == normalized(gold))


def token_f1(answer: str, gold: str) -> float:
    """F1 of the two bags of normalized words; where one is empty, 1 if both are, else 0."""
    found, wanted = normalized(answer).split(), normalized(gold).split()
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def raw_scores(answers: Mapping[str, str], golds: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, float]]:
    """Exact match and F1 of each question: the best over its gold answers (none: the empty answer is right).

    ``answers`` and ``golds`` are keyed by question id. Raises ``Refusal`` where a question has no prediction.
    """
    if not golds:
        raise Refusal("questions", "none", "at least one question")
    if missing := [question for question in golds if question not in answers]:
        raise Refusal("predictions", f"none for {len(missing)} questions, first {missing[0]}", "one for each")
    scores = {}
    for question, texts in golds.items():
        wanted = [text for text in texts if normalized(text)] or [""]
        answer = answers[question]
        scores[question] = (max(exact_match(answer, gold) for gold in wanted),
                            max(token_f1(answer, gold) for gold in wanted))  # fmt: skip
    return scores


def squad_scores(
    answers: Mapping[str, str],
    golds: Mapping[str, Sequence[str]],
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """The official script's totals: ``exact``, ``f1``, both for questions with and without an answer, and, where
    ``null_odds`` are given, ``best_exact``, ``best_f1`` and their thresholds.

    A question whose ``null_odds`` are above ``threshold`` counts as answered by "" (not in the best values, which
    choose the threshold themselves). ``golds``: the answer texts of each question, none where it has no answer.
    """
    raw = raw_scores(answers, golds)
    if null_odds is not None and (missing := [question for question in golds if question not in null_odds]):
        raise Refusal("null odds", f"none for {len(missing)} questions, first {missing[0]}", "one for each")
    has_answer = {question: bool(texts) for question, texts in golds.items()}
    held = dict(raw)
    if null_odds is not None:
        for question in raw:
            if null_odds[question] > threshold:
                held[question] = (int(not has_answer[question]), float(not has_answer[question]))
    totals: dict[str, float] = {}
    for prefix, chosen in (
        ("", list(raw)),
        ("has_answer_", [question for question in raw if has_answer[question]]),
        ("no_answer_", [question for question in raw if not has_answer[question]]),
    ):
        if chosen:
            exact, f1 = np.mean([held[question] for question in chosen], axis=0)
            totals |= {f"{prefix}exact": 100 * float(exact), f"{prefix}f1": 100 * float(f1)}
        totals[f"{prefix}total"] = len(chosen)
    if null_odds is not None:
        for name, place in (("exact", 0), ("f1", 1)):
            scores = {question: float(pair[place]) for question, pair in raw.items()}
            totals[f"best_{name}"], totals[f"best_{name}_threshold"] = best_threshold(
                answers, scores, null_odds, has_answer
            )
    return totals


def best_threshold(
    answers: Mapping[str, str],
    scores: Mapping[str, float],
    null_odds: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """The highest total in percent that a threshold on ``null_odds`` reaches, and that threshold.

    Questions are taken in the order of rising odds, one by one (the official script's way, which also cuts between
    equal odds): a question with an answer adds its score, one without loses a point unless its answer is "". The
    threshold is 0 where answering nothing at all is best.
    """
    order = sorted((question for question in null_odds if question in scores), key=lambda question: null_odds[question])
    gains = [scores[question] if has_answer[question] else -float(bool(answers[question])) for question in order]
    running = sum(not held for held in has_answer.values()) + np.concatenate([[0.0], np.cumsum(gains)])
    best = int(running.argmax())
    return 100 * float(running[best]) / len(scores), null_odds[order[best - 1]] if best else 0.0

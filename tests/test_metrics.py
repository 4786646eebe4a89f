"""Scores equal second, plain implementations and known values; degenerate input has the value that is promised."""

import math
import re
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latemask.downstream import metrics, squad_metrics
from latemask.errors import Refusal

binary = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
numbers = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30)


@settings(deadline=None)
@given(binary)
def test_binary_scores_follow_from_the_confusion_table(pairs):
    counts = Counter(pairs)
    tp, fp, fn, tn = counts[1, 1], counts[1, 0], counts[0, 1], counts[0, 0]
    predictions, labels = zip(*pairs, strict=True)
    assert metrics.accuracy(predictions, labels) == pytest.approx((tp + tn) / len(pairs))
    assert metrics.f1(predictions, labels) == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp else 0.0)
    spread = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    expected = (tp * tn - fp * fn) / math.sqrt(spread) if spread else 0.0
    assert metrics.matthews(predictions, labels) == pytest.approx(expected, abs=1e-12)


def correlation(x, y):
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    product = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    spread = math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))
    return product / spread if spread > 1e-12 else 0.0


def ranks(values):
    return [(sum(b < a for b in values) + sum(b <= a for b in values) + 1) / 2 for a in values]


@settings(deadline=None)
@given(numbers)
def test_correlations_follow_their_definitions(pairs):
    found, wanted = zip(*pairs, strict=True)
    assert metrics.pearson(found, wanted) == pytest.approx(correlation(found, wanted), abs=1e-9)
    assert metrics.spearman(found, wanted) == pytest.approx(correlation(ranks(found), ranks(wanted)), abs=1e-9)


def test_scores_equal_scikit_learn_and_scipy_on_random_data():
    from scipy import stats
    from sklearn import metrics as theirs

    noise = np.random.default_rng(0)
    labels, predictions = noise.integers(0, 3, 500), noise.integers(0, 3, 500)
    assert metrics.accuracy(predictions, labels) == theirs.accuracy_score(labels, predictions)
    assert metrics.matthews(predictions, labels) == theirs.matthews_corrcoef(labels, predictions)
    assert metrics.macro_f1(predictions, labels) == theirs.f1_score(labels, predictions, average="macro")
    scores = noise.normal(size=500)
    assert metrics.spearman(scores, labels) == pytest.approx(stats.spearmanr(scores, labels).statistic)
    assert metrics.pearson(scores, labels) == pytest.approx(stats.pearsonr(scores, labels).statistic)


@pytest.mark.filterwarnings("error")
def test_degenerate_input_has_a_defined_value():
    assert metrics.matthews([1, 1, 1], [0, 1, 1]) == 0
    assert metrics.matthews([0, 1, 1], [1, 1, 1]) == 0
    assert metrics.spearman([2.5, 2.5], [1, 2]) == 0
    assert metrics.pearson([1, 2], [3, 3]) == 0
    assert metrics.f1([0, 0], [0, 0]) == 0
    assert metrics.f1([0, 0], [1, 1]) == 0
    assert metrics.accuracy([1], [1]) == 1
    assert metrics.pearson([1e-300, 2e-300, 3e-300], [1, 2, 3]) == pytest.approx(1)
    assert metrics.pearson([1e300, 2e300, 3e300], [1, 2, 3]) == pytest.approx(1)


@pytest.mark.parametrize("name", sorted(metrics.METRICS))
def test_unusable_input_is_refused(name):
    metric = metrics.METRICS[name]
    with pytest.raises(Refusal, match="none; wanted at least one"):
        metric([], [])
    with pytest.raises(Refusal, match="shape"):
        metric([1, 2], [1])
    with pytest.raises(Refusal, match="not finite"):
        metric([1.0, math.nan], [1.0, 2.0])


def test_span_f1():
    assert metrics.spans(["B-A", "I-A", "B-A", "O", "I-B", "I-A"]) == [
        ("A", 0, 2), ("A", 2, 3), ("B", 4, 5), ("A", 5, 6)]  # fmt: skip
    truth = [["B-A", "I-A", "O", "B-B"], ["O", "O"]]
    guess = [["B-A", "I-A", "O", "B-A"], ["O", "B-B"]]
    assert metrics.span_f1(guess, truth) == pytest.approx(2 * 1 / (3 + 2))
    assert metrics.span_f1([["O"]], [["O"]]) == 0
    with pytest.raises(Refusal, match="sentence 0"):
        metrics.span_f1([["O"]], [["O", "O"]])


# SQuAD: a second implementation, word by word from the published definition.


def plain_normalized(text):
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def plain_scores(answers, golds, odds, threshold):
    exact, f1 = {}, {}
    for question, texts in golds.items():
        texts = [text for text in texts if plain_normalized(text)] or [""]
        exact[question] = max(int(plain_normalized(text) == plain_normalized(answers[question])) for text in texts)
        best = 0.0
        for text in texts:
            wanted, found = plain_normalized(text).split(), plain_normalized(answers[question]).split()
            if not wanted or not found:
                value = float(wanted == found)
            else:
                left, same = list(wanted), 0
                for word in found:
                    if word in left:
                        left.remove(word)
                        same += 1
                precision, recall = same / len(found), same / len(wanted)
                value = 2 * precision * recall / (precision + recall) if same else 0.0
            best = max(best, value)
        f1[question] = best
    result = {}
    for name, raw in (("exact", exact), ("f1", f1)):
        held = {q: (float(not golds[q]) if odds[q] > threshold else raw[q]) for q in golds}
        result[name] = 100 * sum(held.values()) / len(held)
        score = best = sum(not texts for texts in golds.values())
        best_odds = 0.0
        for q in sorted(odds, key=lambda q: odds[q]):
            score += raw[q] if golds[q] else (-1 if answers[q] else 0)
            if score > best + 1e-12:
                best, best_odds = score, odds[q]
        result[f"best_{name}"], result[f"best_{name}_threshold"] = 100 * best / len(golds), best_odds
    return result


words = st.lists(st.sampled_from(["the", "a", "cat", "Cat.", "dog", "an", "1,000", "—", "", "naïve"]), max_size=4)
text = words.map(" ".join)
question = st.tuples(text, st.lists(text, max_size=3), st.integers(-3, 3).map(lambda odds: odds / 2))


@settings(deadline=None, max_examples=200)
@given(st.lists(question, min_size=1, max_size=12), st.sampled_from([-1.0, 0.0, 0.5, 9.0]))
def test_squad_scores_equal_a_plain_implementation(questions, threshold):
    answers = {str(number): item[0] for number, item in enumerate(questions)}
    golds = {str(number): item[1] for number, item in enumerate(questions)}
    odds = {str(number): item[2] for number, item in enumerate(questions)}
    ours = squad_metrics.squad_scores(answers, golds, odds, threshold)
    for name, value in plain_scores(answers, golds, odds, threshold).items():
        assert ours[name] == pytest.approx(value), name


def test_squad_known_values():
    assert squad_metrics.normalized("The  Cat, an (odd) a-one!") == "cat odd aone"
    assert squad_metrics.exact_match("the United States", "United States.") == 1
    assert squad_metrics.token_f1("in 1973 October", "October 1973") == pytest.approx(0.8)
    assert squad_metrics.token_f1("", "") == 1
    assert squad_metrics.token_f1("the", "") == 1  # nothing is left of "the"
    golds = {"a": ["x", "y z"], "b": []}
    scores = squad_metrics.squad_scores({"a": "y", "b": "w"}, golds, {"a": -1.0, "b": 1.0}, threshold=0.0)
    assert scores["exact"] == 50
    assert scores["f1"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert scores["best_f1"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert scores["best_f1_threshold"] == -1.0
    assert scores["best_exact"] == 50
    assert scores["best_exact_threshold"] == 0.0
    assert scores["has_answer_total"] == scores["no_answer_total"] == 1
    assert "best_f1" not in squad_metrics.squad_scores({"a": "y", "b": ""}, golds)


def test_squad_refuses_what_is_missing():
    with pytest.raises(Refusal, match="first b"):
        squad_metrics.squad_scores({"a": ""}, {"a": [], "b": []})
    with pytest.raises(Refusal, match="null odds"):
        squad_metrics.squad_scores({"a": ""}, {"a": []}, {})
    with pytest.raises(Refusal, match="at least one question"):
        squad_metrics.squad_scores({}, {})

"""A task against one tokenizer: training rows and labels as numbers, and how a model's outputs are scored.

``Problem`` is all that fine-tuning knows of a task; SQuAD has its own (``squad.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from latemask.downstream.examples import Examples
from latemask.downstream.inputs import Inputs
from latemask.downstream.metrics import METRICS, span_f1
from latemask.downstream.settings import Settings
from latemask.downstream.tasks import NO_LABEL, Task
from latemask.errors import Refusal

MOST_SHARE = 0.9
"""Of the texts: what rows that hold most of them hold."""
Predict = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Rows of ids -> the model's output for each: [C], [] , [tokens, C] or [D], fp32."""


@dataclass
class Evaluation:
    """Scores of every development set, and what was predicted."""

    scores: dict[str, dict[str, float]]
    """Split -> metric -> value."""
    is_constant: bool
    """Whether every prediction was the same."""
    files: dict[str, Any] = field(default_factory=dict)
    """Predictions to keep, by file name: JSON."""
    broken: int = 0
    """Outputs of the model that were not finite: zeros stand in their place."""


def cautions(task: Task, data: dict[str, dict[str, Any]], asked_tokens: int | None = None) -> list[str]:
    """A line for each split (``Problem.facts["data"]``) whose file has rows that were refused, with the first, for one
    that training has seen all of, and for one with texts (of SQuAD: questions) that were cut.

    ``asked_tokens``: where rows as long as the run's own are the limit, the length that was asked for: it is then also
    said what helps.
    """
    seen = [
        f"{held['source']}: every row is in the training data too, so that its scores say nothing of other text"
        for held in data.values()
        if held.get("in_training") == held["read"]
    ]
    refused = [
        f"{held['source']}: {held['refused']:,} of {held['rows']:,} rows left out, such as {held['first_refusals'][0]}"
        for held in data.values()
        if held["refused"]
    ]
    pairs = "questions" if task.kind == "span" else "pairs"
    texts = pairs if len(task.texts) == 2 and task.kind != "similarity" else "texts"
    cut = [
        f"{task.name} {split}: {held['cut']:,} of {held['inputs']:,} {texts} are longer than {held['most_tokens']:,} "
        f"tokens and were cut{_longer_rows(held, asked_tokens)}"
        for split, held in data.items()
        if held.get("cut")
    ]
    return seen + refused + cut


def _longer_rows(held: dict[str, Any], asked_tokens: int | None) -> str:
    """The next power of two that holds most of the texts, as flags; empty where rows are long enough for most."""
    tokens = held.get("tokens_that_hold_most", 0)
    if asked_tokens is None or tokens <= held["most_tokens"]:
        return ""
    wanted = 1 << (tokens - 1).bit_length()
    also = f", and fine-tune with --sequence-tokens {wanted}" if wanted > asked_tokens else ""
    return f": pretrain with --shape.row-tokens {wanted}{also}"


def evaluated(problem: Problem, predict: Predict) -> Evaluation:
    """``problem.evaluate``, also of a model that has diverged: outputs that are not finite are zeros, and counted."""
    broken = 0

    def finite(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        nonlocal broken
        outputs = predict(rows)
        wrong = [number for number, output in enumerate(outputs) if not np.isfinite(output).all()]
        for number in wrong:
            outputs[number] = np.nan_to_num(outputs[number], nan=0.0, posinf=0.0, neginf=0.0)
        broken += len(wrong)
        return outputs

    return dataclasses.replace(problem.evaluate(finite), broken=broken)


class Problem(Protocol):
    task: Task
    classes: int
    train_rows: list[np.ndarray]
    train_labels: np.ndarray
    """As ``heads.losses`` takes them; for kind tokens one class number for each id of the rows, one after the other."""
    facts: dict[str, Any]
    """What a result says of the data: counts, refused rows, cut rows, subset marks."""

    def evaluate(self, predict: Predict) -> Evaluation: ...

    def majority(self) -> dict[str, dict[str, float]]:
        """Scores of always answering with the commonest training label (regression: its mean)."""
        ...


def score_of(task: Task, scores: dict[str, dict[str, float]]) -> float:
    """The task's score: its first metric on its first development set (MNLI: matched)."""
    return next(iter(scores.values()))[task.metrics[0]]


class TextProblem:
    """Classes or numbers for texts, pairs or words.

    Without a training split it only evaluates; ``scale`` is then the (mean, deviation) of the numbers trained on.
    """

    def __init__(
        self,
        task: Task,
        examples: dict[str, Examples],
        inputs: Inputs,
        settings: Settings,
        scale: tuple[float, float] = (0.0, 1.0),
    ):
        self.task, self.inputs = task, inputs
        self.classes = len(task.labels)
        self.centre, self.spread = scale
        splits = {
            split: held.first(settings.train_rows) if split == "train" else held for split, held in examples.items()
        }
        self.dev = {split: held for split, held in splits.items() if split != "train"}
        self.dev_rows: dict[str, tuple[list[np.ndarray], list[list[int]]]] = {}
        self.train_rows: list[np.ndarray] = []
        self.train_labels = np.empty(0, np.int64)
        facts: dict[str, dict[str, Any]] = {}
        known = set(splits["train"].hashes()) if "train" in splits else set()
        for split, held in splits.items():
            before, rows_before = inputs.cut, len(inputs.whole_lengths)
            rows, firsts = self._rows(held)
            lengths = inputs.whole_lengths[rows_before:]
            most_lengths = int(np.quantile(lengths, MOST_SHARE, method="higher")) if lengths else 0
            facts[split] = held.summary()
            facts[split] |= {"inputs": len(rows), "cut": inputs.cut - before, "most_tokens": inputs.most_tokens,
                             "tokens_that_hold_most": most_lengths}  # fmt: skip
            if split == "train":
                if task.kind == "regression":
                    self.centre, self.spread = _scale(held)
                self.train_rows, self.train_labels = rows, self._numbers(held, rows, firsts)
            else:
                self.dev_rows[split] = rows, firsts
                if known:
                    facts[split]["in_training"] = sum(one in known for one in held.hashes())
        subset = task.subset({split: len(held) for split, held in splits.items()})
        if "train" in splits and len(splits["train"]) < len(examples["train"]):
            subset = {"train": f"{len(splits['train']):,} of {len(examples['train']):,}"} | subset
        self.facts: dict[str, Any] = {"data": facts, "subset": subset}

    def _rows(self, examples: Examples) -> tuple[list[np.ndarray], list[list[int]]]:
        if self.task.kind == "tokens":
            return self.inputs.word_rows([words for (words,) in examples.texts])
        if self.task.kind == "similarity":
            first, second = zip(*examples.texts, strict=True)
            return self.inputs.rows([(text,) for text in (*first, *second)]), []
        return self.inputs.rows(examples.texts), []

    def _numbers(self, examples: Examples, rows: list[np.ndarray], firsts: list[list[int]]) -> np.ndarray:
        kind = self.task.kind
        if kind == "classification":
            return np.array(examples.labels, np.int64)
        if kind == "regression":
            return ((np.array(examples.labels) - self.centre) / self.spread).astype(np.float32)
        if kind == "similarity":
            values = np.array(examples.labels, np.float32)
            span = float(values.max() - values.min()) or 1.0
            return (values - values.min()) / span
        flat = np.full(sum(map(len, rows)), NO_LABEL, np.int64)
        start = 0
        for row, places, labels in zip(rows, firsts, examples.labels, strict=True):
            for place, label in zip(places, labels, strict=True):
                if place >= 0:
                    flat[start + place] = label
            start += len(row)
        return flat

    def predictions(self, rows: list[np.ndarray], firsts: list[list[int]], predict: Predict) -> Any:
        """Class numbers [n] (kind tokens: a list for each sentence, -1 for words that were cut off), or values [n]."""
        outputs = predict(rows)
        kind = self.task.kind
        if kind == "classification":
            return np.array([output.argmax() for output in outputs])
        if kind == "regression":
            return np.array([float(output) for output in outputs]) * self.spread + self.centre
        if kind == "similarity":
            return cosines(np.stack(outputs[: len(rows) // 2]), np.stack(outputs[len(rows) // 2 :]))
        return [[int(output[place].argmax()) if place >= 0 else -1 for place in places]
                for output, places in zip(outputs, firsts, strict=True)]  # fmt: skip

    def evaluate(self, predict: Predict) -> Evaluation:
        scores, constant, files = {}, [], {}
        for split, held in self.dev.items():
            predicted = self.predictions(*self.dev_rows[split], predict)
            scores[split] = self._scored(predicted, held.labels)
            flat = np.concatenate([np.asarray(item).ravel() for item in predicted])
            constant.append(bool((flat == flat[0]).all()) and len(flat) > 1)
            files[f"predictions-{split}.json"] = self._named(predicted)
        return Evaluation(scores, all(constant), files)

    def _named(self, predicted: Any) -> list[Any]:
        names = self.task.labels
        if self.task.kind == "tokens":
            return [[names[number] if number >= 0 else None for number in row] for row in predicted]
        return [names[number] for number in predicted] if names else [float(value) for value in predicted]

    def _scored(self, predicted: Any, labels: list[Any]) -> dict[str, float]:
        if self.task.kind != "tokens":
            return {name: METRICS[name](predicted, labels) for name in self.task.metrics}
        flat_predicted = [number for row in predicted for number in row]
        flat_labels = [number for row in labels for number in row]
        names = (*self.task.labels, "O")  # -1, a word cut off, is in no span
        spelled = [[[names[number] for number in row] for row in side] for side in (predicted, labels)]
        return {name: span_f1(*spelled) if name == "span_f1" else METRICS[name](flat_predicted, flat_labels)
                for name in self.task.metrics}  # fmt: skip

    def majority(self) -> dict[str, dict[str, float]]:
        if self.task.kind in ("regression", "similarity"):
            answer: Any = self.centre
        else:
            flat = self.train_labels[self.train_labels != NO_LABEL]
            answer = int(np.bincount(flat).argmax())
        result = {}
        for split, held in self.dev.items():
            constant = (
                [[answer] * len(row) for row in held.labels] if self.task.kind == "tokens" else [answer] * len(held)
            )
            result[split] = self._scored(constant, held.labels)
        return result


def _scale(train: Examples) -> tuple[float, float]:
    """Mean and deviation (1 for 0) of the training numbers."""
    values = np.array(train.labels, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        centre, spread = float(values.mean()), float(values.std())
    if not math.isfinite(centre) or not math.isfinite(spread):
        raise Refusal(
            train.source, f"labels from {values.min():g} to {values.max():g}", "numbers with a finite deviation"
        )
    return centre, spread or 1.0


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine of each pair of vectors [n, D]; 0 where one is all zeros."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    size = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(1) / np.where(size > 0, size, 1.0)

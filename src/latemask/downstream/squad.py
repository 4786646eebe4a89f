"""SQuAD 2.0: paragraphs in windows, answers by their first and last token, the empty answer where its score is best.

A row is ``<s> question </s> </s> piece of paragraph </s>``. Windows move on by ``stride_tokens`` tokens; every token of
a paragraph is in one at least. The empty answer is the pair (first token, first token); its odds are its score less
that of the best span. Offsets are characters of the paragraph as Python counts them, whatever the script.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latemask.downstream.inputs import Inputs
from latemask.downstream.problem import Evaluation, Predict
from latemask.downstream.settings import Settings
from latemask.downstream.squad_metrics import squad_scores
from latemask.downstream.tasks import SQUAD, Task
from latemask.errors import Refusal, unreadable

BEST = 20
"""Answers kept for each question (n-best), and ends looked at in each window, as in the public scripts."""
NULL_THRESHOLD = 0.0
"""Odds above which the answer is the empty one, for ``exact`` and ``f1``."""


@dataclass(frozen=True)
class Question:
    """One question; ``answers`` are (text, first character), none where the paragraph does not answer it."""

    id: str
    text: str
    paragraph: int
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Squad:
    """A file in SQuAD's layout."""

    path: Path
    paragraphs: list[str]
    questions: list[Question]
    refused: list[tuple[str, str]]
    """(question id, reason): answers that do not stand where the file says."""

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for question in self.questions:
            whole = [question.id, question.text, self.paragraphs[question.paragraph], question.answers]
            digest.update(json.dumps(whole).encode())
        return digest.hexdigest()[:16]


def read_squad(path: Path) -> Squad:
    """Raises ``Refusal`` for another layout, or a question id that occurs twice."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(path, unreadable(error), "a file of SQuAD 2.0") from None
    paragraphs: list[str] = []
    questions: list[Question] = []
    refused: list[tuple[str, str]] = []
    seen: set[str] = set()
    place = "the whole"
    try:
        for i, article in enumerate(data["data"]):
            place = f"data[{i}]"
            for j, paragraph in enumerate(article["paragraphs"]):
                place = f"data[{i}].paragraphs[{j}]"
                context = str(paragraph["context"])
                paragraphs.append(context)
                for k, entry in enumerate(paragraph["qas"]):
                    place = f"data[{i}].paragraphs[{j}].qas[{k}]"
                    held = () if entry.get("is_impossible") else entry["answers"]
                    answers = tuple((str(answer["text"]), int(answer["answer_start"])) for answer in held)
                    name = str(entry["id"])
                    if name in seen:
                        raise Refusal(path, f"question id {name} twice", "each id once")
                    seen.add(name)
                    misplaced = [text for text, start in answers if context[start : start + len(text)] != text]
                    if misplaced:
                        refused.append((name, f"answer {misplaced[0]!r} is not where the file says"))
                    else:
                        questions.append(Question(name, str(entry["question"]), len(paragraphs) - 1, answers))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, Refusal):
            raise
        found = f"another layout: {place} has {unreadable(error)}"
        raise Refusal(path, found, "data[].paragraphs[].qas[] of SQuAD 2.0") from None
    if not questions:
        first = f"; the first, {refused[0][0]}: {refused[0][1]}" if refused else ""
        raise Refusal(path, f"no usable question ({len(refused)} refused{first})", "at least one")
    return Squad(path, paragraphs, questions, refused)


def refuse_shared(train: Squad, dev: Squad) -> None:
    """Raises ``Refusal`` where both files have a question id, or a question about the same paragraph, in common."""
    ids = {question.id for question in train.questions}
    texts = {(question.text.strip(), train.paragraphs[question.paragraph].strip()) for question in train.questions}
    shared = [
        question.id
        for question in dev.questions
        if question.id in ids or (question.text.strip(), dev.paragraphs[question.paragraph].strip()) in texts
    ]
    if shared:
        found = f"{len(shared)} questions that are in {train.path} too, first {shared[0]}"
        raise Refusal(dev.path, found, "a development file that shares none with training",
                      "A model trained on mini-train is scored on mini-dev only")  # fmt: skip


@dataclass(frozen=True)
class Window:
    """One row: which question, where the piece stands in the row, and the characters of each of its tokens."""

    question: int
    ids: np.ndarray
    first: int
    """Place in the row of the piece's first token."""
    offsets: np.ndarray
    """[tokens of the piece, 2]: first character and one past the last, in the paragraph."""
    starts: int
    """Number of the piece's first token among the paragraph's."""


def make_windows(squad: Squad, inputs: Inputs, settings: Settings) -> list[Window]:
    """Windows over every question's paragraph, in order. Raises ``Refusal`` where the stride is not less than the room
    that a question leaves: tokens, or answers across a border, would be seen by no window."""
    frame = inputs.frame
    paragraphs = inputs.encodings(squad.paragraphs)
    ids_of = [np.array(encoding.ids, np.int32) for encoding in paragraphs]
    offsets_of = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in paragraphs]
    queries = inputs.tokenizer.encode_batch([question.text.strip() for question in squad.questions])
    windows = []
    for number, (question, query) in enumerate(zip(squad.questions, queries, strict=True)):
        inputs.cut += len(query) > settings.query_tokens
        query = query[: settings.query_tokens]
        room = inputs.most_tokens - frame.pair_tokens - len(query)
        if settings.stride_tokens >= room:
            wanted = f"less than {room}, the room for a paragraph in {inputs.most_tokens} tokens beside {question.id}"
            raise Refusal("--stride-tokens", str(settings.stride_tokens), wanted)
        ids, offsets = ids_of[question.paragraph], offsets_of[question.paragraph]
        head = np.concatenate(
            [np.array(frame.before, np.int32), query.astype(np.int32), np.array(frame.between, np.int32)]
        )
        start = 0
        while True:
            piece = ids[start : start + room]
            row = np.concatenate([head, piece, np.array(frame.after, np.int32)])
            windows.append(Window(number, row, len(head), offsets[start : start + room], start))
            if start + room >= len(ids):
                break
            start += settings.stride_tokens
    return windows


def ends_of(window: Window, answer: tuple[str, int]) -> tuple[int, int] | None:
    """First and last place in the row of the tokens that hold the answer's characters; None where the window does not
    hold all of them."""
    text, begin = answer
    stripped = text.strip()
    begin += len(text) - len(text.lstrip())
    stop = begin + len(stripped)
    offsets = window.offsets
    if not stripped or not len(offsets) or begin < offsets[0, 0] or stop > offsets[-1, 1]:
        return None
    inside = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < stop))
    if not len(inside):
        return None
    return window.first + int(inside[0]), window.first + int(inside[-1])


class SquadProblem:
    """Training and development questions against one tokenizer (see ``problem.Problem``)."""

    def __init__(self, train: Squad, dev: Squad, inputs: Inputs, settings: Settings, threshold: float = NULL_THRESHOLD):
        self.task: Task = SQUAD
        self.classes = 2
        self.dev, self.threshold, self.most_answer_tokens = dev, threshold, settings.answer_tokens
        kept = train.questions[: settings.train_rows]
        train = Squad(train.path, train.paragraphs, kept, train.refused)
        windows = make_windows(train, inputs, settings)
        self.train_rows = [window.ids for window in windows]
        self.train_labels = np.zeros((len(windows), 2), np.int64)
        reached = set()
        for place, window in enumerate(windows):
            answers = kept[window.question].answers
            ends = ends_of(window, answers[0]) if answers else None
            if ends is not None:
                self.train_labels[place] = ends
                reached.add(window.question)
        unreachable = sum(bool(question.answers) for question in kept) - len(reached)
        cut_in_training = inputs.cut
        self.windows = make_windows(dev, inputs, settings)
        cut = {"train": cut_in_training, "dev": inputs.cut - cut_in_training}
        self.facts: dict[str, Any] = {
            "data": {
                split: {
                    "source": str(squad.path),
                    "rows": len(squad.questions) + len(squad.refused),
                    "read": len(squad.questions),
                    "refused": len(squad.refused),
                    "first_refusals": [f"{name}: {reason}" for name, reason in squad.refused[:3]],
                    "windows": count,
                    "inputs": len(squad.questions),
                    "cut": cut[split],
                    "most_tokens": settings.query_tokens,
                    "fingerprint": squad.fingerprint(),
                }
                for split, squad, count in (("train", train, len(windows)), ("dev", dev, len(self.windows)))
            },
            "unreachable_answers": unreachable,
            "null_threshold": threshold,
            "subset": self.task.subset({"train": len(train.questions), "dev": len(dev.questions)}),
        }

    def evaluate(self, predict: Predict) -> Evaluation:
        outputs = predict([window.ids for window in self.windows])
        answers, nbest, odds = read_answers(self.dev, self.windows, outputs, self.most_answer_tokens)
        golds = self._golds()
        scores = squad_scores(answers, golds, odds, self.threshold)
        final = {name: "" if odds[name] > self.threshold else text for name, text in answers.items()}
        files = {"predictions.json": final, "nbest.json": nbest, "null_odds.json": odds}
        return Evaluation({"dev": scores}, len(set(final.values())) == 1, files)

    def majority(self) -> dict[str, dict[str, float]]:
        """Answering nothing, or (where training questions all have answers) still nothing: no text is common."""
        golds = self._golds()
        return {"dev": squad_scores(dict.fromkeys(golds, ""), golds)}

    def _golds(self) -> dict[str, list[str]]:
        return {question.id: [text for text, _ in question.answers] for question in self.dev.questions}


def read_answers(
    squad: Squad, windows: Sequence[Window], outputs: Sequence[np.ndarray], most_tokens: int
) -> tuple[dict[str, str], dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Outputs [tokens of the row, 2] of each window -> best span, n-best list and null odds of every question.

    The best span is never empty (where a paragraph has any token); whether it is given is the threshold's matter.
    n-best entries: text, first character, score (the sum of both ends' logits), probability among the entries, of
    which the empty answer is one.
    """
    spans: list[list[tuple[float, int, int]]] = [[] for _ in squad.questions]
    null = np.full(len(squad.questions), np.inf)
    for window, output in zip(windows, outputs, strict=True):
        null[window.question] = min(null[window.question], float(output[0, 0] + output[0, 1]))
        stop = window.first + len(window.offsets)
        spans[window.question] += _best_spans(output[window.first : stop], window.offsets, most_tokens)
    answers, nbest, odds = {}, {}, {}
    for number, question in enumerate(squad.questions):
        context = squad.paragraphs[question.paragraph]
        entries: dict[str, tuple[float, int]] = {}
        for score, begin, stop in heapq.nlargest(4 * BEST, spans[number]):
            text = context[begin:stop].strip()
            if text and text not in entries and len(entries) < BEST:
                entries[text] = (score, begin + len(context[begin:stop]) - len(context[begin:stop].lstrip()))
        best = next(iter(entries.items()), ("", (float(null[number]), 0)))
        answers[question.id] = best[0]
        odds[question.id] = float(null[number]) - best[1][0]
        ranked = sorted([*entries.items(), ("", (float(null[number]), -1))], key=lambda item: -item[1][0])
        scores = np.array([score for _, (score, _) in ranked])
        chances = np.exp(scores - scores.max())
        nbest[question.id] = [
            {"text": text, "start": begin, "score": score, "probability": float(chance)}
            for (text, (score, begin)), chance in zip(ranked, chances / chances.sum(), strict=True)
        ]
    return answers, nbest, odds


def _best_spans(output: np.ndarray, offsets: np.ndarray, most_tokens: int) -> list[tuple[float, int, int]]:
    """(score, first character, one past the last) of the best spans of at most ``most_tokens`` tokens in a window."""
    if not len(output):
        return []
    firsts, lasts = (np.argsort(-output[:, end], kind="stable")[:BEST] for end in (0, 1))
    length = lasts[None, :] - firsts[:, None]
    a, b = np.nonzero((length >= 0) & (length < most_tokens))
    if not len(a):  # the best ends do not meet: the best single token
        place = int(output.sum(1).argmax())
        return [(float(output[place].sum()), int(offsets[place, 0]), int(offsets[place, 1]))]
    scores = output[firsts[a], 0] + output[lasts[b], 1]
    best = np.argsort(-scores, kind="stable")[:BEST]
    return [(float(scores[n]), int(offsets[firsts[a[n]], 0]), int(offsets[lasts[b[n]], 1])) for n in best]

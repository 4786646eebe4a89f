"""Fine-tuning of one point: an encoder, a problem, settings -> scores, and everything needed to get them again."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latemask.downstream.bucketed import DeviceRows, epoch_batches, sorted_batches
from latemask.downstream.heads import FineTuned
from latemask.downstream.inputs import Inputs
from latemask.downstream.lanes import Lane, whole
from latemask.downstream.problem import Evaluation, Problem, evaluated, score_of
from latemask.downstream.settings import Settings
from latemask.downstream.stepper import Labels, Stepper, autocast
from latemask.downstream.tasks import ALWAYS
from latemask.errors import Refusal
from latemask.hf.loading import TransformersEncoder
from latemask.hf.source import Source
from latemask.text.tokenizer import Tokenizer
from latemask.training import checkpoint

EVALUATION_TOKENS = {"cuda": 65_536, "cpu": 4_096}
"""Tokens of a batch while predicting."""
FORMAT = 1
"""Of the result's JSON."""


@dataclass
class Model:
    """An encoder that fine-tuning starts from, loaded once for many points."""

    folder: str
    encoder: nn.Module
    """Never trained itself: every bench has a copy."""
    tokenizer: Tokenizer
    facts: dict[str, Any]
    """What a result says of it: folder, run and step where it is a run's, and the fingerprint of its weights."""
    step: Path | None = None
    """The step folder, where it is a run's."""

    @property
    def row_tokens(self) -> int:
        return int(self.encoder.shape.row_tokens)  # type: ignore[union-attr,arg-type]

    @classmethod
    def load(cls, folder: str | Path) -> Model:
        """From whatever ``latemask.load_encoder`` takes: every weight has to find its place, or it is a ``Refusal``."""
        return cls.from_source(Source.of(folder))

    @classmethod
    def from_source(cls, source: Source) -> Model:
        return cls.of(source.encoder(), source.tokenizer(), source.name, source.step)

    @classmethod
    def of(cls, encoder: nn.Module, tokenizer: Tokenizer, folder: str, step: Path | None = None) -> Model:
        facts: dict[str, Any] = {"folder": folder, "weights": weights_fingerprint(encoder.state_dict()),
                                 "tokenizer": tokenizer.fingerprint[:16]}  # fmt: skip
        if step is not None:
            facts |= checkpoint.origin(step)
        return cls(folder, encoder, tokenizer, facts, step)

    def inputs(self, settings: Settings) -> Inputs:
        return Inputs(self.tokenizer, min(settings.sequence_tokens, self.row_tokens))

    def type_token(self) -> int | None:
        """The id after which tokens are of type 1, for models of transformers whose pairs have two types (BERT)."""
        if not isinstance(self.encoder, TransformersEncoder) or not self.inputs(Settings()).frame.second_type:
            return None
        return self.tokenizer.specials.eos if getattr(self.encoder.model.config, "type_vocab_size", 0) > 1 else None


def weights_fingerprint(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names and values, 16 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Bench:
    """Model, problem and stepper on a device, kept for the points that differ only in rates, epochs and seed.

    ``points``: how many it is to train; infinity where this process has compiled the encoder before, which makes
    compiling it again nearly free.
    """

    def __init__(self, model: Model, problem: Problem, settings: Settings, device: torch.device, points: float = 1):
        self.model, self.problem, self.device = model, problem, device
        self.key = bench_key(settings)
        rows = DeviceRows(problem.train_rows, model.tokenizer.specials.pad, device)
        self.rows = rows
        self.examples = len(rows) // (2 if problem.task.kind == "similarity" else 1)
        if self.examples < 1:
            raise Refusal("train", "no example", "at least one")
        self.lengths = rows.lengths
        if problem.task.kind == "similarity":
            self.lengths = np.maximum(rows.lengths[: self.examples], rows.lengths[self.examples :])
        encoder = copy.deepcopy(model.encoder)  # compiled or not, as this bench alone wants it
        self.net = FineTuned(encoder, problem.task.kind, problem.classes, settings.dropout,
                             model.type_token()).to(device)  # fmt: skip
        values = torch.from_numpy(problem.train_labels).to(device)
        labels = Labels(values, rows if problem.task.kind == "tokens" else None)
        self.stepper = Stepper(self.net, rows, labels, settings, device, min(settings.batch_rows, self.examples),
                               points * self.updates(settings))  # fmt: skip

    def updates(self, settings: Settings) -> int:
        return settings.epochs * -(-self.examples // settings.batch_rows)

    def train(self, settings: Settings) -> Training:
        """Fine-tune from the first weights, and evaluate after every epoch."""
        with Lane(self.device).entered():
            return whole(self.training(settings))

    def training(
        self, settings: Settings, advance: Callable[[float], None] = lambda updates: None
    ) -> Generator[None, None, Training]:
        """``train`` in a lane, yielding after every update; ``advance`` is told of it."""
        if bench_key(settings) != self.key:
            raise ValueError("a bench trains points that differ only in rates, epochs, patience and seed")
        stepper, self.stepper.settings = self.stepper, settings
        stepper.begin(self.model.encoder.state_dict())
        updates, done, examples, padded, real = self.updates(settings), 0, 0, 0, 0
        history: list[dict[str, Any]] = []
        best: tuple[float, dict[str, Tensor], Evaluation] | None = None
        evaluation, worse, seconds = None, 0, 0.0
        for epoch in range(settings.epochs):
            self._synchronize()
            begun = time.perf_counter()
            for batch in epoch_batches(self.lengths, settings.batch_rows, self._most_tokens(), settings.seed, epoch):
                stepper.step(batch, settings.rate_at(done, updates))
                done += 1
                advance(1)
                counted = batch.rows[batch.weight > 0]
                examples += len(counted)
                real += int(self.lengths[counted].sum())
                padded += batch.width * len(batch.rows)
                yield
            self._synchronize()
            seconds += time.perf_counter() - begun
            evaluation = self.evaluate(settings)
            score = score_of(self.problem.task, evaluation.scores)
            loss = float(stepper.loss_sum) / (done - float(stepper.skipped) or 1.0)
            history.append(
                {"epoch": epoch + 1, "loss_so_far": loss, "seconds_so_far": seconds, "scores": evaluation.scores}
            )
            if settings.patience is not None:
                if best is None or score > best[0]:
                    held = {
                        name: tensor.detach().to("cpu", copy=True) for name, tensor in self.net.state_dict().items()
                    }
                    best, worse = (score, held, evaluation), 0
                else:
                    worse += 1
                    if worse >= settings.patience:
                        break
        if best is not None:
            self.net.load_state_dict(best[1])
            evaluation = best[2]
        assert evaluation is not None
        return Training(evaluation, history, done, int(stepper.skipped), seconds, examples, 1 - real / padded)

    def evaluate(self, settings: Settings) -> Evaluation:
        self.net.eval()
        try:
            return evaluated(self.problem, lambda rows: self.predict(rows, settings))
        finally:
            self.net.train()

    def predict(self, rows: Sequence[np.ndarray], settings: Settings) -> list[np.ndarray]:
        """The model's output for each row, in their order, fp32; for each token of the row where it is for tokens."""
        return predict(self.net, rows, self.model.tokenizer.specials.pad, self.device, settings)

    def _most_tokens(self) -> int:
        return self.model.row_tokens

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def bench_key(settings: Settings) -> Settings:
    """The settings that a bench cannot change: all but rates, epochs, patience and seed."""
    return dataclasses.replace(settings, learning_rate=1.0, epochs=1, warmup_share=0.0, patience=None, seed=0)


@dataclass(frozen=True)
class Training:
    """What came out of one fine-tuning."""

    evaluation: Evaluation
    history: list[dict[str, Any]]
    updates: int
    skipped: int
    seconds: float
    """From an epoch's first update to its last, its evaluations left out; what other lanes did meanwhile is in it."""
    examples: int
    padding_share: float


@torch.no_grad()
def predict(
    net: FineTuned, rows: Sequence[np.ndarray], pad: int, device: torch.device, settings: Settings
) -> list[np.ndarray]:
    """Outputs of ``net`` for rows of ids, see ``problem.Predict``. The host waits for the device once all is asked."""
    held = DeviceRows(rows, pad, device)
    outputs: list[np.ndarray] = [np.empty(0)] * len(rows)
    batches = sorted_batches(held.lengths, EVALUATION_TOKENS["cuda" if device.type == "cuda" else "cpu"])
    there = torch.from_numpy(np.concatenate(batches)).to(device).split([len(numbers) for numbers in batches])
    found = []
    for numbers, numbers_there in zip(batches, there, strict=True):
        ids, real = held.gather(numbers_there, int(held.lengths[numbers].max()))
        with autocast(device, settings):
            found.append(net(ids, real).float())
    for numbers, scores in zip(batches, found, strict=True):
        for number, output in zip(numbers, scores.cpu().numpy(), strict=True):
            outputs[number] = output[: held.lengths[number]] if net.kind in ("tokens", "span") else output
    return outputs


def result_of(
    model: Model, problem: Problem, settings: Settings, training: Training, device: torch.device
) -> dict[str, Any]:
    """The JSON of a point: scores, baseline, flags, every setting, the data's counts, versions and the card."""
    task, evaluation = problem.task, training.evaluation
    majority = problem.majority()
    score, baseline = score_of(task, evaluation.scores), score_of(task, majority)
    reasons = []
    if evaluation.is_constant:
        reasons.append("every prediction is the same")
    if score <= baseline + 1e-9:
        reasons.append(f"no better than always answering {ALWAYS[task.kind]}")
    if evaluation.broken:
        reasons.append(f"{evaluation.broken:,} outputs are not finite, and counted as zeros")
    if training.skipped > training.updates / 2:
        reasons.append(f"{training.skipped} of {training.updates} updates had a gradient that is not finite")
    return {
        "format": FORMAT,
        "kind": "finetune",
        "task": task.name,
        "title": task.title or task.name,
        "task_kind": task.kind,
        "metric": task.metrics[0],
        "score": score,
        "scores": evaluation.scores,
        "majority": majority,
        "degenerate": bool(reasons),
        "degenerate_because": reasons,
        **problem.facts,
        "id2label": {str(number): name for number, name in enumerate(task.labels)},
        "model": model.facts,
        "settings": settings.to_dict(),
        "seed": settings.seed,
        "history": training.history,
        "updates": training.updates,
        "skipped_updates": training.skipped,
        "train_seconds": training.seconds,
        "examples_per_second": training.examples / training.seconds if training.seconds else 0.0,
        "padding_share": training.padding_share,
        "card": card_name(device),
        "versions": versions(),
    }


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    packages = ("latemask", "torch", "transformers", "tokenizers", "numpy", "scikit-learn", "scipy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}

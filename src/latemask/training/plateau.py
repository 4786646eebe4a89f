"""The loss of word frequencies alone, as a plateau on which a run may stay for ever: who stands there is told, once.

A post-norm stack whose learning rate rises too fast for its depth collapses within some hundred updates: every hidden
vector points the same way, and all that is still learned is how often each token occurs. Nothing else in a run's output
says so. It is advice: nothing stops, unless ``training.stops_on_plateau`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from latemask.config import Run

NAME = "word frequencies alone"
MARGIN_NATS = 0.05
"""Below the loss of word frequencies by less than this a model is no better than they are."""
FAR_NATS = 0.5
"""Above it by more than this a model has not even learned them."""
FEW_UPDATES = 1000
"""After so many a run that went on to learn still stood on the plateau (results/real-text, three_ml_self_small)."""


def is_no_better(loss: float | None, unigram_loss: float | None) -> bool:
    """Whether a validation loss is that of word frequencies alone, or worse; False where one of them is not known."""
    return loss is not None and unigram_loss is not None and loss >= unigram_loss - MARGIN_NATS


def standing(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The last validation loss of these lines of a journal and that of word frequencies alone, where they say that the
    run stood still there and it is still no better; else None."""
    is_told = any(line["kind"] == "plateau" or line.get("word_frequencies_only") for line in lines)
    validations = [line for line in lines if line["kind"] == "validation"]
    losses = [line["loss"] for line in validations if line["loss"] is not None]
    unigram_losses = [line["unigram_loss"] for line in lines if line.get("unigram_loss") is not None]
    if not (is_told and losses and unigram_losses and is_no_better(losses[-1], unigram_losses[-1])):
        return None
    return losses[-1], unigram_losses[-1]


class Plateau:
    """Whether the validations of a run, heard one by one, show no more than word frequencies.

    ``lines``: the journal of a run that goes on.
    """

    def __init__(self, run: Run, unigram_loss: float, lines: Iterable[Mapping[str, Any]] = ()):
        self.run, self.unigram_loss = run, unigram_loss
        self.loss: float | None = None
        self.is_told = False
        lines = list(lines)
        for line in lines:
            if line.get("kind") == "validation":
                loss, seconds = (value if isinstance(value := line.get(name), float) else None
                                 for name in ("loss", "seconds"))  # fmt: skip
                self.hear(line.get("step", 0), loss, seconds or 0.0)
        self.is_told = any(line.get("kind") == "plateau" for line in lines)

    def hear(self, step: int, loss: float | None, seconds: float) -> bool:
        """Whether to tell it now: after the warm-up one validation was no better, and the next is hardly lower; or it
        is the run's last. Once in a run. ``seconds``: of training."""
        training, before = self.run.training, self.loss
        done_share = max(step / self.run.updates, seconds / training.max_seconds if training.max_seconds else 0.0)
        if not step or done_share < training.warmup_share:
            return False
        self.loss = loss
        if loss is None or self.is_told or not self.is_there:
            return False
        stands_still = before is not None and loss > before - MARGIN_NATS
        self.is_told = stands_still or done_share >= 1
        return self.is_told

    @property
    def is_there(self) -> bool:
        """Whether the last validation since the warm-up was no better than word frequencies."""
        return is_no_better(self.loss, self.unigram_loss)

    def advice(self, step: int) -> str:
        """What stands in the way, and flags of this run's that help."""
        assert self.loss is not None
        after = f"after {step:,} updates ({self.loss:.2f} against {self.unigram_loss:.2f})"
        if self.loss > self.unigram_loss + FAR_NATS:
            why = "too few updates, or a learning rate that is far too low or too high"
            return f"worse than word frequencies {after}: {why}"
        training = self.run.training
        few = "these updates are too few, or " if step < FEW_UPDATES else ""
        flags = [f"--training.learning-rate {training.learning_rate / 2:g}"]
        if training.warmup_share <= 0.25:
            flags.append(f"--training.warmup-share {2 * training.warmup_share or 0.1:g}")
        sooner = self._leaves_sooner()
        return (
            f"no better than word frequencies {after}: {few}the rate rose too fast or is too high for this depth. "
            f"Start again with half the rate{' and twice the warm-up' * (len(flags) > 1)} ({' '.join(flags)})"
            + (f"; it is left sooner with {' and '.join(sooner)}" if sooner else "")
        )

    def _leaves_sooner(self) -> list[str]:
        """What else helps, with its flags: rotary positions, and a centred decoder (results/evidence/collapse), where
        this run can have them and has not."""
        shape, decoder, flags = self.run.shape, self.run.decoder, []
        if shape.positions != "rotary" and shape.width // shape.heads % 2 == 0:
            flags.append("--shape.positions rotary")
        can_rotate = decoder is not None and "self" in decoder.sublayers and decoder.width // decoder.heads % 2 == 0
        if decoder is not None and can_rotate and decoder.positions == "absolute":
            flags.append("--decoder.positions absolute+rotary")
        helps = [f"rotary positions ({' '.join(flags)})"] if flags else []
        if decoder is not None and not decoder.centred and not shape.isolate_documents:
            helps.append("a centred decoder (--decoder.centred True)")
        return helps

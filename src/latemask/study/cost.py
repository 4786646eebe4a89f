"""What a run costs, computed from its Run alone: parameters, FLOPs per token, memory of a card, GPU-hours.

The counts are those of ``latemask.counts``; hours are the plain FLOPs of the full run over a card's peak at a stated
MFU. No torch here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from latemask.cards import Card, card, card_of_device
from latemask.config import Masking, Run
from latemask.counts import Flops, Memory, Parameters, flops, flops_per_token, memory, parameters
from latemask.errors import Refusal
from latemask.joins import early

__all__ = ["Cost", "card_of_device", "cost", "flops_per_token"]


@dataclass(frozen=True)
class Cost:
    """Everything ``latemask cost`` says of a run on ``cards`` cards of a kind at a stated MFU."""

    run: Run
    parameters: Parameters
    plain: Flops
    executed: Flops
    plain_ratio: float
    """Plain FLOPs per token over those of MLM at the same shape at 15 %."""
    executed_ratio: float
    """Executed FLOPs per token over those that the same MLM executes."""
    memory: Memory
    card: Card
    cards: int
    mfu: float
    gpu_hours: float
    """Of the full run, all cards together."""
    tokens: int
    """Of the full run, visible and masked."""

    @property
    def rows_that_fit(self) -> int:
        """Rows of a micro-batch by the estimate, a tenth of the card left free."""
        return max(0, int((0.9 * self.card.memory - self.memory.state) / self.memory.row))


def mlm_twin(run: Run) -> Run:
    """MLM at the same shape, vocabulary and training, 15 % masked: what ratios are taken to."""
    return dataclasses.replace(run, recipe="mlm", decoder=None, masking=Masking(rate=0.15, joins=early()))


def training_tokens(run: Run) -> int:
    """Tokens of the full run, visible and masked."""
    tokens = run.training.steps * run.training.batch_rows * run.shape.row_tokens
    return tokens if run.training.max_tokens is None else min(tokens, run.training.max_tokens)


def gpu_hours(flops: float, card: Card, mfu: float) -> float:
    """Hours of one card for this many plain FLOPs. Raises ``Refusal`` for an MFU outside 0..1."""
    if not 0 < mfu <= 1:
        raise Refusal("--mfu", repr(mfu), "more than 0, at most 1")
    return flops / (card.peak * mfu) / 3600


def cost(run: Run, *, kind: str = "H100", cards: int = 8, mfu: float = 0.4, micro_rows: int | None = None) -> Cost:
    """The cost of a run. Raises ``Refusal`` for an unknown kind, no cards, no rows or an MFU outside 0..1."""
    for field, number in (("--cards", cards), ("--micro-rows", 1 if micro_rows is None else micro_rows)):
        if number < 1:
            raise Refusal(field, repr(number), "at least 1")
    named, twin, tokens = card(kind), mlm_twin(run), training_tokens(run)
    plain, executed = flops(run, executed=False), flops(run, executed=True)
    rows = micro_rows or run.training.micro_rows or max(1, min(64, run.training.batch_rows // cards))
    return Cost(
        run=run,
        parameters=parameters(run),
        plain=plain,
        executed=executed,
        plain_ratio=plain.total / flops(twin, executed=False).total,
        executed_ratio=executed.total / flops(twin, executed=True).total,
        memory=memory(run, rows, cards=cards),
        card=named,
        cards=cards,
        mfu=mfu,
        gpu_hours=gpu_hours(plain.total * tokens, named, mfu),
        tokens=tokens,
    )

"""Where the masked tokens take their seats: a method is a tuple of Joins.

A row is laid out [ V visible tokens in order | M masked tokens shuffled ]. ``Join(layer, start, stop)`` says: before
block ``layer`` the masked tokens ``start..stop`` (fractions of the masked part) take their seats, freshly embedded.
Joining and resetting are the same act: everything from ``start`` on is cut off and written anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from latemask.errors import Refusal
from latemask.fields import Spelled

DECODER: Literal["decoder"] = "decoder"


@dataclass(frozen=True)
class Join(Spelled):
    """Before block ``layer`` (counted from 0; "decoder": the decoder's door), masked tokens ``start..stop`` join.

    Raises ``Refusal`` where the fractions are not ``0 <= start <= stop <= 1`` or the layer is negative.
    """

    example: ClassVar[str] = "decoder:0.2:1"
    metavar: ClassVar[str] = "LAYER[:START:STOP]"

    layer: int | Literal["decoder"]
    start: float = 0.0
    stop: float = 1.0

    def __post_init__(self) -> None:
        if self.layer != DECODER and (not isinstance(self.layer, int) or self.layer < 0):
            raise Refusal("masking.joins: layer", repr(self.layer), "a block number from 0, or 'decoder'")
        if not 0 <= self.start <= self.stop <= 1:
            raise Refusal("masking.joins", f"start {self.start}, stop {self.stop}", "0 <= start <= stop <= 1")

    def __str__(self) -> str:
        return f"{self.layer}:{float(self.start)!r}:{float(self.stop)!r}"

    @classmethod
    def parse(cls, text: str) -> Join:
        """``"decoder"``, ``"8"`` or ``"8:0.2:1"`` (layer, start, stop)."""
        layer, *ends = text.split(":")
        try:
            if len(ends) not in (0, 2):
                raise ValueError
            return cls(DECODER if layer == DECODER else int(layer), *map(float, ends))
        except Refusal:
            raise
        except ValueError:
            raise Refusal("masking.joins", repr(text), "'layer' or 'layer:start:stop', as in 'decoder:0.2:1'") from None


def late() -> tuple[Join, ...]:
    """MAE-LM, 3ML_self, 3ML_cross: no mask in the encoder."""
    return (Join(DECODER),)


def early() -> tuple[Join, ...]:
    """MLM: all masks from the first block on."""
    return (Join(0),)


def fraction(delta: float) -> tuple[Join, ...]:
    """MAE-LM section 4.3, Figure 4: the share ``delta`` joins the encoder's input, the rest the decoder's."""
    return (Join(0, 0.0, delta), Join(DECODER, delta, 1.0))


def count(share: float, masked_tokens: int) -> int:
    """``share`` of the masked tokens as a whole number of tokens, halves up."""
    return int(share * masked_tokens + 0.5)


class Arrival(NamedTuple):
    """A Join resolved against an encoder: ``layer`` is a block number, or the depth for the decoder's door."""

    layer: int
    start: float
    stop: float

    def tokens(self, masked_tokens: int) -> tuple[int, int]:
        """``start`` and ``stop`` as places among the M masked tokens."""
        return count(self.start, masked_tokens), count(self.stop, masked_tokens)


@dataclass(frozen=True)
class Plan:
    """Joins checked against an encoder of ``depth`` blocks, in order, empty ones dropped."""

    arrivals: tuple[Arrival, ...]
    depth: int

    @classmethod
    def of(cls, joins: Iterable[Join], depth: int, has_filling_decoder: bool) -> Plan:
        """Raises ``Refusal`` where a layer is out of range, a join leaves a hole, two joins share a layer, or a masked
        token never joins."""
        arrivals: list[Arrival] = []
        for join in joins:
            layer = depth if isinstance(join.layer, str) else join.layer
            if isinstance(join.layer, str) and not has_filling_decoder:
                raise Refusal("masking.joins", "a join at the decoder", "a recipe with a filling decoder")
            if not isinstance(join.layer, str) and layer >= depth:
                raise Refusal("masking.joins", f"a join before block {layer}", f"a block from 0 to {depth - 1}")
            if join.start < join.stop:
                arrivals.append(Arrival(layer, join.start, join.stop))
        arrivals.sort()
        seated = 0.0
        for before, arrival in zip([None, *arrivals], arrivals, strict=False):
            if before is not None and before.layer == arrival.layer:
                raise Refusal("masking.joins", f"two joins before block {arrival.layer}", "one join per block")
            if arrival.start > seated:
                found = f"a join from {arrival.start:g} on after {seated:g} joined"
                raise Refusal("masking.joins", found, f"start <= {seated:g}: no masked token left out")
            seated = arrival.stop
        if seated != 1 and (arrivals or has_filling_decoder):
            raise Refusal("masking.joins", f"{seated:g} of the masked tokens joined", "all of them (stop 1) at the end")
        return cls(tuple(arrivals), depth)

    @property
    def in_encoder(self) -> tuple[Arrival, ...]:
        return tuple(arrival for arrival in self.arrivals if arrival.layer < self.depth)

    @property
    def at_decoder(self) -> Arrival | None:
        return next((arrival for arrival in self.arrivals if arrival.layer == self.depth), None)

    def lengths(self, visible_tokens: int, masked_tokens: int) -> list[int]:
        """Row length in tokens inside each of the ``depth`` encoder blocks."""
        lengths, here = [], visible_tokens
        stops = {arrival.layer: visible_tokens + arrival.tokens(masked_tokens)[1] for arrival in self.in_encoder}
        for layer in range(self.depth):
            here = stops.get(layer, here)
            lengths.append(here)
        return lengths

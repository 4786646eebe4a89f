"""What a network looks like, as frozen data: the encoder that is kept, the decoder that is thrown away.

Each field states its unit and meaning right below itself. Validation happens at construction and names the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from latemask.fields import Typed, require

Positions = Literal["absolute", "absolute+relative", "rotary"]
Sublayer = Literal["self", "cross"]


@dataclass(frozen=True)
class Specials(Typed):
    """Ids of the five special tokens; none of them is ever masked or drawn as a filler."""

    _part = "shape.specials."

    bos: int = 0
    pad: int = 1
    eos: int = 2
    unk: int = 3
    mask: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.ids) >= 0, "shape.specials", self.ids, "ids from 0")
        require(len(set(self.ids)) == 5, "shape.specials", self.ids, "five different ids")

    @property
    def ids(self) -> tuple[int, int, int, int, int]:
        """In the order bos, pad, eos, unk, mask."""
        return (self.bos, self.pad, self.eos, self.unk, self.mask)


@dataclass(frozen=True)
class Shape(Typed):
    """The encoder: what is kept after pretraining."""

    _part = "shape."

    depth: int = 12
    """L, blocks."""
    width: int = 768
    """D, dimensions of a token."""
    heads: int = 12
    """Attention heads; they divide the width."""
    feedforward: int = 3072
    """Inner width of the feed-forward network."""
    row_tokens: int = 512
    """N, tokens in a row (the longest input), including the first `<s>`."""
    vocabulary: int = 32768
    """T, token ids. The model pads it to a multiple of 64; the padded ids never take probability."""
    specials: Specials = field(default_factory=Specials)
    """Ids of `<s>`, `<pad>`, `</s>`, `<unk>`, `<mask>`; taken from the tokenizer of the data."""
    positions: Positions = "absolute"
    """Learned absolute table; the same with a T5 relative bias, one table for all blocks; or rotary (no table)."""
    relative_buckets: int = 32
    """Rows of the relative bias table (Table 4); half of them for each direction."""
    relative_distance: int = 128
    """Distance in tokens from which on all share the last bucket (Table 4)."""
    isolate_documents: bool = False
    """Whether tokens of different documents in one row are hidden from each other."""
    norm: Literal["post", "pre"] = "post"
    """LayerNorm after each residual sum (BERT), or before each sublayer."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every LayerNorm (RoBERTa's value)."""
    dropout: float = 0.1
    """Share of activations and attention weights dropped in training."""
    initial_deviation: float = 0.02
    """Standard deviation of the normal that weights start from (RoBERTa's value); biases 0, LayerNorms 1 and 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_sizes(self)
        require(3 <= self.row_tokens <= 65536, "shape.row_tokens", self.row_tokens, "3 to 65,536 tokens")
        require(self.vocabulary > max(self.specials.ids), "shape.vocabulary", self.vocabulary,
                f"more ids than the largest special id, {max(self.specials.ids)}")  # fmt: skip
        require(
            self.vocabulary > 5, "shape.vocabulary", self.vocabulary, "at least one id besides the five special ones"
        )
        require(self.positions != "rotary" or self.width // self.heads % 2 == 0, "shape.heads", self.heads,
                "an even head width for rotary positions")  # fmt: skip
        require(self.relative_buckets >= 4 and self.relative_buckets % 4 == 0, "shape.relative_buckets",
                self.relative_buckets, "a multiple of 4")  # fmt: skip
        require(self.relative_distance > self.relative_buckets // 4, "shape.relative_distance", self.relative_distance,
                f"more than a quarter of relative_buckets, {self.relative_buckets // 4}")  # fmt: skip
        require(0 <= self.dropout < 1, "shape.dropout", self.dropout, "0 <= dropout < 1")
        require(self.norm_epsilon > 0, "shape.norm_epsilon", self.norm_epsilon, "a positive number")
        require(self.initial_deviation > 0, "shape.initial_deviation", self.initial_deviation, "a positive number")

    @property
    def has_relative_bias(self) -> bool:
        return self.positions == "absolute+relative"

    @property
    def padded_vocabulary(self) -> int:
        """T rounded up to a multiple of 64: rows of the token table."""
        return -(-self.vocabulary // 64) * 64


@dataclass(frozen=True)
class Decoder(Typed):
    """What is thrown away after pretraining."""

    _part = "decoder."
    _newer = frozenset({"centred"})

    depth: int = 4
    """Blocks (MAE-LM section 3: a sixth to a third of the encoder's)."""
    width: int = 768
    """Dimensions; a Linear joins it to the encoder where the widths differ."""
    heads: int = 12
    """Attention heads; they divide the width."""
    feedforward: int = 3072
    """Inner width of the feed-forward network."""
    sublayers: tuple[Sublayer, ...] = ("self",)
    """Attention inside each block: ("self",), ("self", "cross") or ("cross",); cross looks at the encoder's output."""
    positions: Literal["absolute", "absolute+rotary"] = "absolute"
    """Learned absolute table (appendix C), or that and rotary angles in its self-attention (ours, for short runs)."""
    centred: bool = False
    """Whether it reads the encoder's outputs less their mean over the row, so that no loss pulls all one way (ours)."""
    rewrites: bool = False
    """False: fill the masked positions. True: rewrite the whole row causally (Table 2, "uni. self + cross")."""
    dropout: float = 0.0
    """Share dropped in training (appendix C: none in the decoder)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_sizes(self)
        require(tuple(self.sublayers) in (("self",), ("self", "cross"), ("cross",)), "decoder.sublayers",
                self.sublayers, "self, self cross, or cross")  # fmt: skip
        can_rotate = "self" in self.sublayers and self.width // self.heads % 2 == 0
        require(self.positions == "absolute" or can_rotate, "decoder.positions", self.positions,
                "absolute where there is no self-attention, or an odd head width")  # fmt: skip
        require(not self.rewrites or self.sublayers == ("self", "cross"), "decoder.rewrites", self.rewrites,
                "sublayers self cross when the decoder rewrites the row")  # fmt: skip
        require(0 <= self.dropout < 1, "decoder.dropout", self.dropout, "0 <= dropout < 1")


def _require_sizes(of: Shape | Decoder) -> None:
    """What every stack of blocks obeys."""
    for name in ("depth", "width", "heads", "feedforward"):
        require(getattr(of, name) >= 1, f"{of._part}{name}", getattr(of, name), "at least 1")
    require(of.width % of.heads == 0, f"{of._part}heads", of.heads, f"a divisor of {of._part}width {of.width}")

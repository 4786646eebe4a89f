"""Which class of transformers an encoder is, and its weights under that class's names, in both directions.

RoBERTa's, MPNet's and RoFormer's encoders are ours but for names: queries, keys and values apart instead of one matrix,
position rows that start at the pad id + 1 (RoBERTa, MPNet), rotary pairs side by side in a head instead of half a head
apart (RoFormer). MPNet's code fixes 32 buckets, distance 128 and pad id 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    RoFormerConfig,
    RoFormerModel,
)

from latemask.config import Run, Shape, Specials
from latemask.errors import Refusal
from latemask.hf.modeling_latemask import LatemaskConfig
from latemask.model.attention import rotation
from latemask.model.encoder import Encoder
from latemask.model.pretrainer import Pretrainer
from latemask.shapes import Positions

Stock = Literal["roberta", "mpnet", "roformer"]
Family = Literal[Stock, "latemask"]
POSITIONS_OF: dict[Stock, Positions] = {"roberta": "absolute", "mpnet": "absolute+relative", "roformer": "rotary"}
MODELS: dict[Stock, type[PreTrainedModel]] = {"roberta": RobertaModel, "mpnet": MPNetModel, "roformer": RoFormerModel}
PREFIX: dict[Family, str] = {"roberta": "Roberta", "mpnet": "MPNet", "roformer": "RoFormer", "latemask": "Latemask"}
"""What the names of a family's classes begin with."""
MPNET_BUCKETS, MPNET_DISTANCE, MPNET_PAD = 32, 128, 1
COMPUTED: dict[Stock, dict[str, Any]] = {
    "roberta": {"position_embedding_type": "absolute"},
    "mpnet": {"position_embedding_type": "absolute", "relative_attention_num_buckets": MPNET_BUCKETS},
    "roformer": {"rotary_value": False},
}
"""What a class may be told to compute otherwise than an encoder of ours does, and how ours does."""


@dataclass(frozen=True)
class Names:
    """Where a stock class keeps what every block of ours has."""

    query_key_value: tuple[str, str, str]
    output: str
    attention_norm: str

    def linears(self) -> dict[str, str]:
        """Ours -> theirs, inside a block, for everything but queries, keys and values."""
        return {
            "self_attention.output": self.output,
            "norms.0": self.attention_norm,
            "feedforward.0": "intermediate.dense",
            "feedforward.2": "output.dense",
            "norms.1": "output.LayerNorm",
        }


ROBERTA = Names(
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
)
MPNET = Names(("attention.attn.q", "attention.attn.k", "attention.attn.v"), "attention.attn.o", "attention.LayerNorm")
NAMES = {"roberta": ROBERTA, "mpnet": MPNET, "roformer": ROBERTA}

TOKENS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
TOKEN_TYPES, RELATIVE_BIAS = "embeddings.token_type_embeddings.weight", "encoder.relative_attention_bias.weight"
ANGLES = "encoder.embed_positions.weight"
HALF = 2**-8
"""What bfloat16 may take from a sine."""


def family(shape: Shape) -> Family:
    """The stock class that computes what this encoder computes; "latemask" where there is none."""
    if shape.norm == "pre":
        return "latemask"
    if shape.positions == "rotary":
        return "roformer"
    if not shape.has_relative_bias:
        return "roberta"
    is_mpnet = (shape.relative_buckets, shape.relative_distance) == (MPNET_BUCKETS, MPNET_DISTANCE)
    return "mpnet" if is_mpnet and shape.specials.pad == MPNET_PAD else "latemask"


def is_plain_mlm(run: Run) -> bool:
    """Whether a stock masked language model fills masks as this run does: all of them in the row from the first block
    on, as the token table's `<mask>`, at their true positions, and the head on the encoder's output."""
    joins_first = [tuple(arrival) for arrival in run.plan.arrivals] == [(0, 0.0, 1.0)]
    return run.decoder is None and joins_first and run.masking.vector == "token" and run.masking.aligned


def config_of(
    run: Run, kind: Family, fills_masks: bool
) -> RobertaConfig | MPNetConfig | RoFormerConfig | LatemaskConfig:
    """The configuration that describes the encoder of ``run`` (and, for "latemask", how it fills masks).

    ``mask_in_encoder`` says whether pretraining showed it [MASK]: whatever is made of the model keeps that.
    """
    shape = run.shape
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.feedforward,
        "hidden_act": "gelu",
        "hidden_dropout_prob": shape.dropout,
        "layer_norm_eps": shape.norm_epsilon,
        "initializer_range": shape.initial_deviation,
        "bos_token_id": shape.specials.bos,
        "pad_token_id": shape.specials.pad,
        "eos_token_id": shape.specials.eos,
        "tie_word_embeddings": True,
        "mask_in_encoder": run.mask_in_encoder,
    }
    if kind != "latemask":
        common["attention_probs_dropout_prob"] = shape.dropout
        if kind == "roformer":
            return RoFormerConfig(type_vocab_size=1, max_position_embeddings=shape.row_tokens, **common)
        common["max_position_embeddings"] = shape.row_tokens + shape.specials.pad + 1
        if kind == "roberta":
            return RobertaConfig(type_vocab_size=1, **common)
        return MPNetConfig(relative_attention_num_buckets=MPNET_BUCKETS, **common)
    config = LatemaskConfig(
        max_position_embeddings=shape.row_tokens,
        position_embedding_type=shape.positions,
        relative_attention_num_buckets=shape.relative_buckets if shape.has_relative_bias else 0,
        norm=shape.norm,
        mask_token_id=shape.specials.mask,
        **common,
    )
    if fills_masks:
        config.joins = [list(arrival) for arrival in run.plan.arrivals]
        config.aligned = run.masking.aligned
        config.own_mask_vector = run.masking.vector == "own"
        if run.decoder is not None:
            config.decoder_layers = run.decoder.depth
            config.decoder_hidden_size = run.decoder.width
            config.decoder_attention_heads = run.decoder.heads
            config.decoder_intermediate_size = run.decoder.feedforward
            config.decoder_sublayers = list(run.decoder.sublayers)
            config.decoder_position_embedding_type = run.decoder.positions
            config.decoder_centred = run.decoder.centred
    return config


def tensors_of(pretrainer: Pretrainer, kind: Family, fills_masks: bool) -> dict[str, Tensor]:
    """All weights under the names of the class that ``config_of`` describes, padded vocabulary rows cut off."""
    shape, encoder = pretrainer.run.shape, pretrainer.encoder.state_dict()
    if kind == "latemask":
        encoder["tokens.weight"] = encoder["tokens.weight"][: shape.vocabulary]
        if pretrainer.encoder.relative_bias is not None:
            encoder["relative_bias.bucket_of"] = pretrainer.encoder.relative_bias.bucket_of
        if not fills_masks:
            return encoder
        rest = {name: part for name, part in pretrainer.state_dict().items() if not name.startswith("encoder.")}
        return {f"encoder.{name}": tensor for name, tensor in encoder.items()} | rest
    renamed = to_stock(encoder, shape, kind)
    if not fills_masks:
        return renamed
    without_pooler = {f"{kind}.{name}": part for name, part in renamed.items() if not name.startswith("pooler.")}
    return without_pooler | head_to_stock(pretrainer.head.state_dict(), kind)


def to_stock(tensors: dict[str, Tensor], shape: Shape, kind: Stock) -> dict[str, Tensor]:
    """``Encoder.state_dict()`` under the names of ``RobertaModel``, ``MPNetModel`` or ``RoFormerModel``.

    Padded vocabulary rows are cut off. The pooler (RoFormer has none), which pretraining has no use for, is the
    identity: its output is tanh of the first token's vector, the same at every load.
    """
    names, dtype = NAMES[kind], tensors["tokens.weight"].dtype
    out = {TOKENS: tensors["tokens.weight"][: shape.vocabulary]}
    if kind == "mpnet":
        out[RELATIVE_BIAS] = tensors["relative_bias.table.weight"]
    else:
        out[TOKEN_TYPES] = torch.zeros(1, shape.width, dtype=dtype)
    if kind == "roformer":
        out[ANGLES] = _angles(shape, dtype)
    else:
        unused = torch.zeros(shape.specials.pad + 1, shape.width, dtype=dtype)
        out[POSITIONS] = torch.cat([unused, tensors["door.positions.weight"]])
        out["pooler.dense.weight"] = torch.eye(shape.width, dtype=dtype)
        out["pooler.dense.bias"] = torch.zeros(shape.width, dtype=dtype)
    for part in ("weight", "bias"):
        out[f"embeddings.LayerNorm.{part}"] = tensors[f"door.norm.{part}"]
        for layer in range(shape.depth):
            ours, theirs = f"stack.blocks.{layer}.", f"encoder.layer.{layer}."
            for here, there in names.linears().items():
                out[f"{theirs}{there}.{part}"] = tensors[f"{ours}{here}.{part}"]
            pieces = list(tensors[f"{ours}self_attention.query_key_value.{part}"].chunk(3))
            if kind == "roformer":
                pieces[:2] = (_pairs_side_by_side(piece, shape.heads) for piece in pieces[:2])
            for there, piece in zip(names.query_key_value, pieces, strict=True):
                out[f"{theirs}{there}.{part}"] = piece
    return {name: tensor.clone() for name, tensor in out.items()}


def _angles(shape: Shape, dtype: torch.dtype) -> Tensor:
    """RoFormer's table of a head's sines, then cosines, by position."""
    cosine, sine = rotation(torch.arange(shape.row_tokens)[None], shape.width // shape.heads, torch.float64)
    return torch.cat([sine, cosine], -1)[0, 0].to(dtype)


def _pairs_side_by_side(piece: Tensor, heads: int) -> Tensor:
    """Rows of a projection of queries or keys: of each head the pairs (i, i + d/2) become (2i, 2i + 1)."""
    return piece.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _pairs_apart(piece: Tensor, heads: int) -> Tensor:
    """The other way round."""
    return piece.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def head_to_stock(head: dict[str, Tensor], kind: Stock) -> dict[str, Tensor]:
    """``Head.state_dict()`` under the names of the family's class for masked language models."""
    dense, norm, prefix = "dense", "layer_norm", "lm_head."
    if kind == "roformer":
        dense, norm, prefix = "transform.dense", "transform.LayerNorm", "cls.predictions."
    renamed = {"dense.weight": f"{dense}.weight", "dense.bias": f"{dense}.bias", "norm.weight": f"{norm}.weight",
               "norm.bias": f"{norm}.bias", "bias": "bias"}  # fmt: skip
    return {f"{prefix}{there}": head[here].clone() for here, there in renamed.items()}


def from_transformers(model: PreTrainedModel, specials: Specials) -> Encoder:
    """The encoder of a RoBERTa, MPNet or RoFormer model (with or without a head) as an ``Encoder`` in evaluation mode.

    ``specials``: ids of the model's special tokens; its configuration knows only three of them. A token type table has
    one row in use, which goes into the positions (RoBERTa) or the tokens (RoFormer). Raises ``Refusal`` for another
    class, another activation, a decoder, and where a RoFormer rotates values too or by other angles, or has narrower
    token vectors.
    """
    base: Any = model.base_model
    kind: Stock | None = next((one for one, model_class in MODELS.items() if isinstance(base, model_class)), None)
    if kind is None:
        raise Refusal("from_transformers", type(base).__name__, "a RobertaModel, an MPNetModel or a RoFormerModel")
    config, tensors = base.config, {name: tensor.cpu() for name, tensor in base.state_dict().items()}
    wanted = {"hidden_act": "gelu", "is_decoder": False, "embedding_size": config.hidden_size, **COMPUTED[kind]}
    for name, value in wanted.items():
        found = getattr(config, name, value)
        if found != value:
            raise Refusal(f"config.json: {name}", str(found), f"{value}, the only one that latemask computes")
    words: Any = base.get_input_embeddings()
    pad: int = words.padding_idx
    if pad != specials.pad:
        raise Refusal("specials.pad", str(specials.pad), f"{pad}, the model's")
    names, dtype, unused = NAMES[kind], tensors[TOKENS].dtype, 0 if kind == "roformer" else pad + 1
    shape = Shape(
        depth=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        feedforward=config.intermediate_size,
        row_tokens=config.max_position_embeddings - unused,
        vocabulary=config.vocab_size,
        specials=specials,
        positions=POSITIONS_OF[kind],
        relative_buckets=MPNET_BUCKETS,
        relative_distance=MPNET_DISTANCE,
        norm_epsilon=config.layer_norm_eps,
        dropout=float(config.hidden_dropout_prob),
        initial_deviation=config.initializer_range,
    )
    padding = torch.zeros(shape.padded_vocabulary - shape.vocabulary, shape.width, dtype=dtype)
    ours = {"tokens.weight": torch.cat([tensors[TOKENS], padding])}
    match kind:
        case "roberta":
            ours["door.positions.weight"] = tensors[POSITIONS][unused:] + tensors[TOKEN_TYPES][0]
        case "mpnet":
            ours["door.positions.weight"] = tensors[POSITIONS][unused:]
            ours["relative_bias.table.weight"] = tensors[RELATIVE_BIAS]
        case "roformer":
            if not torch.allclose(tensors[ANGLES].double(), _angles(shape, torch.double), atol=HALF):
                raise Refusal(ANGLES, "other angles", "those of RoFormer, the only ones that latemask computes")
            ours["tokens.weight"][: shape.vocabulary] += tensors[TOKEN_TYPES][0]
    for part in ("weight", "bias"):
        ours[f"door.norm.{part}"] = tensors[f"embeddings.LayerNorm.{part}"]
        for layer in range(shape.depth):
            here, there = f"stack.blocks.{layer}.", f"encoder.layer.{layer}."
            for name, theirs in names.linears().items():
                ours[f"{here}{name}.{part}"] = tensors[f"{there}{theirs}.{part}"]
            pieces = [tensors[f"{there}{theirs}.{part}"] for theirs in names.query_key_value]
            if kind == "roformer":
                pieces[:2] = (_pairs_apart(piece, shape.heads) for piece in pieces[:2])
            ours[f"{here}self_attention.query_key_value.{part}"] = torch.cat(pieces)
    encoder = Encoder(shape).to(dtype)
    encoder.load_state_dict(ours)
    return encoder.eval()

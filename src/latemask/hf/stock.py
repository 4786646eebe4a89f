"""Which class of transformers an encoder is, and its weights under that class's names, in both directions.

RoBERTa's and MPNet's encoders are ours but for names: queries, keys and values apart instead of one matrix, and
position rows that start at the pad id + 1. MPNet's code fixes 32 buckets, distance 128 and pad id 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import MPNetConfig, MPNetModel, PreTrainedModel, RobertaConfig, RobertaModel

from latemask.config import Run, Shape, Specials
from latemask.errors import Refusal
from latemask.hf.modeling_latemask import LatemaskConfig
from latemask.model.encoder import Encoder
from latemask.model.pretrainer import Pretrainer

Family = Literal["roberta", "mpnet", "latemask"]
MPNET_BUCKETS, MPNET_DISTANCE, MPNET_PAD = 32, 128, 1


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

TOKENS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
TOKEN_TYPES, RELATIVE_BIAS = "embeddings.token_type_embeddings.weight", "encoder.relative_attention_bias.weight"


def family(shape: Shape) -> Family:
    """The stock class that computes what this encoder computes; "latemask" where there is none."""
    if shape.norm == "pre" or shape.positions == "rotary":
        return "latemask"
    if not shape.has_relative_bias:
        return "roberta"
    is_mpnet = (shape.relative_buckets, shape.relative_distance) == (MPNET_BUCKETS, MPNET_DISTANCE)
    return "mpnet" if is_mpnet and shape.specials.pad == MPNET_PAD else "latemask"


def is_plain_mlm(run: Run) -> bool:
    """Whether a stock masked language model fills masks as this run does: all of them in the row from the first block
    on, as the token table's `<mask>`, at their true positions, and the head on the encoder's output."""
    joins_first = [tuple(arrival) for arrival in run.plan.arrivals] == [(0, 0.0, 1.0)]
    return run.decoder is None and joins_first and run.masking.vector == "token" and run.masking.aligned


def config_of(run: Run, kind: Family, fills_masks: bool) -> RobertaConfig | MPNetConfig | LatemaskConfig:
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
        common["max_position_embeddings"] = shape.row_tokens + shape.specials.pad + 1
        common["attention_probs_dropout_prob"] = shape.dropout
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
    return without_pooler | head_to_stock(pretrainer.head.state_dict())


def to_stock(tensors: dict[str, Tensor], shape: Shape, kind: Literal["roberta", "mpnet"]) -> dict[str, Tensor]:
    """``Encoder.state_dict()`` under the names of ``RobertaModel`` or ``MPNetModel``.

    Padded vocabulary rows are cut off. The pooler, which pretraining has no use for, is the identity: its output is
    tanh of the first token's vector, the same at every load.
    """
    names = ROBERTA if kind == "roberta" else MPNET
    unused = torch.zeros(shape.specials.pad + 1, shape.width, dtype=tensors["tokens.weight"].dtype)
    out = {
        TOKENS: tensors["tokens.weight"][: shape.vocabulary],
        POSITIONS: torch.cat([unused, tensors["door.positions.weight"]]),
        "pooler.dense.weight": torch.eye(shape.width, dtype=unused.dtype),
        "pooler.dense.bias": torch.zeros(shape.width, dtype=unused.dtype),
    }
    if kind == "roberta":
        out[TOKEN_TYPES] = torch.zeros(1, shape.width, dtype=unused.dtype)
    else:
        out[RELATIVE_BIAS] = tensors["relative_bias.table.weight"]
    for part in ("weight", "bias"):
        out[f"embeddings.LayerNorm.{part}"] = tensors[f"door.norm.{part}"]
        for layer in range(shape.depth):
            ours, theirs = f"stack.blocks.{layer}.", f"encoder.layer.{layer}."
            for here, there in names.linears().items():
                out[f"{theirs}{there}.{part}"] = tensors[f"{ours}{here}.{part}"]
            fused = tensors[f"{ours}self_attention.query_key_value.{part}"]
            for there, piece in zip(names.query_key_value, fused.chunk(3), strict=True):
                out[f"{theirs}{there}.{part}"] = piece
    return {name: tensor.clone() for name, tensor in out.items()}


def head_to_stock(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """``Head.state_dict()`` under the names of ``RobertaForMaskedLM`` and ``MPNetForMaskedLM``."""
    renamed = {"dense.weight": "dense.weight", "dense.bias": "dense.bias", "norm.weight": "layer_norm.weight",
               "norm.bias": "layer_norm.bias", "bias": "bias"}  # fmt: skip
    return {f"lm_head.{there}": head[here].clone() for here, there in renamed.items()}


def from_transformers(model: PreTrainedModel, specials: Specials) -> Encoder:
    """The encoder of a RoBERTa or MPNet model (with or without a head) as a latemask ``Encoder``, in evaluation mode.

    ``specials``: ids of the model's special tokens; its configuration knows only three of them. A RoBERTa token type
    table has one row in use, which goes into the positions. Raises ``Refusal`` for another class or another activation.
    """
    base = model.base_model
    if not isinstance(base, RobertaModel | MPNetModel):
        raise Refusal("from_transformers", type(base).__name__, "a RobertaModel or an MPNetModel")
    config, tensors = base.config, {name: tensor.cpu() for name, tensor in base.state_dict().items()}
    if config.hidden_act != "gelu":
        raise Refusal("config.json: hidden_act", config.hidden_act, "gelu (the exact one)")
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        raise Refusal("config.json: position_embedding_type", config.position_embedding_type, "absolute")
    is_mpnet = isinstance(base, MPNetModel)
    if is_mpnet and config.relative_attention_num_buckets != MPNET_BUCKETS:
        found = str(config.relative_attention_num_buckets)
        raise Refusal(
            "config.json: relative_attention_num_buckets", found, f"{MPNET_BUCKETS}, which MPNet's code fixes"
        )
    pad = base.embeddings.padding_idx
    if pad != specials.pad:
        raise Refusal("specials.pad", str(specials.pad), f"{pad}, the model's")
    names, dtype = MPNET if is_mpnet else ROBERTA, tensors[TOKENS].dtype
    shape = Shape(
        depth=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        feedforward=config.intermediate_size,
        row_tokens=config.max_position_embeddings - pad - 1,
        vocabulary=config.vocab_size,
        specials=specials,
        positions="absolute+relative" if is_mpnet else "absolute",
        relative_buckets=MPNET_BUCKETS,
        relative_distance=MPNET_DISTANCE,
        norm_epsilon=config.layer_norm_eps,
        dropout=float(config.hidden_dropout_prob),
        initial_deviation=config.initializer_range,
    )
    padding = torch.zeros(shape.padded_vocabulary - shape.vocabulary, shape.width, dtype=dtype)
    positions = tensors[POSITIONS][pad + 1 :]
    ours = {
        "tokens.weight": torch.cat([tensors[TOKENS], padding]),
        "door.positions.weight": positions if is_mpnet else positions + tensors[TOKEN_TYPES][0],
    }
    if is_mpnet:
        ours["relative_bias.table.weight"] = tensors[RELATIVE_BIAS]
    for part in ("weight", "bias"):
        ours[f"door.norm.{part}"] = tensors[f"embeddings.LayerNorm.{part}"]
        for layer in range(shape.depth):
            here, there = f"stack.blocks.{layer}.", f"encoder.layer.{layer}."
            for name, theirs in names.linears().items():
                ours[f"{here}{name}.{part}"] = tensors[f"{there}{theirs}.{part}"]
            pieces = [tensors[f"{there}{theirs}.{part}"] for theirs in names.query_key_value]
            ours[f"{here}self_attention.query_key_value.{part}"] = torch.cat(pieces)
    encoder = Encoder(shape).to(dtype)
    encoder.load_state_dict(ours)
    return encoder.eval()

"""Masked language models of transformers, fresh from a configuration: what ours are timed beside, on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Run

Peer = Literal["roberta", "roberta masked", "modernbert"]
"""RoBERTa as shipped, with its head on the masked positions only, and ModernBERT."""
Compiled = Literal["no", "whole", "blocks"]
"""Blocks: its layers one by one, embeddings and head as they are. (Compiled whole, the gradient of an embedding is
added up by atomics, where rows that are looked up often wait for each other.)"""


def peer_of(
    peer: Peer, run: Run, batch: Batch, device: torch.device, compiled: Compiled
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model of the run's sizes, and its mean loss on ``batch``, with no attention mask and the same tokens masked."""
    shape = run.shape
    sizes: dict[str, Any] = {"vocab_size": shape.padded_vocabulary, "hidden_size": shape.width,
                             "num_attention_heads": shape.heads, "attn_implementation": "sdpa"}  # fmt: skip
    ids = torch.empty_like(batch.ids).scatter(1, batch.positions, batch.ids)
    masked = batch.positions[:, batch.n_visible :].sort(1).values
    labels = torch.full_like(ids, -100).scatter(1, masked, ids.gather(1, masked))
    shown = ids.scatter(1, masked, shape.specials.mask)
    targets, places = ids.gather(1, masked).flatten(), masked[..., None].expand(-1, -1, shape.width)
    if peer == "modernbert":
        if shape.width != 768:  # At 768 wide its own 22 layers stay.
            sizes |= {"num_hidden_layers": shape.depth, "intermediate_size": shape.feedforward}
        config = transformers.ModernBertConfig(**sizes, pad_token_id=1, bos_token_id=0,
                                                 eos_token_id=2, cls_token_id=0, sep_token_id=2)  # fmt: skip
        made = transformers.ModernBertForMaskedLM(config)
    else:
        config = transformers.RobertaConfig(
            **sizes, num_hidden_layers=shape.depth, intermediate_size=shape.feedforward,
            max_position_embeddings=shape.row_tokens + 2, type_vocab_size=1,
            hidden_dropout_prob=shape.dropout, attention_probs_dropout_prob=shape.dropout,
        )  # fmt: skip
        made = transformers.RobertaForMaskedLM(config)
    model: Any = made.to(device).train()  # type: ignore[arg-type]

    def as_shipped() -> Tensor:
        return model(input_ids=shown, labels=labels).loss

    def on_masked() -> Tensor:
        hidden = model.roberta(input_ids=shown)[0].gather(1, places)
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), targets)

    loss_of = on_masked if peer == "roberta masked" else as_shipped
    if compiled == "blocks":
        compile_layers(model)
    return model, torch.compile(loss_of, dynamic=False) if compiled == "whole" else loss_of


def compile_layers(model: Any) -> None:
    """Compile the layers of a RoBERTa or ModernBERT one by one, in place: its fastest way."""
    for layer in model.roberta.encoder.layer if hasattr(model, "roberta") else model.model.layers:
        layer.compile(dynamic=False)

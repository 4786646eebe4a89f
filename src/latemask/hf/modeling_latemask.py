"""An encoder pretrained with latemask, and the model that fills masks with it, for `transformers` (4.57 and later).

This file needs torch and transformers alone. Positions count real tokens from 0, so padding may stand on either side.
The relative bias of the encoder, where there is one, reads each distance's bucket from a table saved with the weights.
`LatemaskForMaskedLM` takes the `<mask>` tokens out of the encoder's sight until the block (or the decoder) where
pretraining let them join: a token that has not joined is seen by nobody.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput


class LatemaskConfig(PretrainedConfig):
    """Shape of the encoder; for `LatemaskForMaskedLM` also its decoder and when masked tokens join.

    `joins`: `[layer, start, stop]` lists. Before block `layer` (`num_hidden_layers`: at the decoder's door) the masked
    tokens `start..stop` of a row, fractions of their number, take their seats.
    """

    model_type = "latemask"

    def __init__(
        self,
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=512,
        position_embedding_type="absolute",
        relative_attention_num_buckets=0,
        norm="post",
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.1,
        initializer_range=0.02,
        hidden_act="gelu",
        mask_token_id=4,
        joins=(),
        aligned=True,
        own_mask_vector=False,
        decoder_layers=0,
        decoder_hidden_size=768,
        decoder_attention_heads=12,
        decoder_intermediate_size=3072,
        decoder_sublayers=("self",),
        decoder_position_embedding_type="absolute",
        decoder_centred=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.position_embedding_type = position_embedding_type
        self.relative_attention_num_buckets = relative_attention_num_buckets
        self.norm = norm
        self.layer_norm_eps = layer_norm_eps
        self.hidden_dropout_prob = hidden_dropout_prob
        self.initializer_range = initializer_range
        self.hidden_act = hidden_act
        self.mask_token_id = mask_token_id
        self.joins = [list(join) for join in joins]
        self.aligned = aligned
        self.own_mask_vector = own_mask_vector
        self.decoder_layers = decoder_layers
        self.decoder_hidden_size = decoder_hidden_size
        self.decoder_attention_heads = decoder_attention_heads
        self.decoder_intermediate_size = decoder_intermediate_size
        self.decoder_sublayers = list(decoder_sublayers)
        self.decoder_position_embedding_type = decoder_position_embedding_type
        self.decoder_centred = decoder_centred
        super().__init__(**kwargs)


def visibility(present, dtype):
    """[B, 1, 1, N]: 0 where a token is present, -inf where not. A row without any sees everything: nobody reads it."""
    hidden = ~(present | ~present.any(1, keepdim=True))
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)[:, None, None]


def rotation(seats, head_width, dtype, base=10_000.0):
    """Cosine and sine [B, 1, N, head_width / 2] of the rotary angles, in at least float32."""
    dtype = torch.promote_types(dtype, torch.float32)
    frequency = base ** (-torch.arange(0, head_width, 2, device=seats.device, dtype=dtype) / head_width)
    angle = seats[:, None, :, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, cosine, sine):
    """The pairs (i, i + d/2) of each head turned by the token's angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


def attend(q, k, v, heads, bias, dropout, rotary=None):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if rotary is not None:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    bias = None if bias is None else bias.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x, bias, rotary):
        q, k, v = self.query_key_value(x).chunk(3, dim=-1)
        return self.output(attend(q, k, v, self.heads, bias, self.dropout if self.training else 0.0, rotary))


class CrossAttention(nn.Module):
    """Tokens look at the encoder's output; what a row without any reads there is 0."""

    def __init__(self, width, memory_width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(memory_width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x, memory, present):
        k, v = self.key_value(memory).chunk(2, dim=-1)
        read = attend(self.query(x), k, v, self.heads, visibility(present, x.dtype), 0.0)
        return self.output(read * present.any(1)[:, None, None])


class Block(nn.Module):
    """Attention sublayers and a feed-forward network, each with a residual and a LayerNorm before or after it."""

    def __init__(self, width, heads, inner, sublayers, memory_width, epsilon, dropout, pre_norm):
        super().__init__()
        self.pre_norm = pre_norm
        self.self_attention = SelfAttention(width, heads, dropout) if "self" in sublayers else None
        self.cross_attention = CrossAttention(width, memory_width, heads) if "cross" in sublayers else None
        self.feedforward = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=epsilon) for _ in range(len(sublayers) + 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias, rotary=None, memory=None, in_memory=None):
        norms = iter(self.norms)

        def residual(x, sublayer, *more):
            norm = next(norms)
            x = x + self.dropout(sublayer(norm(x) if self.pre_norm else x, *more))
            return x if self.pre_norm else norm(x)

        if self.self_attention is not None:
            x = residual(x, self.self_attention, bias, rotary)
        if self.cross_attention is not None:
            x = residual(x, self.cross_attention, memory, in_memory)
        return residual(x, self.feedforward)


class Door(nn.Module):
    """Where tokens enter: their vector, plus a position (where there is a table), LayerNorm, dropout."""

    def __init__(self, width, rows, epsilon, dropout):
        super().__init__()
        self.positions = nn.Embedding(rows, width) if rows else None
        self.norm = nn.LayerNorm(width, eps=epsilon)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, seats):
        return self.dropout(self.norm(x if self.positions is None else x + self.positions(seats)))


class Stack(nn.Module):
    def __init__(self, depth, width, heads, inner, sublayers, memory_width, epsilon, dropout, pre_norm):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(width, heads, inner, sublayers, memory_width, epsilon, dropout, pre_norm) for _ in range(depth)
        )
        self.final_norm = nn.LayerNorm(width, eps=epsilon) if pre_norm else nn.Identity()


class RelativeBias(nn.Module):
    """One learned number for each head and bucket of distance; `bucket_of` [2 N - 1] holds T5's buckets."""

    bucket_of: torch.Tensor

    def __init__(self, heads, buckets, rows):
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(buckets, heads)
        self.register_buffer("bucket_of", torch.zeros(2 * rows - 1, dtype=torch.long))

    def forward(self, seats):
        offset = seats[:, None, :] - seats[:, :, None]
        return self.table(self.bucket_of[offset + self.rows - 1]).permute(0, 3, 1, 2)


class LatemaskPreTrainedModel(PreTrainedModel):
    config_class = LatemaskConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)


class LatemaskModel(LatemaskPreTrainedModel):
    """The encoder: last hidden states of every token.

    The encoder of a late join has never seen `<mask>` in the blocks before it: to fill masks use `LatemaskForMaskedLM`.
    """

    def __init__(self, config):
        super().__init__(config)
        rows = config.max_position_embeddings
        has_table = config.position_embedding_type != "rotary"
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.door = Door(
            config.hidden_size, rows if has_table else None, config.layer_norm_eps, config.hidden_dropout_prob
        )
        self.stack = Stack(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size,
            ("self",), 0, config.layer_norm_eps, config.hidden_dropout_prob, config.norm == "pre",
        )  # fmt: skip
        buckets = config.relative_attention_num_buckets
        self.relative_bias = RelativeBias(config.num_attention_heads, buckets, rows) if buckets else None
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def set_input_embeddings(self, value):
        self.tokens = value

    def seats(self, real):
        """Position of each token: the real ones are counted from 0."""
        if real.shape[1] > self.config.max_position_embeddings:
            raise ValueError(f"{real.shape[1]} tokens in a row; this model takes {self.config.max_position_embeddings}")
        return (real.long().cumsum(1) - 1).clamp(min=0)

    def sight(self, seats, dtype):
        """What attention is told about distances: a bias, and the rotary angles."""
        bias = 0.0 if self.relative_bias is None else self.relative_bias(seats).to(dtype)
        if self.config.position_embedding_type != "rotary":
            return bias, None
        return bias, rotation(seats, self.config.hidden_size // self.config.num_attention_heads, dtype)

    def forward(
        self, input_ids=None, attention_mask=None, inputs_embeds=None, output_hidden_states=None, return_dict=None
    ):
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        real = real if attention_mask is None else attention_mask.bool()
        seats = self.seats(real)
        x = self.door(x, seats)
        bias, rotary = self.sight(seats, x.dtype)
        bias = bias + visibility(real, x.dtype)
        states = [x]
        for block in self.stack.blocks:
            x = block(x, bias, rotary)
            states.append(x)
        x = states[-1] = self.stack.final_norm(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(last_hidden_state=x, hidden_states=tuple(states) if wanted else None)
        return output if return_dict is not False else output.to_tuple()


class Decoder(nn.Module):
    """What pretraining would throw away: positions are added again, and masked tokens look at the encoder's output."""

    def __init__(self, config):
        super().__init__()
        width, epsilon = config.decoder_hidden_size, config.layer_norm_eps
        self.sublayers = config.decoder_sublayers
        self.is_rotary = config.decoder_position_embedding_type == "absolute+rotary"
        self.head_width = width // config.decoder_attention_heads
        self.narrow = nn.Linear(config.hidden_size, width) if width != config.hidden_size else nn.Identity()
        self.door = Door(width, config.max_position_embeddings, epsilon, 0.0)
        self.stack = Stack(
            config.decoder_layers, width, config.decoder_attention_heads, config.decoder_intermediate_size,
            self.sublayers, config.hidden_size, epsilon, 0.0, config.norm == "pre",
        )  # fmt: skip

    def forward(self, x, positions, real, memory, in_memory):
        """`x`: the encoder's output with mask vectors where they join here; `in_memory`: who was in the encoder."""
        x = self.door(self.narrow(x), positions)
        bias = visibility(real, x.dtype)
        rotary = rotation(positions, self.head_width, x.dtype) if self.is_rotary else None
        for block in self.stack.blocks:
            x = block(x, bias, rotary, memory, in_memory)
        return self.stack.final_norm(x)


class Head(nn.Module):
    """Dense, GELU, LayerNorm, the token table itself, and a bias for each id."""

    def __init__(self, config):
        super().__init__()
        width = config.decoder_hidden_size if config.decoder_layers else config.hidden_size
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.widen = nn.Linear(width, config.hidden_size) if width != config.hidden_size else nn.Identity()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x, table):
        return F.linear(self.widen(self.norm(F.gelu(self.dense(x)))), table, self.bias)


class LatemaskForMaskedLM(LatemaskPreTrainedModel):
    """Fills `<mask>`.

    `logits` [B, N, T]: at a mask, the model's scores. A visible token is known: 0 at its own id, the lowest number
    elsewhere. `loss`: mean cross-entropy over the masks whose label is not -100; labels at visible tokens are left out.
    """

    def __init__(self, config):
        super().__init__(config)
        self.encoder = LatemaskModel(config)
        self.mask_vector = nn.Parameter(torch.zeros(config.hidden_size)) if config.own_mask_vector else None
        self.decoder = Decoder(config) if config.decoder_layers else None
        self.head = Head(config)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, return_dict=None):
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        is_mask = (input_ids == self.config.mask_token_id) & real
        hidden = self.fill(input_ids, real, is_mask)[is_mask]
        scores = self.head(hidden, self.encoder.tokens.weight)
        logits = torch.full((*input_ids.shape, self.config.vocab_size), torch.finfo(scores.dtype).min,
                            dtype=scores.dtype, device=scores.device)  # fmt: skip
        logits = logits.scatter(2, input_ids[..., None], 0.0)
        logits[is_mask] = scores
        loss = None
        if labels is not None:
            asked = labels[is_mask]
            loss = F.cross_entropy(scores, asked, ignore_index=-100, reduction="sum") / (asked != -100).sum().clamp(
                min=1
            )
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output if return_dict is not False else output.to_tuple()

    def fill(self, input_ids, real, is_mask):
        """Final hidden states [B, N, .]; those at masks are predictions."""
        visible, masks = real & ~is_mask, is_mask.sum(1, keepdim=True)
        rank = is_mask.long().cumsum(1) - 1
        positions = self.encoder.seats(real)
        seats = positions
        if not self.config.aligned:
            seats = torch.where(is_mask, visible.sum(1, keepdim=True) + rank, visible.long().cumsum(1) - 1).clamp(min=0)

        def arriving(start, stop):
            """Masked tokens that a join writes anew, and those that are present from then on."""
            first, last = ((share * masks + 0.5).long() for share in (start, stop))
            return is_mask & (rank >= first) & (rank < last), visible | (is_mask & (rank < last))

        vector = self.mask_vector
        if vector is None:
            vector = self.encoder.tokens(torch.tensor(self.config.mask_token_id, device=input_ids.device))
        fresh = x = self.encoder.door(torch.where(is_mask[..., None], vector, self.encoder.tokens(input_ids)), seats)
        bias, rotary = self.encoder.sight(seats, x.dtype)
        joins = {layer: (start, stop) for layer, start, stop in self.config.joins}
        present = visible
        for layer, block in enumerate(self.encoder.stack.blocks):
            if layer in joins:
                newcomers, present = arriving(*joins[layer])
                x = torch.where(newcomers[..., None], fresh, x)
            x = block(x, bias + visibility(present, x.dtype), rotary)
        x = memory = self.encoder.stack.final_norm(x)
        if self.decoder is None:
            return x
        if self.config.decoder_centred:
            there = present[..., None]
            x = memory = x - (x * there).sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
        if self.config.num_hidden_layers in joins:
            newcomers, _ = arriving(*joins[self.config.num_hidden_layers])
            x = torch.where(newcomers[..., None], vector.to(x.dtype), x)
        return self.decoder(x, positions, real, memory, present)

"""Every objective of both papers in one forward pass: enter, run, join, run, decode, predict."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Run
from latemask.model.decoders import FillingDecoder, NoDecoder, RewritingDecoder
from latemask.model.encoder import Encoder
from latemask.model.heads import Head, Prediction
from latemask.model.stack import Row


class Pretrainer(nn.Module):
    """Encoder, mask vector, decoder and head of a run. Called with a Batch: the loss of each predicted token, nats."""

    def __init__(self, run: Run):
        super().__init__()
        shape, plan = run.shape, run.plan
        self.run, self.plan = run, plan
        self.encoder = Encoder(shape)
        self.mask_vector = nn.Parameter(torch.empty(shape.width)) if run.masking.vector == "own" else None
        if run.decoder is None:
            self.decoder = NoDecoder(shape)
        elif run.rewrites:
            self.decoder = RewritingDecoder(run.decoder, shape)
        else:
            self.decoder = FillingDecoder(run.decoder, shape, plan.at_decoder)
        self.head = Head(self.decoder.width, shape.width, shape.vocabulary, shape.norm_epsilon)
        self.apply(self._initialise)
        if self.mask_vector is not None:
            nn.init.normal_(self.mask_vector, std=shape.initial_deviation)

    def predict(self, batch: Batch) -> Prediction:
        """The figure: visible tokens enter, masked tokens join when the plan says, a decoder may follow."""
        visible = batch.n_visible
        row = self.encoder.enter(
            self.encoder.tokens(batch.ids[:, :visible]),
            batch.seats[:, :visible],
            batch.document[:, :visible],
            batch.real,
        )
        done = 0
        for arrival in self.plan.in_encoder:
            row = self.encoder.run(row, done, arrival.layer)
            row = self._join(row, batch, *arrival.tokens(batch.n_masked))
            done = arrival.layer
        first = batch.first_predicted if self.decoder.reads_predicted_only else 0
        row = self.encoder.run(row, done, predict_from=first)
        return self.decoder(row, batch, self.mask(), self.encoder.tokens)

    def forward(self, batch: Batch) -> Float[Tensor, "B P"]:
        """Nats for each predicted token; their mean is the training loss (MAE-LM equation 1)."""
        return self.head(self.predict(batch), self.encoder.tokens.weight)

    def mask(self) -> Float[Tensor, " D"]:
        """The mask vector: the token table's `<mask>` row, or a vector of its own (3ML)."""
        if self.mask_vector is not None:
            return self.mask_vector
        return self.encoder.tokens.weight[self.run.shape.specials.mask]

    def _join(self, row: Row, batch: Batch, start: int, stop: int) -> Row:
        """Masked tokens ``start..stop`` come through the encoder's own door, showing their fillers."""
        seats = slice(batch.n_visible + start, batch.n_visible + stop)
        filler = batch.filler[:, start:stop]
        x = self.encoder.tokens(filler)
        if self.mask_vector is not None:
            x = torch.where((filler == self.run.shape.specials.mask)[..., None], self.mask_vector.to(x.dtype), x)
        newcomers = self.encoder.enter(x, batch.seats[:, seats], batch.document[:, seats])
        return row.joined_at(batch.n_visible + start, newcomers)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.run.shape.initial_deviation)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

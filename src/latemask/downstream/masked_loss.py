"""The held-out loss of any masked model in nats per masked token, on the rows and masks that validation uses.

Masks are keyed by row number and a fixed seed, as in ``feed.batches.ValidationBatches``: two models with one tokenizer
are asked for the same tokens, and a run's loss is the one in its own journal (for recipes whose masks show [MASK]
alone). Models with other tokenizers read the same text at the same rate; then only losses a character compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latemask.batch import Batch
from latemask.config import Masking, Shape
from latemask.errors import Refusal
from latemask.feed.batches import VALIDATION_SEED, Rows, ValidationBatches
from latemask.text.tokenizer import Tokenizer


@torch.inference_mode()
def masked_loss(
    model: nn.Module,
    stream: Any,
    tokenizer: Tokenizer,
    *,
    row_tokens: int,
    rate: float,
    rows: int,
    batch_rows: int,
    device: torch.device,
    source_names: Sequence[str] = (),
    precision: Callable[[], AbstractContextManager[None]] | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> dict[str, Any]:
    """``loss`` (nats per masked token), ``by_source``, ``loss_per_character`` of the masked tokens, the counts, and the
    ``fingerprint`` of what was scored: SHA-256 of the rows as shown and the tokens asked for, 16 hex digits.

    ``model``: (ids [B, N], real) -> logits at the masks. Raises ``Refusal`` where no row can carry the masks.
    """
    shape = Shape(depth=1, width=4, heads=1, feedforward=4, row_tokens=row_tokens, vocabulary=tokenizer.vocabulary,
                  specials=tokenizer.specials)  # fmt: skip
    masking = Masking(rate=rate)
    if masking.masked_tokens(row_tokens) < 1:
        raise Refusal("--rate", f"{rate:g} of rows of {row_tokens} tokens: no masked token", "one or more in each row")
    if len(stream.tokens) < row_tokens - 1:
        raise Refusal("--data", f"{len(stream.tokens)} tokens", f"{row_tokens - 1} for one row", "Lower --row-tokens")
    held = ValidationBatches(Rows(stream, shape, masking.masked_tokens(row_tokens), "data"), masking, rows)
    sums = np.zeros((len(source_names) + 1, 2))
    characters, digest = 0, hashlib.sha256()
    for start in range(0, len(held), batch_rows):
        stop = min(start + batch_rows, len(held))
        batch = held.batch(start, stop)
        ids, targets, order = in_place(batch, shape.specials.mask)
        digest.update(torch.cat([ids, targets], 1).numpy().tobytes())
        with precision() if precision is not None else torch.autocast(device.type, enabled=False):
            logits = model(ids.to(device), torch.ones_like(ids, dtype=torch.bool, device=device))
        losses = nn.functional.cross_entropy(logits.float(), targets.flatten().to(device), reduction="none")
        losses = losses.double().cpu().numpy()
        sums[-1] += losses.sum(), len(losses)
        sources = held.sources(start, stop, batch) if source_names else None
        if sources is not None:
            found = np.take_along_axis(sources, order.numpy(), 1).ravel()
            np.add.at(sums[:, 0], found, losses)
            np.add.at(sums[:, 1], found, 1)
        characters += sum(len(tokenizer.decode([number])) for number in targets.flatten().tolist())
        advance(stop - start)
    return {
        "loss": float(sums[-1, 0] / sums[-1, 1]),
        "loss_per_character": float(sums[-1, 0] / max(characters, 1)),
        "by_source": {
            name: float(total / count) for name, (total, count) in zip(source_names, sums, strict=False) if count
        },
        "masked_tokens": int(sums[-1, 1]),
        "rows": len(held),
        "row_tokens": row_tokens,
        "rate": rate,
        "masks_seed": VALIDATION_SEED,
        "fingerprint": digest.hexdigest()[:16],
    }


def in_place(batch: Batch, mask: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, N] in their natural order with ``mask`` for the masked ones, and the targets [B, M] in that order too;
    ``order`` [B, M] says which of the batch's masked tokens each is."""
    shown = torch.cat([batch.ids[:, : batch.n_visible], torch.full_like(batch.targets, mask)], 1)
    ids = torch.empty_like(shown).scatter(1, batch.positions, shown)
    order = batch.positions[:, batch.n_visible :].argsort(1)
    return ids, batch.targets.gather(1, order), order

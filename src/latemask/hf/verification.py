"""An export is worth what a fresh process makes of it: the same ids from the same texts, the same numbers at every
token, and not one weight left over or made up.

The process has no network, an empty cache and no latemask (``fresh.py``). Its rows are padded on the right, on the left
and not at all, up to the full length; its texts go through the tokenizer class that ``AutoTokenizer`` picks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from latemask.config import Shape
from latemask.errors import Refusal
from latemask.hf import fresh, stock
from latemask.hf.filling import MASK, masked_ids
from latemask.hf.vectors import framed, padded
from latemask.model.encoder import Encoder
from latemask.model.masked_model import MaskedModel
from latemask.text.tokenizer import Tokenizer

TOLERANCE = 1e-6
"""Largest difference of a hidden state or logit, in units of the largest of them (at least 1), in float64."""
ROTARY_TOLERANCE = 1e-5
"""The same of a RoFormer, which keeps its angles in single precision."""

SENTENCE = "It was a bright cold day in April, and the clocks were striking thirteen. "
TEXTS = (
    SENTENCE,
    "",
    "  Two  spaces,\ttabs\r\nand\n\nlines  ",
    "naïve café – “quotes”, 東京, Здравствуйте, مرحبا, 👩\u200d👩\u200d👧, e\u0301, \x00 and \ufeff",
)
MASKED_TEXTS = (
    f"Paris is the {MASK} of France.",
    f"{MASK} {MASK} upon a time,  there was un{MASK}able {MASK}",
    f"\n{MASK}",
)


@dataclass(frozen=True)
class Verified:
    """What the fresh process found."""

    model_class: str
    tokenizer_class: str
    max_difference: float
    """Largest difference of a hidden state (or of a logit at a mask), absolute, in float64."""
    literals_are_text: bool
    """Whether the names of special tokens in a text are text to the exported tokenizer, as they are to ours."""
    transformers: str
    """Version."""


@dataclass(frozen=True)
class Exported(Verified):
    """Where an export is, and what a fresh process found when it loaded it."""

    folder: Path


def verify(export: Path, model: Encoder | MaskedModel, tokenizer: Tokenizer, *, trusts_code: bool) -> Verified:
    """Load ``export`` in a fresh process and compare it with ``model``, which is left in float64.

    Raises ``Refusal`` where a key is missing, unexpected or mismatched, where the ids of a text differ, or where a
    number differs by more than ``TOLERANCE`` (RoFormer: ``ROTARY_TOLERANCE``).
    """
    fills_masks = isinstance(model, MaskedModel)
    shape = model.shape
    texts, long = (MASKED_TEXTS, f"{MASK} ") if fills_masks else (TEXTS, "")
    long += SENTENCE * shape.row_tokens
    mask, literals = tokenizer.special_names["mask"], " ".join(tokenizer.special_names.values())
    rows = _rows(shape, fills_masks)
    question = {
        "export": str(export.resolve()), "trusts_code": trusts_code, "fills_masks": fills_masks,
        "mask": shape.specials.mask, "texts": [text.replace(MASK, mask) for text in texts],
        "long": long.replace(MASK, mask), "literals": literals,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "question.json").write_text(json.dumps(question))
        save_file(rows, folder / "rows.safetensors")
        _ask(folder)
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
        theirs = load_file(folder / "answer.safetensors")
    for kind in ("missing", "unexpected", "mismatched", "errors"):
        if answer[kind]:
            raise Refusal(export, f"{kind} at loading: {', '.join(answer[kind][:6])}", "every weight in its place")
    if answer["longest"] != shape.row_tokens:
        raise Refusal(export, f"a tokenizer for rows of {answer['longest']}", f"{shape.row_tokens} tokens")

    own = _ids_of([*texts, long], tokenizer, shape, fills_masks)
    ids, real = padded(own[:-1], shape.specials.pad, "cpu")
    for text, expected, found in zip([*texts, long], own, answer["alone"], strict=True):
        if expected != found:
            found = f"other ids from {answer['tokenizer_class']} for {text[:60]!r}"
            raise Refusal(export, found, "the ids of training")
    if answer["together"] != ids.tolist():
        raise Refusal(export, f"other padding from {answer['tokenizer_class']}", f"{shape.specials.pad} on the right")

    model.double().eval()
    ours = {"texts": _outputs(model, ids, real)}
    last = torch.tensor(own[-1:])
    ours["alone"] = torch.cat([ours["texts"], _outputs(model, last, torch.ones_like(last, dtype=torch.bool))])
    for side in ("full", "right", "left"):
        ours[side] = _outputs(model, rows[f"{side}.ids"], rows[f"{side}.real"])
    difference = 0.0
    tolerance = ROTARY_TOLERANCE if answer["model_class"].startswith(stock.PREFIX["roformer"]) else TOLERANCE
    for name, expected in ours.items():
        apart = float((expected - theirs[name]).abs().max())
        if not apart <= tolerance * max(1.0, float(expected.abs().max())):
            raise Refusal(export, f"numbers {apart:.2g} apart ({name})", f"{answer['model_class']} as the run's model")
        difference = max(difference, apart)
    literal_ids = framed(tokenizer.encode_batch([literals])[0].tolist(), shape.specials, shape.row_tokens)
    return Verified(answer["model_class"], answer["tokenizer_class"], difference,
                    answer["literals"] == literal_ids, answer["transformers"])  # fmt: skip


def _ids_of(texts: Sequence[str], tokenizer: Tokenizer, shape: Shape, fills_masks: bool) -> list[list[int]]:
    found = masked_ids(texts, tokenizer) if fills_masks else [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    return [framed(ids, shape.specials, shape.row_tokens) for ids in found]


def _rows(shape: Shape, fills_masks: bool) -> dict[str, Tensor]:
    """Rows of random ids: one of full length, and three of up to half of it padded on either side, with a few masks."""
    random = torch.Generator().manual_seed(0)
    ordinary = torch.tensor([number for number in range(shape.vocabulary) if number not in shape.specials.ids])
    half = shape.row_tokens // 2 + 1

    def drawn(count: int, length: int) -> Tensor:
        ids = ordinary[torch.randint(len(ordinary), (count, length), generator=random)]
        ids[:, 0], ids[:, -1] = shape.specials.bos, shape.specials.eos
        if fills_masks:
            for row, masks in enumerate((length // 4 + 1, 2, 1)[:count]):
                ids[row, 1 + torch.randperm(length // 2, generator=random)[:masks]] = shape.specials.mask
        return ids

    full, short = drawn(1, shape.row_tokens), drawn(3, half)
    lengths, places = torch.tensor([[half], [half // 2 + 1], [2]]), torch.arange(half)
    rows = {"full.ids": full, "full.real": torch.ones_like(full, dtype=torch.bool)}
    for side, real in (("right", places < lengths), ("left", places >= half - lengths)):
        rows[f"{side}.ids"] = short.masked_fill(~real, shape.specials.pad)
        rows[f"{side}.real"] = real
    return rows


def _outputs(model: Encoder | MaskedModel, ids: Tensor, real: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids, real) if isinstance(model, MaskedModel) else model(ids, real)[real]


def _ask(folder: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(folder / "cache"),
               "HF_MODULES_CACHE": str(folder / "cache" / "modules"), "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    command = [sys.executable, "-P", str(fresh.__file__), str(folder)]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"status {done.returncode}"]
        raise Refusal("export", f"a fresh process that could not load it ({last[0][:300]})", "one that does")

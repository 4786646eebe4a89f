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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from latemask.config import Shape
from latemask.errors import Refusal
from latemask.hf import fresh
from latemask.hf.filling import MASK, masked_ids
from latemask.hf.vectors import framed, padded
from latemask.model.encoder import Encoder
from latemask.model.masked_model import MaskedModel
from latemask.text.tokenizer import Tokenizer

TOLERANCE = 1e-6
"""Largest difference of a hidden state or logit, in units of the largest of them (at least 1), in float64."""

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


def verify(export: Path, model: Encoder | MaskedModel, tokenizer: Tokenizer, *, trusts_code: bool) -> Verified:
    """Load ``export`` in a fresh process and compare it with ``model``, which is left in float64.

    Raises ``Refusal`` where a key is missing, unexpected or mismatched, where the ids of a text differ, or where a
    number differs by more than ``TOLERANCE``.
    """
    fills_masks = isinstance(model, MaskedModel)
    shape = model.shape
    long = SENTENCE * shape.row_tokens
    texts = [*MASKED_TEXTS, MASK + " " + long] if fills_masks else [*TEXTS, long]
    literals = " ".join(tokenizer.special_names.values())
    rows = _rows(shape, fills_masks)
    question = {
        "export": str(export.resolve()), "trusts_code": trusts_code, "fills_masks": fills_masks,
        "mask": shape.specials.mask, "texts": [text.replace(MASK, tokenizer.special_names["mask"]) for text in texts],
        "literals": literals,
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

    own = _ids_of(texts, tokenizer, shape, fills_masks)
    ids, real = padded(own, shape.specials.pad, "cpu")
    if not torch.equal(ids, theirs["texts.ids"]) or not torch.equal(real.long(), theirs["texts.real"]):
        number = next(
            (n for n, row in enumerate(own) if row != theirs["texts.ids"][n][theirs["texts.real"][n] == 1].tolist()), 0
        )
        raise Refusal(
            export, f"other ids from {answer['tokenizer_class']} for {texts[number][:60]!r}", "the ids of training"
        )

    model.double().eval()
    ours = {"texts": _outputs(model, ids, real)}
    ours["alone"] = ours["texts"]
    for side in ("full", "right", "left"):
        ours[side] = _outputs(model, rows[f"{side}.ids"], rows[f"{side}.real"])
    difference = 0.0
    for name, expected in ours.items():
        apart = float((expected - theirs[name]).abs().max())
        if not apart <= TOLERANCE * max(1.0, float(expected.abs().max())):
            raise Refusal(export, f"numbers {apart:.2g} apart ({name})", f"{answer['model_class']} as the run's model")
        difference = max(difference, apart)
    literal_ids = framed(tokenizer.encode_batch([literals])[0].tolist(), shape.specials, shape.row_tokens)
    return Verified(answer["model_class"], answer["tokenizer_class"], difference,
                    answer["literals"] == literal_ids, answer["transformers"])  # fmt: skip


def _ids_of(texts: list[str], tokenizer: Tokenizer, shape: Shape, fills_masks: bool) -> list[list[int]]:
    if fills_masks:
        found = [masked_ids(text.split(MASK), tokenizer) for text in texts]
    else:
        found = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    return [framed(ids, shape.specials, shape.row_tokens) for ids in found]


def _rows(shape: Shape, fills_masks: bool) -> dict[str, Tensor]:
    """Rows of random ids: three of full length, and three lengths padded on either side, a few masks in each."""
    random = torch.Generator().manual_seed(0)
    ordinary = [number for number in range(shape.vocabulary) if number not in shape.specials.ids]
    drawn = torch.randint(len(ordinary), (3, shape.row_tokens), generator=random)
    full = torch.tensor(ordinary)[drawn]
    full[:, 0], full[:, -1] = shape.specials.bos, shape.specials.eos
    if fills_masks:
        for row, masks in enumerate((1, shape.row_tokens // 4 + 1, 2)):
            full[row, 1 + torch.randperm(shape.row_tokens // 2, generator=random)[:masks]] = shape.specials.mask
    lengths = torch.tensor([[shape.row_tokens], [shape.row_tokens // 2 + 2], [2]])
    places = torch.arange(shape.row_tokens)
    right, left = places < lengths, places >= shape.row_tokens - lengths
    rows = {"full.ids": full, "full.real": torch.ones_like(full, dtype=torch.bool)}
    for side, real in (("right", right), ("left", left)):
        rows[f"{side}.ids"] = full.masked_fill(~real, shape.specials.pad)
        rows[f"{side}.real"] = real
    return {name: tensor.clone() for name, tensor in rows.items()}


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

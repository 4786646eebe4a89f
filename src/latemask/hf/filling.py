"""What stands behind each `<mask>` of a text? The one place where `<mask>` in a text means the mask.

Everything else is tokenized as text. Most tokenizers tie a space to the word behind it, so a space in front of a mask
belongs to the word that is asked for: it is left out, and the predictions bring their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from latemask.config import refuse_rewriting
from latemask.errors import Refusal
from latemask.hf.source import Source
from latemask.text.tokenizer import ROLES, Tokenizer, refuse_surrogates

MASK = "<mask>"
SPACES = " Ġ▁"
"""How tokens spell a space: as it is, as a byte, as SentencePiece does."""


@dataclass(frozen=True)
class Guess:
    """One prediction for one mask."""

    token: str
    """As text, with the space that belongs to it."""
    id: int
    probability: float
    """Share of 1, over the whole vocabulary."""


def fill(text: str, folder: Path | str, top: int = 5) -> list[list[Guess]]:
    """The ``top`` most probable tokens for each ``<mask>`` of ``text``, most probable first.

    Several masks are predicted at once, each without knowing the others' tokens. ``folder``: a run, a step folder, an
    export of kind masked-lm or a Hugging Face masked language model (whose own mask, such as ``[MASK]``, works too).
    Raises ``Refusal`` where there is no mask, the text is too long for a row, or the model cannot fill masks.
    """
    if top < 1:
        raise Refusal("top", str(top), "at least 1")
    refuse_surrogates(text)
    _refuse_without_mask(text, ROLES["mask"])
    source = Source.of(folder)
    tokenizer = source.tokenizer()
    text = text.replace(tokenizer.special_names["mask"], MASK)
    _refuse_without_mask(text, (MASK,))
    ids = [tokenizer.specials.bos, *masked_ids([text], tokenizer)[0], tokenizer.specials.eos]
    if (run := source.run) is not None:
        refuse_rewriting(run)
        _refuse_longer(ids, run.shape.row_tokens)
    model = source.masked_model()
    _refuse_longer(ids, model.shape.row_tokens)
    import torch

    with torch.inference_mode():
        chances = model(torch.tensor([ids])).softmax(-1).topk(min(top, model.shape.vocabulary))
    return [
        [Guess(tokenizer.decode([number]), number, chance) for number, chance in zip(numbers, values, strict=True)]
        for numbers, values in zip(chances.indices.tolist(), chances.values.tolist(), strict=True)
    ]


def _refuse_without_mask(text: str, names: Sequence[str]) -> None:
    if not any(name in text for name in names):
        raise Refusal("text", repr(text[:80]), f"at least one {MASK}")


def _refuse_longer(ids: Sequence[int], row_tokens: int) -> None:
    if len(ids) > row_tokens:
        raise Refusal("text", f"{len(ids)} tokens", f"at most {row_tokens}", "Shorten the text")


def masked_ids(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each text and its masks, no special tokens around; the names of other special tokens are text."""
    import numpy as np

    from latemask.text.words import Encoder as WordEncoder

    names = tokenizer.special_names
    library = WordEncoder(json.loads(tokenizer.library.to_str()), names.values(), names["unk"], np.uint32).library
    mask = str(library.id_to_token(tokenizer.specials.mask))
    library.add_special_tokens([mask])
    masks = re.compile((r"\s*" if ties_spaces(tokenizer) else "") + re.escape(MASK))
    shown = [masks.sub(lambda _: mask, text) for text in texts]
    return [library.encode(text, add_special_tokens=False).ids for text in shown]


def ties_spaces(tokenizer: Tokenizer) -> bool:
    """Whether a space goes with the word behind it (byte-level BPE, Unigram) or vanishes (WordPiece). It does neither
    where each character is a token."""
    goes_with_a_word = any(name[0] in SPACES and len(name) > 1 for name in tokenizer.library.get_vocab() if name)
    one, two = (ids.tolist() for ids in tokenizer.encode_batch(["a", "a a"]))
    return goes_with_a_word or two == one + one

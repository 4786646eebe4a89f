"""A tokenizer written so that AutoTokenizer takes it as it is: ``tokenizer.json`` with the frame of the rows, and its
settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from latemask.hf.filling import ties_spaces
from latemask.text.tokenizer import FILE, Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, row_tokens: int, *, fills_masks: bool = False, is_foreign: bool = False
) -> None:
    """Write ``tokenizer`` for rows of ``row_tokens`` into ``folder``.

    An encoder's tokenizer has no mask token and reads special tokens' names as text, as in pretraining. One of a
    Hugging Face model (``is_foreign``) keeps its frame, where it has one, and its special tokens.
    """
    names = tokenizer.special_names
    bos, eos = names["bos"], names["eos"]
    whole = json.loads(tokenizer.library.to_str())
    library = tokenizers.Tokenizer.from_str(
        json.dumps(whole if is_foreign else _with_special_tokens(whole, tokenizer, fills_masks))
    )
    if not is_foreign or library.post_processor is None:
        frame = processors.TemplateProcessing(
            single=f"{bos} $A {eos}",
            pair=f"{bos} $A {eos} {eos} $B {eos}",
            special_tokens=[(bos, tokenizer.specials.bos), (eos, tokenizer.specials.eos)],
        )
        is_byte_level = "ByteLevel" in json.dumps(whole["pre_tokenizer"])
        trimmed = processors.Sequence([processors.ByteLevel(trim_offsets=True), frame])  # type: ignore[list-item]
        library.post_processor = trimmed if is_byte_level else frame  # type: ignore[assignment]
    library.no_padding()
    library.no_truncation()
    (folder / FILE).write_text(library.to_str(pretty=True), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": row_tokens,
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": bos, "cls_token": bos, "eos_token": eos, "sep_token": eos, "pad_token": names["pad"],
        "unk_token": names["unk"],
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if fills_masks or is_foreign:
        settings["mask_token"] = names["mask"]
    if not fills_masks:
        settings["split_special_tokens"] = True
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_special_tokens(whole: dict[str, Any], tokenizer: Tokenizer, fills_masks: bool) -> dict[str, Any]:
    """The tokenizer's JSON in which the five special tokens are declared; a mask takes the space in front of it."""
    ids = vars(tokenizer.specials)
    others = [token for token in whole["added_tokens"] if token["content"] not in tokenizer.special_names.values()]
    declared = [
        {"id": ids[role], "content": name, "special": True, "normalized": False, "single_word": False, "rstrip": False,
         "lstrip": role == "mask" and fills_masks and ties_spaces(tokenizer)}
        for role, name in tokenizer.special_names.items()
    ]  # fmt: skip
    return whole | {"added_tokens": sorted([*others, *declared], key=lambda token: token["id"])}

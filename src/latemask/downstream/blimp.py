"""Minimal pairs (BLiMP, or any JSON lines with two sentences): the acceptable one has to be the likelier one.

Warstadt et al. 2020: 67 paradigms of 1,000 pairs. Scores are pseudo-log-likelihoods; a tie counts as wrong, and is
reported. Accuracy for each paradigm, field and overall.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latemask.downstream.inputs import Inputs
from latemask.downstream.rows import read_table
from latemask.errors import Refusal
from latemask.writing import json_checksum


@dataclass(frozen=True)
class Pair:
    good: str
    bad: str
    paradigm: str
    field: str
    where: str = ""
    """Its file and line."""


def read_pairs(
    data: Path, good: str = "sentence_good", bad: str = "sentence_bad", first: int | None = None
) -> tuple[list[Pair], dict[str, int], str]:
    """The pairs of a .jsonl file, or of every one in a folder (or its ``data`` folder), the rows refused by file, and a
    fingerprint of all pairs, also of those beyond the ``first``.

    A pair's paradigm is its ``UID``, else the file's name; its field ``field``, else "all" (BLiMP spells one of its
    fields in two ways, with / and with _). ``first``: pairs a file.
    """
    if good == bad:
        raise Refusal("--good, --bad", f"one field, {good!r}", "the fields of two sentences")
    folder = data / "data" if (data / "data").is_dir() else data
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [data]
    if not files:
        below = sorted({str(path.parent) for path in folder.glob("*/*.jsonl")})
        do = f"They lie one folder deeper: {', '.join(below[:5])}" if below else ""
        raise Refusal(data, "no .jsonl file", "a folder of minimal pairs in JSON lines", do)
    pairs, refused, sentences = [], {}, []
    for path in files:
        table = read_table(path, [good, bad], optional=["UID", "field"])
        sentences.append([table.columns[good], table.columns[bad]])
        names, fields = table.columns["UID"], table.columns["field"]
        for number, (one, two) in enumerate(zip(table.columns[good][:first], table.columns[bad][:first], strict=True)):
            if not isinstance(one, str) or not isinstance(two, str) or not one.strip() or not two.strip():
                table.refused.append((table.lines[number], "a sentence that is no text"))
                continue
            paradigm, where = str(names[number] or path.stem), f"{path}:{table.lines[number]}"
            pairs.append(Pair(one, two, paradigm, str(fields[number] or "all").replace("/", "_"), where))
        if table.refused:
            refused[str(path)] = len(table.refused)
    if not pairs:
        raise Refusal(data, "no usable pair", "two sentences a line")
    return pairs, refused, json_checksum({"sentences": sentences})[:16]


def sentence_rows(
    sentences: Sequence[str], inputs: Inputs, whole_words: bool, places: Mapping[str, str] | None = None
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray] | None]:
    """Rows ``<s> sentence </s>``, the places that are scored (all but special tokens), and, for ``whole_words``, the
    word of each place. Raises ``Refusal`` for a sentence of no token, or longer than the model's row, naming its file
    and line where ``places`` has it."""
    before, after = (np.array(part, np.int32) for part in (inputs.frame.before, inputs.frame.after_single))
    rows, scored, words = [], [], []
    encodings = inputs.encodings(sentences) if whole_words else None
    for number, ids in enumerate(inputs.tokenizer.encode_batch(sentences)):
        shown = repr(sentences[number][:60])
        where = (places or {}).get(sentences[number], shown)
        if not len(ids):
            raise Refusal(where, f"no token in {shown}", "a sentence that the model's tokenizer can read")
        if len(before) + len(ids) + len(after) > inputs.most_tokens:
            raise Refusal(
                where, f"{len(ids)} tokens from {shown} on", f"at most {inputs.most_tokens} with special ones"
            )
        rows.append(np.concatenate([before, ids.astype(np.int32), after]))
        scored.append(len(before) + np.arange(len(ids)))
        if encodings is not None:
            # A token of no word (white space alone) is a word of its own.
            own = [-2 - place if word is None else word for place, word in enumerate(encodings[number].word_ids)]
            words.append(np.array([-1] * len(before) + own + [-1] * len(after), np.int32))
    return rows, scored, words if whole_words else None


def accuracies(pairs: Sequence[Pair], good: np.ndarray, bad: np.ndarray) -> dict[str, Any]:
    """Overall ``accuracy``, ``pairs`` and ``ties``; the same by ``fields`` and by ``paradigms`` (with their field).

    ``good`` and ``bad`` [pairs]: log-likelihoods. Right means strictly likelier.
    """
    right, tied = good > bad, good == bad

    def counted(numbers: list[int]) -> dict[str, Any]:
        return {"accuracy": float(right[numbers].mean()), "pairs": len(numbers), "ties": int(tied[numbers].sum())}

    by_field, by_paradigm = defaultdict(list), defaultdict(list)
    for number, pair in enumerate(pairs):
        by_field[pair.field].append(number)
        by_paradigm[pair.field, pair.paradigm].append(number)
    return {
        **counted(list(range(len(pairs)))),
        "fields": {name: counted(numbers) for name, numbers in sorted(by_field.items())},
        "paradigms": {
            name: {"field": field, **counted(numbers)} for (field, name), numbers in sorted(by_paradigm.items())
        },
    }

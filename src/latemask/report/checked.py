"""What the report cannot read a result without: the form of each kind of JSON, checked when a file is read.

A form is a tuple of types, an object's fields with the form of each, or one of ``Each``, ``ListOf``, ``OrNull`` and
``IfThere``.
Fields that the report does not read may be there or not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from latemask.downstream.tasks import SQUAD
from latemask.errors import Refusal

WHOLE, NUMBER, TEXT, FLAG = (int,), (int, float), (str,), (bool,)
NAMES = {WHOLE: "a whole number", NUMBER: "a number", TEXT: "a text", FLAG: "true or false"}


@dataclass(frozen=True)
class Each:
    """An object whose every value has this form; empty where it may be."""

    form: Any
    may_be_empty: bool = False


@dataclass(frozen=True)
class ListOf:
    """A list of one or more of this form; empty where it may be."""

    form: Any
    may_be_empty: bool = False


@dataclass(frozen=True)
class OrNull:
    """This form, or null."""

    form: Any


@dataclass(frozen=True)
class IfThere:
    """A field that may be missing, or of this form."""

    form: Any


ORIGIN = {"run": IfThere(OrNull(TEXT)), "step": IfThere(OrNull(WHOLE)), "pretraining_seconds": IfThere(OrNull(NUMBER))}
STUDY = {"tau": NUMBER, "model": TEXT, **ORIGIN, "rate": NUMBER, "specials": TEXT, "sees_masks": FLAG, "width": WHOLE}
RANK = OrNull({"rank": WHOLE, "centred": WHOLE, "few_vectors": FLAG})
RESIDUAL, SHARE = OrNull({"share": NUMBER}), OrNull(NUMBER)
BOUND = dict.fromkeys(("residual", "one", "infinity_printed", "infinity_corrected", "cubic"), NUMBER)
SCORES = Each(Each(NUMBER))
SETTINGS = dict.fromkeys(("epochs", "learning_rate", "batch_rows", "warmup_share", "seed"), NUMBER)
FINGERPRINT = {"fingerprint": TEXT}
MODEL = {"folder": IfThere(TEXT), **ORIGIN}

FORMS: dict[str, Any] = {
    "rank": {**STUDY, "layers": ListOf({"layer": WHOLE, "masked_input": RANK, "masked_input_real": RANK,
                                        "clean_input": RANK, "masks": RANK})},
    "theory": {**STUDY, "bounds": Each(ListOf(BOUND)), "layers": ListOf({
        "layer": WHOLE, "real_rank": OrNull(WHOLE), "masks_outside": SHARE, "masks_spread_outside": SHARE,
        "real_outside": SHARE, "residual_masked_input": RESIDUAL, "residual_clean_input": RESIDUAL,
        "few_vectors": FLAG})},
    "finetune": {
        "task": TEXT, "title": TEXT, "metric": TEXT, "score": NUMBER, "scores": SCORES, "majority": SCORES,
        "task_kind": IfThere(TEXT), "degenerate": FLAG,
        "degenerate_because": IfThere(ListOf(TEXT, may_be_empty=True)),
        "subset": Each(TEXT, may_be_empty=True), "model": {**MODEL, "weights": TEXT}, "seed": WHOLE,
        "data": Each(FINGERPRINT), "settings": SETTINGS, "train_seconds": NUMBER, "versions": {},
        "card": OrNull(TEXT)},
    "evaluation": {"suite": TEXT, "model": MODEL, "options": IfThere({}),
                   "subset": IfThere(Each(TEXT, may_be_empty=True))},
}  # fmt: skip
SUITES: dict[str, Any] = {
    "blimp": {"score": NUMBER, "accuracy": NUMBER, "pairs": WHOLE, "ties": WHOLE, "fields": Each({"accuracy": NUMBER}),
              "data": IfThere(FINGERPRINT)},
    "masked-loss": {"loss": NUMBER, "loss_per_character": NUMBER, "rate": NUMBER, "masked_tokens": WHOLE,
                    "row_tokens": WHOLE, "rows": IfThere(WHOLE), "tokenizer": IfThere(OrNull(TEXT)),
                    "fingerprint": IfThere(TEXT)},
    "similarity": {"scores": {"dev": {"spearman": NUMBER, "pearson": NUMBER}}, "data": IfThere(FINGERPRINT)},
    "finetuned": {"task": TEXT, "scores": SCORES, "is_constant": FLAG,
                  "data": IfThere(Each(FINGERPRINT, may_be_empty=True))},
}  # fmt: skip
"""Of evaluations, what each suite adds; the report passes over those of other suites."""


def check(file: Path, result: dict[str, Any]) -> None:
    """Raises ``Refusal`` naming the file and the first field that is missing or ill-typed, for a ``result`` whose
    ``kind`` is one of ``FORMS``."""
    _check(file, "", result, FORMS[result["kind"]])
    if result["kind"] == "evaluation":
        _check(file, "", result, SUITES.get(result["suite"], {}))
    if result["kind"] == "finetune":
        for name in ("scores", "majority"):
            for split, values in result[name].items():
                both = ("exact", "f1") if result["task"] == SQUAD.name and name == "scores" else ()
                _check(file, f"{name}.{split}", values, dict.fromkeys((result["metric"], *both), NUMBER))


def _check(file: Path, where: str, value: Any, form: Any) -> None:
    match form:
        case OrNull():
            if value is not None:
                _check(file, where, value, form.form)
        case IfThere():
            _check(file, where, value, form.form)
        case Each():
            if not isinstance(value, dict) or not (value or form.may_be_empty):
                _refuse(file, where, value, "an object with something in it")
            for name, item in value.items():
                _check(file, _inside(where, name), item, form.form)
        case ListOf():
            if not isinstance(value, list) or not (value or form.may_be_empty):
                _refuse(file, where, value, "a list with something in it")
            for number, item in enumerate(value):
                _check(file, f"{where}[{number}]", item, form.form)
        case dict():
            if not isinstance(value, dict):
                _refuse(file, where, value, "an object")
            for name, inner in form.items():
                if name not in value and not isinstance(inner, IfThere):
                    raise Refusal(file, f"no {_inside(where, name)}", "this field", "Make the result anew")
                if name in value:
                    _check(file, _inside(where, name), value[name], inner)
        case _:
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, form) or (isinstance(value, bool) and form != FLAG) or not is_finite:
                _refuse(file, where, value, NAMES[form])


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _refuse(file: Path, where: str, value: Any, wanted: str) -> NoReturn:
    raise Refusal(file, f"{where}, which is {json.dumps(value)[:60]}", wanted, "Make the result anew")

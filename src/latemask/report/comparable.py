"""What does not compare, and why: said here of all numbers that stand side by side.

What a number was measured on is a few named facts. Numbers under one name whose facts differ do not compare: where they
would be compared each gets a name that says its facts, elsewhere a note says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latemask.config import Run
from latemask.report.folders import RunFolder
from latemask.training.journal import PER_MASKED, PER_TOKEN

SAME_TOKENS_SHARE = 0.01
"""Runs whose tokens differ by no more than this share have seen equally many."""
SUBSET, DEGENERATE = "†", "‡"
Facts = Mapping[str, str]
"""What a number was measured on, each in words, by what they say; one that is not known is left out."""

NO_COMPARISON = "these losses do not compare"
ONE_RATE = "With one `--training.validation-rate` for all, when they are trained, they do."
ROWS_NOTE = (
    "Where the decoder rewrites whole rows the loss is a mean over all tokens of the row: it does not compare with the "
    "others, over masked tokens."
)


def differing(each: Iterable[Facts]) -> dict[str, list[str]]:
    """The facts that are not the same in all, with what they are; without those that follow from such as stand before
    them, as a text does from how long its rows are."""
    every = list(each)
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for facts in every for name in facts):
        having = [facts for facts in every if name in facts]
        alike: dict[tuple[str | None, ...], set[str]] = {}
        for facts in having:
            alike.setdefault(tuple(map(facts.get, found)), set()).add(facts[name])
        if any(len(words) > 1 for words in alike.values()):
            found[name] = list(dict.fromkeys(facts[name] for facts in having))
    return found


def told_apart(name: str, facts: Facts, differ: Iterable[str]) -> str:
    """A name that says those facts which ``differ`` among all of that name."""
    return ", ".join([name, *(facts[fact] for fact in differ if fact in facts)])


def of_validation(run: RunFolder) -> dict[str, str]:
    """What a run's validation loss was measured on; nothing without one."""
    valid, fields = run.validation, run.fields
    known = {
        "rate": (valid.get("rate"), _rate),
        "row": (fields.get("shape.row_tokens"), _row),
        "ids": (fields.get("shape.vocabulary"), lambda ids: f"{ids:,} ids"),
        "text": (run.unigram_loss, lambda loss: f"text where word frequencies alone reach {loss:.4f}"),
    }
    if run.text is not None:
        known["text"] = (run.text, lambda text: f"held-out rows {text}")
    return {name: say(value) for name, (value, say) in known.items() if value is not None} if valid else {}


def of_planned(run: Run) -> dict[str, str]:
    """What the validation loss of a run will be measured on, as far as its settings say; nothing without one."""
    if not run.training.validate_every:
        return {}
    return {"rate": _rate(run.validation_rate), "row": _row(run.shape.row_tokens)}


def _rate(rate: float) -> str:
    return f"{100 * rate:.4g}% masked"


def _row(tokens: int) -> str:
    return f"rows of {tokens:,} tokens"


def of_masked_loss(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """What a masked loss was measured on, beside the name of its data and its rate; the text by the path of its data
    where the result has no fingerprint of it."""
    tokenizer, scored = evaluation.get("tokenizer"), evaluation.get("fingerprint")
    path = os.path.normpath(str(evaluation.get("options", {}).get("data", "")))
    return {
        "row": _row(evaluation["row_tokens"]),
        **({"rows": f"{evaluation['rows']:,} rows"} if "rows" in evaluation else {}),
        **({} if tokenizer is None else {"ids": f"tokenizer {tokenizer}"}),
        "data": path if scored is None else f"text {scored}",
    }


def why_not(each: Iterable[Facts], what: str = NO_COMPARISON) -> str:
    """Why numbers measured on these facts do not compare, as a sentence; "" where they do."""
    return _said(differing(each).values(), what)


def _said(reasons: Iterable[Sequence[str]], what: str) -> str:
    told = "; ".join(" and ".join(words) for words in reasons)
    return f"Not measured alike ({told}): {what}." if told else ""


def why_losses_do_not(runs: Sequence[RunFolder]) -> str:
    """Why the validation losses of these runs do not compare; "" where they do. Those of whole rows are another kind of
    number, which ``units`` and ``ROWS_NOTE`` say. Where their masking rates are all that differs, with the remedy."""
    kinds = [[of_validation(run) for run in runs if run.rewrites == rewrites] for rewrites in (False, True)]
    shared = [{name: words for name, words in facts.items() if name != "text"} for kind in kinds for facts in kind]
    texts = [found["text"] for found in map(differing, kinds) if "text" in found]
    differ = differing(shared)
    remedy = f" {ONE_RATE}" if [*differ] == ["rate"] and not texts else ""
    return _said([*differ.values(), *texts], NO_COMPARISON) + remedy


def units(runs: Sequence[RunFolder]) -> str:
    """What the losses of these runs are counted in."""
    if not any(run.rewrites for run in runs):
        return PER_MASKED
    if all(run.rewrites for run in runs):
        return PER_TOKEN
    return f"{PER_MASKED}; {PER_TOKEN} where the decoder rewrites whole rows, which does not compare with the others"


def subsets(parts: Iterable[str]) -> str:
    """What † stands for, of these parts of data; "" where there are none."""
    named = "; ".join(sorted(set(parts)))
    told = f"{SUBSET} The data are a subset, so these numbers are not comparable with published ones: {named}."
    return told if named else ""


def marks(text: str) -> list[str]:
    """A sentence for each mark that stands in ``text``."""
    said = {SUBSET: "On subsets of the data: not to be set beside published numbers.",
            DEGENERATE: "Some of these fine-tunings are degenerate: see the tables."}  # fmt: skip
    return [f"{mark} {sentence}" for mark, sentence in said.items() if mark in text]


def are_equal_tokens(runs: Sequence[RunFolder]) -> bool:
    """Whether all have seen equally many tokens."""
    tokens = [run.reached["tokens"] for run in runs]
    return max(tokens) - min(tokens) <= SAME_TOKENS_SHARE * max(tokens)


def other_cards(runs: Sequence[RunFolder]) -> list[str]:
    """That seconds do not compare, where runs were on different cards."""
    cards = sorted({str(run.cards) for run in runs})
    return [f"On different cards, so seconds do not compare: {', '.join(cards)}."] if len(cards) > 1 else []


def without_flops(runs: Sequence[RunFolder]) -> list[str]:
    """Which runs no FLOPs are known of, and why."""
    names = ", ".join(dict.fromkeys(run.name for run in runs if run.cost("flops") is None))
    why = "their journals do not count them (no plain_flops_per_token), as those of older versions"
    return [f"Without the FLOPs of {names}: {why}."] if names else []


def data_of(evaluation: Mapping[str, Any]) -> str:
    """The name of the data that were evaluated on: of the file, where one of the folder's was asked for."""
    return _path_of(evaluation).name


def data_names(evaluations: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """``data_of`` each by its ``id``; where other data have that name with the folders above that tell them apart, or,
    where none do, with a fingerprint."""
    paths: dict[tuple[str, Any], dict[str, Path]] = {}
    for one in evaluations:
        paths.setdefault(_called(one), {})[_fingerprint(one)] = _path_of(one)
    names = {}
    for one in evaluations:
        name, own, alike = data_of(one), _fingerprint(one), paths[_called(one)]
        others = [path for other, path in alike.items() if own and other not in ("", own)]
        names[id(one)] = (_end(alike[own], others) or f"{name}, data {own[:8]}") if others else name
    return names


def _called(evaluation: Mapping[str, Any]) -> tuple[str, Any]:
    """A folder holds the data of several tasks."""
    return data_of(evaluation), evaluation.get("task")


def _end(path: Path, others: Sequence[Path]) -> str:
    """As much of a path's end as no other ends with; empty where another ends with all of it."""
    ends = (path.parts[-count:] for count in range(1, len(path.parts) + 1))
    return next((str(Path(*end)) for end in ends if all(end != other.parts[-len(end) :] for other in others)), "")


def _path_of(evaluation: Mapping[str, Any]) -> Path:
    options = evaluation.get("options", {})
    data, dev = (str(options.get(name) or "") for name in ("data", "dev"))
    return Path(os.path.normpath(Path(data, dev)))


def _fingerprint(evaluation: Mapping[str, Any]) -> str:
    """Of the data; empty where the result has none."""
    data = evaluation.get("data", {})
    return str(data.get("fingerprint") or "-".join(part["fingerprint"] for part in data.values()))

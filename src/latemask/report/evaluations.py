"""What models are worth as they are, without training: minimal pairs, masked loss, similarity, and saved fine-tuned
models on other data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latemask.downstream.tasks import shown
from latemask.report.comparable import DEGENERATE, SUBSET, data_names, data_of, of_masked_loss, subsets, why_not
from latemask.report.downstream import how, labels, owner, task_title
from latemask.report.folders import RunFolder
from latemask.report.tables import Table, Value, crossed


def _of_suite(folders: Sequence[RunFolder], suite: str) -> list[tuple[RunFolder, dict[str, Any]]]:
    return [(folder, one) for folder in folders for one in folder.of("evaluation") if one["suite"] == suite]


def _mark(evaluation: Mapping[str, Any]) -> str:
    return f" {SUBSET}" if evaluation.get("subset") else ""


def _subsets(evaluations: Iterable[Mapping[str, Any]]) -> str:
    """What † stands for, of these evaluations; "" where none has it."""
    said = subsets(f"{name} {of}" for one in evaluations for name, of in one.get("subset", {}).items())
    return f" {said}" if said else ""


def pairs_table(folders: Sequence[RunFolder]) -> Table | None:
    """Minimal pairs: accuracy by field and overall."""
    given = _of_suite(folders, "blimp")
    names, ones = labels(given), [one for _, one in given]
    data = data_names(ones)
    tells_data = len(set(data.values())) > 1
    found = [(", ".join(word for word in (names[id(one)], tells_data and data[id(one)], how(one)) if word) + _mark(one),
              one) for one in ones]  # fmt: skip
    fields = list(dict.fromkeys(name for _, one in found for name in one["fields"]))
    down = [*fields, "overall", "pairs", "ties (counted wrong)"]

    def cell(row: int, column: int) -> Value:
        one = found[column][1]
        if row < len(fields):
            part = one["fields"].get(fields[row])
            return None if part is None else f"{100 * part['accuracy']:.1f}"
        return (f"{100 * one['accuracy']:.1f}", one["pairs"], one["ties"])[row - len(fields)]

    note = "Accuracy in percent: the acceptable sentence has the higher pseudo-log-likelihood. Chance is 50."
    note += _subsets(one for _, one in found)
    return (
        crossed("Minimal pairs", ("field", "model"), down, [name for name, _ in found], cell, note) if found else None
    )


def masked_loss_table(folders: Sequence[RunFolder]) -> Table | None:
    """Loss of masked tokens on held-out text, of any masked model."""
    given = _of_suite(folders, "masked-loss")
    names = labels(given)
    found = [(names[id(one)], one) for _, one in given]
    columns = ("model", "data", "nats per masked token", "nats per character", "masked", "masked tokens",
               "tokens in a row", "tokenizer")  # fmt: skip
    rows = tuple((name, data_of(one), one["loss"], one["loss_per_character"], f"{100 * one['rate']:.4g}%",
                  one["masked_tokens"], one["row_tokens"], one.get("tokenizer")) for name, one in found)  # fmt: skip
    note = ("The same rows and masks for models of one tokenizer; between tokenizers only losses per character of one "
            "text compare.")  # fmt: skip
    facts = [{"rate": f"{100 * one['rate']:.4g}% masked", **of_masked_loss(one)} for _, one in found]
    note = f"{note} {why_not(facts, 'losses for which one of these differs do not compare')}".rstrip()
    return Table("Masked loss", columns, rows, note) if found else None


def similarity_table(folders: Sequence[RunFolder]) -> Table | None:
    """Cosines of mean-pooled vectors against scores, without fine-tuning."""
    given = _of_suite(folders, "similarity")
    names, data = labels(given), data_names([one for _, one in given])
    rows = tuple((names[id(one)] + _mark(one), data[id(one)],
                  *(f"{100 * one['scores']['dev'][metric]:.1f}" for metric in ("spearman", "pearson")))
                 for _, one in given)  # fmt: skip
    note = "Correlation (times 100) of cosines of mean-pooled vectors with people's scores; nothing was fine-tuned."
    note += _subsets(one for _, one in given)
    return Table("Similarity", ("model", "data", "Spearman", "Pearson"), rows, note) if rows else None


def finetuned_table(folders: Sequence[RunFolder]) -> Table | None:
    """Saved fine-tuned models on development files, one row a file."""
    found = _of_suite(folders, "finetuned")
    data = data_names([one for _, one in found])
    rows = tuple(
        (owner(folder, one["model"]), Path(str(one["model"].get("folder", ""))).name, task_title(task),
         data[id(one)], split, ", ".join(f"{metric} {shown(task, score)}" for metric, score in scores.items())
         + _mark(one) + f" {DEGENERATE}" * one["is_constant"])
        for folder, one in found for task in [one["task"]] for split, scores in one["scores"].items()
    )  # fmt: skip
    note = "As they were saved: nothing was trained further."
    if any(one["is_constant"] for _, one in found):
        note += f" {DEGENERATE} Degenerate: every prediction is the same."
    note += _subsets(one for _, one in found)
    columns = ("run", "saved model", "task", "data", "split", "scores")
    return Table("Saved fine-tuned models", columns, rows, note) if rows else None

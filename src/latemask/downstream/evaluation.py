"""`latemask evaluate`: minimal pairs, masked loss, similarity, and saved fine-tuned models; one JSON each."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latemask import console
from latemask.config import refuse_rewriting
from latemask.downstream.options import EvaluateOptions, refuse_unread
from latemask.downstream.runner import output_folder
from latemask.downstream.tasks import GLUE, Task, own_task, shown
from latemask.errors import Refusal
from latemask.hf.places import refuse_no_place
from latemask.hf.source import Source
from latemask.measurement import refuse_another, say_next
from latemask.out_of_memory import lower, out_of_memory_is_refused
from latemask.text.files import find
from latemask.text.identity import text_identity
from latemask.text.store import SUMMARY
from latemask.training import checkpoint
from latemask.writing import check_file, json_checksum, write_json

if TYPE_CHECKING:
    import torch

MOST_BATCH_TOKENS = 131_072
"""Of minimal pairs on a GPU: enough work for the host to be ahead of it."""
BYTES_A_TOKEN = 1 << 18
"""Of the memory that is free on a GPU."""
MASKED_LOSS_TOKENS = 16_384
"""Of the masked loss on a GPU, whose rows may be masked for the most part: each mask has logits."""
OTHER_BATCH_TOKENS = 4_096
HOW = ("out", "overwrite", "batch_tokens")
"""Options that do not change what is measured."""
PLACES = ("model", "data", "dev")
"""Options that say where something is, not what."""


def run_evaluate(options: EvaluateOptions) -> None:
    """What ``latemask evaluate`` does: see ``evaluate``."""
    say_next(_evaluated(options)[1])


def evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Evaluate, print, write the JSON, and return what it holds. Raises ``Refusal`` for unusable models or data and,
    before anything is run, for counts below 1 and an ``out`` that is a folder, lies in a file or holds the result of
    another measurement."""
    return _evaluated(options)[0]


def _evaluated(options: EvaluateOptions) -> tuple[dict[str, Any], Path]:
    """What the JSON holds, and the JSON."""
    _check(options)
    suites = {"blimp": _blimp, "masked-loss": _masked_loss, "similarity": _similarity, "finetuned": _finetuned}
    found = suites[options.suite](options)
    from latemask.downstream.finetune import card_name, versions

    result = {
        "format": 1,
        "kind": "evaluation",
        "suite": options.suite,
        **found,
        "options": {name: list(value) if isinstance(value, tuple) else value
                    for name, value in dataclasses.asdict(options).items()},
        "card": card_name(_device()),
        "versions": versions(),
    }  # fmt: skip
    out = _place(options, found["identity"], found["model"].get("step"))
    write_json(out, result)
    console.say(f"Written: {out}")
    return result, out


def _check(options: EvaluateOptions) -> None:
    for name in ("first", "rows", "row_tokens", "batch_tokens"):
        count = getattr(options, name)
        if count is not None and count < 1:
            raise Refusal(f"--{name.replace('_', '-')}", str(count), "at least 1")
    refuse_unread(options)
    if not 0 < options.rate < 1:
        raise Refusal("--rate", repr(options.rate), "more than 0 and less than 1")
    if options.out:
        check_file(Path(options.out))
    refuse_no_place(options.model)
    if options.suite != "masked-loss" and not any(map(os.path.exists, filter(None, (options.data, options.dev)))):
        raise Refusal("--data", options.data, "a folder or file that is there")


def _place(options: EvaluateOptions, identity: dict[str, str], step: int | None) -> Path:
    """Where the result goes: by default to a name with a hash of what was measured; of a run's model, of this step."""
    if options.out:
        return Path(options.out)
    tuned = Path(options.model).resolve().name.removesuffix(".model") if options.suite == "finetuned" else ""
    question = json.dumps({**_asked(options), "identity": identity}, sort_keys=True)
    words = [options.suite, tuned, "whole-words" if options.whole_words else "", "" if step is None else f"step-{step}",
             hashlib.sha256(question.encode()).hexdigest()[:8]]  # fmt: skip
    return output_folder("", options.model) / f"{'-'.join(filter(None, words))}.json"


def _asked(options: EvaluateOptions) -> dict[str, Any]:
    """What the result follows from of the options; model and data are known by what they are, not by their places."""
    left_out = (*HOW, *PLACES)
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in left_out}


def _facts(options: EvaluateOptions, data: str, fills_masks: bool = False) -> tuple[Source, dict[str, Any]]:
    """The model, and what the result says of it and of ``data``, the identity of these. Raises ``Refusal`` as
    ``_refuse_another``."""
    source = Source.of(options.model)
    if fills_masks and (run := source.run) is not None:
        refuse_rewriting(run)
    origin = {} if source.step is None else checkpoint.origin(source.step)
    identity = {"model": source.identity, "data": data}
    _refuse_another(options, identity, origin.get("step"))
    return source, {"model": {"folder": options.model, **origin}, "identity": identity}


def _refuse_another(options: EvaluateOptions, identity: dict[str, str], step: int | None = None) -> None:
    """Raise ``Refusal`` where the result of another measurement is where this one's goes; of a run's model, of this
    step."""
    wanted: dict[str, Any] = {"kind": "evaluation", "suite": options.suite, "identity": identity}
    wanted |= {"options": _asked(options)} | ({} if step is None else {"model": {"step": step}})
    refuse_another(_place(options, identity, step), wanted, options.overwrite)


def _device() -> torch.device:
    from latemask.training.distributed import pick_device

    return pick_device()


def _precision(options: EvaluateOptions, device: torch.device) -> Callable[[], AbstractContextManager[None]] | None:
    """fp32 unless bf16 is asked for: the two sentences of a pair are often close."""
    if options.precision != "bf16":
        return None
    from latemask.downstream.settings import Settings
    from latemask.downstream.stepper import autocast

    return lambda: autocast(device, Settings(precision="bf16"))


def _blimp(options: EvaluateOptions) -> dict[str, Any]:
    from latemask.downstream.blimp import accuracies, read_pairs, sentence_rows
    from latemask.downstream.inputs import Inputs

    pairs, refused, fingerprint = read_pairs(Path(options.data), options.good, options.bad, options.first)
    for path, count in refused.items():
        console.warn(f"{path}: {count:,} rows left out: no two sentences")
    source, facts = _facts(options, fingerprint, fills_masks=True)
    from latemask.downstream.likelihood import pseudo_log_likelihoods

    device = _device()
    model, tokenizer = source.masked_model().to(device), source.tokenizer()
    places: dict[str, str] = {}
    for pair in pairs:
        for text in (pair.good, pair.bad):
            places.setdefault(text, pair.where)
    sentences, inputs = list(places), Inputs(tokenizer, model.shape.row_tokens)
    rows, scored, words = sentence_rows(sentences, inputs, options.whole_words, places)
    batch_tokens = _batch_tokens(options, device)
    instead = lower(("--batch-tokens", batch_tokens, max(map(len, rows), default=0)))
    with (
        out_of_memory_is_refused("evaluate", instead),
        console.progress("tokens", sum(map(len, scored)), "tokens") as advance,
    ):
        nats = pseudo_log_likelihoods(
            model, rows, scored, mask=tokenizer.specials.mask, pad=tokenizer.specials.pad, device=device, words=words,
            batch_tokens=batch_tokens, precision=_precision(options, device), advance=advance,
        )  # fmt: skip
    score_of = dict(zip(sentences, nats.tolist(), strict=True))
    import numpy as np

    good, bad = (np.array([score_of[getattr(pair, side)] for pair in pairs]) for side in ("good", "bad"))
    found = accuracies(pairs, good, bad)
    rows_of_table = [(name, f"{100 * part['accuracy']:.1f}", part["pairs"], part["ties"])
                     for name, part in [*found["fields"].items(), ("overall", found)]]  # fmt: skip
    console.table(f"Minimal pairs, {options.model}", ("field", "accuracy", "pairs", "ties (wrong)"), rows_of_table)
    subset = {} if options.first is None else {"pairs": f"the first {options.first:,} of each file"}
    _say_subset(subset)
    return {**facts, "score": found["accuracy"], "refused_rows": refused, "subset": subset,
            "data": {"fingerprint": fingerprint}, **found}  # fmt: skip


def _say_subset(subset: dict[str, str]) -> None:
    if subset:
        parts = ", ".join(f"{name} {mark}" for name, mark in subset.items())
        console.say(f"Subset, not to be set beside published numbers: {parts}")


def _batch_tokens(options: EvaluateOptions, device: torch.device) -> int:
    if options.batch_tokens or device.type != "cuda":
        return options.batch_tokens or OTHER_BATCH_TOKENS
    if options.suite == "masked-loss":
        return MASKED_LOSS_TOKENS
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return min(MOST_BATCH_TOKENS, max(1, free // BYTES_A_TOKEN))


def _masked_loss(options: EvaluateOptions) -> dict[str, Any]:
    from latemask.downstream.held_out import held_out

    if not (Path(options.data) / SUMMARY).is_file():
        find([options.data])
    source, facts = _facts(options, text_identity(options.data), fills_masks=True)
    if (run := source.run) is not None:
        model, most = None, run.shape.row_tokens
    else:  # what another's model takes is known once it is loaded
        model = source.masked_model()
        most = model.shape.row_tokens
    row_tokens = options.row_tokens or min(most, 512)
    if row_tokens > most:
        raise Refusal("--row-tokens", str(row_tokens), f"at most {most}, the model's")
    tokenizer = source.tokenizer()
    stream, names = held_out(Path(options.data), tokenizer, options.rows * (row_tokens - 1))
    from latemask.downstream.masked_loss import masked_loss

    device = _device()
    model = (model or source.masked_model()).to(device)
    batch_tokens = _batch_tokens(options, device)
    with (
        out_of_memory_is_refused("evaluate", lower(("--batch-tokens", batch_tokens, 2 * row_tokens - 1))),
        console.progress("rows", options.rows, "rows") as advance,
    ):
        found = masked_loss(
            model, stream, tokenizer, row_tokens=row_tokens, rate=options.rate, rows=options.rows,
            batch_rows=max(1, batch_tokens // row_tokens), device=device, source_names=names,
            precision=_precision(options, device), advance=advance,
        )  # fmt: skip
    console.say(f"{options.model}: {found['loss']:.4f} nats per masked token ({found['loss_per_character']:.4f} per "
                f"character), {found['masked_tokens']:,} tokens at rate {options.rate:g}")  # fmt: skip
    return {**facts, "score": found["loss"], "tokenizer": tokenizer.fingerprint[:16], **found}


def _similarity(options: EvaluateOptions) -> dict[str, Any]:
    from latemask.downstream.examples import numbered
    from latemask.downstream.glue import read_development
    from latemask.downstream.metrics import pearson, spearman
    from latemask.downstream.problem import cautions, cosines

    if options.task == "own":
        task: Task = own_task("similarity", options.texts, options.label, "", options.dev)
    elif options.task in GLUE and GLUE[options.task].kind == "regression":
        task = dataclasses.replace(GLUE[options.task], kind="similarity")
    else:
        raise Refusal("--task", repr(options.task), "stsb, or own with --texts and --label")
    _, examples = numbered(task, read_development(task, options.data, options.dev))
    held = examples["dev"]
    for line in cautions(task, {"dev": held.summary()}):
        console.warn(line)
    first, second = zip(*held.texts, strict=True)
    facts = _facts(options, held.fingerprint())[1]
    from latemask.hf.vectors import encode

    vectors = encode([*first, *second], options.model, device=_device()).numpy()
    found = cosines(vectors[: len(held)], vectors[len(held) :])
    scores = {"spearman": spearman(found, held.labels), "pearson": pearson(found, held.labels)}
    told = ", ".join(f"{name.capitalize()} {shown(task.name, score)}" for name, score in scores.items())
    console.say(f"{options.model}: {told} of {len(held):,} cosines of mean-pooled vectors")
    subset = task.subset({"dev": len(held)})
    _say_subset(subset)
    return {**facts, "score": scores["spearman"], "scores": {"dev": scores},
            "subset": subset, "data": held.summary()}  # fmt: skip


def _trained_on(facts: dict[str, Any]) -> str | None:
    """The mark of a saved model whose training data were a subset."""
    mark = _of_result(facts, "subset").get("train")
    return None if mark is None else str(mark)


def _length(facts: dict[str, Any]) -> int | None:
    """The length at which a saved model's texts were cut in training; None where it does not say that."""
    length = _of_result(facts, "settings").get("sequence_tokens")
    return length if type(length) is int else None


def _of_result(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """A field of the result that a saved model came with; empty where it has none, for results are not checked."""
    result = facts.get("result")
    found = result.get(name) if isinstance(result, dict) else None
    return found if isinstance(found, dict) else {}


def _finetuned(options: EvaluateOptions) -> dict[str, Any]:
    from latemask.downstream.examples import numbered
    from latemask.downstream.glue import read_development
    from latemask.downstream.problem import TextProblem, cautions, evaluated
    from latemask.downstream.saved import read_facts, task_of
    from latemask.downstream.settings import Settings

    facts = read_facts(options.model)
    task = task_of(facts)
    if task.kind == "span":
        raise Refusal(options.model, "a model for answers", "one for classes, numbers or words")
    task, examples = numbered(task, read_development(task, options.data, options.dev))
    prints = {split: held.fingerprint() for split, held in examples.items()}
    identity = {"model": Source(options.model, None).identity, "data": json_checksum(prints)[:16]}
    _refuse_another(options, identity)
    from latemask.downstream.finetune import predict
    from latemask.downstream.saving import load_finetuned

    device = _device()
    net, model, facts = load_finetuned(options.model)
    settings = Settings(precision=options.precision, sequence_tokens=_length(facts) or Settings().sequence_tokens)
    problem = TextProblem(task, examples, model.inputs(settings), settings, (facts["centre"], facts["spread"]))
    for line in cautions(task, problem.facts["data"]):
        console.warn(line)
    net.to(device)
    evaluation = evaluated(problem, lambda rows: predict(net, rows, model.tokenizer.specials.pad, device, settings))
    if evaluation.broken:
        console.warn(f"{options.model}: {evaluation.broken:,} outputs are not finite, and counted as zeros")
    for split, scores in evaluation.scores.items():
        told = ", ".join(f"{name} {shown(task.name, score)}" for name, score in scores.items())
        console.say(f"{options.model}, {split}: {told}")
    first = next(iter(evaluation.scores.values()))
    if (mark := _trained_on(facts)) is not None:
        problem.facts["subset"] = {"train": mark} | problem.facts["subset"]
    _say_subset(problem.facts["subset"])
    return {"model": {"folder": options.model}, "identity": identity, "task": task.name,
            "score": first[task.metrics[0]], "scores": evaluation.scores, "is_constant": evaluation.is_constant,
            **problem.facts}  # fmt: skip

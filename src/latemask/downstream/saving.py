"""A fine-tuned model on disk: one folder that latemask loads, and transformers where a stock class has the same head.

``config.json`` and ``model.safetensors`` hold encoder and head as ``RobertaForSequenceClassification`` or
``MPNetForSequenceClassification`` (classes and numbers), else the encoder alone (the head of RoFormer's class is
another); ``head.safetensors`` the head, ``finetuned.json`` the class names (``id2label``), the task and the point's
whole result, ``SHA256SUMS`` what all these were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from latemask.downstream.finetune import Model
from latemask.downstream.heads import FineTuned
from latemask.downstream.problem import Problem
from latemask.downstream.saved import FACTS, HEAD, read_facts
from latemask.errors import Refusal
from latemask.hf import stock
from latemask.hf.checksums import write_sums
from latemask.hf.loading import TransformersEncoder
from latemask.hf.tokenization import write_tokenizer
from latemask.training import checkpoint
from latemask.writing import written_aside

STOCK = {"roberta": "RobertaForSequenceClassification", "mpnet": "MPNetForSequenceClassification"}


def save_finetuned(net: FineTuned, model: Model, problem: Problem, result: dict[str, Any], out: Path) -> None:
    """Write ``net`` to the folder ``out``, aside and renamed; one that is there is replaced."""
    head = {} if net.head is None else _plain(net.head.state_dict())
    facts = {
        "result": result,
        "labels": list(problem.task.labels),
        "task": {"name": problem.task.name, "kind": problem.task.kind, "texts": list(problem.task.texts),
                 "label": problem.task.label, "metrics": list(problem.task.metrics)},
        "centre": getattr(problem, "centre", 0.0),
        "spread": getattr(problem, "spread", 1.0),
    }  # fmt: skip
    is_foreign = isinstance(net.encoder, TransformersEncoder)
    with written_aside(out) as aside:
        save_file(head, aside / HEAD)
        _write_encoder(aside, net, model, problem, head)
        most_tokens = min(model.row_tokens, result.get("settings", {}).get("sequence_tokens", model.row_tokens))
        write_tokenizer(aside, model.tokenizer, most_tokens, is_foreign=is_foreign)
        (aside / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_sums(aside)


def load_finetuned(folder: Path | str) -> tuple[FineTuned, Model, dict[str, Any]]:
    """Encoder and head in evaluation mode, the model it was made of, and what ``finetuned.json`` says.

    Raises ``Refusal`` as ``read_facts`` does, for a broken file, and where a weight of encoder or head is missing,
    unexpected or of another shape.
    """
    folder, facts = Path(folder), read_facts(folder)
    try:
        head = load_file(folder / HEAD)
    except (OSError, SafetensorError) as error:
        raise Refusal(folder / HEAD, f"a broken file ({error})", "a safetensors file") from None
    model = Model.load(folder)
    net = FineTuned(model.encoder, facts["task"]["kind"], len(facts["labels"]), 0.0, model.type_token())
    checkpoint.load_strictly(net.head or torch.nn.Module(), head, folder / HEAD)
    return net.eval(), model, facts


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _write_encoder(folder: Path, net: FineTuned, model: Model, problem: Problem, head: dict[str, Tensor]) -> None:
    encoder = net.encoder
    if isinstance(encoder, TransformersEncoder):
        config = encoder.model.config.__class__.from_dict(encoder.model.config.to_dict())
        tensors = _plain(encoder.model.state_dict())
        family = config.model_type if config.model_type in STOCK else ""
        config.architectures = [type(encoder.model).__name__]
    else:
        if model.step is None:
            raise Refusal(model.folder, "an encoder of no run", "a run, a step folder or a Hugging Face model")
        run = checkpoint.read_run(model.step)
        family = stock.family(run.shape)
        config = stock.config_of(run, family, False)
        tensors = _plain(encoder.state_dict())
        if family == "latemask":
            tensors["tokens.weight"] = tensors["tokens.weight"][: run.shape.vocabulary].clone()
            bias = encoder.relative_bias
            if isinstance(bias, torch.nn.Module):
                tensors["relative_bias.bucket_of"] = bias.bucket_of.detach().cpu().clone()  # type: ignore[union-attr]
            config.architectures, family = ["LatemaskModel"], ""
        else:
            tensors = {
                name: part.clone().contiguous() for name, part in stock.to_stock(tensors, run.shape, family).items()
            }
            config.architectures = [f"{stock.PREFIX[family]}Model"]
    if family in STOCK and problem.task.kind in ("classification", "regression"):
        tensors = {f"{family}.{name}": part for name, part in tensors.items() if not name.startswith("pooler.")}
        renamed = {"dense": "classifier.dense", "output": "classifier.out_proj"}
        tensors |= {f"{renamed[part]}.{leaf}": value for (part, _, leaf), value in
                    ((name.partition("."), value) for name, value in head.items())}  # fmt: skip
        config.architectures = [STOCK[family]]
        config.problem_type = "regression" if problem.task.kind == "regression" else "single_label_classification"
        if problem.task.kind == "regression":
            config.num_labels = 1
            spread, centre = getattr(problem, "spread", 1.0), getattr(problem, "centre", 0.0)
            tensors["classifier.out_proj.weight"] = tensors["classifier.out_proj.weight"] * spread
            tensors["classifier.out_proj.bias"] = tensors["classifier.out_proj.bias"] * spread + centre
    if problem.task.labels:
        config.id2label = dict(enumerate(problem.task.labels))
        config.label2id = {name: number for number, name in enumerate(problem.task.labels)}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

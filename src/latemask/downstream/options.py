"""What `latemask finetune` and `latemask evaluate` are told: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from latemask.errors import Refusal

Suite = Literal["blimp", "masked-loss", "similarity", "finetuned"]


@dataclass(frozen=True)
class FinetuneOptions:
    """Fine-tune an encoder on GLUE, SQuAD 2.0 or a task of your own, over a grid and several seeds.

    The folder --out is the queue: one JSON for each point that is done. Starting again goes on, and any number of
    processes and machines can share it.
    """

    model: str
    """A run folder (its newest checkpoint), a step folder, an export, or any Hugging Face encoder (folder or name)."""
    task: tuple[str, ...]
    """mnli qqp qnli sst2 cola rte mrpc stsb, glue for all eight, squad2, or own (with --kind, --texts and --label)."""
    data: str
    """Folder with GLUE's tasks, of one task, with SQuAD's files or your own; or hub:NAME for a hub data set."""
    out: str = ""
    """Folder of results; by default runs/x/downstream for a run and an export in it, runs/NAME/downstream for
    another model."""
    grid: Literal["quick", "paper"] = "quick"
    """quick: one sane point a task. paper: all of MAE-LM Tables 5 (GLUE) and 6 (SQuAD)."""
    size: Literal["auto", "base", "large"] = "auto"
    """Column of the tables; auto: large from a width of 1,024 on."""
    seeds: int = 1
    """Seeds a point, from --seed on; the paper reports medians over 5."""
    seed: int = 0
    """The first seed."""
    epochs: int | None = None
    """Fixes this dimension of the grid, as do the next three."""
    learning_rate: float | None = None
    """Peak."""
    batch_rows: int | None = None
    """Examples an update."""
    warmup_share: float | None = None
    """Share of all updates in which the learning rate rises from 0."""
    sequence_tokens: int = 512
    """Longest input, special tokens included; at most the encoder's."""
    dropout: float = 0.1
    """In encoder and head."""
    weight_decay: float = 0.01
    """AdamW's."""
    clip_norm: float | None = None
    """Largest gradient norm; none: no clipping, as in Tables 5 and 6."""
    patience: int | None = None
    """Early stopping: end after this many epochs in a row without a better score, and keep the best weights."""
    train_rows: int | None = None
    """Use only the first so many training examples (the result is marked a subset)."""
    stride_tokens: int = 128
    """SQuAD: tokens the window moves on; less than its room for the paragraph."""
    query_tokens: int = 64
    """SQuAD: longest question; of longer ones the rest is cut, which is said."""
    answer_tokens: int = 30
    """SQuAD: longest predicted answer."""
    null_threshold: float = 0.0
    """SQuAD: odds of the empty answer above which it is given."""
    train: str = ""
    """File of the training split, where it has another name than the task's own (train.tsv, train-v2.0.json); with
    hub:NAME what the hub calls the split."""
    dev: str = ""
    """File of the development split, likewise."""
    name: str = "own"
    """Own task: what it is called in files and tables."""
    kind: Literal["classification", "regression", "tokens", "similarity"] = "classification"
    """Own task: a class or a number for a text or pair, a class for each word, or a number for a pair by cosine."""
    texts: tuple[str, ...] = ("text",)
    """Own task: column of the text, or two columns."""
    label: str = "label"
    """Own task: column of the label."""
    metrics: tuple[str, ...] = ()
    """Own task: accuracy, macro_f1, f1 (of the second of two classes), matthews, span_f1 (tokens), spearman, pearson;
    the first one is the score. None: the two usual ones of its kind."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 on GPUs that have it."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on CUDA, where a process has 4,000 updates of a task before it or has compiled already."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs; auto: on CUDA."""
    parallel: int = 1
    """Processes that work on the queue here at once, on one GPU or spread over several."""
    together: int = 1
    """Points that each of them trains in turn, on a GPU at the same time: their updates are too small to fill it."""
    save: bool = False
    """Save the fine-tuned model of every point beside its result."""
    predictions: bool = False
    """Write every point's predictions beside its result (SQuAD's always are)."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a model without training it further.

    blimp: minimal pairs by pseudo-log-likelihood. masked-loss: nats per masked token on your text. similarity: cosine
    of mean-pooled vectors against scores. finetuned: a saved fine-tuned model on a development file.
    """

    model: str
    """A run folder, a step folder, an export, any Hugging Face model, or (finetuned) a saved fine-tuned model."""
    suite: Suite
    """blimp, masked-loss, similarity or finetuned."""
    data: str
    """blimp: folder or .jsonl. masked-loss: prepared folder, or text. similarity, finetuned: as in finetune, or the
    development file."""
    out: str = ""
    """The result's JSON; by default a file named by suite, step and settings in the folder where finetune writes."""
    overwrite: bool = False
    """Replace the result of another measurement that is there."""
    task: str = "stsb"
    """similarity: stsb, or own with --texts and --label."""
    texts: tuple[str, ...] = ("sentence1", "sentence2")
    """similarity, own task: two columns."""
    label: str = "score"
    """similarity, own task: column of the score."""
    dev: str = ""
    """similarity, finetuned: file of the development split, where it has another name than the task's own."""
    whole_words: bool = False
    """blimp: while one token of a word is scored, those after it in the word are hidden too."""
    good: str = "sentence_good"
    """blimp: field of the acceptable sentence."""
    bad: str = "sentence_bad"
    """blimp: field of the other one."""
    first: int | None = None
    """blimp: only the first so many pairs of each file; table and JSON say so."""
    rate: float = 0.15
    """masked-loss: masking rate."""
    row_tokens: int | None = None
    """masked-loss: tokens in a row; none: the model's, at most 512."""
    rows: int = 1024
    """masked-loss: most rows."""
    batch_tokens: int | None = None
    """blimp, masked-loss: tokens in a batch; none: 4,096, on a GPU 16,384 or (blimp) up to 131,072 by its free
    memory."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """All but similarity, which is fp32. auto: bf16 on GPUs that have it (blimp and masked-loss: fp32 unless bf16 is
    asked for)."""


OF_OWN = ("name", "kind", "texts", "label", "metrics")
"""Options of ``latemask finetune`` that only a task of one's own reads."""
OF_SUITES: dict[Suite, tuple[str, ...]] = {
    "blimp": ("whole_words", "good", "bad", "first", "batch_tokens", "precision"),
    "masked-loss": ("rate", "row_tokens", "rows", "batch_tokens", "precision"),
    "similarity": ("task", "texts", "label", "dev"),
    "finetuned": ("dev", "precision"),
}
"""Options of ``latemask evaluate`` that only some suites read."""


def refuse_unread(options: FinetuneOptions | EvaluateOptions) -> None:
    """Raise ``Refusal`` for an option that nothing reads of what was asked for: its result would look as if it had."""
    usual = {field.name: field.default for field in fields(options)}
    for name, readers in _unread(options).items():
        if getattr(options, name) != usual[name]:
            flag = f"--{name.replace('_', '-')}"
            raise Refusal(flag, f"no {', nor '.join(readers)}, and nothing else reads it",
                          f"{' or '.join(readers)}, or {flag} left out")  # fmt: skip


def _unread(options: FinetuneOptions | EvaluateOptions) -> dict[str, tuple[str, ...]]:
    """The options that nothing reads of what was asked for, and what would."""
    if isinstance(options, FinetuneOptions):
        return {} if "own" in options.task else dict.fromkeys(OF_OWN, ("--task own",))
    readers: dict[str, tuple[str, ...]] = {}
    for suite, names in OF_SUITES.items():
        for name in names:
            readers[name] = (*readers.get(name, ()), f"--suite {suite}")
    of_suites = {name: suites for name, suites in readers.items() if name not in OF_SUITES[options.suite]}
    return ({} if options.task == "own" else dict.fromkeys(("texts", "label"), ("--task own",))) | of_suites

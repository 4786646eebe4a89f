"""The model card: what an export is, the run's numbers, how to use it, and what it does not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latemask.config import Run
from latemask.console import warn_once
from latemask.training import checkpoint, journal
from latemask.training.plateau import standing

if TYPE_CHECKING:
    from latemask.hf.verification import Verified

METHOD_TAGS = {"mlm": "masked-language-modeling", "three_ml": "3ml", "mae_lm": "mae-lm"}
NO_BETTER = "no better than word frequencies alone"
TAG = "latemask"
"""Of every export's card."""
ReadLines = Callable[[Path], list[dict[str, Any]]]
"""The lines of a journal."""


def card(step: Path, run: Run, verified: Verified, names: dict[str, str], *, fills_masks: bool, has_code: bool) -> str:
    """README.md: YAML head (no license: that is the owner's to choose) and text. ``names`` of the special tokens."""
    method = next((tag for name, tag in METHOD_TAGS.items() if run.recipe.startswith(name)), None)
    tags = [TAG, *([method] if method else []), *(["custom_code"] if has_code else [])]
    task = "fill-mask" if fills_masks else "feature-extraction"
    head = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", *[f"- {tag}" for tag in tags], "---"]
    about = "A masked language model: encoder, what fills the masks, and head." if fills_masks else (
        "A text encoder: to be fine-tuned, or to make vectors of texts.")  # fmt: skip
    parts = [
        "\n".join(head),
        f"# {run.recipe}",
        f"{about} Pretrained with latemask, recipe `{run.recipe}`.",
        "\n".join(["| | |", "| --- | --- |", *[f"| {name} | {value} |" for name, value in numbers(step, run)]]),
        "## Use",
        _use(names, fills_masks, has_code),
        "## To know",
        "\n".join(f"- {point}" for point in _points(run, verified, names, fills_masks, has_code)),
    ]
    return "\n\n".join(parts) + "\n"


def warn_of_frequencies(step: Path | None, read: ReadLines = lambda path: journal.salvaged(path)[0]) -> None:
    """Warn, once in this process, where the journal beside a run's step folder says that up to there the run learned no
    more than word frequencies. Lines of it that cannot be read say nothing, unless ``read`` refuses them."""
    if step is not None and (found := standing(lines_up_to(step, read))):
        warn_once(f"{step}: {NO_BETTER}: validation loss {found[0]:.4f}, theirs {found[1]:.4f}")


def numbers(step: Path, run: Run) -> list[tuple[str, str]]:
    """Rows of the card's table, from ``run`` and, where it is there, the journal beside the step folder."""
    shape = run.shape
    rows = [
        ("encoder", f"{shape.depth} blocks x {shape.width}, {shape.heads} heads, {shape.positions} positions"),
        ("longest row", f"{shape.row_tokens} tokens"),
        ("token ids", f"{shape.vocabulary:,}"),
        ("masking rate in pretraining", run.masking.rates_text),
    ]
    number, lines = checkpoint.step_number(step), lines_up_to(step)
    if number is not None:
        rows.append(("steps", f"{number:,} of {run.training.batch_rows:,} rows"))
    told = {name: [line[name] for line in lines if line.get(name) is not None] for name in ("tokens", "seconds")}
    if told["tokens"]:  # of a run that was stopped between two train lines its end line says the most
        rows.append(("input tokens seen", f"{max(told['tokens']):,}"))
        rows.append(("training time", f"{max(told['seconds'], default=0.0) / 3600:.2f} h"))
    if validated := [line for line in lines if line.get("kind") == "validation"]:
        last = validated[-1]
        if not last["step"] and max(number or 0, *(line.get("step", 0) for line in lines)):
            return [*rows, ("validation loss", "not validated after step 0")]
        rate = f"masking rate {last['rate']:g}, " if isinstance(last.get("rate"), int | float) else ""
        about = f"{rate}step {last['step']:,}"
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f} {journal.loss_unit(run.rewrites)}"
        beside = f"; {NO_BETTER} ({found[1]:.4f})" if (found := standing(lines)) else ""
        rows.append(("validation loss", f"{loss} ({about}){beside}"))
    return rows


def lines_up_to(step: Path, read: ReadLines = journal.read_checked) -> list[dict[str, Any]]:
    """Lines of the journal beside ``step`` up to it; none where there is no journal. A last line cut short is left
    out."""
    path, last_step = step.parent / journal.JOURNAL, checkpoint.step_number(step)
    lines = read(path) if path.is_file() else []
    return [line for line in lines if last_step is None or line.get("step", 0) <= last_step]


def _use(names: dict[str, str], fills_masks: bool, has_code: bool) -> str:
    folder = '"path/to/this/folder"' + (", trust_remote_code=True" if has_code else "")
    if fills_masks:
        code = ["from transformers import pipeline", "", f'fill = pipeline("fill-mask", {folder})',
                f'fill("Paris is the {names["mask"]} of France.")']  # fmt: skip
    else:
        code = ["from transformers import AutoModel, AutoTokenizer", "",
                f"tokenizer = AutoTokenizer.from_pretrained({folder})",
                f"model = AutoModel.from_pretrained({folder})",
                'hidden = model(**tokenizer("Some text.", return_tensors="pt")).last_hidden_state']  # fmt: skip
    shown = "\n".join(["```python", *code, "```"])
    if fills_masks:
        return shown
    sentences = ["from sentence_transformers import SentenceTransformer", "",
                 f'vectors = SentenceTransformer({folder}).encode(["Some text."])']  # fmt: skip
    about = "One vector a text, the mean over its tokens (what `latemask.encode` gives), with sentence-transformers:"
    return "\n\n".join([shown, about, "\n".join(["```python", *sentences, "```"])])


def _points(run: Run, verified: Verified, names: dict[str, str], fills_masks: bool, has_code: bool) -> list[str]:
    bos, eos, mask = names["bos"], names["eos"], names["mask"]
    points = [
        f"A row is `{bos} text {eos}`, a pair `{bos} a {eos} {eos} b {eos}`, at most {run.shape.row_tokens} tokens.",
        "The GELU is the exact one.",
        f"`{verified.model_class}`: a fresh process with transformers {verified.transformers} loaded every weight, "
        f"picked `{verified.tokenizer_class}`, and agreed with the run within {verified.max_difference:.1e} (float64).",
    ]
    if has_code:
        points.append("No class of transformers computes this model: `modeling_latemask.py` comes with it. Read it.")
    if fills_masks:
        points.append(
            f"A space in front of `{mask}` belongs to the predicted token. The names of special tokens in a text are "
            "special tokens here; in pretraining they were text."
        )
        if has_code:
            points.append(
                "Masked tokens stay out of the encoder's sight until they join, as in pretraining. Logits at visible "
                "tokens predict nothing: 0 at the token itself, the lowest number elsewhere."
            )
        return points
    points.append(
        f"Not for filling masks: {_why_not(run, mask)}. The tokenizer declares no mask token, so `fill-mask` stops "
        "instead of answering at random. `latemask export --kind masked-lm` makes a folder that fills masks."
    )
    literals = f"The names of special tokens in a text (`{mask}`, `{eos}`)"
    if verified.literals_are_text:
        points.append(f"{literals} are ordinary text, as in pretraining (`split_special_tokens`).")
    else:
        points.append(f"{literals} become special tokens; in pretraining they were text.")
    if not has_code:
        points.append("The pooler is the identity, not trained: `pooler_output` is tanh of the first token's vector.")
    return points


def _why_not(run: Run, mask: str) -> str:
    first = min((arrival.layer for arrival in run.plan.in_encoder), default=0)
    if run.mask_in_encoder == "never":
        return f"the encoder has never seen `{mask}`"
    return f"its first {first} blocks have never seen `{mask}`" if first else "this export has no head"

"""The border to transformers: models come in from any folder, runs go out as folders that transformers loads.

``places``, ``source`` and ``loading`` (a run, an export, any Hugging Face model), ``vectors`` and ``filling`` (texts to
vectors, masks to words), ``stock`` (RoBERTa's, MPNet's and RoFormer's names for our weights), ``exporting``,
``verification`` (with ``fresh``) and ``card``; ``modeling_latemask`` travels with exports that no stock class computes.
Names are imported when they are asked for, and torch with the first weights: what the command line refuses needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latemask.console import hush_torchao
from latemask.errors import Refusal
from latemask.hf.options import ExportOptions, FillOptions

if TYPE_CHECKING:
    from latemask.hf.exporting import export
    from latemask.hf.filling import Guess, fill
    from latemask.hf.loading import load_encoder, load_masked_model, load_pretrained, load_tokenizer_of
    from latemask.hf.stock import from_transformers
    from latemask.hf.vectors import encode
    from latemask.hf.verification import Exported

hush_torchao()

_HOMES = {
    "exporting": ("export",),
    "filling": ("Guess", "fill"),
    "loading": ("load_encoder", "load_masked_model", "load_pretrained", "load_tokenizer_of"),
    "stock": ("from_transformers",),
    "vectors": ("encode",),
    "verification": ("Exported",),
}

__all__ = [
    "ExportOptions",
    "Exported",
    "FillOptions",
    "Guess",
    "encode",
    "export",
    "fill",
    "from_transformers",
    "load_encoder",
    "load_masked_model",
    "load_pretrained",
    "load_tokenizer_of",
    "run_export",
    "run_fill",
]


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"latemask.hf.{module}"), name)
    raise AttributeError(f"module 'latemask.hf' has no attribute {name!r}")


def run_export(options: ExportOptions) -> None:
    """What ``latemask export`` does: write, verify, and say what was found."""
    from latemask.console import say
    from latemask.hf.exporting import CODE, export

    done = export(options.model, options.out, kind=options.kind, overwrite=options.overwrite)
    say(f"{done.folder}: {done.model_class} and {done.tokenizer_class}, loaded in a fresh process by transformers "
        f"{done.transformers}; largest difference {done.max_difference:.1e}")  # fmt: skip
    if (done.folder / f"{CODE}.py").is_file():
        say(f"No class of transformers computes this model: pass trust_remote_code=True to run {CODE}.py in the folder")


def run_fill(options: FillOptions) -> None:
    """What ``latemask fill`` does: a table of tokens and probabilities for each mask."""
    from latemask.console import say, table
    from latemask.hf.filling import fill

    if options.top < 1:
        raise Refusal("--top", str(options.top), "at least 1")
    masks = fill(options.text, options.model, options.top)
    rows = [(number, repr(guess.token), f"{guess.probability:.4f}")
            for number, guesses in enumerate(masks, 1) for guess in guesses]  # fmt: skip
    say(options.text)
    table("Most probable tokens", ("mask", "token", "probability"), rows)

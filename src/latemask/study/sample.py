"""What a study feeds to an encoder, checked as far as that needs no torch: options, the model's folder, the data."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from latemask.errors import Refusal
from latemask.hf.source import Source
from latemask.text.blocks import Reading
from latemask.text.corpus import read_documents
from latemask.text.files import find
from latemask.text.identity import text_identity
from latemask.text.store import SUMMARY, TokenStore, open_store


@dataclass
class Sample:
    """What is fed to the encoder."""

    model: str
    """A run or step folder, an export, or the folder or name of a Hugging Face masked language model."""
    data: str
    """A folder made by `latemask prepare` (its held-out part is read), or a file of text: .txt, .jsonl, .parquet."""
    tokens: int = 500_000
    """Read about this many tokens; the paper reads 5,000,000. A base-size model needs some 10,000 at least."""
    rate: float | None = None
    """Share of tokens masked; by default the run's own, .15 for other models."""
    specials: Literal["out", "in"] = "out"
    """Whether special tokens such as <s> count among the real ones. Padding never does."""
    sees_masks: Literal["as-trained", "yes", "no"] = "as-trained"
    """Whether the encoder is fed [MASK]: a run knows, and so does what was exported or fine-tuned from one; other
    models are taken to have been trained with it."""
    row_tokens: int = 512
    """Longest row for a model that is not a run, at most what the model takes."""
    micro_rows: int = 8
    """Rows at a time."""
    device: str | None = None
    """Such as cuda or cpu; by default a GPU where there is one."""

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_rows"):
            if getattr(self, name) < 1:
                raise Refusal(f"--{name.replace('_', '-')}", repr(getattr(self, name)), "at least 1")
        for name, allowed in (("specials", ("out", "in")), ("sees_masks", ("as-trained", "yes", "no"))):
            if getattr(self, name) not in allowed:
                raise Refusal(f"--{name.replace('_', '-')}", repr(getattr(self, name)), " or ".join(allowed))
        if self.row_tokens < 3:
            raise Refusal("--row-tokens", repr(self.row_tokens), "at least 3")
        if self.rate is not None and not 0 < self.rate < 1:
            raise Refusal("--rate", repr(self.rate), "more than 0 and less than 1")
        if self.device is not None and not re.fullmatch(r"(cpu|cuda|mps)(:\d{1,3})?", self.device):
            raise Refusal("--device", repr(self.device), "cpu, cuda, one card such as cuda:1, or mps")

    @cached_property
    def source(self) -> Source:
        """The model's folder or name. Raises ``Refusal`` as ``Source.of``."""
        return Source.of(self.model)

    @cached_property
    def store(self) -> TokenStore | None:
        """The data, where they were prepared with the tokenizer that the model was trained with here; else None."""
        if not (Path(self.data) / SUMMARY).is_file():
            return None
        store, is_run = open_store(self.data), self.source.step is not None
        return store if is_run and self.source.tokenizer().fingerprint == store.tokenizer_fingerprint else None

    @property
    def masking_rate(self) -> float:
        """Share of tokens masked, as asked for or else by default."""
        return self.rate or (0.15 if self.source.run is None else self.source.run.masking.rate)

    @cached_property
    def asked(self) -> dict[str, Any]:
        """What the result of a study depends on besides its ``tau``, as its JSON says it: model, data and flags."""
        flags = {"tokens": self.tokens, "sees_masks": self.sees_masks}
        return {
            **({"model": self.model} if self.source.step is None else {}),
            **self.source.origin,
            "data": self.data,
            "rate": self.masking_rate,
            "specials": "counted" if self.specials == "in" else "left out",
            "options": flags if self.store is not None else flags | {"row_tokens": self.row_tokens},
            "identity": {"model": self.source.identity, "data": text_identity(self.data)},
        }

    @property
    def measured(self) -> dict[str, Any]:
        """Of ``asked`` what the result follows from: without the places and names of model and data, for these may
        change, and others may take them."""
        return {name: value for name, value in self.asked.items() if name not in ("model", "run", "data")}

    def check(self) -> None:
        """Raise ``Refusal`` where model and data are not there, or the options ask of a run what it cannot give."""
        run, store = self.source.run, self.store
        if not (Path(self.data) / SUMMARY).is_file() and not self._has_text:
            raise Refusal(self.data, "no text", "text to feed to the encoder")
        if run is None or store is None:
            return
        if self.sees_masks == "yes" and run.mask_in_encoder == "never":
            found = f"yes for {run.recipe}, whose encoder is never shown [MASK]"
            raise Refusal("--sees-masks", found, "as-trained or no")
        masking, row_tokens = dataclasses.replace(run.masking, rate=self.masking_rate), run.shape.row_tokens
        if (masked := masking.masked_tokens(row_tokens)) > row_tokens - 2:
            found = f"{masking.rate:g}, {masked} tokens of a row of {row_tokens}"
            raise Refusal("--rate", found, "at least one token that stays beside `<s>`", "Lower --rate")

    @cached_property
    def _has_text(self) -> bool:
        """Whether the files of text hold a document; taken for granted of a pipe, which can be read once."""
        files = find([self.data])
        if not all(os.path.isfile(file.path) for file in files):
            return True
        return any(read_documents(files, Reading()))

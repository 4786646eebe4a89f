"""What a folder or name means: a step folder, or a Hugging Face folder or name. It is found out without torch, which
comes with the first weights, and without transformers, which comes with the first model that is not latemask's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latemask.config import Run, refuse_rewriting
from latemask.errors import Refusal
from latemask.hf.checksums import check_sums
from latemask.hf.places import CONFIG, SOURCES, check_json, of_no_run, refuse_no_place
from latemask.text.tokenizer import Tokenizer, load_tokenizer
from latemask.training import checkpoint
from latemask.writing import file_checksum, json_checksum

if TYPE_CHECKING:
    from latemask.hf.loading import TransformersEncoder, TransformersMaskedModel
    from latemask.model.encoder import Encoder
    from latemask.model.masked_model import MaskedModel
    from latemask.model.pretrainer import Pretrainer


@dataclass(frozen=True)
class Source:
    """Where a model comes from. Files that carry checksums were checked."""

    name: str
    step: Path | None
    """None: a Hugging Face model."""

    @classmethod
    def of(cls, folder: Path | str, *, takes_older: bool = True) -> Source:
        """Raises ``Refusal`` for a folder that holds neither, for a path that does not exist, and for a file that has
        changed since latemask wrote it; of a run folder's newest checkpoint only unless ``takes_older``."""
        path = Path(folder)
        refuse_no_place(folder)
        if not path.is_dir():
            return cls(str(folder), None)
        if (path / checkpoint.RUN).is_file() or checkpoint.steps(path):
            return cls(str(folder), checkpoint.resolve(path, takes_older=takes_older))
        if not (path / CONFIG).is_file():
            raise Refusal(folder, f"no checkpoint and no {CONFIG}", SOURCES, checkpoint.runs_below(path))
        check_sums(path)
        check_json(path)
        return cls(str(folder), None)

    @property
    def origin(self) -> dict[str, Any]:
        """``checkpoint.origin``; for a model that is no run's each None."""
        if self.step is None:
            return dict.fromkeys(("run", "step", "pretraining_seconds", "recipe"))
        return checkpoint.origin(self.step)

    @property
    def identity(self) -> str:
        """What tells the model from others wherever it lies: 16 hex digits of SHA-256 of its files; of a model of the
        hub its name."""
        if self.step is not None:
            return checkpoint.identity(self.step)
        folder = Path(self.name)
        if not folder.is_dir():
            return self.name
        files = sorted(path for pattern in ("*.json", "*.safetensors") for path in folder.glob(pattern))
        return json_checksum({path.name: file_checksum(path) for path in files})[:16]

    @property
    def run(self) -> Run | None:
        """The run of a step folder; None for a Hugging Face model."""
        return None if self.step is None else checkpoint.read_run(self.step)

    def encoder(self) -> Encoder | TransformersEncoder:
        """See ``loading.load_encoder``."""
        if self.step is not None:
            return checkpoint.read_encoder(self.step)
        from latemask.hf.loading import read_encoder

        return read_encoder(self.name)

    def pretrained(self) -> Pretrainer:
        """See ``loading.load_pretrained``."""
        if self.step is None:
            raise Refusal(self.name, of_no_run(self.name), "a run folder or a step folder: they hold the decoder too")
        return checkpoint.read_pretrainer(self.step)

    def masked_model(self) -> MaskedModel | TransformersMaskedModel:
        """See ``loading.load_masked_model``."""
        if self.step is None:
            from latemask.hf.loading import read_masked_model

            return read_masked_model(self.name)
        refuse_rewriting(checkpoint.read_run(self.step))
        from latemask.model.masked_model import MaskedModel

        return MaskedModel(self.pretrained()).eval()

    def check_masked(self) -> None:
        """Raises ``Refusal`` for a Hugging Face model that is no masked language model, such as a decoder alone."""
        if self.step is None:
            from latemask.hf.loading import check_masked

            check_masked(self.name)

    def tokenizer(self) -> Tokenizer:
        """See ``loading.load_tokenizer_of``."""
        if self.step is not None:
            return load_tokenizer(self.step / checkpoint.TOKENIZER)
        from latemask.hf.loading import read_tokenizer

        return read_tokenizer(self.name)

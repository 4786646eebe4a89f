"""Folders become models: a run, a step folder, an export, or any Hugging Face encoder, all called in the same way.

Weights come from safetensors files, and every key has to find its place. Code beside weights is never run: the classes
of latemask's own exports are registered here. Nothing is fetched unless a Hugging Face name is given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, get_session
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from latemask.config import MaskInEncoder
from latemask.errors import Refusal
from latemask.fields import typed
from latemask.hf.modeling_latemask import LatemaskConfig, LatemaskForMaskedLM, LatemaskModel
from latemask.hf.places import CONFIG, SOURCES
from latemask.hf.source import Source
from latemask.model.encoder import Encoder
from latemask.model.masked_model import MaskedModel
from latemask.model.pretrainer import Pretrainer
from latemask.text.tokenizer import Tokenizer, is_of_library

AutoConfig.register(LatemaskConfig.model_type, LatemaskConfig, exist_ok=True)
AutoModel.register(LatemaskConfig, LatemaskModel, exist_ok=True)
AutoModelForMaskedLM.register(LatemaskConfig, LatemaskForMaskedLM, exist_ok=True)

NO_LIMIT = 1 << 30
"""Row length of a model that has no table of positions and states no limit."""


@dataclass(frozen=True)
class Extent:
    """Of a model that is not latemask's own: the part of ``latemask.config.Shape`` that every encoder has."""

    depth: int
    width: int
    row_tokens: int
    vocabulary: int


class _Foreign(nn.Module):
    """A transformers model, told about padding by ``real`` alone.

    Padding stands on the right; it may stand on either side where the model can be told positions.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        config = model.config
        table = next((part for name, part in model.named_modules()
                      if name.endswith("position_embeddings") and isinstance(part, nn.Embedding)), None)  # fmt: skip
        rows = getattr(config, "max_position_embeddings", NO_LIMIT)
        if table is not None:
            rows = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.counts_from_left = table is not None and table.padding_idx is None and takes_positions
        self.pad = config.pad_token_id if config.pad_token_id is not None else 0
        self.shape = Extent(config.num_hidden_layers, config.hidden_size, rows, config.vocab_size)

    def inputs(self, ids: Tensor, real: Tensor | None) -> dict[str, Tensor]:
        if ids.shape[1] > self.shape.row_tokens:
            wanted = f"at most {self.shape.row_tokens}"
            raise Refusal("input", f"{ids.shape[1]} tokens", wanted, "Truncate or split the text")
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
        given = {"input_ids": ids.masked_fill(~real, self.pad), "attention_mask": real.long()}
        if self.counts_from_left:
            given["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)
        return given


class TransformersEncoder(_Foreign):
    """An encoder of transformers, called like ``latemask.model.encoder.Encoder``."""

    @property
    def mask_in_encoder(self) -> MaskInEncoder | None:
        """``Run.mask_in_encoder`` of the run that the model came from; None where its config.json does not say. Raises
        ``Refusal`` where that says anything else."""
        said = getattr(self.model.config, "mask_in_encoder", None)
        return None if said is None else typed(MaskInEncoder, said, f"{CONFIG}: mask_in_encoder")

    def forward(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N D"]:
        """Last hidden states. Raises ``Refusal`` where N is more than the model's positions."""
        return self.model(**self.inputs(ids, real)).last_hidden_state

    def states(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None) -> list[Float[Tensor, "B N D"]]:
        """Hidden states before the first block and after each block: L + 1 tensors, the last as ``forward`` has it."""
        output = self.model(**self.inputs(ids, real), output_hidden_states=True)
        return [*output.hidden_states[:-1], output.last_hidden_state]


class TransformersMaskedModel(_Foreign):
    """A masked language model of transformers, called like ``latemask.model.masked_model.MaskedModel``."""

    def __init__(self, model: PreTrainedModel, mask: int):
        super().__init__(model)
        self.mask = mask

    def forward(
        self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"] | None = None, masked: int | None = None
    ) -> Float[Tensor, "K T"]:
        """Logits at the K masks of ``ids``, in the order of ``(ids == mask).nonzero()``.

        Where ``masked`` says how many masks each row has (and no token is padding), nothing here waits for the device,
        and only vectors at masks are multiplied with the token table.
        """
        given = self.inputs(ids, real)
        if real is not None or masked is None:
            return self.model(**given).logits[given["input_ids"] == self.mask]
        del given["attention_mask"]
        places = (ids != self.mask).long().argsort(dim=1, stable=True)[:, :masked, None]
        with _only_at(self.model.get_output_embeddings(), ids.shape[1], places):
            logits = self.model(**given).logits
        if logits.shape[1] != masked:  # a head that multiplies in another way
            logits = logits.gather(1, places.expand(-1, -1, logits.shape[2]))
        return logits.flatten(0, 1)


@contextlib.contextmanager
def _only_at(table: nn.Module | None, tokens: int, places: Int[Tensor, "B M 1"]) -> Iterator[None]:
    """Of rows of ``tokens`` vectors ``table`` gets those at ``places`` alone."""

    def chosen(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = given
        if x.ndim == 3 and x.shape[:2] == (len(places), tokens):
            x = x.gather(1, places.expand(-1, -1, x.shape[2]))
        return x, *others

    if table is None:
        yield
        return
    hook = table.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()


def read_encoder(name: str) -> TransformersEncoder:
    """The encoder of a Hugging Face folder or name, see ``load_encoder``."""
    encoder = TransformersEncoder(read_model(name, AutoModel)).eval()
    _refuse_causal(name, encoder)
    return encoder


def read_masked_model(name: str) -> TransformersMaskedModel:
    """The masked language model of a Hugging Face folder or name, see ``load_masked_model``."""
    model = read_model(name, AutoModelForMaskedLM)
    return TransformersMaskedModel(model, read_tokenizer(name).specials.mask).eval()


def check_masked(name: str) -> None:
    """Raises ``Refusal`` for a Hugging Face model that is no masked language model."""
    with quiet(), refusing(name):
        config = AutoConfig.from_pretrained(name, **_options(name))
    _refuse_other_than_masked(name, config)


def read_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or name, see ``load_tokenizer_of``."""
    with quiet(), refusing(name):
        found = AutoTokenizer.from_pretrained(name, **_options(name))
    if not found.is_fast:
        raise Refusal(name, type(found).__name__, "a tokenizer of the tokenizers library (tokenizer.json)")
    tokenizer = Tokenizer(found.backend_tokenizer, name)
    ids = tokenizer.library.get_vocab(with_added_tokens=False).values()
    if set(ids) <= set(tokenizer.specials.ids):
        raise Refusal(name, "a tokenizer of special tokens alone", "tokenizer.json beside the model")
    with quiet(), refusing(name):
        rows = AutoConfig.from_pretrained(name, **_options(name)).vocab_size
    if max(ids) >= rows:
        raise Refusal(name, f"a tokenizer with ids up to {max(ids)}, and {rows} rows of a token table",
                      "the tokenizer that the model was trained with")  # fmt: skip
    return tokenizer


def load_encoder(folder: Path | str) -> Encoder | TransformersEncoder:
    """The encoder of a run, a step folder, an export, or a Hugging Face encoder (folder or name): a ``torch.nn.Module``
    called as ``encoder(ids [B, N] int64, real [B, N] bool) -> [B, N, D]``, in fp32, on the CPU, in evaluation mode.

    ``real`` may be left out where no token is padding; padding may stand on either side and is not counted as a
    position. ``encoder.states(ids, real)`` gives the L + 1 hidden states, ``encoder.shape`` has its depth, width,
    row_tokens and vocabulary. Raises ``Refusal`` for anything else, and where a weight is missing, unexpected or of
    another shape (only a pooler may be).

    >>> encoder = latemask.load_encoder("runs/x")
    >>> encoder(torch.tensor([[0, 35, 46, 2]])).shape
    torch.Size([1, 4, 128])
    """
    return Source.of(folder).encoder()


def load_pretrained(folder: Path | str) -> Pretrainer:
    """Encoder, decoder and head of a run or step folder, in fp32, on the CPU, in evaluation mode.

    Called with a ``latemask.batch.Batch`` it returns the loss of each predicted token in nats, [B, P]. Raises
    ``Refusal`` for anything else, and where a weight is missing, unexpected or of another shape.

    >>> pretrained = latemask.load_pretrained("runs/x")
    >>> pretrained.run.recipe
    'mae_lm_tiny'
    """
    return Source.of(folder).pretrained()


def load_masked_model(folder: Path | str) -> MaskedModel | TransformersMaskedModel:
    """Encoder and decoder as one thing that fills masks, from a run, a step folder, an export of kind masked-lm, or a
    Hugging Face masked language model: called as ``model(ids [B, N], real [B, N]) -> [K, T]``, logits at the K masks.

    Raises ``Refusal`` as ``load_encoder`` does, for a run whose decoder rewrites rows, and for an encoder without head.
    """
    return Source.of(folder).masked_model()


def load_tokenizer_of(folder: Path | str) -> Tokenizer:
    """The tokenizer that a model was trained with, from whatever ``load_encoder`` takes. Raises ``Refusal`` where there
    is none that the ``tokenizers`` library runs, or a special token is missing."""
    return Source.of(folder).tokenizer()


def step_of(folder: Path | str) -> Path | None:
    """The step folder that ``folder`` means; None for a Hugging Face folder or name. Raises ``Refusal`` for neither."""
    return Source.of(folder).step


ATTEMPT_SECONDS = 5.0


def _options(name: str) -> dict[str, Any]:
    """A folder is read where it is, a name may be fetched or else is in the hub's cache; code beside the weights is not
    run."""
    return {"local_files_only": Path(name).is_dir() or not _hub_answers(), "trust_remote_code": False}


@functools.cache
def _hub_answers() -> bool:
    """One attempt, for the library would try each file for half a minute."""
    try:
        get_session().head(constants.ENDPOINT, timeout=ATTEMPT_SECONDS)
    except Exception:  # whatever the HTTP library of this version raises: no network, no name service, offline mode
        return False
    return True


def read_model(name: str, kind: type[AutoModel] | type[AutoModelForMaskedLM]) -> PreTrainedModel:
    """A model of transformers in fp32.

    Raises ``Refusal`` listing each weight that is missing, unexpected or of another shape; a pooler is not asked for,
    nor, for ``AutoModel``, the head on top of the encoder.
    """
    options = _options(name)
    with quiet(), refusing(name):
        config = AutoConfig.from_pretrained(name, **options)
        _refuse_impossible(Path(name), config)
        if kind is AutoModelForMaskedLM:
            _refuse_other_than_masked(name, config)
        elif getattr(config, "is_encoder_decoder", False):
            raise Refusal(name, f"{config.model_type}, an encoder with a decoder", "an encoder alone")
        architecture = str((config.architectures or [""])[0])
        if kind is AutoModelForMaskedLM and architecture.endswith("Model"):
            raise Refusal(name, f"{architecture}, an encoder alone", "a model that fills masks",
                          "Of a run: latemask export RUN --kind masked-lm")  # fmt: skip
        model, report = kind.from_pretrained(
            name, config=config, output_loading_info=True, use_safetensors=True, ignore_mismatched_sizes=True,
            **options,
        )  # fmt: skip
    has_head = not architecture.endswith("Model")
    inside = {model.base_model_prefix, *(name for name, _ in model.named_children())}  # transformers 4 takes it off

    def may_be_ignored(key: str) -> bool:
        is_head = kind is AutoModel and has_head and key.split(".")[0] not in inside
        return is_head or key.endswith("position_ids") or "pooler" in key.split(".")

    odd = [f"missing {key}" for key in report["missing_keys"] if "pooler" not in key.split(".")]
    odd += [f"unexpected {key}" for key in report["unexpected_keys"] if not may_be_ignored(key)]
    odd += [f"misshapen {entry[0] if isinstance(entry, tuple) else entry}" for entry in report["mismatched_keys"]]
    if odd:
        found = ", ".join(sorted(odd)[:6]) + (f" and {len(odd) - 6} more" if len(odd) > 6 else "")
        raise Refusal(name, found, f"the weights of {type(model).__name__}")
    return model.float()


def _refuse_other_than_masked(name: str, config: PretrainedConfig) -> None:
    """Raise ``Refusal`` for a kind of model that transformers has no masked language model of, and for a causal one."""
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or getattr(config, "is_decoder", False):
        found = str((config.architectures or [config.model_type])[0])
        raise Refusal(name, f"{found}, no masked language model", "one such as BERT, RoBERTa, MPNet or ModernBERT")


@torch.no_grad()
def _refuse_causal(name: str, encoder: TransformersEncoder) -> None:
    """Raise ``Refusal`` for a model whose first token is told of the second after no block: a decoder, whatever it is
    called. (Of a dead encoder the last states may all be one.)"""
    last = encoder.shape.vocabulary - 1
    after_blocks = encoder.states(torch.tensor([[last, last - 1], [last, last - 2]]))[1:]
    if last > 1 and after_blocks and all(torch.equal(*states[:, 0]) for states in after_blocks):
        raise Refusal(name, f"{encoder.model.config.model_type}, in which no token sees those after it", "an encoder")


def _refuse_impossible(folder: Path, config: Any) -> None:
    """Raise ``Refusal`` for sizes that the weights in ``folder`` cannot have, before anything of that size is built."""
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        return
    tensors, size = 0, sum(path.stat().st_size for path in weights)
    for path in weights:
        try:
            with safe_open(path, "pt") as file:
                tensors += len(file.keys())
        except SafetensorError as error:
            raise Refusal(path, f"a broken file ({error})", "a safetensors file") from None
    layers, width = config.num_hidden_layers, config.hidden_size
    if layers > tensors or width * max(config.vocab_size, getattr(config, "intermediate_size", 0)) > size:
        found = f"{layers} layers {width} wide, {config.vocab_size} ids"
        raise Refusal(folder / CONFIG, found, f"what {tensors} tensors in {size:,} bytes can hold")


@contextlib.contextmanager
def refusing(name: str) -> Iterator[None]:
    """What transformers raises for a folder or name that it cannot load, as a Refusal."""
    try:
        yield
    except Refusal:
        raise
    except BaseException as error:
        if not is_of_library(error):
            raise
        found = _in_words(error)
        if not Path(name).is_dir():
            reached = "which the hub does not give" if _hub_answers() else "the hub cannot be reached"
            found = f"no such folder, nor (as the name of a Hugging Face model; {reached}) anything to load: {found}"
        raise Refusal(name, found, SOURCES if not Path(name).is_dir() else "a model that transformers loads") from error


def _in_words(error: BaseException) -> str:
    """What transformers found. It checks the type of some fields itself, and stops in the middle of its code where
    others are of another kind than it takes for granted, which says nothing of the file to who reads it."""
    text = " ".join(str(error).split())
    if checked := re.match(r"Validation error for field '(\w+)':.*?\(value: (.*?)\)(;|$)", text):
        return f"{checked[1]} = {checked[2]} in {CONFIG}, of another kind than it takes"
    if isinstance(error, TypeError | AttributeError | LookupError | ArithmeticError | AssertionError):
        named = f" ({error.args[0]})" if isinstance(error, KeyError) and error.args else ""
        return f"a value that it cannot work with{named} in {CONFIG} or the tokenizer's files"
    return text[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the library's warnings and progress bars: what matters is checked and refused here."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()

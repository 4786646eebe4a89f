"""Everything that defines a run, as frozen data: shape, decoder, masking, training.

Each field states its unit and meaning right below itself. Validation happens at construction and names the field.
``Run`` is what ``run.json`` holds beside every checkpoint, and the only source for rebuilding it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from latemask.errors import Refusal, unreadable
from latemask.fields import Spelled, Typed, require, typed
from latemask.joins import Join, Plan, count, early, fraction
from latemask.rates import MOST_RATES, RateStep
from latemask.shapes import Decoder, Shape, Specials, Sublayer

__all__ = ["Decoder", "MaskInEncoder", "Masking", "Run", "Shape", "Specials", "Stage", "Sublayer", "Training",
           "replace", "typed"]  # fmt: skip

MaskInEncoder = Literal["never", "in part", "always"]
"""What ``Run.mask_in_encoder`` says, and ``mask_in_encoder`` in the config.json of what a run becomes."""


@dataclass(frozen=True)
class Masking(Typed):
    """Which tokens are masked, when they join, and what they show when they join early."""

    _part = "masking."

    rate: float = 0.15
    """Share of a row's tokens that is masked; every row masks exactly round(rate * row_tokens)."""
    later_rates: tuple[RateStep, ...] = ()
    """Rates that follow, as START:RATE: from the share START of the run's updates on, RATE. At most five, so that a run
    has at most six. The borders lie between whole updates and follow from the planned number of them alone."""
    predicted_share: float = 1.0
    """Share of a row's masked tokens that is predicted: the last ones to join. The others give no loss (ours)."""
    joins: tuple[Join, ...] = field(default_factory=early)
    """When the masked tokens take their seats. Empty where `delta` says so, or where the decoder rewrites the row."""
    delta: float | None = None
    """Figure 4: this share of the masked tokens joins the encoder's input, the rest the decoder's; None: `joins`."""
    filler: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """Shares of early masked tokens that show [MASK], a random token, their own token (BERT: .8 .1 .1)."""
    vector: Literal["token", "own"] = "token"
    """The mask vector: the token table's `<mask>` row (MAE-LM), or a vector of its own (3ML)."""
    aligned: bool = True
    """Whether the encoder is told true positions; False: visible tokens are numbered 0..V-1 (Table 2, "misaligned")."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.rate < 1, "masking.rate", self.rate, "more than 0 and less than 1")
        require(len(self.later_rates) < MOST_RATES, "masking.later_rates", self._texts(self.later_rates),
                f"at most {MOST_RATES - 1} rates after masking.rate")  # fmt: skip
        rises = all(before.start < after.start for before, after in pairwise(self.later_rates))
        require(rises, "masking.later_rates", self._texts(self.later_rates), "starts that rise")
        require(0 < self.predicted_share <= 1, "masking.predicted_share", self.predicted_share,
                "more than 0, at most 1")  # fmt: skip
        require(self.delta is None or 0 <= self.delta <= 1, "masking.delta", self.delta, "0 <= delta <= 1")
        require(self.delta is None or not self.joins or self._seated() == self._seated(fraction(self.delta)),
                "masking.delta", f"{self.delta} beside masking.joins {self._texts(self.joins)}",
                "one of them: no joins (--masking.joins with nothing after it), or delta none")  # fmt: skip
        require(min(self.filler) >= 0 and abs(sum(self.filler) - 1) < 1e-9, "masking.filler", self.filler,
                "three shares (mask, random, own) that add up to 1")  # fmt: skip

    def masked_tokens(self, row_tokens: int) -> int:
        """M, the same for every row: of the first stage, where later rates follow."""
        return count(self.rate, row_tokens)

    def predicted_tokens(self, row_tokens: int) -> int:
        """How many of these M are predicted, the same for every row."""
        return count(self.predicted_share, self.masked_tokens(row_tokens))

    def at(self, rate: float) -> Masking:
        """The same at one rate throughout."""
        return dataclasses.replace(self, rate=rate, later_rates=())

    def stages(self, updates: int) -> tuple[tuple[int, Masking], ...]:
        """(First batch, masking at the stage's rate) of each stage of a run of so many updates; a stage that would hold
        no batch is left out. Batches beyond the last update, after skipped ones, belong to the last stage."""
        firsts = [0, *(count(step.start, updates) for step in self.later_rates)]
        rates = [self.rate, *(step.rate for step in self.later_rates)]
        stops = [*firsts[1:], max(updates, 1)]
        return tuple((first, self.at(rate)) for first, stop, rate in zip(firsts, stops, rates, strict=True)
                     if first < stop)  # fmt: skip

    @property
    def effective_joins(self) -> tuple[Join, ...]:
        """``joins``, or what ``delta`` says in their place."""
        return self.joins if self.delta is None else fraction(self.delta)

    @property
    def rates_text(self) -> str:
        """The rate in words: 50%, or, of a run, 50%, 30% from 40% on, 15% from 80% on."""
        later = (f"{100 * step.rate:.3g}% from {100 * step.start:.3g}% on" for step in self.later_rates)
        return ", ".join([f"{100 * self.rate:.3g}%", *later])

    def _seated(self, joins: tuple[Join, ...] | None = None) -> list[Join]:
        return [join for join in (self.joins if joins is None else joins) if join.start < join.stop]

    @staticmethod
    def _texts(values: tuple[object, ...]) -> str:
        return " ".join(map(str, values))


@dataclass(frozen=True)
class Training(Typed):
    """The optimizer, the schedule and the loop (MAE-LM Table 4 where the paper says)."""

    _part = "training."
    _newer = frozenset({"graphs", "stops_on_plateau"})

    steps: int = 125_000
    """Updates of the weights."""
    max_tokens: int | None = None
    """Stop after this many input tokens (visible and masked); None: `steps` says."""
    max_seconds: float | None = None
    """Stop after this many seconds of training (compiling, validation and saving left out); the schedule then follows
    the clock. None: `steps` says."""
    batch_rows: int = 2048
    """Rows per update, over all processes."""
    micro_rows: int | None = None
    """Rows per forward pass and process; None: found by trying."""
    learning_rate: float = 5e-4
    """Peak."""
    warmup_share: float = 0.08
    """Share of the run in which the learning rate rises linearly from 0 (base: 10 K of 125 K steps)."""
    decay: Literal["linear", "cosine", "constant"] = "linear"
    """How it falls to 0 afterwards."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    epsilon: float = 1e-6
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """Decoupled; on matrices and tables (tokens, positions, relative bias), not on biases, LayerNorms and a mask vector
    of its own."""
    clip_norm: float | None = 2.0
    """Largest gradient norm; None: no clipping."""
    max_skips: int = 20
    """This many non-finite updates in a row stop the run."""
    stops_on_plateau: bool = False
    """Whether a run ends where it is told to be no better than word frequencies: for trials of settings."""
    recompute: bool = False
    """Whether blocks are computed again in the backward pass: a third more FLOPs, far less memory, the same bits."""
    precision: Literal["auto", "bf16", "fp8", "fp32"] = "auto"
    """auto: bf16 on GPUs that have it, fp32 elsewhere. fp8: bf16, and FP8 in the blocks' linear layers (on an H100,
    L40, RTX 4090 or later)."""
    data_parallel: Literal["replicate", "shard"] = "replicate"
    """replicate: each process holds the whole model (DDP). shard: each holds a share of weights, gradients and moments,
    for a model beyond one card (FSDP2; `batch_rows` a multiple of their number). Checkpoints are the same."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the blocks; auto: on GPUs."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """CUDA graphs: forward and backward in one launch, the same bits; auto: compiled, one process, few rows a pass."""
    seed: int = 0
    """Of weights, data order, masks and dropout."""
    data_seed: int | None = None
    """Of data order and masks alone, where it should differ from `seed`; None: the same."""
    log_every: int = 50
    """Steps between lines of the journal."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints kept, besides step 0 and the best; 0: all of them."""
    validate_every: int = 1000
    """Steps between validations; 0: never."""
    validation_rows: int = 1024
    """Most rows per validation."""
    validation_rate: float | None = None
    """Masking rate of the validation, the same throughout; None: `masking.rate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "batch_rows", "max_skips", "log_every", "save_every", "validation_rows"):
            require(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), "at least 1")
        require(self.batch_rows <= 1 << 24, "training.batch_rows", self.batch_rows, f"at most {1 << 24}")
        for name in ("max_tokens", "max_seconds", "micro_rows", "clip_norm"):
            value = getattr(self, name)
            require(value is None or value > 0, f"training.{name}", value, "more than 0, or none")
        require(self.micro_rows is None or self.micro_rows <= self.batch_rows, "training.micro_rows", self.micro_rows,
                f"at most training.batch_rows {self.batch_rows}")  # fmt: skip
        require(self.learning_rate > 0, "training.learning_rate", self.learning_rate, "more than 0")
        require(0 <= self.warmup_share <= 1, "training.warmup_share", self.warmup_share, "0 <= share <= 1")
        require(all(0 <= beta < 1 for beta in self.betas), "training.betas", self.betas, "two numbers, 0 <= beta < 1")
        require(self.epsilon > 0, "training.epsilon", self.epsilon, "more than 0")
        require(self.weight_decay >= 0, "training.weight_decay", self.weight_decay, "0 or more")
        for name in ("keep", "validate_every"):
            require(getattr(self, name) >= 0, f"training.{name}", getattr(self, name), "0 or more")
        for name in ("seed", "data_seed"):
            value = getattr(self, name)
            require(value is None or 0 <= value < 2**63, f"training.{name}", value, "0 or more, below 2 ** 63")
        require(self.validation_rate is None or 0 < self.validation_rate < 1, "training.validation_rate",
                self.validation_rate, "more than 0 and less than 1, or none")  # fmt: skip

    @property
    def order_seed(self) -> int:
        """Of data order and masks."""
        return self.seed if self.data_seed is None else self.data_seed


class Stage(NamedTuple):
    """A part of a run whose masking rate is one number."""

    first_batch: int
    stop_batch: int
    run: Run
    """The run at this stage's rate."""


@dataclass(frozen=True)
class Run(Typed):
    """One pretraining run: a recipe with every number filled in."""

    recipe: str
    """Name of the recipe it started from."""
    shape: Shape = field(default_factory=Shape)
    decoder: Decoder | None = None
    masking: Masking = field(default_factory=Masking)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        super().__post_init__()
        plan, row_tokens = self.plan, self.shape.row_tokens
        for rate in (self.masking.rate, *(step.rate for step in self.masking.later_rates)):
            where = "masking.rate" if rate == self.masking.rate else "masking.later_rates"
            masked = count(rate, row_tokens)
            require(masked >= 1, where, rate, f"at least one masked token in a row of {row_tokens}")
            require(masked <= row_tokens - 2, where, rate,
                    f"at least one visible token besides `<s>` in a row of {row_tokens}")  # fmt: skip
            require(count(self.masking.predicted_share, masked) >= 1, "masking.predicted_share",
                    self.masking.predicted_share, f"at least one predicted token of {masked} masked ones")  # fmt: skip
        require(not self.masking.later_rates or self.training.max_seconds is None, "training.max_seconds",
                self.training.max_seconds, "none where masking.later_rates follow the number of updates")  # fmt: skip
        require(not self.rewrites or self.masking.predicted_share == 1, "masking.predicted_share",
                self.masking.predicted_share, "1 where the decoder rewrites the whole row")  # fmt: skip
        is_centred = self.decoder is not None and self.decoder.centred
        require(not is_centred or not self.shape.isolate_documents, "decoder.centred", True,
                "False where documents are isolated: a mean over the row is one over all of them")  # fmt: skip
        if self.rewrites:
            require(not plan.arrivals, "masking.joins", self.masking.joins, "none when the decoder rewrites the row")
        elif self.decoder is None:
            require(bool(plan.arrivals), "masking.joins", self.masking.joins, "at least one join")
        require(bool(plan.in_encoder) or self.masking.filler[0] == 1, "masking.filler", self.masking.filler,
                "1 0 0 where no masked token joins inside the encoder")  # fmt: skip
        shows_mask = plan.at_decoder is not None or (bool(plan.in_encoder) and self.masking.filler[0] > 0)
        require(shows_mask or self.masking.vector == "token", "masking.vector", self.masking.vector,
                "token where no masked token shows [MASK]")  # fmt: skip

    @property
    def rewrites(self) -> bool:
        return self.decoder is not None and self.decoder.rewrites

    @property
    def validation_rate(self) -> float:
        """The masking rate of the validation: the one that the run begins with, unless ``training`` has its own."""
        return self.training.validation_rate or self.masking.rate

    @property
    def plan(self) -> Plan:
        """The joins, resolved against the encoder's depth."""
        has_filling_decoder = self.decoder is not None and not self.rewrites
        return Plan.of(self.masking.effective_joins, self.shape.depth, has_filling_decoder)

    @property
    def mask_in_encoder(self) -> MaskInEncoder:
        """How [MASK] (the token table's `<mask>`) stood in the encoder's rows: "always", from the first block on for
        every masked token that shows no other; "in part", later, for some, or as a vector of its own; "never"."""
        if not self.plan.in_encoder or self.masking.filler[0] == 0:
            return "never"
        joins_first = [tuple(arrival) for arrival in self.plan.in_encoder] == [(0, 0.0, 1.0)]
        return "always" if joins_first and self.masking.vector == "token" else "in part"

    @property
    def updates(self) -> int:
        """Planned updates of the weights: ``training.steps``, or as many as ``training.max_tokens`` allow."""
        training = self.training
        if training.max_tokens is None:
            return training.steps
        return min(training.steps, max(1, training.max_tokens // (training.batch_rows * self.shape.row_tokens)))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Where the masking rate changes, and the run at each rate; one stage where it does not change."""
        if not self.masking.later_rates:
            return (Stage(0, self.updates, self),)
        found = self.masking.stages(self.updates)
        stops = [*(first for first, _ in found[1:]), self.updates]
        return tuple(Stage(first, stop, dataclasses.replace(self, masking=masking))
                     for (first, masking), stop in zip(found, stops, strict=True))  # fmt: skip

    @property
    def masked_tokens(self) -> int:
        """M; where the rate changes, that of the first stage."""
        return self.masking.masked_tokens(self.shape.row_tokens)

    @property
    def most_masked_tokens(self) -> int:
        """The largest M of all stages: what every row must be able to carry."""
        return max(stage.run.masked_tokens for stage in self.stages)

    @property
    def predicted_tokens(self) -> int:
        """Predicted positions of a row: masked ones, or all but the first where the row is rewritten."""
        row_tokens = self.shape.row_tokens
        return row_tokens - 1 if self.rewrites else self.masking.predicted_tokens(row_tokens)

    @property
    def visible_tokens(self) -> int:
        """V."""
        return self.shape.row_tokens - self.masked_tokens

    def to_json(self) -> str:
        def plain(value: Any) -> Any:
            if isinstance(value, Spelled):
                return str(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return [plain(item) for item in value] if isinstance(value, tuple) else value

        return json.dumps(plain(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "run.json") -> Run:
        """The inverse of ``to_json``. Raises ``Refusal`` naming the field that is unknown, missing or ill-typed."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refusal(where, unreadable(error), "JSON") from None
        return typed(cls, data, where)


def refuse_rewriting(run: Run) -> None:
    """Raise ``Refusal`` for a run whose decoder rewrites whole rows: it has no distribution for one masked token."""
    if run.rewrites:
        raise Refusal("model", f"{run.recipe}, whose decoder rewrites the row", "a model that fills masks")


def replace(run: Run, changes: dict[str, Any]) -> Run:
    """``run`` with dotted fields changed: ``replace(run, {"training.steps": 10, "masking.rate": .5})``.

    Raises ``Refusal`` for a field that does not exist or a value that breaks a rule.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        part, _, leaf = name.partition(".")
        if name not in _dotted(run):
            where = name or "a field without a name"
            raise Refusal(where, "no such field in this recipe", f"a field such as {', '.join(_alike(name, run))}",
                          f"`latemask pretrain {run.recipe} --help` lists all of them")  # fmt: skip
        parts.setdefault(part, {})[leaf] = value
    return dataclasses.replace(
        run, **{part: dataclasses.replace(getattr(run, part), **leaves) for part, leaves in parts.items()}
    )


def _alike(name: str, run: Run) -> list[str]:
    """Fields with a name like this one, or with its last part; where there is none, two that every recipe has."""
    fields = _dotted(run)
    leaves = {field.rpartition(".")[2] for field in fields}
    near = difflib.get_close_matches(name.rpartition(".")[2], leaves)
    found = [*difflib.get_close_matches(name, fields), *(f for f in fields if f.rpartition(".")[2] in near)]
    return list(dict.fromkeys(found))[:4] or ["masking.rate", "training.steps"]


def _dotted(run: Run) -> list[str]:
    parts = [(part.name, getattr(run, part.name)) for part in dataclasses.fields(run)]
    return [f"{name}.{leaf.name}" for name, part in parts if dataclasses.is_dataclass(part)
            for leaf in dataclasses.fields(part)]  # fmt: skip


def newer_fields(run: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> default, of the fields that the JSON of an older ``run`` lacks, in the parts that it has."""
    found: dict[str, Any] = {}
    for part in (Shape, Decoder, Masking, Training):
        held = run.get(part._part.removesuffix("."))
        if isinstance(held, dict):
            found |= {f"{part._part}{name}": getattr(part, name) for name in part._newer - held.keys()}
    return found

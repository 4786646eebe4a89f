"""The studies of docs/evidence.md as data: which recipes with which flags, and what is measured of each run.

A study is its trials (a recipe and flags), the most telling first, and its measures, which follow each trial. What
`tuning` found best of one system goes into `time` by a call of its own: ``--only roberta --rows 32 --rate 4e-4``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from latemask.errors import Refusal
from latemask.recipes import recipe

WARMUP_SHARE = 0.3
LONG_WARMUP = 2_000
"""Updates: a stack with a decoder bore 4e-4 after 2,289 of them, and not after 915 (docs/evidence.md)."""

Study = Literal[
    "real-text", "real-text-rotary", "objectives", "masks", "delta", "three-ml", "tuning", "collapse", "time"
]
BY_TOKENS: tuple[Study, ...] = ("objectives", "masks", "delta", "three-ml", "time")
Data = Literal["blimp", "glue", "squad"]
Measure = Data | Literal["rank", "theory", "rank-mnli", "rank-squad2"]


class Asked(Protocol):
    """What a study may be told: None leaves it its own."""

    @property
    def study(self) -> Study: ...
    @property
    def seeds(self) -> tuple[int, ...] | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def rows(self) -> int | None: ...
    @property
    def rate(self) -> str | None: ...
    @property
    def size(self) -> str | None: ...


@dataclass(frozen=True)
class Trial:
    """One pretraining."""

    name: str
    recipe: str
    flags: tuple[str, ...]
    stop_at_seconds: float | None = None
    """It is told to stop after so many seconds and then gone on with: a resume in the middle."""
    is_peer: bool = False
    """Whether it is transformers' RoBERTa (roberta.py beside this file), not a recipe."""
    steps: tuple[int, ...] = ()
    """Checkpoints that are measured, in this order; none: the last one."""


def trials_of(asked: Asked) -> tuple[list[Trial], tuple[Measure, ...]]:
    """The trials of a study, one seed after the other, and what is measured of each."""
    found, measures = STUDIES[asked.study]
    trials = found(asked)
    seeds = asked.seeds or ((1, 2, 3) if asked.study == "objectives" else None)
    if seeds is None:
        return trials, measures
    return [
        replace(trial, name=f"{trial.name},seed={seed}", flags=(*trial.flags, "--training.seed", str(seed)))
        for seed in seeds
        for trial in trials
    ], measures


def named(trials: Sequence[Trial], only: Collection[str]) -> list[Trial]:
    """Those of these names, or all where there are none. Raises ``Refusal`` for a name that is none of the trials'."""
    if unknown := set(only) - {trial.name for trial in trials}:
        raise Refusal("--only", ", ".join(sorted(unknown)), f"some of: {' '.join(trial.name for trial in trials)}")
    return [trial for trial in trials if not only or trial.name in only]


def short_run(
    tokens: int, name: str, rows: int = 64, rate: str | None = None, row_tokens: int = 512, dropout: str = "0"
) -> tuple[str, ...]:
    """Flags of recipe ``name`` for some hundred million tokens, ``rows`` an update, all validated at one rate.

    Rotary positions in encoder and decoder, for only so does a decoder's self-attention find the words beside a mask in
    so short a time; a long warm-up to a low rate, for a fast one ends where every vector points the same way
    (results/real-text); no dropout, many updates, and a decoder at half the rate where the warm-up is short
    (results/evidence). The ablation of positions keeps its own.
    """
    steps = max(1, tokens // (row_tokens * rows))
    bears_4e_4 = recipe(name).decoder is None or WARMUP_SHARE * steps >= LONG_WARMUP
    rate = rate or ("4e-4" if bears_4e_4 else "2e-4")
    flags = ("--training.batch-rows", str(rows), "--training.steps", str(steps),
             "--training.learning-rate", rate, "--training.warmup-share", str(WARMUP_SHARE),
             "--training.log-every", str(max(1, steps // 100)), "--training.validate-every", str(max(1, steps // 12)),
             "--training.validation-rate", "0.15", "--training.save-every", "1000000",
             "--shape.dropout", dropout)  # fmt: skip
    if row_tokens != recipe(name).shape.row_tokens:
        flags += ("--shape.row-tokens", str(row_tokens))
    if name.startswith("no_relative"):
        return flags
    decoder = recipe(name).decoder
    rotates = decoder is not None and "self" in decoder.sublayers
    rotary = ("--decoder.positions", "absolute+rotary") if rotates else ()
    return (*flags, "--shape.positions", "rotary", *rotary)


def _short(asked: Asked, name: str, tokens: int, rate: str | None = None) -> tuple[str, ...]:
    """``short_run`` as asked for, else of ``tokens`` and at ``rate``."""
    return short_run(asked.tokens or tokens, name, asked.rows or 64, asked.rate or rate)


def real_text(asked: Asked) -> list[Trial]:
    """Five minutes each with absolute positions, as the papers have them."""
    flags = ("--shape.positions", "absolute", "--training.learning-rate", "5e-4", "--training.warmup-share", "0.1")
    return _five_minutes(asked, flags, ())


def real_text_rotary(asked: Asked) -> list[Trial]:
    """The same with rotary ones, half the rate and twice the warm-up: at 5e-4 the deeper stacks had collapsed within
    300 updates."""
    flags = ("--shape.positions", "rotary", "--training.learning-rate", "2.5e-4", "--training.warmup-share", "0.2")
    return _five_minutes(asked, flags, ("--decoder.positions", "absolute+rotary"))


def _five_minutes(asked: Asked, flags: tuple[str, ...], decoder: tuple[str, ...]) -> list[Trial]:
    size = asked.size or "small"
    flags = ("--training.validation-rate", "0.15", "--training.log-every", "100", "--training.max-seconds", "310",
             *flags)  # fmt: skip
    return [
        Trial(f"mlm_{size}", f"mlm_{size}", flags),
        Trial(f"three_ml_self_{size}", f"three_ml_self_{size}", flags + decoder),
        Trial(f"mae_lm_{size}", f"mae_lm_{size}", flags + decoder, stop_at_seconds=170),
    ]


def objectives(asked: Asked) -> list[Trial]:
    """Both papers' systems beside MLM."""
    clock, size = asked.seconds, asked.size or "base"
    ends = () if clock is None else ("--training.max-seconds", f"{clock:g}")
    label = "" if clock is None else f",seconds={clock:g}"
    return [
        Trial(system + label, f"{system}_{size}", (*_short(asked, f"{system}_{size}", 250_000_000), *ends))
        for system in ("mlm", "mae_lm", "three_ml_self", "three_ml")
    ]


DELTA_ENDS = {"mae_lm": ("--masking.delta", "0"), "mask_in_encoder": ("--masking.delta", "1")}
"""The same runs by another name: in a report of `masks` and `delta` they are the ends of MAE-LM's Figure 4."""


def masks(asked: Asked) -> list[Trial]:
    """Table 2 of MAE-LM: the ways to handle [MASK], and the decoder's attentions, at one rate, which MAE-LM bears."""
    size = asked.size or "small"
    ways = ("mlm", "mask_in_encoder", "decoder_resets_mask", "random_replace", "mae_lm", "misaligned_positions",
            "no_relative", "decoder_self_cross", "decoder_causal_cross", "decoder_cross")  # fmt: skip
    return [
        Trial(way, f"{way}_{size}", (*_short(asked, f"{way}_{size}", 100_000_000, "2e-4"), *DELTA_ENDS.get(way, ())))
        for way in ways
    ]


def delta(asked: Asked) -> list[Trial]:
    """Figure 4 of MAE-LM between its ends."""
    name = f"delta_{asked.size or 'small'}"
    flags = (*_short(asked, name, 100_000_000, "2e-4"), "--masking.delta")
    return [Trial(f"delta={share}", name, (*flags, str(share))) for share in (0.5, 0.25, 0.75)]


MLM_RATES, THREE_ML_RATES = (0.15, 0.5, 0.4, 0.3, 0.6), (0.5, 0.4, 0.3, 0.6, 0.15)
"""Of `three-ml`, the most telling first."""
THREE_ML_SYSTEMS = ("k=0", "self", "cross", "k={1}", "k={2}", "k={0}")
"""Likewise; k counts quarters of the depth."""


def three_ml(asked: Asked) -> list[Trial]:
    """3ML's joins and rates: 15 % MLM and 50 % joining late, then by turns further down both lists."""
    size = asked.size or "base"
    depth = recipe(f"mlm_{size}").shape.depth
    systems: dict[str, tuple[str, tuple[str, ...]]] = {
        "k=0": (f"mlm_{size}", ()),
        "self": (f"three_ml_self_{size}", ()),
        "cross": (f"three_ml_cross_{size}", ()),
    }
    quarters = (depth // 4, depth // 2, 3 * depth // 4)
    for layer in quarters:
        systems[f"k={layer}"] = (f"three_ml_{size}", ("--masking.joins", f"{layer}:0:1"))
    order = sorted(itertools.product(range(len(systems)), range(5)), key=lambda place: (sum(place), place))
    trials = []
    for one, other in order:
        system = THREE_ML_SYSTEMS[one].format(*quarters)
        rate = (THREE_ML_RATES if one else MLM_RATES)[other]
        name, joins = systems[system]
        flags = (*_short(asked, name, 100_000_000), "--masking.rate", str(rate), *joins)
        trials.append(Trial(f"{system},rate={rate}", name, flags))
    return trials


MORE_MASKED = ("--masking.rate", "0.3")
TUNED_ALIKE = (
    ("128x512", 128, 512, "4e-4", ()),
    ("64x512", 64, 512, "4e-4", ()),
    ("32x512", 32, 512, "2e-4", ()),
    ("32x512", 32, 512, "4e-4", ()),
    ("32x512,masked=.3", 32, 512, "2e-4", MORE_MASKED),
    ("128x128", 128, 128, "2e-4", ()),
)
"""What `tuning` tries of every system: a label, rows an update, tokens a row, peak rate, and flags."""
TUNED = {
    "mlm": (*TUNED_ALIKE, ("32x512,masked=.3", 32, 512, "4e-4", MORE_MASKED), ("32x512", 32, 512, "8e-4", ())),
    "mae_lm": (*TUNED_ALIKE, ("64x512", 64, 512, "2e-4", ()), ("32x512", 32, 512, "1e-4", ())),
    "roberta": (*TUNED_ALIKE, ("32x512", 32, 512, "1e-4", ()), ("32x512", 32, 512, "5e-5", ())),
}
"""Two more for each, on the side where its six pointed: MLM's best rate was the highest, the others stayed at word
frequencies at it (results/evidence/tuning)."""


def tuning(asked: Asked) -> list[Trial]:
    """As many trials of the peer's as of ours; what is best then goes into the other studies."""
    trials = []
    for system, tried in TUNED.items():
        name, kept, is_peer = _recipes(system, asked.size or "base")
        for label, rows, row_tokens, rate, more in tried:
            flags = short_run(asked.tokens or 60_000_000, kept, rows, rate, row_tokens, dropout="0.1")
            trials.append(Trial(f"{system},{label},rate={rate}", name, (*flags, *more), is_peer=is_peer))
    return trials


def _recipes(system: str, size: str) -> tuple[str, str, bool]:
    """Of a ``system``: its recipe, the one whose positions it keeps, and whether it is transformers' RoBERTa, which has
    no rotary ones."""
    if system == "roberta":
        return f"mlm_{size}", f"no_relative_{size}", True
    return f"{system}_{size}", f"{system}_{size}", False


SMALL = ("--shape.initial-deviation", "0.01")
AT_HIGH_RATES = (
    ("mae_lm", "", "4e-4", ()),
    ("mae_lm", "centred", "4e-4", ("--decoder.centred", "True")),
    ("mae_lm", "centred", "2e-4", ("--decoder.centred", "True")),
    ("mae_lm", "", "2e-4", ()),
    ("mae_lm", "small", "4e-4", SMALL),
    ("mlm", "", "4e-4", ()),
    ("mlm", "small", "4e-4", SMALL),
    ("mlm", "small", "8e-4", SMALL),
    ("roberta", "small", "4e-4", SMALL),
    ("roberta", "", "1e-4", ()),
)
"""What `collapse` tries against the fall of deep stacks to word frequencies: system, label, peak rate, and flags."""


def collapse(asked: Asked) -> list[Trial]:
    """What keeps deep stacks from staying at word frequencies."""
    trials = []
    for system, way, rate, more in AT_HIGH_RATES:
        name, kept, is_peer = _recipes(system, asked.size or "base")
        label = ",".join(filter(None, (system, way, f"rate={rate}")))
        flags = short_run(asked.tokens or 20_000_000, kept, 64, rate)
        trials.append(Trial(label, name, (*flags, *more), is_peer=is_peer))
    return trials


def time(asked: Asked) -> list[Trial]:
    """Figure 3 of MAE-LM: checkpoints at eighths of the way, beside transformers' RoBERTa."""
    tokens = asked.tokens or 250_000_000
    last = max(1, tokens // (512 * (asked.rows or 64)))
    every = max(1, last // 8)
    often = ("--training.save-every", str(every), "--training.keep", "0")
    eighths = (every * number for number in (4, 2, 6, 1, 3))
    steps = tuple(dict.fromkeys(step for step in (last, *eighths) if step <= last))
    trials = []
    for system in ("mlm", "three_ml", "three_ml_self", "mae_lm", "roberta"):
        name, kept, is_peer = _recipes(system, asked.size or "base")
        flags = (*_short(asked, kept, tokens, "1e-4" if is_peer else None), *often)
        trials.append(Trial(system, name, flags, steps=steps, is_peer=is_peer))
    return trials


STUDIES: Mapping[Study, tuple[Callable[[Asked], list[Trial]], tuple[Measure, ...]]] = {
    "real-text": (real_text, ("blimp", "rank", "theory")),
    "real-text-rotary": (real_text_rotary, ("blimp", "rank", "theory")),
    "objectives": (objectives, ("blimp", "rank", "rank-mnli", "rank-squad2", "glue", "squad")),
    "masks": (masks, ("blimp", "rank", "glue")),
    "delta": (delta, ("blimp", "rank", "glue")),
    "three-ml": (three_ml, ("blimp", "glue")),
    "tuning": (tuning, ("blimp",)),
    "collapse": (collapse, ()),
    "time": (time, ("blimp", "glue")),
}
"""The trials of one seed, and what is measured of each."""
TUNED_FOR: tuple[Data, ...] = ("glue", "squad")
READ_FOR: Mapping[str, tuple[Data, ...]] = {
    "glue": ("glue",), "squad": ("squad",), "blimp": ("blimp",), "first": ("blimp",), "tasks": ("glue",),
    "finetuning_seeds": TUNED_FOR, "parallel": TUNED_FOR, "together": TUNED_FOR, "finetuning": TUNED_FOR,
}  # fmt: skip
"""The data that a flag is for."""
TAKEN_BY: Mapping[str, tuple[Study, ...]] = {
    "seconds": ("objectives",), "seeds": BY_TOKENS, "tokens": (*BY_TOKENS, "tuning", "collapse"),
    "rows": BY_TOKENS, "rate": BY_TOKENS,
    **{flag: tuple(study for study, (_, measures) in STUDIES.items() if not set(data).isdisjoint(measures))
       for flag, data in READ_FOR.items()},
}  # fmt: skip
"""The studies that a flag is for."""

"""One function per system: a recipe returns a whole Run, and a variant is another recipe changed in a few lines.

Names are ``<system>_<size>``. Sizes: tiny (4 x 128, rows of 128), small (12 x 384), base (12 x 768), large
(24 x 1024); ``base_plus`` and ``large_plus`` are MAE-LM's *base++* and *large++* (Table 4). What the papers leave open
is chosen after RoBERTa: LayerNorm epsilon 1e-5, weights from a normal of deviation 0.02, weight decay on matrices only;
``docs/recipes.md`` lists it all. Hours are computed: the plain FLOPs of the whole run at 40 % of the card's peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from latemask.config import Decoder, Masking, Run, Shape, Training
from latemask.errors import Refusal
from latemask.joins import DECODER, Join, early, late
from latemask.rates import RateStep

Size = Literal["tiny", "small", "base", "large", "base_plus", "large_plus"]
SIZES: tuple[Size, ...] = ("tiny", "small", "base", "large")
PAPER_SIZES: tuple[Size, ...] = ("base_plus", "large_plus")


def shape(size: Size) -> Shape:
    """Encoder of a size; base and larger after MAE-LM section 4.1."""
    match size:
        case "tiny":
            return Shape(depth=4, width=128, heads=2, feedforward=512, row_tokens=128)
        case "small":
            return Shape(depth=12, width=384, heads=6, feedforward=1536)
        case "base":
            return Shape()
        case "base_plus":
            return Shape(vocabulary=64000, relative_buckets=64)
        case "large":
            return Shape(depth=24, width=1024, heads=16, feedforward=4096)
        case "large_plus":
            return Shape(depth=24, width=1024, heads=16, feedforward=4096, vocabulary=64000, relative_buckets=128,
                         relative_distance=256)  # fmt: skip


def training(size: Size) -> Training:
    """Table 4 for base and larger; tiny and small are ours, for a laptop and for minutes on one GPU.

    Small: at twice the rate and half the warm-up the stacks with a decoder collapsed (results/real-text/absolute).
    """
    match size:
        case "tiny":
            return Training(steps=2000, batch_rows=64, learning_rate=2e-3, save_every=500, validate_every=500)
        case "small":
            return Training(steps=20_000, batch_rows=128, learning_rate=2.5e-4, warmup_share=0.1)
        case "base":
            return Training()
        case "base_plus":
            return Training(steps=2_000_000, learning_rate=2e-4, warmup_share=0.005, save_every=10_000,
                            validate_every=10_000)  # fmt: skip
        case "large":
            return Training(learning_rate=2e-4, clip_norm=1.0)
        case "large_plus":
            return Training(steps=1_000_000, learning_rate=1e-4, warmup_share=0.01, clip_norm=1.0, save_every=10_000,
                            validate_every=10_000)  # fmt: skip


def decoder(size: Size, depth: int | None = None) -> Decoder:
    """As wide as the encoder; 4 blocks as in MAE-LM section 4.1, 1 for tiny."""
    like = shape(size)
    blocks = depth if depth is not None else (1 if size == "tiny" else 4)
    return Decoder(depth=blocks, width=like.width, heads=like.heads, feedforward=like.feedforward)


def decoder_of_width(size: Size, base_width: int) -> Decoder:
    """A decoder that is to the encoder of ``size`` as ``base_width`` is to 768, to the nearest whole head of 64."""
    heads = round(base_width / 768 * shape(size).width / 64)
    return replace(decoder(size), width=64 * heads, heads=heads, feedforward=256 * heads)


def mlm(size: Size) -> Run:
    """Masked language modelling, all masked tokens shown as [MASK]: MAE-LM's "RoBERTa (Ours)" (Table 1; Table 2,
    "enc. w. [MASK], no dec."), with the paper's relative positions.

    Paper, base: GLUE 85.2, SQuAD 2.0 78.3 / 81.5. ``latemask pretrain mlm_base --data data/en --out runs/mlm``
    Base: 54 hours on one H100 at 40 % of its peak.
    """
    return Run("mlm_" + size, _relative(shape(size)), None, Masking(joins=early()), training(size))


def mlm_80_10_10(size: Size) -> Run:
    """BERT's corruption: of the masked tokens 80 % show [MASK], 10 % a random token, 10 % themselves.

    Paper: MAE-LM does without (its pretraining settings), so there is no number.
    ``latemask pretrain mlm_80_10_10_base --data data/en --out runs/bert``
    Base: 54 hours on one H100 at 40 % of its peak.
    """
    run = mlm(size)
    return replace(run, recipe="mlm_80_10_10_" + size, masking=replace(run.masking, filler=(0.8, 0.1, 0.1)))


def mae_lm(size: Size) -> Run:
    """MAE-LM: the encoder sees real tokens only, a 4-block decoder fills the masks (section 3; Table 1).

    Paper, base: GLUE 86.1, SQuAD 2.0 81.1 / 84.1; base++: 87.8, 83.5 / 86.5; large++: 89.3, 87.0 / 89.8.
    ``latemask pretrain mae_lm_base --data data/en --out runs/mae``
    Base: 63 hours on one H100 at 40 % of its peak; base_plus: 1042 hours, large_plus: 1499 hours.
    """
    return replace(mlm(size), recipe="mae_lm_" + size, decoder=decoder(size), masking=Masking(joins=late()))


def three_ml(size: Size) -> Run:
    """3ML: half of the tokens masked, [MASK]s appended before the last quarter of the encoder, no decoder.

    Paper: the abstract gives the rate and no number for this variant; the layer is ours, and any other is
    ``--masking.joins LAYER``. ``latemask pretrain three_ml_base --data data/en --out runs/3ml``
    Base: 39 hours on one H100 at 40 % of its peak.
    """
    plain = shape(size)
    masking = Masking(rate=0.5, joins=(Join(plain.depth - max(1, plain.depth // 4)),), vector="own")
    return Run("three_ml_" + size, plain, None, masking, training(size))


def three_ml_self(size: Size) -> Run:
    """3ML_self: half of the tokens masked, a small self-attention decoder over the whole row.

    Paper: RoBERTa-base's GLUE at 78 % of its compute, large at 68 %; decoder depth (2, large 4, tiny 1) is ours.
    ``latemask pretrain three_ml_self_base --data data/en --out runs/3ml-self``
    Base: 41 hours on one H100 at 40 % of its peak.
    """
    depth = {"tiny": 1, "large": 4, "large_plus": 4}.get(size, 2)
    masking = Masking(rate=0.5, joins=late(), vector="own")
    return Run("three_ml_self_" + size, shape(size), decoder(size, depth), masking, training(size))


def three_ml_cross(size: Size) -> Run:
    """3ML_cross: as 3ML_self, each decoder block also attends to the encoder's output.

    Paper: the abstract gives no number for this variant.
    ``latemask pretrain three_ml_cross_base --data data/en --out runs/3ml-cross``
    Base: 43 hours on one H100 at 40 % of its peak.
    """
    run = three_ml_self(size)
    assert run.decoder is not None
    return replace(run, recipe="three_ml_cross_" + size, decoder=replace(run.decoder, sublayers=("self", "cross")))


def three_ml_random_kept(size: Size) -> Run:
    """3ML as its Figure 2 shows it: a fifth of the masked tokens stays in the encoder's input, half of them replaced by
    random tokens and half as they are (the 10/10 of 80/10/10); the rest joins the decoder as [MASK].

    Paper: the abstract gives no number for this variant.
    ``latemask pretrain three_ml_random_kept_base --data data/en --out runs/3ml-kept``
    Base: 46 hours on one H100 at 40 % of its peak.
    """
    run = three_ml_self(size)
    joins = (Join(0, 0.0, 0.2), Join(DECODER, 0.2, 1.0))
    masking = replace(run.masking, joins=joins, filler=(0.0, 0.5, 0.5))
    return replace(run, recipe="three_ml_random_kept_" + size, masking=masking)


def mask_in_encoder(size: Size) -> Run:
    """MAE-LM's decoder after an encoder that has seen [MASK] from the start (Table 2, "enc. w. [MASK]").

    Paper, base: GLUE 85.1. ``latemask pretrain mask_in_encoder_base --data data/en --out runs/mask-in-encoder``
    Base: 72 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="mask_in_encoder_" + size, masking=Masking(joins=early()))


def decoder_resets_mask(size: Size) -> Run:
    """The encoder sees [MASK], the decoder starts from the bare mask vector again (Table 2, "enc. w. [MASK], dec.
    resets [MASK]").

    Paper, base: GLUE 85.9. ``latemask pretrain decoder_resets_mask_base --data data/en --out runs/resets``
    Base: 72 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="decoder_resets_mask_" + size, masking=Masking(joins=early() + late()))


def random_replace(size: Size) -> Run:
    """Masked tokens show a random token to the encoder, never [MASK] (Table 2, "random replace w. real token").

    Paper, base: GLUE 85.1. ``latemask pretrain random_replace_base --data data/en --out runs/random-replace``
    Base: 72 hours on one H100 at 40 % of its peak.
    """
    masking = Masking(joins=early(), filler=(0.0, 1.0, 0.0))
    return replace(mae_lm(size), recipe="random_replace_" + size, masking=masking)


def misaligned_positions(size: Size) -> Run:
    """The encoder numbers its visible tokens 0..V-1, the decoder knows the true positions (Table 2, "misaligned
    position encoding").

    Paper, base: GLUE 86.0. ``latemask pretrain misaligned_positions_base --data data/en --out runs/misaligned``
    Base: 63 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="misaligned_positions_" + size, masking=Masking(joins=late(), aligned=False))


def no_relative(size: Size) -> Run:
    """MAE-LM with absolute positions alone (Table 2, "no relative position encoding").

    Paper, base: GLUE 86.1. ``latemask pretrain no_relative_base --data data/en --out runs/no-relative``
    Base: 63 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="no_relative_" + size, shape=shape(size))


def decoder_self_cross(size: Size) -> Run:
    """Each decoder block also attends to the encoder's output (Table 2, "bi. self-attention + cross-attention").

    Paper, base: GLUE 85.4. ``latemask pretrain decoder_self_cross_base --data data/en --out runs/self-cross``
    Base: 69 hours on one H100 at 40 % of its peak.
    """
    both = replace(decoder(size), sublayers=("self", "cross"))
    return replace(mae_lm(size), recipe="decoder_self_cross_" + size, decoder=both)


def decoder_causal_cross(size: Size) -> Run:
    """Like BART: the decoder rewrites the whole row from left to right (Table 2, "uni. self-attention +
    cross-attention").

    Paper, base: GLUE 85.5. ``latemask pretrain decoder_causal_cross_base --data data/en --out runs/causal-cross``
    Base: 81 hours on one H100 at 40 % of its peak.
    """
    causal = replace(decoder(size), sublayers=("self", "cross"), rewrites=True)
    return replace(mae_lm(size), recipe="decoder_causal_cross_" + size, decoder=causal, masking=Masking(joins=()))


def decoder_cross(size: Size) -> Run:
    """Masked positions look at the encoder's output only, not at each other (Table 2, "cross-attention").

    Paper, base: GLUE 86.0. ``latemask pretrain decoder_cross_base --data data/en --out runs/cross``
    Base: 62 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="decoder_cross_" + size, decoder=replace(decoder(size), sublayers=("cross",)))


def decoder_2_layers(size: Size) -> Run:
    """A decoder of 2 blocks at every size (Table 2, "2 layer, 768 dimension").

    Paper, base: GLUE 85.8. ``latemask pretrain decoder_2_layers_base --data data/en --out runs/2-layers``
    Base: 54 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="decoder_2_layers_" + size, decoder=decoder(size, 2))


def decoder_6_layers(size: Size) -> Run:
    """A decoder of 6 blocks at every size (Table 2, "6 layer, 768 dimension").

    Paper, base: GLUE 84.8. ``latemask pretrain decoder_6_layers_base --data data/en --out runs/6-layers``
    Base: 72 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="decoder_6_layers_" + size, decoder=decoder(size, 6))


def decoder_512_wide(size: Size) -> Run:
    """A decoder of two thirds of the encoder's width (Table 2, "4 layer, 512 dimension"), in whole heads of 64: 64 for
    tiny, 256 for small, 512 for base, 704 for large.

    Paper, base: GLUE 85.8. ``latemask pretrain decoder_512_wide_base --data data/en --out runs/512-wide``
    Base: 54 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="decoder_512_wide_" + size, decoder=decoder_of_width(size, 512))


def decoder_1024_wide(size: Size) -> Run:
    """A decoder of four thirds of the encoder's width (Table 2, "4 layer, 1024 dimension"), in whole heads of 64: 192
    for tiny, 512 for small, 1024 for base, 1344 for large.

    Paper, base: GLUE 85.5. ``latemask pretrain decoder_1024_wide_base --data data/en --out runs/1024-wide``
    Base: 76 hours on one H100 at 40 % of its peak.
    """
    return replace(mae_lm(size), recipe="decoder_1024_wide_" + size, decoder=decoder_of_width(size, 1024))


def delta(size: Size) -> Run:
    """Between MAE-LM (delta 0) and an encoder with every [MASK] (delta 1): half of the masks join early (Figure 4).

    Paper, base: the more join early, the lower GLUE; 86.1 at 0, about MLM's 85.2 at 1.
    ``latemask sweep delta_base --vary masking.delta=0,.25,.5,.75,1 --data data/en --out runs/delta``
    Base: 67 hours on one H100 at 40 % of its peak, a value.
    """
    return replace(mae_lm(size), recipe="delta_" + size, masking=Masking(joins=(), delta=0.5))


def gradual(size: Size) -> Run:
    """MLM whose masks arrive in three parts: .3 at the first block, .3 after a third of the encoder, .4 after two
    thirds; no decoder. Ours: no paper has this row.

    ``latemask pretrain gradual_base --data data/en --out runs/gradual``
    Base: 51 hours on one H100 at 40 % of its peak.
    """
    run = mlm(size)
    third = run.shape.depth // 3
    joins = (Join(0, 0.0, 0.3), Join(third, 0.3, 0.6), Join(2 * third, 0.6, 1.0))
    return replace(run, recipe="gradual_" + size, masking=Masking(joins=joins))


def falling_rate(size: Size) -> Run:
    """3ML_self whose masking rate falls in five equal parts of the run: 50, 40, 30, 20, 15 %. Ours: no paper has this
    row.

    ``latemask pretrain falling_rate_base --data data/en --out runs/falling``
    Base: 48 hours on one H100 at 40 % of its peak.
    """
    run = three_ml_self(size)
    steps = (RateStep(0.2, 0.4), RateStep(0.4, 0.3), RateStep(0.6, 0.2), RateStep(0.8, 0.15))
    return replace(run, recipe="falling_rate_" + size, masking=replace(run.masking, later_rates=steps))


def predict_subset(size: Size) -> Run:
    """3ML_self that predicts three tenths of its masked tokens, as many as MLM at 15 % does; the other masked tokens
    give no loss. Ours: no paper has this row.

    ``latemask pretrain predict_subset_base --data data/en --out runs/subset``
    Base: 36 hours on one H100 at 40 % of its peak.
    """
    run = three_ml_self(size)
    return replace(run, recipe="predict_subset_" + size, masking=replace(run.masking, predicted_share=0.3))


def _relative(plain: Shape) -> Shape:
    return replace(plain, positions="absolute+relative")


SYSTEMS: tuple[Callable[[Size], Run], ...] = (
    mlm, mlm_80_10_10, three_ml, three_ml_self, three_ml_cross, three_ml_random_kept, mae_lm, mask_in_encoder,
    decoder_resets_mask, random_replace, misaligned_positions, no_relative, decoder_self_cross, decoder_causal_cross,
    decoder_cross, decoder_2_layers, decoder_6_layers, decoder_512_wide, decoder_1024_wide, delta, gradual,
    falling_rate, predict_subset,
)  # fmt: skip
PAPER_SYSTEMS = (mlm, mae_lm)


def names() -> list[str]:
    """Every recipe name."""
    return [f"{system.__name__}_{size}" for system in SYSTEMS for size in SIZES] + [
        f"{system.__name__}_{size}" for system in PAPER_SYSTEMS for size in PAPER_SIZES
    ]


def of_the_size(name: str) -> list[str]:
    """The recipe names of the same size, this one among them."""
    ends = tuple(f"_{size}" for size in SIZES + PAPER_SIZES if name.endswith(f"_{size}"))
    return [other for other in names() if other.endswith(ends)]


def recipe(name: str) -> Run:
    """The Run of a recipe by its name. Raises ``Refusal`` listing the close ones."""
    for system in SYSTEMS:
        for size in SIZES + (PAPER_SIZES if system in PAPER_SYSTEMS else ()):
            if name == f"{system.__name__}_{size}":
                return system(size)
    import difflib

    close = difflib.get_close_matches(name, names(), n=4, cutoff=0.4) or names()[:4]
    raise Refusal("recipe", repr(name), f"one of `latemask recipes`, such as {', '.join(close)}")

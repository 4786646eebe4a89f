"""Recipes: every system at every size is the row of the papers' tables that its docstring names."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from latemask import config, recipes
from latemask.cli.cost import run_cost
from latemask.cli.sweep import points, read_vary
from latemask.config import Run, Shape, Training
from latemask.errors import Refusal
from latemask.joins import DECODER, Join
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import PAPER_SIZES, SIZES, SYSTEMS, names, recipe
from latemask.study.cost import cost
from samples import batch_of

DOCS = Path(__file__).parents[1] / "docs"

TABLE_2 = {
    "mae_lm": 86.1, "mlm": 85.2, "mask_in_encoder": 85.1, "decoder_resets_mask": 85.9, "random_replace": 85.1,
    "misaligned_positions": 86.0, "no_relative": 86.1, "decoder_self_cross": 85.4, "decoder_causal_cross": 85.5,
    "decoder_cross": 86.0, "decoder_2_layers": 85.8, "decoder_6_layers": 84.8, "decoder_512_wide": 85.8,
    "decoder_1024_wide": 85.5,
}  # fmt: skip
"""GLUE averages of the paper."""

GROWING = (Join(0, 0, 0.3), Join(4, 0.3, 0.6), Join(8, 0.6, 1))
FIGURE = {
    # system: joins, filler, decoder (sublayers, depth, width), rate
    "mlm": ((Join(0),), (1, 0, 0), None, 0.15),
    "mlm_80_10_10": ((Join(0),), (0.8, 0.1, 0.1), None, 0.15),
    "three_ml": ((Join(9),), (1, 0, 0), None, 0.5),
    "three_ml_self": ((Join(DECODER),), (1, 0, 0), (("self",), 2, 768), 0.5),
    "three_ml_cross": ((Join(DECODER),), (1, 0, 0), (("self", "cross"), 2, 768), 0.5),
    "three_ml_random_kept": ((Join(0, 0, 0.2), Join(DECODER, 0.2, 1)), (0, 0.5, 0.5), (("self",), 2, 768), 0.5),
    "mae_lm": ((Join(DECODER),), (1, 0, 0), (("self",), 4, 768), 0.15),
    "mask_in_encoder": ((Join(0),), (1, 0, 0), (("self",), 4, 768), 0.15),
    "decoder_resets_mask": ((Join(0), Join(DECODER)), (1, 0, 0), (("self",), 4, 768), 0.15),
    "random_replace": ((Join(0),), (0, 1, 0), (("self",), 4, 768), 0.15),
    "misaligned_positions": ((Join(DECODER),), (1, 0, 0), (("self",), 4, 768), 0.15),
    "no_relative": ((Join(DECODER),), (1, 0, 0), (("self",), 4, 768), 0.15),
    "decoder_self_cross": ((Join(DECODER),), (1, 0, 0), (("self", "cross"), 4, 768), 0.15),
    "decoder_causal_cross": ((), (1, 0, 0), (("self", "cross"), 4, 768), 0.15),
    "decoder_cross": ((Join(DECODER),), (1, 0, 0), (("cross",), 4, 768), 0.15),
    "decoder_2_layers": ((Join(DECODER),), (1, 0, 0), (("self",), 2, 768), 0.15),
    "decoder_6_layers": ((Join(DECODER),), (1, 0, 0), (("self",), 6, 768), 0.15),
    "decoder_512_wide": ((Join(DECODER),), (1, 0, 0), (("self",), 4, 512), 0.15),
    "decoder_1024_wide": ((Join(DECODER),), (1, 0, 0), (("self",), 4, 1024), 0.15),
    "delta": ((Join(0, 0, 0.5), Join(DECODER, 0.5, 1)), (1, 0, 0), (("self",), 4, 768), 0.15),
    "gradual": (GROWING, (1, 0, 0), None, 0.15),
    "falling_rate": ((Join(DECODER),), (1, 0, 0), (("self",), 2, 768), 0.5),
    "predict_subset": ((Join(DECODER),), (1, 0, 0), (("self",), 2, 768), 0.5),
}  # fmt: skip


def test_every_system_stands_at_every_size():
    assert {system.__name__ for system in SYSTEMS} == set(FIGURE)
    assert len(names()) == len(set(names())) == len(SYSTEMS) * len(SIZES) + 2 * len(PAPER_SIZES)
    for name in names():
        assert recipe(name).recipe == name


@pytest.mark.parametrize("system", FIGURE)
def test_a_base_recipe_is_its_row_of_the_table(system):
    run = recipe(f"{system}_base")
    joins, filler, decoder, rate = FIGURE[system]
    found = tuple((arrival.layer, arrival.start, arrival.stop) for arrival in run.plan.arrivals)
    assert found == tuple((12 if join.layer == DECODER else join.layer, join.start, join.stop) for join in joins)
    assert run.masking.filler == filler
    assert (run.decoder and (run.decoder.sublayers, run.decoder.depth, run.decoder.width)) == decoder
    assert run.masking.rate == rate
    assert run.masking.aligned == (system != "misaligned_positions")
    assert run.rewrites == (system == "decoder_causal_cross")
    assert run.masking.predicted_share == (0.3 if system == "predict_subset" else 1)
    falls = [(0.2, 0.4), (0.4, 0.3), (0.6, 0.2), (0.8, 0.15)] if system == "falling_rate" else []
    assert [(step.start, step.rate) for step in run.masking.later_rates] == falls
    is_3ml = system.startswith("three_ml") or system in ("falling_rate", "predict_subset")
    assert run.masking.vector == ("own" if is_3ml else "token")
    assert run.shape.has_relative_bias == (not is_3ml and system != "no_relative")
    assert run.training == Training()
    assert replace(run.shape, positions="absolute") == Shape()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_size_changes_sizes_only(system, size):
    run, base = system(size), system("base")
    assert run.shape.positions == base.shape.positions
    assert (run.shape.depth, run.shape.width, run.shape.row_tokens) == {
        "tiny": (4, 128, 128), "small": (12, 384, 512), "base": (12, 768, 512), "large": (24, 1024, 512)
    }[size]  # fmt: skip
    assert run.training == recipes.training(size)
    shares = [(arrival.start, arrival.stop) for arrival in run.plan.arrivals]
    assert shares == [(arrival.start, arrival.stop) for arrival in base.plan.arrivals]
    assert replace(run.masking, joins=(), delta=None) == replace(base.masking, joins=(), delta=None)
    if run.decoder:
        assert run.decoder.width == run.decoder.heads * 64
        assert run.decoder.feedforward == 4 * run.decoder.width
        assert (run.decoder.sublayers, run.decoder.rewrites) == (base.decoder.sublayers, base.decoder.rewrites)


@pytest.mark.parametrize(("size", "narrow", "wide"), [("tiny", 64, 192), ("small", 256, 512), ("large", 704, 1344)])
def test_decoder_widths_keep_the_paper_s_ratio_to_the_encoder(size, narrow, wide):
    for name, width, ratio in (("512", narrow, 2 / 3), ("1024", wide, 4 / 3)):
        run = recipe(f"decoder_{name}_wide_{size}")
        assert run.decoder.width == width
        assert abs(run.decoder.width / run.shape.width - ratio) <= 32 / run.shape.width
        assert f"{width} for {size}" in " ".join(getattr(recipes, f"decoder_{name}_wide").__doc__.split())


def test_the_paper_s_own_sizes_are_those_of_table_4():
    plus, large = recipe("mae_lm_base_plus"), recipe("mae_lm_large_plus")
    assert (plus.shape.vocabulary, plus.shape.relative_buckets, plus.shape.relative_distance) == (64000, 64, 128)
    assert (large.shape.vocabulary, large.shape.relative_buckets, large.shape.relative_distance) == (64000, 128, 256)
    assert (plus.training.steps, plus.training.learning_rate, plus.training.clip_norm) == (2_000_000, 2e-4, 2.0)
    assert (large.training.steps, large.training.learning_rate, large.training.clip_norm) == (1_000_000, 1e-4, 1.0)
    assert large.decoder.depth == 4
    for run in (recipe("mae_lm_base"), plus, large):
        warmup = run.training.warmup_share * run.training.steps
        assert warmup == pytest.approx(10_000)
        assert (run.training.batch_rows, run.training.betas, run.training.epsilon) == (2048, (0.9, 0.98), 1e-6)
        assert (run.shape.dropout, run.decoder.dropout, run.training.weight_decay) == (0.1, 0.0, 0.01)
    for size in PAPER_SIZES:
        twin = recipe(f"mlm_{size}")
        assert (twin.shape, twin.training) == (recipe(f"mae_lm_{size}").shape, recipe(f"mae_lm_{size}").training)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_docstring_holds_the_command_and_the_paper_s_number(system):
    text = " ".join(system.__doc__.split())
    verb = "sweep" if system is recipes.delta else "pretrain"
    assert re.search(rf"``latemask {verb} {system.__name__}_base .*--data data/en --out runs/\S+``", text)
    if system.__name__ in TABLE_2:
        assert f"GLUE {TABLE_2[system.__name__]}" in text
        assert "Table" in text
    assert re.search(r"\bPaper\b|Ours: no paper has this row", text)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_hours_of_a_docstring_are_the_computed_ones(system):
    text = " ".join(system.__doc__.split())
    [hours] = re.findall(r"Base: (\d+) hours on one H100 at 40 % of its peak", text)
    others = re.findall(r"(\w+_plus): (\d+) hours", text)
    assert len(others) == (2 if system is recipes.mae_lm else 0)
    for size, said in [("base", hours), *others]:
        assert round(cost(system(size), kind="H100", cards=1, mfu=0.4).gpu_hours) == int(said)


def test_predicting_a_subset_predicts_as_much_as_mlm():
    for size in SIZES:
        subset, mlm = recipe(f"predict_subset_{size}"), recipe(f"mlm_{size}")
        assert (subset.predicted_tokens, subset.masked_tokens) == (mlm.masked_tokens, subset.shape.row_tokens // 2)


def test_row_lengths_follow_the_joins():
    assert recipe("gradual_base").plan.lengths(435, 77) == [458] * 4 + [481] * 4 + [512] * 4
    for system, lengths in (("mae_lm", [435] * 12), ("mlm", [512] * 12), ("decoder_causal_cross", [435] * 12)):
        run = recipe(f"{system}_base")
        assert run.plan.lengths(run.visible_tokens, run.masked_tokens) == lengths
    three = recipe("three_ml_base")
    assert three.plan.lengths(three.visible_tokens, three.masked_tokens) == [256] * 9 + [512] * 3


@pytest.mark.parametrize("name", ["mae_lm", "mae_lm_huge", "", "mae-lm-base", "three_ml_base_plus", "shape_base"])
def test_an_unknown_recipe_is_refused_with_close_names(name):
    with pytest.raises(Refusal, match="recipe") as refused:
        recipe(name)
    suggested = re.findall(r"[a-z0-9_]+_(?:tiny|small|base|large|plus)\b", refused.value.wanted)
    assert suggested
    assert set(suggested) <= set(names())


# --- docs/recipes.md --------------------------------------------------------------------------------------------------


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import refresh

    return refresh


def test_the_tables_of_the_docs_are_what_the_recipes_say(docs):
    text = docs.rows.RECIPES.read_text(encoding="utf-8")
    assert docs.refreshed(text, docs.rows.sections()) == text
    shown = {row.system for rows in docs.rows.TABLES.values() for row in rows}
    assert shown == set(FIGURE), "every system has a row"
    numbers = {row.system: float(row.number) for row in docs.rows.TABLES["MAE-LM Tables 1 and 2"] if row.number}
    assert numbers == TABLE_2


def test_every_row_of_the_docs_is_one_command_that_runs(docs, capsys):
    """Its flags as `latemask cost` and `latemask sweep` read them, and one pass of each run of it, cut down."""
    for row in (row for rows in docs.rows.TABLES.values() for row in rows):
        program, verb, name, *flags = shlex.split(row.command("small"))
        assert (program, name) == ("latemask", f"{row.system}_small")
        if verb == "sweep":
            assert flags[0] == "--vary"
            assert [point.run for point in points(recipe(name), read_vary(recipe(name), flags[1:]))] == row.runs(
                "small"
            )
        else:
            assert verb == "pretrain"
            run_cost([name, *flags])
            assert name in capsys.readouterr().out
        for run in row.runs("small"):
            narrow = {"width": 16, "heads": 2, "feedforward": 16}
            cut = {f"shape.{field}": value for field, value in (narrow | {"row_tokens": 40, "vocabulary": 70}).items()}
            cut |= {f"decoder.{field}": value for field, value in narrow.items() if run.decoder}
            run = config.replace(run, cut)
            loss = Pretrainer(run)(batch_of(run)).mean()
            loss.backward()
            assert 3 < loss.item() < 6


def test_recipes_share_no_state():
    assert recipe("delta_base") == recipe("delta_base")
    assert isinstance(recipe("delta_base"), Run)

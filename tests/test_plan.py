"""Plans: within the budget, within the text, growing with both; the numbers are those of ``latemask cost``."""

from __future__ import annotations

import contextlib
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latemask.__main__ import dispatch, main
from latemask.cards import CARDS
from latemask.cli.options import parse_run
from latemask.cli.pretrain import PretrainOptions
from latemask.config import replace
from latemask.errors import Refusal
from latemask.recipes import SIZES, recipe
from latemask.study.cost import cost
from latemask.study.plan import (
    FEWEST_ROWS,
    FEWEST_STEPS,
    LOWEST_RATE,
    LOWEST_RATE_WITH_DECODER,
    MOST_EPOCHS,
    SHORT_WARMUP,
    TOKENS_PER_PARAMETER,
    PlanOptions,
    plan,
    reach,
    run_plan,
)

ORDER = {f"{system}_{size}": number for number, size in enumerate(SIZES) for system in ("mlm", "three_ml", "mae_lm")}


@given(tokens=st.floats(6, 12), hours=st.floats(-1, 5), kind=st.sampled_from(["H100", "L4", "RTX 4090"]))
def test_plans_keep_to_hours_and_text(tokens, hours, kind):
    options = PlanOptions(10**tokens, 10**hours, kind)
    chosen = plan(options)
    training = chosen.run.training
    own = recipe(chosen.run.recipe).training
    one_step = training.batch_rows * chosen.run.shape.row_tokens
    assert chosen.hours <= options.gpu_hours * (1 + 1e-9) or training.steps == 1
    assert chosen.epochs <= MOST_EPOCHS * (1 + 1e-9) or training.steps == 1
    assert training.steps >= FEWEST_STEPS or training.batch_rows < 2 * FEWEST_ROWS
    left = min(options.gpu_hours * chosen.tokens / chosen.hours, MOST_EPOCHS * options.tokens) - chosen.tokens
    assert left < one_step * (1 + 1e-6)
    assert training.batch_rows <= own.batch_rows
    by_the_root = own.learning_rate * (training.batch_rows / own.batch_rows) ** 0.5
    is_short = training.batch_rows < own.batch_rows
    has_decoder = chosen.run.decoder is not None
    size = SIZES[ORDER[chosen.run.recipe]]
    assert has_decoder != reach(recipe(f"mae_lm_{size}"), options).is_short
    lowest = min(own.learning_rate, LOWEST_RATE_WITH_DECODER if has_decoder else LOWEST_RATE)
    assert training.learning_rate == pytest.approx(max(by_the_root, lowest), rel=0.05)
    assert (chosen.run.shape.positions == "rotary") == (not has_decoder)
    assert chosen.run.shape.dropout == (0 if is_short else recipe(chosen.run.recipe).shape.dropout)
    assert training.warmup_share == (SHORT_WARMUP if is_short else own.warmup_share)
    larger = [each for each in SIZES if ORDER[f"mae_lm_{each}"] > ORDER[chosen.run.recipe]]
    for each in larger:
        late = reach(recipe(f"mae_lm_{each}"), options)
        assert not late.is_enough
        assert not late.is_short or not reach(recipe(f"three_ml_{each}"), options).is_enough


def test_short_runs_are_3ml_and_a_decoder_learns_at_half_the_rate():
    for tokens, hours, wanted in (
        (7.7e7, 0.15, "three_ml_small"),
        (1e9, 1, "mae_lm_small"),
        (3e9, 10, "three_ml_base"),
        (2e9, 40, "mae_lm_large"),
    ):
        assert plan(PlanOptions(tokens, hours)).run.recipe == wanted
    short = PlanOptions(2.5e8, 0.15)
    rates = {name: reach(recipe(name), short).run.training.learning_rate for name in ("mlm_base", "mae_lm_base")}
    assert rates == {"mlm_base": LOWEST_RATE, "mae_lm_base": LOWEST_RATE_WITH_DECODER}
    assert reach(recipe("mae_lm_base"), short).run.shape.dropout == 0


def test_3ml_gets_rotary_positions_also_where_its_own_batch_stays_whole():
    """It is the cheaper one: MAE-LM's batch would be halved at budgets at which its own is not."""
    chosen = plan(PlanOptions(3e9, 10))
    assert (chosen.run.recipe, chosen.is_short) == ("three_ml_base", False)
    assert chosen.changes["shape.positions"] == "rotary"


@given(tokens=st.floats(6, 12), hours=st.floats(-1, 4), more=st.floats(1, 100))
def test_more_of_either_never_shrinks_the_model(tokens, hours, more):
    here = ORDER[plan(PlanOptions(10**tokens, 10**hours)).run.recipe]
    assert here <= ORDER[plan(PlanOptions(10**tokens * more, 10**hours)).run.recipe]
    assert here <= ORDER[plan(PlanOptions(10**tokens, 10**hours * more)).run.recipe]


def test_hours_are_those_of_cost():
    chosen = plan(PlanOptions(2e9, 40))
    assert chosen.hours == pytest.approx(cost(chosen.run, kind="H100", cards=1, mfu=0.4).gpu_hours)
    assert cost(replace(chosen.run, {"training.steps": chosen.run.training.steps + 1}), cards=1).gpu_hours > 40


def test_help_says_the_rules(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["latemask", "plan", "--help"])
    with contextlib.suppress(SystemExit):
        main()
    said = " ".join(capsys.readouterr().out.split())
    for number in (MOST_EPOCHS, TOKENS_PER_PARAMETER, f"{FEWEST_STEPS:,}", FEWEST_ROWS, SHORT_WARMUP):
        assert f" {number} " in said
    assert "not below 4e-4, with a decoder 2e-4" in said


@pytest.mark.parametrize(("tokens", "hours"), [(2e9, 40), (7.7e7, 0.15), (1e6, 1000)])
def test_what_is_printed_is_the_plan_and_can_be_typed(tokens, hours, capsys):
    run_plan(PlanOptions(tokens, hours))
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if line.startswith("latemask pretrain"))
    chosen = plan(PlanOptions(tokens, hours)).run
    words = command.split()
    assert words[2] == chosen.recipe
    flags = [word for word in words[3:] if word not in ("--data", "data/en", "--out", f"runs/{chosen.recipe}")]
    _, typed = parse_run(PretrainOptions, recipe(chosen.recipe), ["--data", "d", "--out", "o", *flags], prog="latemask")
    assert typed == chosen
    assert "not measured" in said
    assert ("The text is what limits" in said) == (tokens == 1e6)


@pytest.mark.parametrize(("hours", "shown"), [(1, "1 H100-hour at"), (40_000, "40,000 H100-hours at")])
def test_numbers_are_printed_as_people_read_them(hours, shown, capsys):
    """Thousands apart everywhere but in the command, and no powers of ten."""
    run_plan(PlanOptions(1e6, hours))
    said, command = re.split("(?=\nlatemask pretrain )", capsys.readouterr().out, maxsplit=1)
    assert f"1,000,000 tokens of text, {shown}" in said
    assert re.search(r"about \d+,\d{3} \(estimate\)", said)
    assert not re.search(r"\d{4,}(?!\d*\.)|\de[+-]\d", re.sub(r"0\.\d+", "", said))
    assert re.search(r"--training.steps \d+ ", command)


@pytest.mark.parametrize("command", [["plan"], ["cost", "mlm_tiny"]])
def test_the_help_lists_every_card(command, capsys):
    with pytest.raises(SystemExit):
        dispatch([*command, "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f": {', '.join(card.name for card in CARDS[:-1])} or {CARDS[-1].name}." in said


@pytest.mark.parametrize(
    ("where", "given"),
    [("--tokens", {"tokens": 0}), ("--gpu-hours", {"gpu_hours": -1}), ("--kind", {"kind": "abacus"}),
     ("--mfu", {"mfu": 2})],
)  # fmt: skip
def test_bad_options_are_refused_by_name(where, given):
    with pytest.raises(Refusal) as refused:
        plan(PlanOptions(**({"tokens": 1e9, "gpu_hours": 1} | given)))
    assert refused.value.where == where


@pytest.mark.parametrize("number", [float("inf"), float("nan"), float("-inf"), 1e300, -1.0, 0.0])
def test_budgets_that_cannot_be_are_refused_by_name(number):
    for field, options in (("--tokens", (number, 40.0)), ("--gpu-hours", (2e9, number))):
        with pytest.raises(Refusal) as refused:
            PlanOptions(*options)
        assert refused.value.where == field

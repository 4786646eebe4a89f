"""Joins: what they may say, how they resolve against an encoder, and how long the row is in each block."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latemask.errors import Refusal
from latemask.joins import DECODER, Join, Plan, count, early, fraction, late


@pytest.mark.parametrize(
    "join",
    [
        (-1,),
        (1.5,),
        ("end",),
        (None,),
        (0, -0.1, 1.0),
        (0, 0.5, 0.4),
        (0, 0.0, 1.1),
        (0, math.nan, 1.0),
        (0, 0.0, math.nan),
    ],
)
def test_an_impossible_join_is_refused(join):
    with pytest.raises(Refusal, match=r"masking\.joins"):
        Join(*join)


@pytest.mark.parametrize(
    "text", ["", "x", "8:0.2", "8:0:1:1", "8:a:1", "decoder:", "0x8", "8.0", "decoder:nan:1", "0:0:inf"]
)
def test_a_join_that_cannot_be_read_is_refused(text):
    with pytest.raises(Refusal, match=r"masking\.joins"):
        Join.parse(text)


@pytest.mark.parametrize(
    ("text", "join"),
    [("decoder", Join(DECODER)), ("8", Join(8)), ("8:0.2:1", Join(8, 0.2, 1)), ("decoder:.2:1", Join(DECODER, 0.2, 1))],
)
def test_a_join_is_read(text, join):
    assert Join.parse(text) == join


fractions = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@given(st.integers(0, 99) | st.just(DECODER), fractions)
def test_text_holds_a_join_exactly(layer, ends):
    join = Join(layer, *ends)
    assert Join.parse(str(join)) == join


@pytest.mark.parametrize(
    ("joins", "has_decoder", "wanted"),
    [
        (late(), False, "filling decoder"),
        ((Join(4),), False, "0 to 3"),
        ((Join(0, 0, 0.5), Join(0, 0.5, 1)), False, "one join per block"),
        ((Join(0, 0, 0.3), Join(2, 0.4, 1)), False, "no masked token left out"),
        ((Join(0, 0.1, 1),), False, "no masked token left out"),
        ((Join(0, 0, 0.9),), False, "all of them"),
        ((Join(0), Join(2, 0, 0.5)), False, "all of them"),
        ((Join(0, 0, 0.9),), True, "all of them"),
        ((), True, "all of them"),
    ],
)
def test_a_plan_that_loses_a_masked_token_is_refused(joins, has_decoder, wanted):
    with pytest.raises(Refusal) as refused:
        Plan.of(joins, 4, has_decoder)
    assert refused.value.where == "masking.joins"
    assert wanted in refused.value.wanted


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_join_of_nothing_is_dropped(delta):
    plan = Plan.of(fraction(delta), 4, True)
    assert len(plan.arrivals) == 1
    assert (plan.at_decoder is None) == (delta == 1)


def test_joins_may_be_given_in_any_order():
    joins = (Join(DECODER, 0.6, 1), Join(0, 0, 0.3), Join(2, 0.3, 0.6))
    assert Plan.of(joins, 4, True) == Plan.of(sorted(joins, key=lambda join: join.start), 4, True)


@pytest.mark.parametrize(
    ("joins", "has_decoder", "lengths"),
    [
        (early(), False, [40, 40, 40, 40]),
        (late(), True, [30, 30, 30, 30]),
        (early() + late(), True, [40, 40, 40, 40]),
        ((Join(3),), False, [30, 30, 30, 40]),
        (fraction(0.25), True, [33, 33, 33, 33]),
        ((Join(0, 0, 0.3), Join(1, 0.3, 0.6), Join(2, 0.6, 1)), False, [33, 36, 40, 40]),
        ((Join(0), Join(2, 0.5, 0.7), Join(DECODER, 0.7, 1)), True, [40, 40, 37, 37]),
        ((), False, [30, 30, 30, 30]),
    ],
)
def test_the_row_is_as_long_as_the_joins_say(joins, has_decoder, lengths):
    assert Plan.of(joins, 4, has_decoder).lengths(30, 10) == lengths


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_count_rounds_to_the_nearest_token(share, tokens):
    assert 0 <= count(share, tokens) <= tokens
    assert abs(count(share, tokens) - share * tokens) <= 0.5


@given(st.floats(0, 1), st.integers(1, 1000))
def test_a_fraction_splits_the_masked_tokens_without_rest(delta, masked):
    seated = [arrival.tokens(masked) for arrival in Plan.of(fraction(delta), 4, True).arrivals]
    assert [number for start, stop in seated for number in range(start, stop)] == list(range(masked))

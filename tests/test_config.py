"""Every rule of a Run fires and names its field; run.json holds a Run exactly, and nothing else passes for one."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latemask import config
from latemask.config import Decoder, Masking, Run, Shape, Specials, Training
from latemask.errors import Refusal
from latemask.fields import dotted
from latemask.joins import DECODER, Join, early, late
from latemask.rates import RateStep
from latemask.recipes import names, recipe

NAN, INF = math.nan, math.inf

SHAPE = [
    ("depth", 0), ("width", 0), ("heads", 0), ("feedforward", 0), ("heads", 7), ("row_tokens", 2),
    ("row_tokens", 65537), ("positions", "relative"), ("vocabulary", 4), ("norm", "middle"), ("dropout", 1.0),
    ("dropout", -0.1), ("dropout", NAN), ("norm_epsilon", 0.0), ("norm_epsilon", INF), ("initial_deviation", 0.0),
    ("relative_buckets", 0), ("relative_buckets", 6), ("relative_distance", 8), ("depth", 2.0), ("depth", True),
    ("depth", "12"), ("isolate_documents", 1), ("specials", [0, 1, 2, 3, 4]),
]  # fmt: skip
DECODER_RULES = [
    ("depth", 0), ("width", 0), ("heads", 0), ("feedforward", 0), ("heads", 7), ("sublayers", ()),
    ("sublayers", ("cross", "self")), ("sublayers", ("self", "self")), ("sublayers", "self"), ("sublayers", ("both",)),
    ("rewrites", True), ("rewrites", "no"), ("dropout", 1.0), ("dropout", NAN), ("positions", "rotary"),
]  # fmt: skip
MASKING = [
    ("rate", 0.0), ("rate", 1.0), ("rate", -0.15), ("rate", NAN), ("rate", "0.15"), ("delta", 1.5), ("delta", -0.1),
    ("delta", INF), ("filler", (0.8, 0.1, 0.2)), ("filler", (1.2, -0.1, -0.1)), ("filler", (1.0, 0.0)),
    ("delta", 0.5), ("later_rates", ("0.5",)), ("later_rates", ("0.5:0.3:0.1",)), ("later_rates", ("half:0.3",)),
    ("later_rates", ("0:0.3",)), ("later_rates", ("1:0.3",)), ("later_rates", ("0.5:0",)), ("later_rates", ("0.5:1",)),
    ("later_rates", ("nan:0.3",)), ("later_rates", ("0.5:nan",)), ("later_rates", ("0.5:0.3", "0.5:0.2")),
    ("later_rates", ("0.5:0.3", "0.4:0.2")), ("later_rates", 0.3), ("later_rates", (0.3,)),
    ("later_rates", tuple(f"0.{n}:0.3" for n in range(1, 7))), ("predicted_share", 0.0), ("predicted_share", 1.1),
    ("predicted_share", NAN),
    ("filler", (NAN, 0.5, 0.5)), ("vector", "mean"), ("aligned", "yes"), ("joins", (0,)), ("joins", "0"),
    ("joins", ("0:0.5",)), ("joins", ("last",)), ("joins", ("-1",)), ("joins", ("0:0.5:0.2",)), ("joins", ("0:0:2",)),
    ("joins", ({"layer": 0, "start": 0.0, "stop": 1.0},)),
]  # fmt: skip
TRAINING = [
    ("steps", 0), ("steps", 1e3), ("batch_rows", 0), ("max_skips", 0), ("log_every", 0), ("save_every", 0),
    ("batch_rows", 1 << 25),
    ("validation_rows", 0), ("max_tokens", 0), ("max_seconds", 0.0), ("max_seconds", -1), ("micro_rows", 0),
    ("clip_norm", 0.0), ("micro_rows", 4096), ("learning_rate", 0.0), ("learning_rate", INF),
    ("learning_rate", 10**400), ("warmup_share", 1.5), ("warmup_share", -0.5), ("decay", "step"),
    ("betas", (0.9, 1.0)), ("betas", (0.9,)), ("betas", 0.9), ("epsilon", 0.0), ("weight_decay", -0.01),
    ("precision", "fp16"), ("compile", True), ("keep", -1), ("validate_every", -1), ("seed", -1), ("seed", 2**63),
    ("data_seed", -1), ("data_seed", 2**63), ("validation_rate", 0.0), ("validation_rate", 1.0),
]  # fmt: skip
SPECIALS = [("bos", -1), ("mask", 0), ("pad", None), ("eos", 2.0)]


@pytest.mark.parametrize(
    ("kind", "part", "field", "value"),
    [(Shape, "shape", *rule) for rule in SHAPE]
    + [(Decoder, "decoder", *rule) for rule in DECODER_RULES]
    + [(Masking, "masking", *rule) for rule in MASKING]
    + [(Training, "training", *rule) for rule in TRAINING]
    + [(Specials, "shape.specials", *rule) for rule in SPECIALS],
)
def test_every_rule_of_a_part_fires_and_names_its_field(kind, part, field, value):
    with pytest.raises(Refusal) as refused:
        kind(**{field: value})
    allowed = {f"{part}.{field}", part} if kind is Specials else {f"{part}.{field}", f"{part}.{field}: layer"}
    assert refused.value.where in allowed
    assert refused.value.found
    assert refused.value.wanted


def falling(*later_rates: str) -> Masking:
    return Masking(later_rates=later_rates)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("shape.vocabulary", lambda: Shape(vocabulary=5)),
        ("shape.vocabulary", lambda: Shape(vocabulary=100, specials=Specials(mask=100))),
        ("shape.heads", lambda: Shape(width=36, heads=12, positions="rotary")),
        ("masking.rate", lambda: Run("r", Shape(row_tokens=3), masking=Masking(rate=0.1))),
        ("masking.rate", lambda: Run("r", Shape(row_tokens=10), masking=Masking(rate=0.85))),
        ("masking.joins", lambda: Run("r", masking=Masking(joins=()))),
        ("masking.joins", lambda: Run("r", masking=Masking(joins=late()))),
        ("masking.joins", lambda: Run("r", masking=Masking(joins=(), delta=0.5))),
        ("masking.joins", lambda: Run("r", Shape(depth=4), masking=Masking(joins=(Join(4),)))),
        ("masking.joins", lambda: Run("r", decoder=Decoder(sublayers=("self", "cross"), rewrites=True))),
        ("masking.joins", lambda: Run("r", decoder=Decoder(), masking=Masking(joins=()))),
        ("masking.filler", lambda: Run("r", decoder=Decoder(), masking=Masking(joins=late(), filler=(0.8, 0.1, 0.1)))),
        ("masking.vector", lambda: Run("r", masking=Masking(filler=(0.0, 1.0, 0.0), vector="own"))),
        ("masking.vector", lambda: Run("r", decoder=Decoder(sublayers=("self", "cross"), rewrites=True),
                                       masking=Masking(joins=(), vector="own"))),
        ("masking.later_rates", lambda: Run("r", Shape(row_tokens=10), masking=falling("0.5:0.04"))),
        ("masking.later_rates", lambda: Run("r", Shape(row_tokens=10), masking=falling("0.2:0.3", "0.5:0.85"))),
        ("training.max_seconds", lambda: Run("r", masking=falling("0.5:0.1"), training=Training(max_seconds=60))),
        ("masking.predicted_share", lambda: Run("r", Shape(row_tokens=10), masking=Masking(predicted_share=0.2))),
        ("masking.predicted_share", lambda: Run("r", Shape(row_tokens=100),
                                                masking=replace(falling("0.5:0.02"), predicted_share=0.2))),
        ("masking.predicted_share", lambda: Run("r", decoder=Decoder(sublayers=("self", "cross"), rewrites=True),
                                                masking=Masking(joins=(), predicted_share=0.5))),
        ("masking.delta", lambda: Masking(joins=late(), delta=0.5)),
        ("masking.delta", lambda: config.replace(recipe("mae_lm_tiny"), {"masking.delta": 1})),
        ("masking.delta", lambda: config.replace(recipe("delta_tiny"), {"masking.joins": ("0:0:.4", "decoder:.4:1")})),
        ("decoder", lambda: Run("r", decoder=Shape())),
        ("decoder.positions", lambda: Decoder(sublayers=("cross",), positions="absolute+rotary")),
        ("decoder.positions", lambda: Decoder(width=36, positions="absolute+rotary")),
        ("decoder.centred", lambda: config.replace(recipe("mae_lm_tiny"), {"decoder.centred": True,
                                                                           "shape.isolate_documents": True})),
        ("recipe", lambda: Run(None)),
    ],
)  # fmt: skip
def test_every_rule_between_parts_fires_and_names_its_field(field, make):
    with pytest.raises(Refusal) as refused:
        make()
    assert refused.value.where == field


def test_the_allowed_borders_are_allowed():
    Shape(row_tokens=3, relative_buckets=4, relative_distance=2, dropout=0.0, vocabulary=6)
    Shape(row_tokens=65536)
    Training(betas=(0.0, 0.0), warmup_share=0.0, seed=2**63 - 1, micro_rows=2048, keep=0, validate_every=0)
    Training(warmup_share=1.0, clip_norm=None)
    Run("r", Shape(row_tokens=10), masking=Masking(rate=0.84))
    Run("r", Shape(row_tokens=3), masking=Masking(rate=0.17))
    Run("r", Shape(row_tokens=10), masking=Masking(predicted_share=0.25))
    Run("r", masking=Masking(later_rates=tuple(f"0.{n}:0.3" for n in range(1, 6))), training=Training(max_tokens=1))
    assert Masking(joins=late(), delta=0).effective_joins == Masking(joins=(), delta=0).effective_joins
    Masking(joins=("0:0:0.5", "decoder:0.5:1"), delta=0.5)
    assert config.replace(recipe("mae_lm_tiny"), {"masking.delta": 0}).plan == recipe("mae_lm_tiny").plan
    assert config.replace(recipe("delta_tiny"), {"masking.delta": 0.25}).masking.effective_joins[0].stop == 0.25


def test_whole_numbers_serve_as_floats_and_lists_as_tuples():
    assert type(Masking(delta=1).delta) is float
    assert Training(betas=[0, 0.5]).betas == (0.0, 0.5)
    assert Masking(joins=["8", "decoder:0.5:1"]).joins == (Join(8), Join(DECODER, 0.5, 1))


def test_parts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Shape().depth = 3


@pytest.mark.parametrize(("vocabulary", "padded"), [(64, 64), (65, 128), (32768, 32768), (50265, 50304)])
def test_the_vocabulary_is_padded_to_a_multiple_of_64(vocabulary, padded):
    assert Shape(vocabulary=vocabulary).padded_vocabulary == padded


@pytest.mark.parametrize(
    ("rate", "row_tokens", "masked"), [(0.15, 128, 19), (0.5, 37, 19), (0.5, 36, 18), (0.15, 512, 77)]
)
def test_masked_and_visible_tokens_add_up_and_round_halves_up(rate, row_tokens, masked):
    run = Run("r", Shape(row_tokens=row_tokens), masking=Masking(rate=rate))
    assert run.masked_tokens == masked
    assert run.visible_tokens + run.masked_tokens == row_tokens


# --- stages -----------------------------------------------------------------------------------------------------------


@given(st.sets(st.floats(0.001, 0.999), max_size=5), st.integers(1, 3000))
def test_stages_cut_a_run_without_gap_where_the_shares_say(starts, updates):
    steps = tuple(RateStep(start, 0.1 + 0.1 * n) for n, start in enumerate(sorted(starts)))
    run = Run("r", masking=Masking(rate=0.7, later_rates=steps), training=Training(steps=updates))
    spans = [range(stage.first_batch, stage.stop_batch) for stage in run.stages]
    assert [number for span in spans for number in span] == [*range(updates)]
    rates = [stage.run.masking.rate for stage, span in zip(run.stages, spans, strict=True) for _ in span]
    for number, rate in enumerate(rates):
        begun = [step.rate for step in steps if step.start * updates <= number + 0.5 - 1e-9]
        assert rate == (begun or [0.7])[-1] or any(abs(step.start * updates - number - 0.5) < 1e-6 for step in steps)
    assert all(stage.run.masking.later_rates == () for stage in run.stages)
    assert run.most_masked_tokens == max(stage.run.masked_tokens for stage in run.stages)


def test_tokens_bound_the_updates_that_stages_are_cut_from():
    run = Run("r", masking=Masking(later_rates=("0.5:0.3",)), training=Training(max_tokens=2048 * 512 * 10))
    assert run.updates == 10
    assert [stage[:2] for stage in run.stages] == [(0, 5), (5, 10)]


def test_rates_are_told_in_words():
    assert Masking(rate=0.5, later_rates=("0.25:0.3", "0.75:0.15")).rates_text == (
        "50%, 30% from 25% on, 15% from 75% on"
    )
    assert Masking().rates_text == "15%"


# --- run.json ---------------------------------------------------------------------------------------------------------

positive = st.floats(1e-12, 1e12)
share = st.floats(0, 0.99)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    heads = draw(st.integers(1, 16))
    specials = Specials(*draw(st.lists(st.integers(0, 500), min_size=5, max_size=5, unique=True)))
    shape = Shape(
        depth=draw(st.integers(1, 48)), heads=heads, width=heads * draw(st.integers(1, 64)) * 2,
        feedforward=draw(st.integers(1, 9999)), row_tokens=draw(st.integers(16, 65536)), specials=specials,
        vocabulary=draw(st.integers(501, 10**6)), positions=draw(st.sampled_from(["absolute", "rotary"])),
        isolate_documents=draw(st.booleans()), norm=draw(st.sampled_from(["post", "pre"])),
        dropout=draw(st.floats(0, 0.99)), norm_epsilon=draw(positive), initial_deviation=draw(positive),
    )  # fmt: skip
    sublayers = st.sampled_from([("self",), ("self", "cross"), ("cross",)])
    decoder = draw(st.none() | st.builds(Decoder, depth=st.integers(1, 9), dropout=share, sublayers=sublayers))
    parts = sorted(draw(st.sets(st.floats(0.001, 0.999), max_size=3)))
    ends = [0.0, *parts, 1.0]
    layers = [*range(shape.depth)] + ([DECODER] if decoder else [])
    chosen = [
        layers[i] for i in sorted(draw(st.sets(st.integers(0, len(layers) - 1), min_size=1, max_size=len(ends) - 1)))
    ]
    joins = [Join(layer, start, stop) for layer, start, stop in zip(chosen, ends, ends[1:], strict=False)]
    joins[-1] = replace(joins[-1], stop=1.0)
    starts = sorted(draw(st.sets(st.floats(0.001, 0.999), max_size=5)))
    steps = tuple(RateStep(start, draw(st.floats(0.1, 0.8))) for start in starts)
    masking = Masking(
        rate=draw(st.floats(0.1, 0.8)), joins=tuple(joins), vector=draw(st.sampled_from(["token", "own"])),
        aligned=draw(st.booleans()), predicted_share=draw(st.floats(0.8, 1)), later_rates=steps,
    )  # fmt: skip
    training = Training(
        steps=draw(st.integers(1, 10**9)), max_tokens=draw(st.none() | st.integers(1, 10**15)),
        max_seconds=None if steps else draw(st.none() | positive), learning_rate=draw(positive),
        warmup_share=draw(share),
        betas=(draw(st.floats(0, 0.999)), draw(st.floats(0, 0.999))), clip_norm=draw(st.none() | positive),
        seed=draw(st.integers(0, 2**63 - 1)), validation_rate=draw(st.none() | st.floats(0.01, 0.99)),
    )  # fmt: skip
    return Run(draw(st.text()), shape, decoder, masking, training)


@given(runs())
def test_run_json_holds_a_run_exactly(run):
    assert Run.from_json(run.to_json()) == run


@pytest.mark.parametrize("name", names())
def test_run_json_holds_every_recipe_exactly(name):
    assert Run.from_json(recipe(name).to_json()) == recipe(name)


def leaves(data: dict, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of run.json, as a path."""
    found = []
    for name, value in data.items():
        found.append((*prefix, name))
        if isinstance(value, dict):
            found += leaves(value, (*prefix, name))
    return found


PLAIN = json.loads(recipe("mae_lm_tiny").to_json())
FIELDS = leaves(PLAIN)


def changed(path: tuple[str, ...], change) -> str:
    data = json.loads(json.dumps(PLAIN))
    inside = data
    for name in path[:-1]:
        inside = inside[name]
    change(inside, path[-1])
    return json.dumps(data)


def remove(part: dict, name: str) -> None:
    del part[name]


NEWER = (("training", "graphs"), ("training", "stops_on_plateau"), ("decoder", "centred"))
"""Fields that older files lack."""


@pytest.mark.parametrize("path", [path for path in FIELDS if path not in NEWER], ids=".".join)
def test_a_missing_field_is_refused_by_name(path):
    with pytest.raises(Refusal) as refused:
        Run.from_json(changed(path, remove))
    assert refused.value.where == "run.json: " + ".".join(path)


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
@pytest.mark.parametrize("wrong", [{"a": 1}, [[]], NAN, -INF, "elephant", 1e400], ids=repr)
def test_an_ill_typed_field_is_refused_by_name(path, wrong):
    if path == ("recipe",) and isinstance(wrong, str):
        return
    with pytest.raises(Refusal) as refused:
        Run.from_json(changed(path, lambda part, name: part.update({name: wrong})))
    assert ".".join(path) in refused.value.where


@pytest.mark.parametrize("path", [path for path in FIELDS if len(path) > 1 or path == ("recipe",)], ids=".".join)
def test_an_unknown_field_is_refused_by_name(path):
    with pytest.raises(Refusal) as refused:
        Run.from_json(changed(path, lambda part, name: part.update({f"{name}_too": 1})))
    assert refused.value.where == "run.json: " + ".".join(path) + "_too"
    assert "unknown" in refused.value.found


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.sampled_from(FIELDS), value=json_values)
def test_any_json_in_any_field_is_a_run_or_a_refusal(path, value):
    text = changed(path, lambda part, name: part.update({name: value}))
    try:
        run = Run.from_json(text)
    except Refusal:
        return
    assert Run.from_json(run.to_json()) == run


@given(st.text() | json_values.map(json.dumps))
def test_any_text_is_a_run_or_a_refusal(text):
    with pytest.raises(Refusal, match=r"run\.json"):
        Run.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "nul", "1" * 5000, "[" * 100_000, '{"recipe": "a"} {}', "\ufeff{}"])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(Refusal, match=r"run\.json:?1?"):
        Run.from_json(text)


def test_the_line_of_broken_json_is_named():
    with pytest.raises(Refusal) as refused:
        Run.from_json('{\n"recipe": "x",\n!\n}', where="runs/x/run.json")
    assert refused.value.where == "runs/x/run.json"
    assert "line 3" in refused.value.found


# --- changing fields by dotted name -----------------------------------------------------------------------------------


def test_replace_changes_dotted_fields_and_nothing_else():
    run = recipe("mae_lm_base")
    changed = config.replace(run, {"training.steps": 10, "masking.rate": 0.5, "decoder.depth": 2, "training.seed": 3})
    assert (changed.training.steps, changed.training.seed) == (10, 3)
    assert (changed.masking.rate, changed.decoder.depth) == (0.5, 2)
    back = config.replace(changed, {"training.steps": run.training.steps, "training.seed": run.training.seed,
                                    "masking.rate": run.masking.rate, "decoder.depth": run.decoder.depth})  # fmt: skip
    assert back == run


TREES = st.recursive(
    st.none() | st.integers() | st.lists(st.integers(), max_size=2),
    lambda inside: st.dictionaries(st.sampled_from("abcd"), inside, min_size=1, max_size=3), max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from("abcd"), TREES, max_size=3))
def test_dotted_names_lead_to_the_values_they_stand_for(tree: dict) -> None:
    def leaves(value: object) -> int:
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    found = dotted(tree)
    assert len(found) == leaves(tree)
    for name, value in found.items():
        held = tree
        for part in name.split("."):
            held = held[part]
        assert held == value


@pytest.mark.parametrize(
    "name", ["training.step", "steps", "training", "", "shape.depth.more", "decoder.depth", "recipe"]
)
def test_replace_refuses_a_field_that_the_recipe_has_not(name):
    with pytest.raises(Refusal) as refused:
        config.replace(recipe("mlm_base"), {name: 1})
    assert refused.value.where == (name or "a field without a name")
    assert "a field such as" in refused.value.wanted


@pytest.mark.parametrize(
    ("name", "meant"),
    [("masking.rats", "masking.rate"), ("steps", "training.steps"), ("shape.learning_rat", "training.learning_rate")],
)
def test_replace_names_the_fields_that_may_be_meant_and_no_others(name, meant):
    with pytest.raises(Refusal) as refused:
        config.replace(recipe("mae_lm_base"), {name: 1})
    assert meant in refused.value.wanted
    assert len(str(refused.value)) < 240


def test_replace_refuses_a_value_that_breaks_a_rule():
    with pytest.raises(Refusal) as refused:
        config.replace(recipe("mlm_base"), {"shape.heads": 5})
    assert refused.value.where == "shape.heads"


def test_joins_default_to_mlm():
    assert Masking().joins == early()

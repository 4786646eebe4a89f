"""Costs: the published arithmetic, torch's own FLOP counter and torch's own parameter count say the same."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from latemask import cards, recipes
from latemask.batch import Batch
from latemask.cards import card, card_of_device
from latemask.cli.cost import run_cost
from latemask.config import Decoder, Masking, Run, Shape, replace
from latemask.counts import flops, flops_per_token, memory, parameters
from latemask.errors import Refusal
from latemask.feed.masking import lay_out
from latemask.joins import Join, late
from latemask.model.pretrainer import Pretrainer
from latemask.model.stack import Block
from latemask.study import cost
from latemask.text.store import open_store


def sized(name: str, vocabulary: int, **fields: object) -> Run:
    """A recipe with another vocabulary and ``part__field`` changes."""
    changes = {field.replace("__", "."): value for field, value in fields.items()}
    return replace(recipes.recipe(name), {"shape.vocabulary": vocabulary, **changes})


@pytest.mark.parametrize(
    ("name", "vocabulary", "row_tokens", "rate", "linear", "attention", "head", "total"),
    [
        ("mlm_base", 32768, 512, 0.15, 509.6, 56.6, 23.2, 589),
        ("mlm_base", 50304, 512, 0.15, 509.6, 56.6, 35.3, 602),
        ("mlm_base", 50304, 512, 0.50, 509.6, 56.6, 117.7, 684),
        ("mlm_base", 50304, 128, 0.15, 509.6, 14.2, 35.3, 559),
        ("mlm_large", 32768, 512, 0.15, 1811.9, 151.0, 31.1, 1994),
        ("mlm_large", 50304, 512, 0.15, 1811.9, 151.0, 47.3, 2010),
        ("mlm_large", 50304, 512, 0.50, 1811.9, 151.0, 157.7, 2121),
    ],
)
def test_plain_count_is_the_table(name, vocabulary, row_tokens, rate, linear, attention, head, total):
    """The table's heads are for a share of exactly ``rate``; ours mask M = round(rate N), as 77 of 512."""
    run = sized(name, vocabulary, shape__row_tokens=row_tokens, masking__rate=rate)
    of = flops(run, executed=False)
    assert round(of.linear / 1e6, 1) == linear
    assert round(of.attention / 1e6, 1) == attention
    assert round(of.head / 1e6 * rate / (run.masked_tokens / row_tokens), 1) == head
    assert of.total / 1e6 == pytest.approx(total, abs=0.6)
    assert of.decoder == 0
    n_lin, width, share = 12 * run.shape.depth * run.shape.width**2, run.shape.width, run.masked_tokens / row_tokens
    formula = 6 * n_lin + 12 * run.shape.depth * row_tokens * width + share * 6 * (vocabulary * width + width * width)
    assert flops_per_token(run).plain == pytest.approx(formula, rel=1e-12)


def test_head_on_all_positions_is_the_tables_802():
    """A rewriting decoder predicts N - 1 of N tokens: its head is the table's "head on ALL"."""
    run = sized("mlm_base", 50304)
    rewriting = dataclasses.replace(
        run, decoder=Decoder(sublayers=("self", "cross"), rewrites=True), masking=Masking(joins=())
    )
    head = flops(rewriting, executed=False).head * 512 / 511
    assert round(head / 1e6, 1) == 235.3
    assert round((flops(run, executed=False).linear + flops(run, executed=False).attention + head) / 1e6) in (801, 802)


@pytest.mark.parametrize(
    ("name", "rate", "blocks", "full", "cross_only"),
    [("base", 0.15, 4, 1.42, 1.78), ("base", 0.5, 2, 2.06, 2.29), ("large", 0.15, 4, 0.489, 0.556),
     ("large", 0.5, 2, 0.782, 0.838), ("large", 0.5, 4, 0.693, 0.786)],
)  # fmt: skip
def test_late_joins_are_the_second_table(name, rate, blocks, full, cross_only):
    """Million tokens a second at 989 TFLOP/s: full-length self-attention decoder as plain, cross-only as executed."""
    shape = dataclasses.replace(recipes.shape(name), vocabulary=50304)
    run = Run("late", shape, recipes.decoder(name, blocks), Masking(rate=rate, joins=late()))
    cross = dataclasses.replace(run, decoder=dataclasses.replace(run.decoder, sublayers=("cross",)))
    assert 989e12 / flops_per_token(run).plain / 1e6 == pytest.approx(full, rel=5e-3)
    assert 989e12 / flops_per_token(cross).executed / 1e6 == pytest.approx(cross_only, rel=5e-3)


def batch_of(run: Run, rows: int = 2) -> Batch:
    shape = run.shape
    ids = np.random.default_rng(0).integers(5, shape.vocabulary, (rows, shape.row_tokens))
    ids[:, 0] = shape.specials.bos
    keys = torch.arange(rows)
    return lay_out(
        torch.from_numpy(ids), run.masking, shape.specials, shape.vocabulary, seed=0, epoch=keys * 0, row=keys
    )


TINY = Shape(depth=4, width=32, heads=2, feedforward=80, row_tokens=24, vocabulary=100)
NARROW = Decoder(depth=2, width=16, heads=2, feedforward=48)


def variants() -> dict[str, Run]:
    """Every system at size tiny, cut down, and shapes that no recipe has."""
    runs = {}
    for system in recipes.SYSTEMS:
        run = system("tiny")
        decoder = run.decoder and dataclasses.replace(run.decoder, depth=2, width=32, heads=2, feedforward=80)
        runs[system.__name__] = dataclasses.replace(
            run, shape=dataclasses.replace(TINY, positions=run.shape.positions), decoder=decoder
        )
    wide = dataclasses.replace(NARROW, width=48)
    cross, both = (dataclasses.replace(NARROW, sublayers=sublayers) for sublayers in (("cross",), ("self", "cross")))
    rewriting = dataclasses.replace(both, rewrites=True)
    growing = (Join(0, 0, 0.3), Join(1, 0.3, 0.6), Join(3, 0.6, 1))
    return runs | {
        "narrow decoder": Run("x", TINY, NARROW, Masking(joins=late(), rate=0.4)),
        "wide decoder": Run("x", TINY, wide, Masking(joins=late(), rate=0.4)),
        "cross only": Run("x", TINY, cross, Masking(joins=late(), rate=0.4)),
        "self and cross, a part early": Run("x", TINY, both, Masking(joins=(), delta=0.4, rate=0.4)),
        "rewriting": Run("x", TINY, rewriting, Masking(joins=(), rate=0.4)),
        "gradual": Run("x", TINY, None, Masking(joins=growing, rate=0.4)),
        "reset at the door": Run("x", TINY, NARROW, Masking(joins=(Join(0), Join("decoder")), rate=0.4)),
        "a part of the masked predicted": Run("x", TINY, None, Masking(joins=growing, rate=0.4, predicted_share=0.4)),
        "a part predicted, self": Run("x", TINY, NARROW, Masking(joins=late(), rate=0.4, predicted_share=0.4)),
        "a part predicted, cross only": Run("x", TINY, cross, Masking(joins=late(), rate=0.4, predicted_share=0.4)),
        "own vector, rotary, pre-norm": Run(
            "x",
            dataclasses.replace(TINY, positions="rotary", norm="pre"),
            both,
            Masking(joins=late(), vector="own", rate=0.4),
        ),
    }


@pytest.mark.parametrize("name", variants())
def test_executed_count_is_torchs(name):
    """Forward and backward, every matrix product that torch runs; plain attention, so that nothing is recomputed."""
    for stage in variants()[name].stages:
        run = stage.run
        model, batch = Pretrainer(run), batch_of(run)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss = model(batch).mean()
            forward = counter.get_total_flops()
            loss.backward()
        tokens = batch.rows * run.shape.row_tokens
        executed = flops(run, executed=True).total * tokens
        assert round(executed) == counter.get_total_flops()
        assert round(executed / 3) == forward


def test_a_run_whose_rate_falls_costs_what_its_batches_cost():
    """The mean over batches, whichever are asked for; memory is that of the stage which needs most."""
    run = sized("falling_rate_small", 32768, training__steps=7, masking__later_rates=("0.5:0.3", "0.8:0.15"))
    at = {rate: replace(run, {"masking.rate": rate, "masking.later_rates": ()}) for rate in (0.5, 0.3, 0.15)}
    rates = [0.5] * 4 + [0.3] * 2 + [0.15] * 1
    for batches in (range(7), range(1), range(3, 5), range(2, 7), range(5, 9)):
        seen = [rates[min(index, 6)] for index in batches]
        for number, found in enumerate(flops_per_token(run, batches)):
            assert found == pytest.approx(sum(flops_per_token(at[rate])[number] for rate in seen) / len(seen))
    assert flops_per_token(run) == flops_per_token(run, range(7))
    of = cost.cost(run, cards=1)
    assert of.gpu_hours == pytest.approx(sum(cost.cost(at[rate], cards=1).gpu_hours / 7 for rate in rates))
    assert memory(run, 3).total == max(memory(one, 3).total for one in at.values())


@pytest.mark.parametrize("name", [*variants(), *recipes.names()])
def test_parameters_are_torchs(name):
    run = variants().get(name) or recipes.recipe(name)
    with torch.device("meta"):
        model = Pretrainer(run)
    counted = parameters(run)
    assert counted.kept == sum(parameter.numel() for parameter in model.encoder.parameters())
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mlm", "mae_lm", "cross only", "self and cross, a part early", "gradual"])
def test_memory_estimate_is_near_what_autograd_keeps(name):
    """In fp32 and without dropout, which has no memory-saving attention on CPUs: the bytes of every tensor that the
    forward pass saves. Two of the three numbers for each logit come in the backward pass only."""
    run = variants()[name]
    shape = dataclasses.replace(
        run.shape, width=128, heads=2, feedforward=512, row_tokens=128, positions="absolute", dropout=0.0
    )
    decoder = run.decoder and dataclasses.replace(run.decoder, width=128, feedforward=512, dropout=0.0)
    run = dataclasses.replace(run, shape=shape, decoder=decoder)
    model, batch = Pretrainer(run), batch_of(run, 4)
    own = {parameter.untyped_storage().data_ptr() for parameter in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch).mean()
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert loss.isfinite()
    estimate = memory(run, 4, bytes_per_number=4)
    only_in_backward = 4 * run.masked_tokens * 8 * shape.padded_vocabulary
    assert estimate.activations - only_in_backward == pytest.approx(measured, rel=0.05)
    assert estimate.state == 16 * parameters(run).total


@pytest.mark.parametrize("name", ["mlm", "self and cross, a part early"])
def test_a_shard_is_a_share_and_what_is_whole_beside_it(name):
    """In fp32: 12 bytes a number shared, 4 shared or whole by the number of micro-batches; gathered is what is in no
    block, and two of the largest blocks."""
    run = replace(variants()[name], {"training.data_parallel": "shard", "training.batch_rows": 64})
    model = Pretrainer(run)
    blocks = [sum(p.numel() for p in module.parameters()) for module in model.modules() if isinstance(module, Block)]
    total = sum(parameter.numel() for parameter in model.parameters())
    gathered = 4 * (total - sum(blocks)) + 8 * max(blocks)
    for rows, count, gradients in ((16, 4, total), (8, 4, 4 * total), (32, 2, 2 * total)):
        found = memory(run, rows, bytes_per_number=4, cards=count)
        assert found.state == 12 * total / count + gradients + gathered
        assert found.activations == memory(run, rows, bytes_per_number=4).activations
    assert memory(run, 8).state == 18 * total
    large = replace(recipes.recipe("mae_lm_large"), {"training.data_parallel": "shard"})
    whole, sharded = cost.cost(large, cards=1).memory, cost.cost(large, cards=8).memory
    assert sharded.state < 0.5 * whole.state


MEASURED = [
    ("mlm_base", 0.0, "the same, doors compiled too: as committed"),
    ("mae_lm_base", 0.0, "mae_lm_base, absolute positions, dropout 0"),
    ("mae_lm_base", 0.1, "mae_lm_base, absolute positions, dropout .1"),
]


@pytest.mark.parametrize(("name", "dropout", "what"), MEASURED)
def test_memory_estimate_is_near_what_a_card_measured(name, dropout, what):
    """128 rows of 512 on an H100; the allocator and workspaces are not in the estimate."""
    profile = json.loads((Path(__file__).parents[1] / "results" / "profile_h100.json").read_text())
    (measured,) = [step for step in profile["steps"] if step["what"] == what]
    run = replace(recipes.recipe(name), {"shape.positions": "absolute", "shape.dropout": dropout})
    assert memory(run, 128).total == pytest.approx(measured["memory_bytes"], rel=0.1)


def test_what_rotary_positions_add_is_near_what_a_card_measured():
    """Queries and keys of 128 rows, turned by the kernel, on an H200."""
    timed = json.loads((Path(__file__).parents[1] / "results" / "attention_rotary.json").read_text())["timed"]
    measured = {step["name"]: step["memory_bytes"] for step in timed if step["way"] == "ours"}
    plain, turned = (
        memory(replace(recipes.recipe("mlm_base"), {"shape.positions": positions, "shape.dropout": 0.0}), 128).total
        for positions in ("absolute", "rotary")
    )
    assert turned - plain == pytest.approx(measured["mlm, rotary"] - measured["mlm"], rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 6),
    joins=st.lists(st.floats(0, 1), max_size=3),
    rate=st.floats(0.1, 0.8),
    decoder=st.sampled_from([None, ("self",), ("cross",), ("self", "cross")]),
)
def test_executed_never_exceeds_plain_and_later_joins_never_cost_more(depth, joins, rate, decoder):
    shape = dataclasses.replace(TINY, depth=depth)
    decoding = decoder and dataclasses.replace(NARROW, sublayers=decoder)
    ends = [*sorted(joins)[: depth - 1], 1.0]
    steps = (Join(layer, start, stop) for layer, (start, stop) in enumerate(pairwise([0.0, *ends])))
    run = Run("x", shape, decoding, Masking(rate=rate, joins=tuple(steps)))
    plain, executed = flops_per_token(run)
    assert 0 < executed <= plain
    at_once = dataclasses.replace(run, masking=Masking(rate=rate))
    assert plain <= flops_per_token(at_once).plain + 1e-6


def test_cards_by_name_and_by_driver():
    assert card("h100").peak == 989e12
    assert card("rtx-4090") is card("RTX 4090") is card_of_device("NVIDIA GeForce RTX 4090")
    assert card_of_device("NVIDIA H100 80GB HBM3") is card("H100")
    assert card_of_device("NVIDIA H100 PCIe") is card("H100 PCIe")
    assert card_of_device("NVIDIA A100-SXM4-80GB") is card("A100")
    assert card_of_device("NVIDIA L4") is card("L4")
    for unknown in ("NVIDIA L40", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "Apple M3"):
        assert card_of_device(unknown) is None
    with pytest.raises(Refusal, match="RTX 4090"):
        card("H1000")


@pytest.mark.parametrize(
    ("field", "options"),
    [("--mfu", "--mfu=0"), ("--mfu", "--mfu=40"), ("--cards", "--cards=0"), ("--kind", "--kind=TPU"),
     ("--micro-rows", "--micro-rows=0"), ("shape.vocabulary", "--vocabulary=3"), ("shape.depth", "--shape.depth=0")],
)  # fmt: skip
def test_bad_options_are_refused_by_name(field, options):
    with pytest.raises(Refusal) as refused:
        run_cost(["mlm_tiny", options])
    assert refused.value.where == field


def test_gpu_hours():
    """One H100 at its whole peak does 989e12 plain FLOPs a second; the hours of all cards do not depend on how many."""
    run = recipes.recipe("mlm_base")
    whole = cost.cost(run, kind="H100", cards=1, mfu=1.0)
    seconds = 125_000 * 2048 * 512 * flops_per_token(run).plain / 989e12
    assert whole.gpu_hours == pytest.approx(seconds / 3600)
    assert cost.cost(run, cards=8, mfu=0.5).gpu_hours == pytest.approx(2 * whole.gpu_hours)
    shorter = replace(run, {"training.max_tokens": 10**9})
    assert cost.cost(shorter).tokens == 10**9


def test_printed_cost_holds_the_published_share_beside_the_computed(capsys):
    run_cost(["three_ml_self_base", "--vocabulary", "50304"])
    said = capsys.readouterr().out
    assert "256 x 12" in said
    assert "78%" in next(line for line in said.splitlines() if "published" in line)
    assert "80.0%" in next(line for line in said.splitlines() if "computed" in line and "%" in line)
    run_cost(["mlm_base"])
    said = capsys.readouterr().out
    assert "published" not in said
    assert "589.5" in said


@pytest.mark.parametrize(
    ("arguments", "published"),
    [
        (["three_ml_self_base"], "78%"),
        (["three_ml_self_large", "--vocabulary", "50304", "--training.steps", "10"], "68%"),
        (["three_ml_cross_base", "--decoder.sublayers", "self"], "78%"),
        (["three_ml_self_base", "--masking.rate", ".4"], None),
        (["three_ml_self_base", "--masking.later-rates", ".5:.15"], None),
        (["three_ml_self_base", "--masking.predicted-share", ".3"], None),
        (["three_ml_self_base", "--masking.joins", "6"], None),
        (["three_ml_self_base", "--decoder.depth", "6"], None),
        (["three_ml_self_base", "--shape.feedforward", "1536"], None),
        (["three_ml_self_small", "--shape.width", "768"], None),
        (["three_ml_base"], None),
        (["three_ml_cross_base"], None),
        (["three_ml_random_kept_large"], None),
    ],
)
def test_a_published_share_stands_beside_the_run_that_it_describes_only(arguments, published, capsys):
    """The same recipe by any other name is the same recipe; with another rate, decoder or shape it is not."""
    run_cost(arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if "published" in line]
    assert [published in line for line in lines] == ([True] if published else [])


def test_any_field_of_the_recipe_can_be_changed(capsys):
    """The printed numbers are those of the changed run."""
    run_cost(["mae_lm_base", "--shape.depth", "6", "--masking.rate", ".3"])
    said = capsys.readouterr().out
    changed = cost.cost(replace(recipes.recipe("mae_lm_base"), {"shape.depth": 6, "masking.rate": 0.3}))
    assert f"{changed.parameters.kept:,}" in said
    assert "358 + 154" in said
    assert "358 x 6" in said
    assert f"{changed.plain_ratio:.1%}" in said
    with pytest.raises(Refusal, match="no recipe"):
        run_cost([])


def test_with_data_the_cost_is_that_of_its_vocabulary(data, tmp_path, capsys):
    run_cost(["mlm_tiny", "--masking.rate", ".4", "--data", str(data)])
    few = capsys.readouterr().out
    run_cost(["mlm_tiny", "--masking.rate", ".4", "--vocabulary", str(open_store(data).vocabulary)])
    assert few == capsys.readouterr().out
    run_cost(["mlm_tiny", "--masking.rate", ".4"])
    assert few != capsys.readouterr().out
    with pytest.raises(Refusal, match=r"store\.json"):
        run_cost(["mlm_tiny", "--data", str(tmp_path)])


def test_the_recipe_to_begin_with_follows_from_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(cards.sys, "platform", "linux")
    monkeypatch.setattr(cards, "DRIVERS", (str(tmp_path / "none"),))
    assert (cards.has_gpu(), cards.recipe_for_here()) == (False, ("mae_lm_tiny", ""))
    (tmp_path / "driver").touch()
    monkeypatch.setattr(cards, "DRIVERS", (str(tmp_path / "none"), str(tmp_path / "driver")))
    assert (cards.has_gpu(), cards.recipe_for_here()) == (True, ("three_ml_small", " --shape.positions rotary"))

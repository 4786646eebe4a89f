"""The report over systems and seeds: who is one system, what is seed noise, what quality costs, when it is reached."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from latemask.config import Run, typed
from latemask.counts import flops_per_token
from latemask.downstream.tasks import GLUE
from latemask.report import plots
from latemask.report.curves import checkpoint_drawings
from latemask.report.downstream import entries
from latemask.report.folders import RunFolder, read_folders
from latemask.report.front import cost_table, front, front_drawings
from latemask.report.looks import Look
from latemask.report.material import Material
from latemask.report.objectives import by_objective, number_that_varies
from latemask.report.one_seed import interval, one_seed_table
from latemask.report.page import ReportOptions, parts, run_report
from latemask.report.rank import masked_table, rank_table
from latemask.report.rank_by_layer import layer_tables, rank_drawings
from latemask.report.runs import runs_table
from latemask.report.seeds import Difference, seeds_tables, value_at
from latemask.report.systems import reference, systems
from latemask.report.tables import Drawing, Table
from latemask.report.time_to_quality import time_table, time_to
from latemask.report.tuning import tuning_tables
from reported import masked_loss, pairs, point, put, study, write_curve, write_journal, write_lines

FINITE = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))


def seeded(folder: Path, name: str, seed: int, **fields: Any) -> Path:
    return write_journal(folder, name, fields={"training.seed": seed} | fields)


def cells(table: Table | None, name: str) -> dict[str, Any]:
    assert table is not None
    [row] = [row for row in table.rows if row[0] == name]
    return dict(zip(table.columns, row, strict=True))


# Systems


def test_runs_are_grouped_by_settings_and_told_apart_by_seed_whatever_their_folders_are_called(tmp_path):
    folders = [seeded(tmp_path / "x", "mae_lm_tiny", 2), seeded(tmp_path / "y", "mlm_tiny", 1),
               seeded(tmp_path / "z", "mae_lm_tiny", 1, **{"training.log_every": 7}),
               seeded(tmp_path / "v", "mae_lm_tiny", 1, **{"masking.rate": 0.3}),
               seeded(tmp_path / "w", "mae_lm_tiny", 2, **{"masking.rate": 0.3})]  # fmt: skip
    found = {system.name: [run.name for run in system.runs] for system in systems(read_folders(folders))}
    assert found == {
        "mae_lm_tiny, masking.rate 0.15": ["z", "x"],
        "y": ["y"],
        "mae_lm_tiny, masking.rate 0.3": ["v", "w"],
    }


def test_a_run_from_before_a_field_was_is_one_system_with_those_at_its_default(tmp_path):
    folders = [seeded(tmp_path / str(seed), "mae_lm_tiny", seed) for seed in (1, 2)]
    folders.append(seeded(tmp_path / "3", "mae_lm_tiny", 3, **{"decoder.centred": True}))
    first = folders[0] / "journal.jsonl"
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    for part, name in (("decoder", "centred"), ("training", "graphs")):
        del lines[0]["run"][part][name]
    first.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [[run.name for run in system.runs] for system in systems(read_folders(folders))] == [["1", "2"], ["3"]]


def test_seeds_that_were_fitted_to_other_cards_are_one_system(tmp_path):
    folders = [seeded(tmp_path / "1", "mae_lm_tiny", 1), seeded(tmp_path / "2", "mae_lm_tiny", 2, **{
        "training.micro_rows": 2, "training.recompute": True})]  # fmt: skip
    assert [len(system.runs) for system in systems(read_folders(folders))] == [2]


def test_a_system_is_not_called_as_another_run_is(tmp_path):
    folders = [seeded(tmp_path / "mlm_tiny", "mlm_tiny", 1, **{"shape.initial_deviation": 0.01}),
               *(seeded(tmp_path / f"run-{seed}", "mlm_tiny", seed) for seed in (1, 2)),
               seeded(tmp_path / "z", "mae_lm_tiny", 1)]  # fmt: skip
    found = read_folders(folders)
    assert [system.name for system in systems(found)] == ["mlm_tiny", "mlm_tiny (2 seeds)", "z"]
    drawn = front_drawings(Material.of(found))[0].svg
    assert all(f">{name}<" in drawn for name in ("mlm_tiny", "mlm_tiny (2 seeds)", "z"))


def test_others_are_set_beside_the_peer_or_mlm_at_the_usual_rate(tmp_path):
    mae, half, usual = (seeded(tmp_path / name, name, 1, **fields) for name, fields in (
        ("mae_lm_tiny", {}), ("mlm_tiny", {"masking.rate": 0.5}), ("mlm_80_10_10_tiny", {})))  # fmt: skip
    runs = [mae, half]
    assert reference(systems(read_folders(runs))).name == "mlm_tiny"
    runs.append(usual)
    assert reference(systems(read_folders(runs))).name == "mlm_80_10_10_tiny"
    start, *lines = [json.loads(line) for line in (usual / "journal.jsonl").read_text().splitlines()]
    runs.append(write_lines(tmp_path / "roberta", [start | {"peer": "transformers RobertaForMaskedLM"}, *lines]))
    found = systems(read_folders(runs))
    assert len(found) == 4, "a peer is no run of ours"
    assert reference(found).name == "roberta"
    assert reference(found[:1]).name == "mae_lm_tiny"


def test_seeds_of_a_system_have_one_colour_and_marker_and_each_its_dash(tmp_path):
    for seed, name in itertools.product((1, 2, 3), ("mlm_tiny", "mae_lm_tiny")):
        seeded(tmp_path / f"{name}-{seed}", name, seed)
    put(tmp_path / "other", point("rte", 0.5, run="other", step=None))
    runs = Material.of(read_folders([*sorted(tmp_path.iterdir())])).folders
    looks = {run.name: run.look.style for run in runs}
    colours = {name: {looks[f"{name}-{seed}"]["color"] for seed in (1, 2, 3)} for name in ("mlm_tiny", "mae_lm_tiny")}
    assert all(len(found) == 1 for found in colours.values())
    assert len({looks["other"]["color"], *itertools.chain(*colours.values())}) == 3
    assert len({str(looks[f"mlm_tiny-{seed}"]["linestyle"]) for seed in (1, 2, 3)}) == 3
    alone = read_folders([tmp_path / f"mlm_tiny-{seed}" for seed in (1, 2, 3)])
    assert [run.look for run in Material.of(alone).folders] == [run.look for run in alone]


# Seed noise


@given(st.lists(FINITE, min_size=2, max_size=6))
def test_a_difference_is_beyond_seed_noise_where_a_t_test_says_so(changes):
    difference = Difference.of(changes)
    if np.ptp(changes) < 1e-6:
        return
    low, high = scipy.stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    assert difference.mean - difference.half_width == pytest.approx(low, rel=1e-6, abs=1e-6)
    assert difference.mean + difference.half_width == pytest.approx(high, rel=1e-6, abs=1e-6)
    if min(abs(low), abs(high)) > 1e-6:
        word = "within seed noise" if low < 0 < high else "better, beyond seed noise" if low > 0 else "worse, beyond"
        assert difference.word(is_loss=False).startswith(word)


def test_one_pair_says_nothing_of_noise_and_a_lower_loss_is_better():
    assert Difference.of([3.0]).word(is_loss=False) == "one seed: noise unknown"
    assert Difference.of([-1.0, -1.1]).word(is_loss=True) == "better, beyond seed noise"
    assert Difference.of([-1.0, -1.1]).word(is_loss=False) == "worse, beyond seed noise"
    assert Difference.of([-1.0, -1.1]).word(is_loss=False, is_neutral=True) == "lower, beyond seed noise"
    assert Difference.of([0.0, 0.0]).word(is_loss=False) == "within seed noise"


@given(FINITE.filter(bool), st.integers(2, 4), st.floats(0, 1e-12))
def test_equal_differences_of_all_pairs_are_no_verdict(change, pairs, rounding):
    """Of scores that come in steps two pairs are often equal: the interval would have no width at all."""
    difference = Difference.of([change * (1 + rounding), *[change] * (pairs - 1)])
    assert difference.word(is_loss=True) == "no verdict: equal differences"
    assert difference.half_width == math.inf


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=6, unique_by=lambda point: point[0]), FINITE)
def test_between_close_checkpoints_a_curve_is_straight_and_nothing_else_is_read_of_it(points, at):
    points = sorted(points)
    found = value_at(points, at)
    around = [[x for x, _ in points if x <= at][-1:], [x for x, _ in points if x >= at][:1]]
    if all(around) and around[1][0] - around[0][0] <= 0.15 * at:
        assert found == pytest.approx(np.interp(at, *zip(*points, strict=True)), abs=1e-6)
    else:
        assert found is None


def test_halfway_between_two_checkpoints_is_their_mean():
    assert value_at([(0, 9), (95, 1), (105, 2)], 100) == 1.5


def test_nothing_is_said_of_equal_seconds_where_validations_are_far_apart(tmp_path):
    for seed in SEEDS:
        for name, seconds in (("mlm_tiny", 900), ("mae_lm_tiny", 1000)):
            folder = write_curve(tmp_path / f"{name}-{seed}", name, 3.0 + seed, seconds, {"training.seed": seed})
            lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
            ends = (0, 1000)
            write_lines(folder, [line for line in lines if line["kind"] != "validation" or line["step"] in ends])
    [table] = seeds_tables(Material.of(read_folders([tmp_path])))
    assert "equal seconds" not in str(table.rows)
    assert "Nothing at equal seconds" in table.note


SEEDS = (1, 2, 3)


def two_systems(place: Path, seeds: tuple[int, ...] = SEEDS, steps: int = 1000) -> list[RunFolder]:
    """MAE-LM 2 points better in RTE, give or take .1; its loss .3 lower, give or take a whole nat; it takes 1.5 times
    as long."""
    for seed in seeds:
        of = {"training.seed": seed}
        mlm = write_curve(place / f"run-{seed}", "mlm_tiny", 3.0 + 0.1 * seed, 1000, of)
        name = f"run-{seed}"
        put(mlm, *(point("rte", 0.60 + 0.02 * seed + 0.01 * again, again, run=name) for again in range(3)),
            masked_loss(name, 3.0 + seed), pairs(name, 0.6), study(f"runs/{name}", top=90))  # fmt: skip
        mae = write_curve(place / f"other-{seed}", "mae_lm_tiny", 2.7 + 0.1 * seed + (seed - 2), 1500, of, steps)
        name = f"other-{seed}"
        put(mae, *(point("rte", 0.62 + 0.021 * seed + 0.01 * again, again, run=name) for again in range(3)),
            masked_loss(name, 2.0 + 1.1 * seed), study(f"runs/{name}", top=100 + seed))  # fmt: skip
    return read_folders([place])


def test_paired_differences_say_which_are_seed_noise(tmp_path):
    runs = two_systems(tmp_path)
    [table] = seeds_tables(Material.of(runs))
    assert table.title == "mae_lm_tiny against mlm_tiny, seed by seed"
    rte = cells(table, "RTE")
    assert (rte["mlm_tiny"], rte["mae_lm_tiny"]) == ("65.0", "67.2")
    assert (rte["difference by seed"], rte["seeds"]) == ("+2.1 +2.2 +2.3", "1, 2, 3")
    assert (rte["mean difference ± 95 %"], rte["verdict"]) == ("+2.2 ± 0.2", "better, beyond seed noise")
    loss = cells(table, "validation loss")
    assert loss["verdict"] == "within seed noise"
    assert cells(table, "masked loss, , 15%")["verdict"] == "better, beyond seed noise"
    assert cells(table, "rank_.9 of the last layer, pretrained")["verdict"] == "higher, beyond seed noise"
    assert cells(table, "card-seconds of pretraining")["difference by seed"] == "+500.0 +500.0 +500.0"
    assert "Minimal pairs" not in str(table.rows), "of one system alone"
    assert "At equal tokens (4.096 million a run)" in table.note


def test_at_equal_seconds_both_curves_are_read_where_the_quicker_run_ended(tmp_path):
    runs = two_systems(tmp_path)
    loss = cells(seeds_tables(Material.of(runs))[0], "validation loss, at equal seconds")
    wanted = []
    for name in ("run", "other"):
        curves = [plots.loss_points(run.lines, "seconds") for run in runs if run.name.startswith(name)]
        wanted.append(np.mean([np.interp(1000, *zip(*curve, strict=True)) for curve in curves]))
    assert [loss["mlm_tiny"], loss["mae_lm_tiny"]] == [f"{value:.3f}" for value in wanted]
    assert loss["mae_lm_tiny"] != cells(seeds_tables(Material.of(runs))[0], "validation loss")["mae_lm_tiny"]


def test_scores_of_checkpoints_on_the_way_are_compared_at_equal_seconds_too(tmp_path):
    for seed, (name, slower) in itertools.product(SEEDS, (("mlm_tiny", 1), ("mae_lm_tiny", 2))):
        run = write_curve(tmp_path / f"{name}-{seed}", name, 2.0, 100 * slower, {"training.seed": seed})
        points = [point("rte", 0.5 + (step + slower * seed) / 10_000, step=step, run=run.name) for step in (500, 1000)]
        for one in points:
            one["model"]["pretraining_seconds"] = one["model"]["step"] * slower / 10
        put(run, *points)
    row = cells(seeds_tables(Material.of(read_folders([tmp_path])))[0], "RTE, at equal seconds")
    assert (row["mlm_tiny"], row["mae_lm_tiny"], row["verdict"]) == ("60.0", "55.0", "worse, beyond seed noise")


def test_what_does_not_compare_is_not_compared_and_said(tmp_path):
    shorter = two_systems(tmp_path / "tokens", steps=500)
    assert (
        "Not at equal tokens: run-1 4.096 million, other-1 2.048 million" in seeds_tables(Material.of(shorter))[0].note
    )
    for seed, name in itertools.product(SEEDS, ("mlm_tiny", "mae_lm_tiny")):
        rate = 0.15 if name == "mlm_tiny" else 0.5
        write_journal(tmp_path / "rates" / f"{name}-{seed}", name, rate, {"training.seed": seed})
    [table] = seeds_tables(Material.of(read_folders([tmp_path / "rates"])))
    assert [row[0] for row in table.rows] == ["card-seconds of pretraining"]
    assert "do not compare: validation loss, 15% masked (mlm_tiny); validation loss, 50% masked (mae" in table.note
    assert not seeds_tables(Material.of(two_systems(tmp_path / "alone", (1,)))), "one pair is no spread"


def test_losses_of_the_pairs_that_have_ended_are_compared_and_the_others_said(tmp_path):
    two_systems(tmp_path)
    [whole] = seeds_tables(Material.of(read_folders([tmp_path])))
    assert "Without the validation losses" not in whole.note
    journal = tmp_path / "other-3" / "journal.jsonl"
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if '"kind": "end"' not in line))
    [table] = seeds_tables(Material.of(read_folders([tmp_path])))
    assert cells(table, "validation loss")["seeds"] == "1, 2"
    assert cells(table, "RTE")["seeds"] == "1, 2, 3"
    assert "Without the validation losses of pairs that have not ended" in table.note


# Cost and time


@given(st.lists(st.tuples(st.integers(0, 500), FINITE), min_size=1, max_size=7), st.booleans())
def test_on_the_front_are_those_that_none_as_cheap_is_as_good_as(points, is_loss):
    named = {str(number): point for number, point in enumerate(points)}
    sign = -1 if is_loss else 1
    found = front(named, is_loss)
    assert [named[name][0] for name in found] == sorted({named[name][0] for name in found})
    for name, (cost, quality) in named.items():
        others = [one for one in found if one != name]
        beaten = any(named[one][0] <= cost and sign * named[one][1] >= sign * quality for one in others)
        assert beaten == (name not in found)


def test_who_costs_a_step_more_is_as_cheap():
    assert front({"a": (310.0, 3.5), "b": (310.1, 3.2), "c": (300.0, 3.6), "d": (311.0, 3.1)}, True) == ["c", "b", "d"]
    assert front({"a": (310.1, 3.2), "b": (310.0, 3.2), "c": (310.0, 3.2)}, True) == ["b"]


def test_quality_stands_beside_cost_and_a_figure_joins_the_front(tmp_path):
    part = {"subset": {"pairs": "the first 2 of each file"}}
    for name, seconds, loss in (("mlm_tiny", 100, 3.0), ("three_ml_tiny", 80, 3.1), ("mae_lm_tiny", 120, 3.2)):
        put(write_curve(tmp_path / name, name, loss, seconds), pairs(name, loss / 4, step=1000) | part)
    folders = read_folders([tmp_path])
    table = cost_table(Material.of(folders))
    mlm, three, mae = (cells(table, name) for name in ("mlm_tiny", "three_ml_tiny", "mae_lm_tiny"))
    assert [each["of mlm_tiny's"] for each in (mlm, three, mae)] == ["100.0%", "80.0%", "120.0%"]
    assert [str(each["validation loss"]).endswith("◆") for each in (mlm, three, mae)] == [True, True, False]
    assert [each["Minimal pairs †"] for each in (mlm, three, mae)] == ["75.0", "77.5 ◆", "80.0 ◆"]
    assert "one seed" in table.note
    drawings = {drawing.name: drawing for drawing in front_drawings(Material.of(folders))}
    assert set(drawings) == {"front-validation-loss", "front-minimal-pairs"}
    assert ["subsets" in drawing.note for drawing in drawings.values()] == [False, True]
    for name in ("mlm_tiny", "three_ml_tiny", "mae_lm_tiny"):
        assert f">{name}<" in drawings["front-validation-loss"].svg
    for number in range(20):
        write_curve(
            tmp_path / f"dear-{number}", "mlm_tiny", 3.0, 500, {"shape.initial_deviation": 0.03 + number / 1000}
        )
    crowded = front_drawings(Material.of(read_folders([tmp_path])))[0].svg
    assert ">21 more, grey<" in crowded, "of many only those on the front are named"
    assert [f">{name}<" in crowded for name in ("mlm_tiny", "three_ml_tiny", "mae_lm_tiny")] == [True, True, False]
    assert "not ended" not in drawings["front-validation-loss"].note
    going = write_curve(tmp_path / "going", "three_ml_tiny", 2.9, 80, {"training.learning_rate": 1e-5})
    journal = (going / "journal.jsonl").read_text().splitlines(keepends=True)
    (going / "journal.jsonl").write_text("".join(journal[:-1]))
    assert "Without the runs that have not ended." in front_drawings(Material.of(read_folders([tmp_path])))[0].note
    two = read_folders([tmp_path / "mlm_tiny", tmp_path / "mae_lm_tiny"])
    assert not front_drawings(Material.of(two))
    assert "◆" not in str(cost_table(Material.of(two)))
    assert cost_table(Material.of(two[:1])) is None


def test_trials_that_differ_in_one_number_are_joined_in_its_order_and_named_by_their_objective(tmp_path):
    tried = (("mlm_tiny", 0.3, 3.0, 110), ("mlm_tiny", 0.15, 3.1, 100), ("three_ml_tiny", 0.5, 3.2, 80),
             ("three_ml_tiny", 0.3, 3.1, 90), ("mae_lm_tiny", 0.15, 3.3, 130))  # fmt: skip
    for name, rate, loss, seconds in tried:
        write_curve(tmp_path / f"{name}-{seconds}", name, loss, seconds, {"masking.rate": rate})
    [drawing] = front_drawings(Material.of(read_folders([tmp_path])))
    named = re.findall(r">([^<>]+)</text>", drawing.svg)
    assert {"mlm_tiny", "three_ml_tiny", "mae_lm_tiny"} <= set(named), "the legend names objectives, not trials"
    assert [label for label in named if label in ("0.15", "0.3", "0.5")] == ["0.15", "0.15", "0.3", "0.3", "0.5"]
    assert "masking.rate" in drawing.note
    write_curve(tmp_path / "else", "mlm_tiny", 3.0, 120, {"masking.rate": 0.4, "training.learning_rate": 1e-5})
    [drawing] = front_drawings(Material.of(read_folders([tmp_path])))
    assert ">mlm_tiny-100<" in drawing.svg, "of two fields none is the order"
    assert "masking.rate" not in drawing.note


def test_quality_stands_beside_flops_where_seconds_say_nothing(tmp_path):
    """Runs that shared their cards: the seconds tell a front of their own, the FLOPs are those of the settings."""

    def on_front(table: Table | None) -> set[str]:
        return {name for name, *_ in found if str(cells(table, name)["validation loss"]).endswith("◆")}

    found = (("mlm_tiny", 3.2, 100), ("three_ml_tiny", 3.15, 200), ("mae_lm_tiny", 3.1, 300))
    for name, loss, seconds in found:
        write_curve(tmp_path / name, name, loss, seconds)
    folders = read_folders([tmp_path])
    spent = {}
    for folder in folders:
        run = typed(Run, folder.start["run"], "run")
        each = flops_per_token(run).plain
        folder.lines[0]["plain_flops_per_token"] = each
        spent[folder.name] = folder.reached["step"] * run.training.batch_rows * run.shape.row_tokens * each / 1e15
    material = Material.of(folders, "flops")
    table = cost_table(material)
    for name, cost in spent.items():
        assert cells(table, name)["PFLOP, plain"] == pytest.approx(cost)
    assert on_front(table) == {"mlm_tiny", "mae_lm_tiny"}, "50 % of masks cost a tiny model more than a decoder does"
    [drawing] = front_drawings(material)
    assert drawing.title == "Validation loss against PFLOP, plain"
    assert ">PFLOP of pretraining (plain objective)<" in drawing.svg
    assert on_front(cost_table(Material.of(folders))) == {"mlm_tiny", "three_ml_tiny", "mae_lm_tiny"}
    quality, timed = time_table(material), time_table(Material.of(folders))
    assert [table.title for table in (quality, timed)] == ["FLOPs to quality", "Time to quality"]
    sooner = _share_of_curve(3.1, until=3.2)
    shares = {"PFLOP": spent["mae_lm_tiny"] / spent["mlm_tiny"], "s": 3.0}
    for table, (unit, share) in zip((quality, timed), shares.items(), strict=True):
        mine, its = (cells(table, "validation loss")[name] for name in ("mae_lm_tiny", "mlm_tiny"))
        assert its.endswith(f" {unit} (100%)")
        reached = re.fullmatch(rf"([\d.]+) {unit} \((\d+)%\)", mine).groups()
        assert float(reached[0]) == pytest.approx(float(its.split()[0]) * share * sooner, rel=0.02)
        assert float(reached[1]) == pytest.approx(100 * share * sooner, abs=2)


def _share_of_curve(floor: float, until: float) -> float:
    """Of ``write_curve``'s run: after what share of it its loss is as low as that of another at its end."""
    end = until + (10 - until) * math.exp(-4)
    return -math.log((end - floor) / (10 - floor)) / 4


@pytest.mark.parametrize("told", [{}, {"plain_flops_per_token": None}])
def test_a_run_whose_journal_does_not_say_its_flops_has_a_row_and_no_place_on_the_front(told, tmp_path):
    for name in ("mlm_tiny", "three_ml_tiny", "mae_lm_tiny"):
        write_curve(tmp_path / name, name, 3.0, 100)
    folders = read_folders([tmp_path])
    del folders[0].lines[0]["plain_flops_per_token"]
    folders[0].lines[0] |= told
    table = cost_table(Material.of(folders, "flops"))
    assert cells(table, folders[0].name)["PFLOP, plain"] is None
    assert not front_drawings(Material.of(folders, "flops")), "two are too few"
    [against_flops] = [part for part in parts(folders, "flops") if isinstance(part, Drawing) and part.name == "flops"]
    assert "<svg" in against_flops.svg


@pytest.mark.parametrize("resumed", [False, True])
def test_what_has_no_flops_is_named_wherever_it_is_missing(resumed, tmp_path):
    """An older journal does not count them; once a newer version has gone on with its run, it does."""
    old = priced(tmp_path / "old", "mlm_tiny", 1, 2e9, 3.0)
    priced(tmp_path / "old-2", "mlm_tiny", 2, 2e9, 3.0)
    for seed, number in itertools.product((1, 2), (1, 2, 3)):
        fields = {"training.learning_rate": number / 1e4}
        priced(tmp_path / f"new-{number}-{seed}", "three_ml_tiny", seed, 2e9, 3.0 + number / 10, **fields)
    (start, *lines) = [json.loads(line) for line in (old / "journal.jsonl").read_text().splitlines()]
    resume = [start | {"kind": "resume"}] if resumed else []
    write_lines(old, [{name: value for name, value in start.items() if name != "plain_flops_per_token"},
                      *resume, *lines])  # fmt: skip
    priced(tmp_path / "lower", "mlm_tiny", 1, 2e9, 3.4, **{"training.learning_rate": 1e-6})
    folders = read_folders([tmp_path])
    notes = {part.title: part.note for part in parts(folders, "flops")}
    told = {title for title, note in notes.items() if "Without the FLOPs of old: " in note}
    missing = {"Loss against FLOPs", "Minimal pairs of checkpoints against FLOPs", "Costs", "Quality beside cost",
               "Validation loss against PFLOP, plain", "Minimal pairs against PFLOP, plain", "FLOPs to quality",
               "Settings of mlm_tiny",
               *(title for title in notes if title.endswith(", seed by seed"))}  # fmt: skip
    assert missing < notes.keys()
    assert told == (set() if resumed else missing)
    [drawn] = [part for part in parts(folders) if isinstance(part, Drawing) and part.name == "flops"]
    assert (">old<" in drawn.svg) == resumed
    assert not any("Without the FLOPs" in part.note for part in parts(folders) if "econds" in part.title)


def test_checkpoints_whose_results_do_not_say_their_seconds_are_told_of(tmp_path):
    for name in ("mlm_tiny", "mae_lm_tiny"):
        run = write_curve(tmp_path / name, name, 3.0, 100)
        put(run, *(pairs(name, step / 2000, step=step) for step in (500, 1000)))
    result = next((tmp_path / "mlm_tiny" / "downstream").iterdir())
    found = json.loads(result.read_text())
    del found["model"]["pretraining_seconds"]
    result.write_text(json.dumps(found))
    for by in ("seconds", "flops"):
        told = [part.title for part in parts(read_folders([tmp_path]), by) if "pretraining_seconds" in part.note]
        assert told == ["Time to quality"] * (by == "seconds") + ["Minimal pairs of checkpoints against seconds"]


def test_that_seconds_of_other_cards_do_not_compare_is_said_beside_seconds_alone(tmp_path):
    for name in ("mlm_tiny", "three_ml_tiny", "mae_lm_tiny"):
        write_curve(tmp_path / name, name, 3.0, 100)
    folders = read_folders([tmp_path])
    folders[0].lines[0]["card"] = "another"
    for material, is_said in ((Material.of(folders), True), (Material.of(folders, "flops"), False)):
        table, [drawing] = cost_table(material), front_drawings(material)
        assert table is not None
        assert ["On different cards" in part.note for part in (table, drawing)] == [is_said, is_said]


def test_tasks_stand_beside_averages_over_all_seeds_where_one_run_lacks_the_average(tmp_path):
    for name, seed, tasks in (("mlm_tiny", 1, GLUE), ("mlm_tiny", 2, GLUE), ("mae_lm_tiny", 1, ["rte"]),
                              ("mae_lm_tiny", 2, GLUE)):  # fmt: skip
        run = f"{name}-{seed}"
        folder = write_curve(tmp_path / run, name, 3.0, 100, {"training.seed": seed})
        put(folder, *(point(task, 0.5 + 0.1 * seed, run=run) for task in tasks))
    material = Material.of(read_folders([tmp_path]))
    table = cost_table(material)
    mlm, mae = (cells(table, name) for name in ("mlm_tiny", "mae_lm_tiny"))
    assert mlm["RTE"] == mae["RTE"] == "65.0 ± 7.1"
    assert (mlm["GLUE average"], mae["GLUE average"]) == ("65.0 ± 7.1", "70.0 (1 of 2)")
    assert table is not None
    assert "for the third has none" in table.note
    assert "CoLA" not in mlm, "every run that has it has the average"


def test_the_mean_of_the_tasks_that_all_pairs_have_is_compared_where_an_average_is_lacking(tmp_path):
    for seed, tasks in ((1, ["rte", "cola", "sst2"]), (2, ["rte", "cola"])):
        for name, gain in (("mlm_tiny", 0.0), ("mae_lm_tiny", 0.1)):
            run = f"{name}-{seed}"
            folder = write_curve(tmp_path / run, name, 3.0, 100, {"training.seed": seed})
            scores = {"rte": 0.5, "cola": 0.7 + gain * seed, "sst2": 0.9}
            put(folder, *(point(task, scores[task], run=run) for task in tasks))
    [table] = seeds_tables(Material.of(read_folders([tmp_path])))
    found = cells(table, "mean of 2 tasks of GLUE")
    assert (found["mlm_tiny"], found["mae_lm_tiny"], found["difference by seed"]) == ("60.0", "67.5", "+5.0 +10.0")
    for folder in (tmp_path / f"{name}-2" for name in ("mlm_tiny", "mae_lm_tiny")):
        put(folder, *(point(task, 0.5, run=folder.name) for task in GLUE))
        put(tmp_path / f"{folder.name[:-1]}1", *(point(task, 0.5, run=f"{folder.name[:-1]}1") for task in GLUE))
    [table] = seeds_tables(Material.of(read_folders([tmp_path])))
    assert cells(table, "GLUE average")["seeds"] == "1, 2"
    assert "mean of" not in str(table.rows)


# One seed


def test_with_95_percent_another_value_lies_within_the_interval_of_those_before():
    drawn = np.random.default_rng(0).normal(3, 2, (4000, 5))
    bounds = [interval(list(values[:4])) for values in drawn]
    inside = [low <= values[4] <= high for values, (low, high) in zip(drawn, filter(None, bounds), strict=True)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.01)
    low, high = interval([1.0, 2.0, 6.0]) or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(3.0)
    assert (high - low) / 2 == pytest.approx(scipy.stats.t.ppf(0.975, 2) * np.std([1, 2, 6], ddof=1) * (4 / 3) ** 0.5)
    assert interval([1.0, 2.0]) is None
    assert interval([2.0, 2.0, 2.0]) is None, "equal values tell no spread"


def test_a_system_of_one_run_is_set_beside_what_another_seed_of_the_reference_would_be(tmp_path):
    two_systems(tmp_path)  # three seeds of MLM: RTE 63, 65, 67
    for name, seed, rte, loss in (("three_ml_tiny", 1, 0.70, 3.2), ("mask_in_encoder_tiny", 1, 0.80, 4.2),
                                  ("three_ml_cross_tiny", 1, 0.1, 9.0)):  # fmt: skip
        folder = write_curve(tmp_path / name, name, loss, 1000, {"training.seed": seed})
        put(folder, point("rte", rte, run=name), study(f"runs/{name}", top=90))
    stopped = tmp_path / "three_ml_cross_tiny"
    lines = map(json.loads, (stopped / "journal.jsonl").read_text().splitlines())
    write_lines(stopped, [line for line in lines if line["kind"] != "end"])
    table = one_seed_table(Material.of(read_folders([tmp_path])))
    assert table is not None
    assert {row[0] for row in table.rows} == {"another seed of mlm_tiny", "three_ml_tiny", "mask_in_encoder_tiny"}
    assert cells(table, "another seed of mlm_tiny")["RTE"] == "55.1 to 74.9 (3)"
    inside, outside = (cells(table, name) for name in ("three_ml_tiny", "mask_in_encoder_tiny"))
    assert (inside["RTE"], outside["RTE"]) == ("70.0", "80.0: better")
    assert (inside["validation loss"][:3], outside["validation loss"][-5:]) == ("3.2", "worse")
    assert "rank" not in str(table.columns), "the same in all seeds"
    fewer = Material.of(read_folders([path for path in tmp_path.iterdir() if path.name != "run-3"]))
    assert one_seed_table(fewer) is None


def test_what_one_of_a_system_s_two_runs_has_alone_is_set_beside_the_seeds_too(tmp_path):
    two_systems(tmp_path)
    for seed, loss in ((1, 3.2), (2, 3.3)):
        name = f"three_ml_tiny,seed={seed}"
        folder = write_curve(tmp_path / name, "three_ml_tiny", loss, 1000, {"training.seed": seed})
        if seed == 2:
            put(folder, point("rte", 0.80, run=name), study(f"runs/{name}", top=90))
    table = one_seed_table(Material.of(read_folders([tmp_path])))
    assert table is not None
    assert [row[0] for row in table.rows] == ["another seed of mlm_tiny", "three_ml_tiny,seed=2"]
    assert cells(table, "three_ml_tiny,seed=2")["RTE"] == "80.0: better"
    assert "validation loss" not in table.columns, "two runs have it: pair by pair"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-5, 5)), min_size=2, max_size=6,
                unique_by=lambda point: round(point[0], 1)), st.floats(-6, 6), st.booleans())  # fmt: skip
def test_time_to_a_level_is_the_first_time_on_the_curve(points, level, is_loss):
    points, sign = sorted(points), -1 if is_loss else 1
    xs, ys = map(np.array, zip(*points, strict=True))
    found = time_to(points, level, is_loss)
    if found is None:
        assert (sign * ys < sign * level).all()
    else:
        assert sign * np.interp(found, xs, ys) >= sign * level - 1e-9
        before = np.linspace(xs[0], found, 50, endpoint=False)
        assert found == xs[0] or (sign * np.interp(before, xs, ys) <= sign * level + 1e-9).all()


def test_time_to_quality_is_a_share_of_the_reference_s(tmp_path):
    write_curve(tmp_path / "mlm", "mlm_tiny", 3.0, 1000)
    write_curve(tmp_path / "quick", "mae_lm_tiny", 3.0, 250)
    write_curve(tmp_path / "bad", "three_ml_tiny", 4.0, 100)
    table = time_table(Material.of(read_folders([tmp_path])))
    assert table is not None
    assert cells(table, "validation loss") == {
        "measure": "validation loss", "bad": "not reached", "mlm": "1,000 s (100%)", "quick": "250 s (25%)",
    }  # fmt: skip
    assert time_table(Material.of(read_folders([tmp_path / "mlm"]))) is None


def test_there_is_no_time_where_no_line_says_seconds(tmp_path):
    for name in ("mlm_tiny", "mae_lm_tiny"):
        run = write_journal(tmp_path / name, name)
        lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        write_lines(run, [line for line in lines if line["kind"] != "train"])
    folders = read_folders([tmp_path])
    assert time_table(Material.of(folders)) is None
    assert cost_table(Material.of(folders)) is not None


def test_a_measure_that_the_reference_s_first_seed_lacks_has_its_time_too(tmp_path):
    for name, seed in itertools.product(("mlm_tiny", "mae_lm_tiny"), (1, 2)):
        run = write_curve(tmp_path / f"{name}-{seed}", name, 2.0, 100, {"training.seed": seed})
        if (name, seed) != ("mlm_tiny", 1):
            put(run, *(point("rte", 0.5 + step / 10_000, step=step, run=run.name) for step in (500, 1000)))
    assert cells(time_table(Material.of(read_folders([tmp_path]))), "RTE")["mae_lm_tiny"] == "100 s (100%)"


def test_glue_s_average_of_checkpoints_is_a_curve_and_a_time(tmp_path):
    for name, system, gain in (("slow", "mlm_tiny", 0.0), ("fast", "mae_lm_tiny", 0.1)):
        results = [
            point(task, 0.5 + gain + step / 10_000, step=step, run=name) for task in GLUE for step in (500, 1000)
        ]
        put(write_journal(tmp_path / name, system), *results, point("rte", 0.9, step=2000, run=name))
    folders = read_folders([tmp_path])
    names = [drawing.name for drawing in checkpoint_drawings(entries(folders))]
    assert names[:2] == ["checkpoints-avg-seconds", "checkpoints-avg-flops"]
    table = cells(time_table(Material.of(folders)), "GLUE average")
    assert (table["slow"], table["fast"]) == ("100 s (100%)", "≤ 50 s (50%)")


def test_runs_that_learned_no_more_than_word_frequencies_lead_nowhere_and_the_page_begins_with_them(tmp_path):
    """The dead runs are the cheapest, and the first of the reference's seeds is one of them."""
    made = (("mlm-1", "mlm_tiny", 1, 9.1, 10), ("mlm-2", "mlm_tiny", 2, 3.0, 1000), ("mae", "mae_lm_tiny", 2, 2.9, 900),
            ("3ml", "three_ml_self_tiny", 1, 3.1, 800), ("ahead", "three_ml_tiny", 2, 3.2, 700),
            ("dead", "decoder_self_cross_tiny", 2, 9.1, 20))  # fmt: skip
    for name, system, seed, loss, seconds in made:
        run = write_curve(tmp_path / name, system, loss, seconds, {"training.seed": seed})
        start, *lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        end = lines.pop() | {"word_frequencies_only": loss == 9.1}
        write_lines(run, [start | {"unigram_loss": 9.01}, *lines, end])
        put(run, *(pairs(name, 0.6 + (loss == 9.1) * 0.1, step=step) for step in (500, 1000)))
    folders = read_folders([tmp_path])
    material = Material.of(folders)
    for name, column in itertools.product(("mlm_tiny", "dead"), ("validation loss", "Minimal pairs")):
        assert "◆" not in cells(cost_table(material), name)[column]
    assert "◆" in cells(cost_table(material), "mae")["validation loss"]
    assert "No place on a front: dead, mlm_tiny, with a run" in cost_table(material).note
    for drawing in front_drawings(material):
        assert ">dead<" not in drawing.svg
        assert "Not drawn: dead, mlm_tiny" in drawing.note
    pairs_reached = cells(time_table(material), "Minimal pairs")
    assert pairs_reached["dead"] == "not reached", "it is above the target from its first checkpoint on"
    assert "(" in pairs_reached["3ml"], "the reference's seed of it is dead: another sets the target"
    assert "Set and reach nothing: dead, mlm-1, which" in time_table(material).note

    def beginning(names: list[str]) -> str:
        out = tmp_path / "report.html"
        run_report(ReportOptions(tuple(str(tmp_path / name) for name in names), out))
        first = out.with_suffix(".md").read_text().splitlines()[2]
        assert f"<p>{first}</p>" in out.read_text() or "learned no more" not in first
        return first

    said = "learned no more than word frequencies, which alone reach a loss of 9.0100: what stands below about"
    assert beginning(["mlm-1", "mae", "dead"]) == f"mlm-1, dead {said} them says nothing of their methods."
    assert beginning(["mlm-1", "dead"]) == f"All 2 runs {said} them says nothing of their methods."
    assert beginning(["dead"]) == f"This run {said} it says nothing of its method."
    assert "learned" not in beginning(["mae", "3ml"])
    runs = runs_table(read_folders([tmp_path]))
    assert cells(runs, "mae")["word frequencies alone"] == 9.01
    assert "Learned: whose loss stood still" in runs.note


def test_seconds_of_seeds_that_differ_are_told_with_their_deviation(tmp_path):
    for name, seconds in (("mlm_tiny", (100, 125)), ("mae_lm_tiny", (100, 105))):
        for seed, spent in enumerate(seconds):
            write_curve(tmp_path / f"{name}-{seed}", name, 3.0, spent, {"training.seed": seed})
    folders = read_folders([tmp_path])
    table = cost_table(Material.of(folders))
    assert cells(table, "mlm_tiny")["card-seconds"] == "112.5 ± 17.68"
    assert "Seconds of seeds differ: mlm_tiny by 25% (another load" in table.note
    by_flops = cost_table(Material.of(folders, "flops"))
    assert "Seconds of seeds" not in by_flops.note
    assert isinstance(cells(by_flops, "mlm_tiny")["PFLOP, plain"], float)


# Ranks


def test_a_rank_is_explained_where_it_is_compared_and_tables_name_whom_they_leave_out(tmp_path):
    for seed, name in itertools.product((1, 2), ("mlm_tiny", "mae_lm_tiny")):
        run = write_journal(tmp_path / f"{name}-{seed}", name, fields={"training.seed": seed})
        put(run, study(f"runs/{run.name}", sees_masks=name == "mlm_tiny") | {"without_masks": "no block sees [MASK]"})
    material = Material.of(read_folders([tmp_path]))
    [beside] = seeds_tables(material)
    assert "rank_.9: how many directions hold .9 of the energy" in beside.note
    assert "Without mae_lm_tiny-1; mae_lm_tiny-2: no block sees [MASK]." in masked_table(material.ranks).note
    clean, *masked = layer_tables(material.ranks_over_seeds)
    assert "Without" not in clean.note
    assert len(masked) == 3
    assert all("Without mae_lm_tiny: no block sees [MASK]." in table.note for table in masked)


def test_ranks_of_seeds_are_one_line_with_a_band_and_a_column_of_medians(tmp_path, monkeypatch):
    for seed, top in ((1, 80), (2, 100), (3, 90)):
        for name, more in (("mlm_tiny", 0), ("mae_lm_tiny", 20)):
            run = write_journal(tmp_path / f"{name}-{seed}", name, fields={"training.seed": seed})
            tuned = study(f"runs/{run.name}/saved/squad2-e3-lr2e-05-b32-w0.06-s0-ab.model", top=top + more)
            put(run, study(f"runs/{run.name}", top=top), tuned | {"data": "held-out.jsonl"})
    figures = []
    monkeypatch.setattr(plots, "svg", lambda figure: figures.append(figure) or "<svg></svg>")
    folders = read_folders([tmp_path])
    drawings = [drawing.name for drawing in rank_drawings(Material.of(folders).ranks_over_seeds)]
    assert drawings == ["rank-clean-input", "rank-masked-input", "rank-masked-input-real", "rank-masks",
                        "rank-clean-input-squad2"]  # fmt: skip
    axes = figures[-1].axes[0]
    heights = [list(line.get_ydata())[-1] for line in axes.lines]
    assert sorted(heights) == [90, 110]
    bands = [collection.get_paths()[0].vertices for collection in axes.collections]
    ends = [{float(y) for x, y in band if x == 4} for band in bands]
    assert sorted((min(end), max(end)) for end in ends) == [(80, 100), (100, 120)]
    plots.plt.close("all")
    clean = next(layer_tables(Material.of(folders).ranks_over_seeds))
    assert clean.columns == ("layer", "mae_lm_tiny", "mlm_tiny", "mae_lm_tiny on SQuAD 2.0", "mlm_tiny on SQuAD 2.0")
    assert clean.rows[-1] == ("4", "90 [80..100]", "90 [80..100]", "110 [100..120]", "90 [80..100]")
    row = cells(rank_table(Material.of(folders).ranks), "mae_lm_tiny-1")
    assert (row["pretrained"], row["SQuAD 2.0"]) == ("80 (82)", "100 (102)"), "in one row, though of other texts"
    assert "pretrained en, SQuAD 2.0 held-out.jsonl" in rank_table(Material.of(folders).ranks).note


# What quality is bought with


def priced(folder: Path, name: str, seed: int, each: float, loss: float, **fields: Any) -> Path:
    """A run whose journal counts so many FLOPs a token, its minimal pairs at half of the way and at the end."""
    write_curve(folder, name, loss, 100 + seed, {"training.seed": seed, **fields})
    start, *lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    write_lines(folder, [start | {"plain_flops_per_token": each}, *lines])
    for step, score in ((500, 0.6), (1000, 0.7)):
        put(folder, pairs(folder.name, score - loss / 100, step=step) | {"pretraining_seconds": step / 10.0})
    return folder


def test_pairs_of_seeds_stand_at_equal_flops_where_one_was_cheaper(tmp_path):
    for seed in (1, 2):
        priced(tmp_path / f"mlm-{seed}", "mlm_tiny", seed, 2e9, 3.0 + seed / 10)
        priced(tmp_path / f"three-{seed}", "three_ml_tiny", seed, 1e9, 3.3 + seed / 5)
        priced(tmp_path / f"slow-{seed}", "mlm_tiny", seed, 2e9, 3.5 + seed / 7, **{"training.learning_rate": 1e-5})
    folders = read_folders([tmp_path])
    for by, equal, less in (("flops", "at equal FLOPs", "cheaper"), ("seconds", "at equal seconds", "quicker")):
        three, slow = seeds_tables(Material.of(folders, by))
        if "three" not in three.title:
            three, slow = slow, three
        measures = [str(row[0]) for row in three.rows]
        assert (f"validation loss, {equal}" in measures) == (by == "flops"), "these seconds are the same"
        assert ("card-seconds of pretraining" in measures) == (by == "seconds"), "FLOPs have no noise"
        assert (f"{less} run had ended" in three.note) == (by == "flops")
        assert not any(equal in str(row[0]) for row in slow.rows), "neither of two alike was cheaper"


def test_curves_and_settings_are_priced_in_flops(tmp_path):
    for rate, each in ((0.15, 2e9), (0.3, 3e9)):
        priced(tmp_path / f"mlm-{rate}", "mlm_tiny", 1, each, 3.0 + rate, **{"masking.rate": rate})
    folders = read_folders([tmp_path])
    material = Material.of(folders, "flops")
    rows, row_tokens = (folders[0].fields[name] for name in ("training.batch_rows", "shape.row_tokens"))
    whole = 1000 * rows * row_tokens * 2e9 / 1e15
    curve = material.curves["mlm-0.15"]
    assert [x for x, _ in curve["Minimal pairs"]] == pytest.approx([whole / 2, whole])
    assert curve["validation loss"][-1][0] == pytest.approx(whole)
    [settings] = tuning_tables(material, ())
    assert f"validation loss at {whole:,.4g} PFLOP" in settings.columns
    assert [cells(settings, f"mlm-{rate}")["PFLOP, plain"] for rate in (0.15, 0.3)] == pytest.approx(
        [whole, 1.5 * whole]
    )
    assert not {"seconds", "tokens/s"} & set(settings.columns)
    del folders[0].lines[0]["plain_flops_per_token"]
    assert Material.of(folders, "flops").curves[folders[0].name] == {}


def test_labels_stand_at_their_points_and_the_front_is_edged():
    points = {"a": (1.0, 3.0), "b": (2.0, 2.5), "c": (1.5, 3.5)}
    members = [plots.Family("one", Look(0), {"b": "0.3", "a": "0.5"}), plots.Family("two", Look(1), {"c": "0.15"})]
    axes = plots.families(points, ["a", "b"], "cost", "loss", members).axes[0]
    assert {text.get_text(): tuple(text.xy) for text in axes.texts} == {
        "0.3": (2.0, 2.5),
        "0.5": (1.0, 3.0),
        "0.15": (1.5, 3.5),
    }
    edged = [line for line in axes.lines if line.get_markeredgecolor() == "black" and line.get_linestyle() == "None"]
    assert {(line.get_xdata()[0], line.get_ydata()[0]) for line in edged} == {points["a"], points["b"]}
    assert [tuple(x) for x in axes.lines[1].get_xydata()] == [points["b"], points["a"]], "a line in the family's order"


def test_labels_of_points_close_together_cover_neither_each_other_nor_a_point():
    """Thirty points, five of them in one place and four in corners of the axes."""
    random = np.random.default_rng(0)
    places = [*random.normal((0, 0), (1, 1), (21, 2)), *[(2.0, 2.0)] * 5, (-3, -3), (-3, 3), (3, -3), (3, 3)]
    points = {str(number): (float(x), float(y)) for number, (x, y) in enumerate(places)}
    families = [plots.Family(f"family {some}", Look(some), {str(one): f"0.{one}5" for one in range(some, 30, 3)})
                for some in range(3)]  # fmt: skip
    found = []
    for _ in range(2):
        figure = plots.families(points, ["0", "1"], "cost", "loss", families)
        figure.draw_without_rendering()
        axes, half = figure.axes[0], 3 * figure.dpi / 72
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        markers = [Bbox([(x - half, y - half), (x + half, y + half)])
                   for x, y in axes.transData.transform(list(points.values()))]  # fmt: skip
        assert len(boxes) == 30
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert not any(box.overlaps(marker) for box in boxes for marker in markers)
        assert all(axes.bbox.containsx(x) and axes.bbox.containsy(y) for box in boxes for x, y in box.get_points())
        found.append(plots.svg(figure))
    assert found[0] == found[1]


@pytest.mark.parametrize("label", ["0.5", "a label as long as half of the figure is wide"])
def test_a_label_stands_off_the_line_and_inside_the_axes(label):
    points = {str(number): (float(number), float(number)) for number in range(3)}
    figure = plots.families(points, ["0"], "cost", "loss", [plots.Family("one", Look(0), dict.fromkeys(points, label))])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    line = axes.transData.transform([(x, x) for x in np.linspace(0, 2, 200)])
    for box in (Text.get_window_extent(text) for text in axes.texts):
        assert not any(box.contains(x, y) for x, y in line)
        assert all(axes.bbox.containsx(x) and axes.bbox.containsy(y) for x, y in box.get_points())


def test_a_number_that_varies_is_one_number_in_all(tmp_path):
    def varies(*runs: dict[str, Any]) -> str | None:
        for number, fields in enumerate(runs):
            write_curve(tmp_path / f"{len(runs)}-{number}", "mlm_tiny", 3.0, 100, fields)
        folders = read_folders([tmp_path / f"{len(runs)}-{number}" for number in range(len(runs))])
        return number_that_varies([group for _, group in by_objective(Material.of(folders).worth)])

    rates = [{"masking.rate": rate} for rate in (0.15, 0.3)]
    other = {"shape.initial_deviation": 0.01}
    assert varies(*rates, other) == "masking.rate"
    assert varies(*rates, other, other | {"masking.rate": 0.5}) == "masking.rate"
    assert varies(*rates, {"masking.rate": 0.3, "training.steps": 7}, other, other) is None
    assert varies({"training.precision": "bf16"}, {"training.precision": "fp32"}) is None
    assert varies(other) is None


def test_an_axis_of_a_long_name_stays_in_the_figure():
    up = "validation loss, text where word frequencies alone reach 7.0295, nats per masked token"
    for figure in (
        plots.lines({"a": [(0, 1), (1, 2)]}, "cost", up),
        plots.front({"a": (1, 2)}, ["a"], "cost", up, {"a": Look(0)}),
    ):
        figure.draw_without_rendering()
        [label] = [axes.yaxis.label for axes in figure.axes]
        assert label.get_text().split() == up.split()
        low, high = label.get_window_extent().intervaly
        assert 0 <= low < high <= figure.bbox.ymax
        plots.plt.close(figure)

"""The programs that measure cost against size, memory, waiting and long runs: their arithmetic, and small runs."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark_files import load
from latemask.counts import flops_per_token
from latemask.errors import Refusal
from latemask.goals import Timed
from training_support import write_store

idle, memory, sizes, soak = (load(name) for name in ("idle", "memory", "sizes", "soak"))
GB = 10**9


# --- sizes ------------------------------------------------------------------------------------------------------------


def timed(speed: float, flops: float) -> Timed:
    return Timed("", 1, 1.0, 0.0, speed, flops, flops, None, None, None, 0.0)


def test_time_over_flops_is_one_where_time_follows_flops():
    base = timed(1000.0, 6e8)
    assert sizes.beside(timed(500.0, 12e8), base) == {"time_ratio": 2.0, "flops_ratio": 2.0, "time_over_flops": 1.0}
    assert sizes.beside(timed(500.0, 6e8), base)["time_over_flops"] == 2.0


def test_each_size_is_timed_once_on_as_many_tokens_and_the_base_first():
    options = sizes.Options()
    points = sizes.points_of(options)
    assert len(points) == len(set(points)) == 4 * 3 + 4 * 3 - 3
    assert points[0] == sizes.Point("mlm", 512, 0.15)
    for point in points:
        entry = sizes.entry_of(point, options, 65_536, compiles=True)
        assert entry.rows * entry.run.shape.row_tokens == 65_536
        assert (entry.run.shape.row_tokens, entry.run.masking.rate) == (point.row_tokens, point.rate)
        assert entry.is_plain == (point.system == "mlm")
        assert entry.run.shape.dropout == 0
        assert entry.run.decoder is None or entry.run.decoder.sublayers == ("self",)


@pytest.fixture(scope="module")
def small_sizes(tmp_path_factory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("sizes") / "sizes.json"
    options = sizes.Options(out=out, size="tiny", systems=("mlm", "mae_lm"), row_tokens=(16, 32), rates=(0.5,),
                            at_row_tokens=16, tokens=64, rounds=1, steps=1)  # fmt: skip
    return sizes.measure(options), out


def test_sizes_are_measured_beside_their_flops(small_sizes):
    found, out = small_sizes
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    names = [(one["system"], one["row_tokens"], one["rate"]) for one in found["entries"]]
    assert names == [("mlm", 16, 0.15), ("mae_lm", 16, 0.15), ("mlm", 32, 0.15), ("mae_lm", 32, 0.15), ("mlm", 16, 0.5),
                     ("mae_lm", 16, 0.5)]  # fmt: skip
    base, *others = found["entries"]
    assert base["time_over_flops"] == 1
    for one in others:
        assert one["rows"] * one["row_tokens"] == 64
        point = sizes.Point(one["system"], one["row_tokens"], one["rate"])
        run = sizes.entry_of(point, sizes.Options(size="tiny"), 64, compiles=False).run
        count = flops_per_token(run).plain if one["system"] == "mlm" else flops_per_token(run).executed
        assert one["flops_ratio"] == pytest.approx(count / base["plain_flops"])
        assert one["time_over_flops"] * one["flops_ratio"] == pytest.approx(one["time_ratio"])
    assert found["left_out"] == []
    assert found["drift"] > 0
    drawn = out.with_suffix(".svg").read_text()
    assert drawn.startswith("<svg")
    for text in ("plain MLM", "MAE-LM", "tokens in a row", "share masked"):
        assert text in drawn


def test_the_base_is_not_timed_again_beyond_the_time(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(sizes, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    options = sizes.Options(
        tmp_path / "sizes.json", seconds=1000, size="tiny", systems=("mlm",), row_tokens=(8, 16), rates=(0.15,),
        at_row_tokens=16, tokens=32, rounds=1, steps=1,
    )  # fmt: skip
    timed, calls = sizes.timed, []
    monkeypatch.setattr(sizes.plots, "save", lambda *_: None)  # drawn anew after each entry
    monkeypatch.setattr(sizes, "timed", lambda entry, *rest: calls.append(entry.name) or timed(entry, *rest))
    assert sizes.measure(options)["drift"] is not None
    assert len(calls) == 3
    clock = iter([0, 0, 0, 500, 900, 901, 902, 903])
    calls.clear()
    found = sizes.measure(options)
    assert (found["left_out"], found["drift"]) == ([], None)
    assert len(calls) == 2


def test_sizes_beyond_the_time_are_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes.plots, "save", lambda *_: None)
    options = sizes.Options(out=tmp_path / "sizes.json", seconds=0, size="tiny", systems=("mlm",), row_tokens=(8, 16),
                            rates=(0.15, 0.5), at_row_tokens=16, tokens=32, rounds=1, steps=1)  # fmt: skip
    sizes.measure(options)
    kept = json.loads((tmp_path / "sizes.json").read_text())
    assert [one["row_tokens"] for one in kept["entries"]] == [16]
    assert [one["name"] for one in kept["left_out"]] == ["plain MLM, N = 8, 15% masked",
                                                         "plain MLM, N = 16, 50% masked"]  # fmt: skip
    assert kept["drift"] is None


# --- memory -----------------------------------------------------------------------------------------------------------


def card_held(monkeypatch, held: int, reserved: int) -> None:
    """A GPU of 80 GB of which ``held`` bytes are taken, ``reserved`` of them by torch."""
    found = {"mem_get_info": (80 * GB - held, 80 * GB), "memory_reserved": reserved}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for name in ("synchronize", "empty_cache", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


def test_a_card_that_others_use_is_refused_and_its_context_is_not(monkeypatch):
    device = torch.device("cuda")
    card_held(monkeypatch, 31 * GB, 30 * GB)
    with memory.card_of(80, device) as found:
        assert found == (79 * GB, False)
    card_held(monkeypatch, 5 * GB, GB)
    with pytest.raises(Refusal, match=r"the card: found 4\.0 GB held by other programs"), memory.card_of(80, device):
        pass


def peak(rows: int) -> memory.Peak:
    """2 GB of weights, .3 GB a row."""
    return memory.Peak(rows, 2 * GB + 3 * GB * rows // 10)


@pytest.mark.parametrize(
    ("room", "rows"),
    [(80 * GB, 260), (24 * GB, 73), (peak(50).bytes, 50), (peak(50).bytes - 1, 49), (peak(4).bytes, 4), (2 * GB, 0),
     (GB, 0)],
)  # fmt: skip
def test_rows_are_predicted_on_the_line_through_two_peaks(room, rows):
    assert memory.predicted_rows(peak(8), peak(24), room) == rows


def test_peaks_that_do_not_rise_predict_nothing():
    with pytest.raises(ValueError, match="hold no more"):
        memory.predicted_rows(memory.Peak(8, GB), memory.Peak(24, GB), 80 * GB)


@pytest.mark.parametrize("fits", [260, 259, 250, 231, 130, 40, 9, 2])
def test_only_rows_that_ran_are_stated_and_the_most_is_found_to_3_percent(fits):
    asked = []

    def measure(rows: int) -> memory.Peak | None:
        asked.append(rows)
        return peak(rows) if rows <= fits else None

    found, failed = memory.largest(measure, peak(8), peak(24), 80 * GB)
    assert asked[0] == 260
    assert found is not None
    assert found in map(peak, asked)
    assert failed == [rows for rows in asked if rows > fits]
    assert fits / 1.03 - 1 <= found.rows <= fits


def test_a_line_that_bends_is_followed():
    def bent(rows: int) -> memory.Peak:
        """From 100 rows on, another moment holds the most: .5 GB a row."""
        return max(peak(rows), memory.Peak(rows, 5 * GB // 10 * rows - 18 * GB), key=lambda found: found.bytes)

    asked = []

    def measure(rows: int) -> memory.Peak | None:
        asked.append(rows)
        return found if (found := bent(rows)).bytes <= 80 * GB else None

    found, failed = memory.largest(measure, bent(8), bent(24), 80 * GB)
    assert found is not None
    assert 196 / 1.03 <= found.rows <= 196
    assert failed[0] == 260
    assert len(asked) <= 5


@pytest.mark.parametrize("bend", [9, 30, 100, 150])
def test_rows_are_predicted_from_passes_beyond_the_bend(bend):
    """With recomputation the update holds the most of few rows: there 24 MB a row, behind it 56."""
    mb = 10**6

    def bent(rows: int) -> memory.Peak:
        return memory.Peak(rows, 4 * GB + 24 * mb * rows + 32 * mb * max(0, rows - bend))

    room, asked = 80 * GB, []

    def measure(rows: int) -> memory.Peak | None:
        asked.append(rows)
        return found if (found := bent(rows)).bytes <= room else None

    right = max(rows for rows in range(3200) if bent(rows).bytes <= room)
    assert memory.predicted_rows(bent(8), bent(24), room) > 1.03 * right
    near, far = memory.settled(measure, bent(8), bent(24), room)
    assert memory.predicted_rows(near, far, room) == right
    assert memory.largest(measure, near, far, room) == (bent(right), [])
    assert len(asked) == 3


def test_where_far_passes_do_not_run_nearer_ones_do():
    def fits(rows: int) -> memory.Peak | None:
        return peak(rows) if rows <= 40 else None

    near, far = memory.settled(fits, memory.Peak(1, peak(1).bytes), memory.Peak(2, peak(1).bytes + 1), 80 * GB)
    assert (near, far) != (peak(1), peak(2))
    assert far.rows <= 40
    assert memory.settled(lambda rows: None, peak(8), peak(24), 80 * GB) == (peak(8), peak(24))
    assert memory.settled(fits, peak(8), peak(24), 24 * GB) == (peak(8), peak(24))  # an eighth is no further up


def test_where_nothing_runs_an_end_is_found():
    assert memory.largest(lambda rows: None, peak(8), peak(24), 80 * GB) == (None, [260, 130, 65, 32, 16, 8, 4, 2])
    assert memory.largest(lambda rows: None, peak(8), peak(24), peak(3).bytes) == (None, [3, 1])
    assert memory.largest(peak, peak(8), peak(24), GB) == (None, [])
    assert memory.largest(peak, peak(8), peak(24), peak(8).bytes) == (peak(8), [])
    assert memory.largest(peak, peak(8), peak(24), peak(24).bytes) == (peak(24), [])


def test_memory_needs_a_gpu_and_known_names(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "pick_device", lambda: torch.device("cpu"))
    with pytest.raises(Refusal, match="wanted a GPU"):
        memory.measure(memory.Options(out=tmp_path / "memory.json"))
    assert not (tmp_path / "memory.json").exists()
    with pytest.raises(Refusal, match="mlm_huge"):
        memory.Options(only=("mlm_huge",))


def test_what_is_measured_has_the_sizes_that_are_stated():
    found = memory.models(memory.Options())
    assert {run.shape.row_tokens for run in found.values()} == {512}
    wide = next(run for name, run in found.items() if "64,000" in name)
    assert (wide.shape.vocabulary, wide.masking.rate, wide.shape.depth) == (64_000, 0.5, 24)
    assert {"mlm_base", "mae_lm_base", "mlm_large", "mae_lm_large"} < found.keys()


# --- waiting ----------------------------------------------------------------------------------------------------------


def line(step: int, seconds: float) -> dict:
    return {"kind": "train", "step": step, "seconds": seconds, "tokens": 100 * step}


def test_waiting_counts_between_two_lines_and_only_where_the_device_stood_still():
    lines = [{"kind": "start", "step": 0}, line(5, 1.0), line(10, 6.0), line(20, 16.0)]
    takes = [idle.Take(0, 50.0, True), *(idle.Take(index, 0.2, index % 2 == 0) for index in range(21))]
    found = idle.shares(lines, takes, 5)
    assert (found["seconds"], found["steps"], found["tokens_per_second"]) == (10.0, 10, 100.0)
    assert found["blocked_share"] == pytest.approx(0.2)
    assert found["waiting_share"] == pytest.approx(0.1)
    with pytest.raises(Refusal, match="two or more"):
        idle.shares(lines, takes, 7)
    with pytest.raises(Refusal, match="skipped"):
        idle.shares([*lines, {"kind": "skip", "step": 20}], takes, 5)


def test_a_slow_feed_is_seen_and_the_loop_is_the_real_one(tmp_path, monkeypatch):
    data = write_store(tmp_path / "data", train_rows=100)
    options = idle.Options(data, tmp_path / "idle.json", recipes=("mlm_tiny",), seconds=2, warm_up_seconds=0,
                           batch_rows=2, log_every=1, row_tokens=16, rounds=1, steps=1)  # fmt: skip
    take = idle.Prefetch.take

    def slow(self, index):
        idle.time.sleep(0.1)
        return take(self, index)

    monkeypatch.setattr(idle.Prefetch, "take", slow)
    idle.measure(options)
    found = json.loads((tmp_path / "idle.json").read_text())["recipes"]["mlm_tiny"]
    assert found["loop"]["waiting_share"] * found["loop"]["seconds"] > 0.099 * found["loop"]["steps"]
    assert found["loop"]["waiting_share"] == found["loop"]["blocked_share"] <= 1
    assert found["lost_share"] == 1 - found["loop"]["tokens_per_second"] / found["one_batch"]["tokens_per_second"]


# --- long runs --------------------------------------------------------------------------------------------------------


def test_a_trend_is_growth_not_what_a_save_holds_for_a_second():
    saving = [{"seconds": float(at), "rss_bytes": 5e8 + (4e8 if at % 13 == 0 else 0)} for at in range(200)]
    assert soak.trend(saving, "rss_bytes") == (0, 0)
    leaking = [one | {"rss_bytes": one["rss_bytes"] + 1e6 * one["seconds"]} for one in saving]
    grown, least = soak.trend(leaking, "rss_bytes")
    assert grown == pytest.approx(199e6, rel=0.02)
    assert 0.8 * grown < least <= grown


def judged(tmp_path: Path, **grows: float) -> list[str]:
    """The faults of a made-up run of 200 samples on a card, some of whose values grow by so much a sample."""
    run = tmp_path / "run"
    (run / "step-0000000").mkdir(parents=True, exist_ok=True)
    (run / "step-0000000" / "weights").write_bytes(bytes(1000))
    options = soak.Options(seconds=200, data=tmp_path, log_every=5, save_every=50)
    level = {"rss_bytes": 1e9, "open_files": 12.0, "threads": 8.0, "card_bytes": 4e10, "journal_bytes": 0.0,
             "disk_bytes": 1000.0, "step_folders": 1.0, "log_bytes": 0.0}  # fmt: skip
    samples = [{name: value + at * grows.get(name, 0) for name, value in level.items()}
               | {"seconds": float(at), "step": max(0, at - 60)} for at in range(1, 201)]  # fmt: skip
    lines = [{"kind": "start", "step": 0}, {"kind": "validation", "step": 0, "loss": 9.0}, {"kind": "save", "step": 0}]
    for step in range(5, 141, 5):
        rises = grows.get("memory_bytes", 0) * max(0, step - 50)
        lines.append({"kind": "train", "step": step, "memory_bytes": int(4e9 + rises)})
        if step % 50 == 0:
            lines += [{"kind": "validation", "step": step, "loss": 8.0}, {"kind": "save", "step": step}]
    lines += [{"kind": "save", "step": 140}, {"kind": "end", "step": 140, "reason": "signal"}]
    found = soak.judged(samples, lines, run, 75, options)
    assert found["warm_up_seconds"] == pytest.approx(200 / 6 + 61)
    return found["faults"]


def test_a_flat_run_on_a_card_has_no_fault(tmp_path):
    assert judged(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "growth", "said"),
    [
        ("rss_bytes", 1e6, "memory grew"),
        ("card_bytes", 1e6, "card_bytes grew"),
        ("memory_bytes", 1e6, "journal_memory_bytes grew"),
        ("open_files", 0.1, "open_files grew"),
        ("threads", 0.1, "threads grew"),
    ],
)
def test_what_grows_on_a_card_is_a_fault(tmp_path, name, growth, said):
    [fault] = judged(tmp_path, **{name: growth})
    assert fault.startswith(said)


def test_the_driver_s_word_on_a_process_counts_and_else_that_on_the_card(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in *apps*) echo "7, 100"; echo "8, 20";; *) echo 500;; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    card = soak.Card(str(program))
    assert card.held(7) == 100 << 20
    assert card.of == {"process"}
    assert card.held(9) == 500 << 20
    assert card.of == {"process", "card"}


def test_the_step_that_training_has_reached_is_read_from_the_journal_s_end(tmp_path):
    journal = tmp_path / "journal.jsonl"
    assert soak.trained_steps(journal) == 0
    start = [json.dumps({"kind": "start", "step": 0, "run": "x" * 30_000}), json.dumps({"kind": "save", "step": 0})]
    journal.write_text("\n".join(start) + "\n")
    assert soak.trained_steps(journal) == 0
    lines = [json.dumps({"kind": "train", "step": step, "loss": 1.0}) for step in (25, 50)]
    journal.write_text("\n".join([*start, *lines, '{"kind": "train", "step": 7']))
    assert soak.trained_steps(journal) == 50


def test_a_run_on_given_data_is_the_recipe_as_it_stands(tmp_path):
    flags = soak.Options(recipe="mae_lm_small", data=tmp_path).flags()
    assert not [flag for flag in flags if flag.startswith(("--shape", "--training.batch", "--training.micro"))]
    assert (
        flags[flags.index("--training.save-every") + 1] == flags[flags.index("--training.validate-every") + 1] == "250"
    )
    assert "--shape.depth" in soak.Options().flags()


# --- one way ----------------------------------------------------------------------------------------------------------


def test_mean_cosine_is_that_of_every_pair():
    one_way = load("one_way")
    vectors = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(vectors.reshape(12, 5).double(), dim=-1)
    pairs = [float(unit[i] @ unit[j]) for i in range(12) for j in range(12) if i != j]
    assert one_way.mean_cosine(vectors) == pytest.approx(sum(pairs) / len(pairs))
    assert one_way.mean_cosine(torch.ones(7, 5)) == pytest.approx(1)
    assert one_way.mean_cosine(torch.eye(6)) == pytest.approx(0)


def test_every_way_is_looked_at_before_between_and_after(tmp_path, monkeypatch):
    one_way, out = load("one_way"), tmp_path / "one_way.json"
    sizes = ["--updates", "3", "--every", "2", "--rows", "2", "--depth", "2"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["one_way.py", "--data", str(write_store(tmp_path / "data", train_rows=60)), "--out", str(out), *sizes],
    )
    one_way.main()
    found = json.loads(out.read_text())["ways"]
    assert list(found) == list(one_way.WAYS)
    for looks in found.values():
        assert [look["step"] for look in looks] == [0, 2, 3]
        assert all(len(look["cosines"]) == 3 and abs(cosine) <= 1 for look in looks for cosine in look["cosines"])
    assert found["mae_lm"][0] == found["mae_lm, epsilon 1e-9"][0] != found["mae_lm"][2]
    with pytest.raises(Refusal, match=r"^--ways: found another; wanted some of: mlm; "):
        one_way.Options(tmp_path, ways=("mlm", "another"))

"""Tables 5 and 6 as printed, points named by their settings, and a folder that many processes can take points from."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from latemask.downstream import claims
from latemask.downstream.claims import claimed, is_done, read_results, who_is_at
from latemask.downstream.grid import PAPER, QUICK, point_name, points_of, said, space_of, summarize
from latemask.downstream.settings import Settings
from latemask.downstream.tasks import GLUE, SQUAD, own_task
from latemask.errors import Refusal
from latemask.writing import write_json

BASE = Settings()


def test_the_paper_grids_are_tables_5_and_6():
    sizes = {key: len(list(grid.points())) for key, grid in PAPER.items()}
    assert sizes == {("small", "base"): 64, ("small", "large"): 64, ("large", "base"): 12, ("large", "large"): 12,
                     ("squad", "base"): 32, ("squad", "large"): 32}  # fmt: skip
    assert [name for name, task in GLUE.items() if space_of(task) == "small"] == ["cola", "rte", "mrpc", "stsb"]
    assert {space_of(SQUAD), space_of(GLUE["mnli"])} == {"squad", "large"}
    assert space_of(own_task("classification", ["a"], "b", "c", "d")) == "small"
    rates = {point.learning_rate for point in points_of(GLUE["mnli"], "paper", "base", BASE, {}, 1)}
    assert rates == {1e-5, 2e-5, 3e-5, 4e-5}
    for key, grid in QUICK.items():
        [point] = grid.points()
        assert point in list(PAPER[key].points())
    settings = Settings()
    assert (settings.epsilon, settings.betas, settings.dropout, settings.weight_decay) == (1e-6, (0.9, 0.98), 0.1, 0.01)
    assert settings.clip_norm is None
    assert settings.sequence_tokens == 512


def test_points_are_every_combination_and_seed_once():
    points = points_of(GLUE["rte"], "paper", "base", BASE, {}, 5)
    assert len(points) == len(set(points)) == 64 * 5
    fixed = points_of(GLUE["rte"], "paper", "base", BASE, {"epochs": 1, "warmup_share": 0.0}, 2)
    assert len(fixed) == 4 * 2 * 2
    assert {
        point.seed for point in points_of(GLUE["rte"], "quick", "base", dataclasses.replace(BASE, seed=7), {}, 2)
    } == {7, 8}
    names = {point_name(GLUE["rte"], point, {"weights": "w"}) for point in points}
    assert len(names) == 320
    assert "rte-e2-lr2e-05-b16-w0.06-s0-" in min(names, key=lambda name: ("-e2-lr2e-05-b16-w0.06-s0" not in name, name))


@pytest.mark.parametrize("change", [{"dropout": 0.0}, {"sequence_tokens": 128}, {"seed": 9}, {"clip_norm": 1.0}])
def test_a_name_stands_for_every_setting_model_and_data(change):
    name = point_name(GLUE["rte"], BASE, {"weights": "w"})
    assert name == point_name(GLUE["rte"], Settings(), {"weights": "w"})
    assert name != point_name(GLUE["rte"], dataclasses.replace(BASE, **change), {"weights": "w"})
    assert name != point_name(GLUE["rte"], BASE, {"weights": "v"})


@pytest.mark.parametrize(("field", "value"), [
    ("epochs", 0), ("learning_rate", 0.0), ("batch_rows", 0), ("warmup_share", 1.0), ("dropout", 1.0), ("seed", -1),
    ("clip_norm", 0.0), ("patience", 0), ("sequence_tokens", 4), ("betas", (0.9, 1.0)), ("epsilon", 0.0),
    ("weight_decay", -0.1), ("precision", "fp16"), ("compile", "maybe"), ("learning_rate", "much"),
])  # fmt: skip
def test_every_broken_setting_is_named(field, value):
    with pytest.raises(Refusal, match=field):
        dataclasses.replace(BASE, **{field: value})


def result(score, seed, **settings):
    return {
        "kind": "finetune", "task": "rte", "title": "RTE", "metric": "accuracy", "score": score, "seed": seed,
        "scores": {"dev": {"accuracy": score}}, "majority": {"dev": {"accuracy": 0.5}}, "degenerate": score <= 0.5,
        "subset": {}, "model": {"weights": "w", "folder": "x"}, "data": {"dev": {"fingerprint": "f"}},
        "settings": Settings(seed=seed, **settings).to_dict(), "train_seconds": 2.0, "versions": {}, "card": "cpu",
    }  # fmt: skip


def test_the_best_setting_is_the_one_with_the_best_median():
    lucky = [result(score, seed, epochs=2) for seed, score in enumerate((0.9, 0.5, 0.5))]
    steady = [result(score, seed, epochs=3) for seed, score in enumerate((0.6, 0.7, 0.8))]
    half = [result(0.95, 0, epochs=5)]
    [row] = summarize([*lucky, *steady, *half])
    assert row["settings"]["epochs"] == 3
    assert row["median"] == 0.7
    assert row["spread"]["min"] == 0.6
    assert row["spread"]["max"] == 0.8
    assert row["spread"]["deviation"] == pytest.approx(0.1)
    assert row["seeds"] == {"0": 0.6, "1": 0.7, "2": 0.8}
    assert (row["points"], row["runs"], row["degenerate"], row["seconds"]) == (3, 7, 0, 14.0)
    [row] = summarize(lucky)
    assert row["degenerate"] == 2
    assert said(row["settings"]) == "2 epochs, rate 3e-05, batch 32, warm-up 0.06"
    assert said({**row["settings"], "epochs": 1}).startswith("1 epoch, rate")
    bold = [{**item, "null_threshold": 2.5, "score": item["score"] + 0.05} for item in lucky]
    [row] = summarize([*lucky, *bold])  # of another threshold is another setting
    assert row["points"] == 2
    assert row["median"] == pytest.approx(0.55)
    assert said(row["settings"] | {"dropout": 0.0}).endswith("warm-up 0.06, dropout 0.0, null threshold 2.5")
    other = [{**item, "model": {"weights": "v", "folder": "y"}} for item in lucky]
    assert len(summarize([*lucky, *other])) == 2


def test_results_are_written_whole_and_read_back(tmp_path):
    write_json(tmp_path / "a.json", result(0.5, 0))
    write_json(tmp_path / "summary.json", {"kind": "other"})
    assert read_results(tmp_path) == {"a": json.loads(json.dumps(result(0.5, 0)))}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", {"score": float("nan")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "summary.json"]
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(Refusal, match=r"c.json"):
        read_results(tmp_path)


def test_a_claim_keeps_others_out_until_it_ends(tmp_path):
    with claimed(tmp_path, "x") as first:
        assert first
        assert who_is_at(tmp_path, "x")
        with claimed(tmp_path, "x") as second, claimed(tmp_path, "y") as other:
            assert not second
            assert other
    with contextlib.suppress(KeyboardInterrupt), claimed(tmp_path, "x") as again:
        assert again
        raise KeyboardInterrupt
    with claimed(tmp_path, "x") as after:
        assert after
        write_json(tmp_path / "x.json", {})
    with claimed(tmp_path, "x") as done:
        assert not done
    assert not list(tmp_path.glob("*claim*"))


def test_of_a_point_that_was_done_just_before_a_kill_nothing_but_its_result_stays(tmp_path):
    write_json(tmp_path / "x.json", {})
    (tmp_path / "x.claim-0").write_text("{}")
    with claimed(tmp_path, "x") as is_ours:
        assert not is_ours
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def abandoned(folder, name, owner, age=0.0):
    path = folder / f"{name}.claim-0"
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_stale_claim_is_passed_over(tmp_path):
    alive = claims._identity(os.getpid())
    elsewhere = {**alive, "machine": "another"}
    dead = {**alive, "began": "1"}  # the number of the process came again
    abandoned(tmp_path, "fresh", elsewhere)
    abandoned(tmp_path, "old", elsewhere, age=claims.STALE_AFTER_SECONDS + 60)
    abandoned(tmp_path, "dead", dead)
    abandoned(tmp_path, "torn", {})
    for name, free in (("fresh", False), ("old", True), ("dead", True), ("torn", False)):
        with claimed(tmp_path, name) as is_ours:
            assert is_ours == free, name
            if is_ours:
                write_json(tmp_path / f"{name}.json", {})
    assert not list(tmp_path.glob("old.claim*"))
    assert who_is_at(tmp_path, "fresh")
    assert not is_done(tmp_path, "fresh")


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", "null", "{}", '{"process": 1}', '{"machine": "%s"}', '{"machine": "%s", "process": "x"}',
    '{"machine": "%s", "process": null}',
])  # fmt: skip
def test_a_claim_that_names_no_owner_holds_until_the_clock_says_it_is_stale(text, tmp_path):
    claim = tmp_path / "x.claim-0"
    claim.write_text(text.replace("%s", claims._machine()))
    with claimed(tmp_path, "x") as is_ours:
        assert not is_ours
    then = claim.stat().st_mtime - claims.STALE_AFTER_SECONDS - 60
    os.utime(claim, (then, then))
    with claimed(tmp_path, "x") as is_ours:
        assert is_ours


def test_a_claim_is_kept_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "TOUCH_EVERY_SECONDS", 0.05)
    with claimed(tmp_path, "x"):
        [path] = tmp_path.glob("x.claim-0")
        os.utime(path, (1, 1))
        time.sleep(0.5)
        assert path.stat().st_mtime > 1


def test_a_point_that_is_done_while_it_is_claimed_is_left(tmp_path, monkeypatch):
    """Whoever did it deletes all that belongs to its claims, also what another process is about to make one of."""
    link = os.link

    def late(aside, claim):
        (tmp_path / "p.json").write_text("{}")
        claims._give_up(tmp_path, "p")
        link(aside, claim)

    monkeypatch.setattr(claims.os, "link", late)
    with claims.claimed(tmp_path, "p") as is_ours:
        assert not is_ours
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_many_processes_do_each_point_once(tmp_path):
    """Eight processes take 40 points; some of the claims they find are stale."""
    for number in range(0, 40, 4):
        abandoned(tmp_path, f"p{number}", {"machine": "another"}, age=10_000)
    program = f"""
import sys, time
from pathlib import Path
from latemask.downstream.claims import claimed
from latemask.writing import write_json
folder = Path({str(tmp_path)!r})
for number in range(40):
    with claimed(folder, f"p{{number}}") as is_ours:
        if is_ours:
            with open(folder / f"p{{number}}.log", "a") as log:
                log.write("done\\n")
            time.sleep(0.005)
            write_json(folder / f"p{{number}}.json", {{}})
"""
    workers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(8)]
    assert [worker.wait(timeout=120) for worker in workers] == [0] * 8
    assert len(list(tmp_path.glob("p*.json"))) == 40
    assert all(Path(path).read_text() == "done\n" for path in tmp_path.glob("p*.log"))
    assert not list(tmp_path.glob("*claim*"))


def test_options_and_grids_need_no_torch():
    program = ("import sys, latemask.downstream.options, latemask.downstream.grid, latemask.downstream.claims;"
               "import latemask.downstream.runner; print('torch' in sys.modules)")  # fmt: skip
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )

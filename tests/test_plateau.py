"""Who has learned nothing but word frequencies is told: the number is right, the warning comes once, and in time."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from latemask.cli.pretrain import read, run_pretrain
from latemask.config import Run, replace
from latemask.errors import Refusal
from latemask.hf.card import numbers, warn_of_frequencies
from latemask.model.pretrainer import Pretrainer
from latemask.recipes import SIZES, SYSTEMS, recipe
from latemask.text.array import HEADER
from latemask.text.store import open_store, write_summary
from latemask.training import checkpoint, loop, validation
from latemask.training.distributed import World
from latemask.training.loop import pretrain
from latemask.training.plateau import MARGIN_NATS, Plateau, is_no_better
from latemask.training.validation import Validation
from training_support import SPECIALS, VOCABULARY, lines_of, stop_in_batch, tiny_run, write_store

FIRST = max(SPECIALS.ids) + 1
ALONE = World(0, 1, torch.device("cpu"))


def probabilities(data: Path, run: Run, tokens: int | None = None) -> dict[int, float]:
    """Of every id that may be predicted, from the raw tokens."""
    special = {SPECIALS.bos, SPECIALS.pad, SPECIALS.mask} if run.rewrites else set(SPECIALS.ids)
    raw = np.asarray(open_store(data).train.tokens[:tokens]).tolist()
    seen = Counter(token for token in raw if token not in special)
    may = [token for token in range(VOCABULARY) if token not in special]
    return {token: (seen[token] + 1) / (seen.total() + len(may)) for token in may}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each word is less frequent than the one before: at random weights a model is far worse than word frequencies."""
    return write_store(tmp_path_factory.mktemp("skewed") / "data", draw=lambda numbers, count:
                       FIRST + np.minimum(numbers.geometric(0.3, count) - 1, 60))  # fmt: skip


# The number


@pytest.mark.parametrize(("system", "rate"), [("mlm", None), ("mae_lm", 0.5), ("mlm_80_10_10", None),
                                              ("three_ml_cross", 0.2), ("decoder_causal_cross", None)])  # fmt: skip
@pytest.mark.parametrize("most", [None, 100])
def test_it_is_the_mean_over_the_targets_of_a_plain_loop(
    system: str, rate: float | None, most: int | None, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the raw tokens, of which the first 100 count or all; in pieces that do not divide them."""
    monkeypatch.setattr(validation, "PIECE_TOKENS", 37)
    monkeypatch.setattr(validation, "PIECE_ROWS", 3)
    if most is not None:
        monkeypatch.setattr(validation, "FREQUENCY_TOKENS", most)
    run = tiny_run(system, validation_rate=rate)
    held_out = Validation(run, open_store(data))
    chance, losses = probabilities(data, run, most), []
    assert sum(chance.values()) == pytest.approx(1)
    for row in range(len(held_out)):
        batch = held_out.batches.batch(row, row + 1)
        predicted = batch.ids[batch.positions > 0] if run.rewrites else batch.targets[0]
        losses += [-math.log(chance[token]) for token in predicted.tolist()]
    assert len(losses) == 10 * (15 if run.rewrites else held_out.batches.masking.masked_tokens(16))
    assert held_out.unigram_loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_a_text_is_the_same_however_it_is_masked_and_whatever_is_trained_on(data: Path, tmp_path: Path) -> None:
    text = Validation(tiny_run(), open_store(data)).text
    ids = np.fromfile(data / "valid.tokens", "<u2", count=10 * 15, offset=HEADER.size).reshape(10, 15).astype("<i8")
    rows = np.concatenate([np.zeros((10, 1), "<i8"), ids], 1)
    assert text == hashlib.sha256(rows.tobytes()).hexdigest()[:16]
    for run in (tiny_run("mlm", validation_rate=0.5), tiny_run("decoder_causal_cross")):
        assert Validation(run, open_store(data)).text == text
    assert Validation(tiny_run(validation_rows=9), open_store(data)).text != text
    more = write_store(tmp_path / "more", seed=1)
    summaries = [json.loads((folder / "store.json").read_text()) for folder in (more, data)]
    del summaries[0]["checksum"]
    summaries[0]["splits"]["valid"] = summaries[1]["splits"]["valid"]
    write_summary(more, summaries[0])
    for file in data.glob("valid.*"):
        shutil.copy(file, more)
    other = Validation(tiny_run(), open_store(more))
    assert (other.text, other.unigram_loss) != (text, Validation(tiny_run(), open_store(data)).unigram_loss)
    assert other.text == text


@pytest.mark.parametrize("system", ["mlm", "mae_lm", "decoder_causal_cross"])
def test_it_is_the_validation_loss_of_a_model_that_knows_frequencies_alone(system: str, data: Path) -> None:
    """Whose vectors are all nothing, and whose output bias is the logarithm of the frequencies."""
    run = tiny_run(system)
    model = Pretrainer(run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.bias.fill_(-100.0)
        for token, chance in probabilities(data, run).items():
            model.head.bias[token] = math.log(chance)
    held_out = Validation(run, open_store(data))
    assert held_out.loss(model, 4, nullcontext, ALONE).overall == pytest.approx(held_out.unigram_loss, rel=1e-6)


def test_damaged_text_is_refused_before_anything_is_replaced(data: Path, tmp_path: Path) -> None:
    text, out = write_store(tmp_path / "data"), tmp_path / "run"
    pretrain(tiny_run(steps=1), text, out)
    before = sorted(out.rglob("*"))
    tokens = bytearray((text / "train.tokens").read_bytes())
    tokens[200] ^= 1
    (text / "train.tokens").write_bytes(tokens)
    with pytest.raises(Refusal, match=r"train\.tokens: bytes .* differ from their checksum"):
        pretrain(tiny_run(steps=1), text, out, overwrite=True)
    assert sorted(out.rglob("*")) == before


# When it is told


def told(run: Run, losses: dict[int, float | None], unigram_loss: float = 7.03) -> list[int]:
    plateau = Plateau(run, unigram_loss)
    return [step for step, loss in losses.items() if plateau.hear(step, loss, 0.0)]


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ({0: 10.5, 10: 7.04, 20: 7.03, 30: 7.03, 40: 7.03, 100: 7.03}, [30]),  # a second time after the warm-up
        ({0: 10.5, 10: 7.04, 20: 7.03, 30: 6.9, 100: 7.03}, [100]),  # it left, and fell back
        ({0: 10.5, 20: 7.3, 40: 7.2, 60: 7.1, 80: 7.0}, []),  # still falling
        ({0: 10.5, 20: 7.3, 40: 7.2, 60: 7.1, 100: 7.0}, [100]),  # it ends there
        ({0: 10.5, 20: 7.03, 40: 6.97, 100: 6.97}, []),
        ({0: 10.5, 10: 7.03, 20: 7.03, 30: None, 40: 7.03, 50: 7.04}, [50]),  # not finite in between
        ({0: 10.5, 20: 12.0, 40: 15.0}, [40]),
        ({0: 7.0, 10: 7.03, 19: 7.03}, []),  # the warm-up is not over
        ({0: 10.5, 100: math.nan}, []),
        ({100: 3.6}, []),
    ],
)
def test_standing_still_after_the_warm_up_is_told_once(losses: dict[int, float | None], steps: list[int]) -> None:
    assert told(tiny_run(steps=100, warmup_share=0.2), losses) == steps


def test_a_run_on_a_clock_warms_up_by_it() -> None:
    plateau = Plateau(tiny_run(steps=10**6, max_seconds=300.0, warmup_share=0.1), 7.03)
    heard = [(1000, 29.0), (2000, 31.0), (3000, 60.0)]
    assert [plateau.hear(step, 7.03, seconds) for step, seconds in heard] == [False, False, True]
    last = Plateau(tiny_run(steps=10**6, max_seconds=300.0, warmup_share=0.1), 7.03)
    assert last.hear(9000, 7.03, 301.0)


@given(losses=some.lists(some.sampled_from([6.5, 6.97, 6.99, 7.0, 7.03, 7.2, 9.0, None]), min_size=1, max_size=9),
       cut=some.integers(0, 9), share=some.sampled_from([0.0, 0.2, 0.5, 1.0]))  # fmt: skip
def test_a_stop_anywhere_changes_nothing(losses: list[float | None], cut: int, share: float) -> None:
    """The journal says what was heard and told before."""
    run, lines, said = tiny_run(steps=len(losses), warmup_share=share), [], []
    plateau = Plateau(run, 7.03)
    for step, loss in enumerate(losses, 1):
        if step == cut:
            plateau = Plateau(run, 7.03, lines)
        lines.append({"kind": "validation", "step": step, "loss": loss, "seconds": 1.5})
        if plateau.hear(step, loss, 1.5):
            lines.append({"kind": "plateau", "step": step, "loss": loss})
            said.append(step)
    assert said == told(run, dict(enumerate(losses, 1)))
    assert len(said) <= 1
    assert plateau.is_there == is_no_better(losses[-1], 7.03)


# Whole runs


def test_a_run_that_moves_by_nothing_is_warned_once(
    skewed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    pretrain(tiny_run(steps=8, validate_every=2, learning_rate=1e-9), skewed, out)
    printed = capsys.readouterr().err
    [start], [plateau], [end] = (lines_of(out, kind) for kind in ("start", "plateau", "end"))
    validations = lines_of(out, "validation")
    assert start["unigram_loss"] == Validation(tiny_run(), open_store(skewed)).unigram_loss
    assert min(line["loss"] for line in validations) > start["unigram_loss"] - MARGIN_NATS
    assert plateau == {"kind": "plateau", "step": 4, "loss": validations[2]["loss"],
                       "unigram_loss": start["unigram_loss"]}  # fmt: skip
    assert end["word_frequencies_only"] is True
    [warning] = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert "worse than word frequencies after 4 updates (4." in warning
    assert printed.count(f"; word frequencies alone: {start['unigram_loss']:.2f}") == 1
    assert re.search(r"validation loss .*; word frequencies alone", printed)
    assert printed.splitlines()[-1].endswith(f"{out}; no better than word frequencies")


def repeated(numbers: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, numbers.integers(FIRST, VOCABULARY))


def test_a_run_that_learns_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents that repeat one word: what stands beside a masked token says it."""
    data, out = write_store(tmp_path / "data", draw=repeated), tmp_path / "run"
    pretrain(tiny_run("mlm", steps=60, batch_rows=16, micro_rows=16, validate_every=20, log_every=60), data, out)
    [start], [end] = lines_of(out, "start"), lines_of(out, "end")
    assert lines_of(out, "validation")[-1]["loss"] < start["unigram_loss"] - MARGIN_NATS
    assert lines_of(out, "plateau") == []
    assert end["word_frequencies_only"] is False
    printed = capsys.readouterr().err
    assert "warning" not in printed
    assert "no better" not in printed


@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_a_resume_neither_repeats_nor_loses_it(
    stop: int, skewed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(steps=8, validate_every=2, learning_rate=1e-9)
    pretrain(run, skewed, tmp_path / "whole")
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        stop_in_batch(patch, stop)
        assert pretrain(run, skewed, tmp_path / "run").reason == "signal"
    pretrain(None, None, tmp_path / "run", resume="always")
    assert capsys.readouterr().err.count("warning: ") == 1
    kinds = ("validation", "plateau")
    assert lines_of(tmp_path / "run", *kinds) == lines_of(tmp_path / "whole", *kinds)
    [resume] = lines_of(tmp_path / "run", "resume")
    assert resume["unigram_loss"] == lines_of(tmp_path / "whole", "start")[0]["unigram_loss"]


def test_a_run_that_is_to_stop_there_does_and_goes_on_when_it_is_resumed(skewed: Path, tmp_path: Path) -> None:
    run, whole, out = tiny_run(steps=8, validate_every=2, learning_rate=1e-9), tmp_path / "whole", tmp_path / "run"
    last = pretrain(run, skewed, whole).step
    stopped = pretrain(replace(run, {"training.stops_on_plateau": True}), skewed, out)
    assert (stopped.reason, stopped.step.name) == ("plateau", checkpoint.step_name(4))
    [end] = lines_of(out, "end")
    assert (end["reason"], end["step"], end["word_frequencies_only"]) == ("plateau", 4, True)
    went_on = pretrain(None, None, out, resume="always")
    assert (went_on.reason, went_on.step.name) == ("steps", last.name)
    kinds = ("validation", "plateau")
    assert lines_of(out, *kinds) == lines_of(whole, *kinds)
    found, wanted = (checkpoint.read_pretrainer(step).state_dict() for step in (went_on.step, last))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("reason", "status", "says"), [
    ("plateau", 1, "stops-on-plateau says. Go on all the same with: latemask pretrain --resume "),
    ("signal", loop.PREEMPTED, "Go on with: latemask pretrain --resume "),
    ("steps", 0, "Next: latemask export "),
])  # fmt: skip
def test_the_exit_status_says_why_a_run_ended(reason, status, says, tmp_path, monkeypatch, capsys) -> None:
    outcome = loop.Outcome(tmp_path / "run" / "step-4", reason, 7.0)
    monkeypatch.setattr(loop, "pretrain", lambda *_, **__: outcome)
    monkeypatch.setattr("latemask.cli.pretrain.refuse_early", lambda *given: None)
    assert run_pretrain(["mlm_tiny", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == status
    assert says in "".join(capsys.readouterr()).replace("\n", " ")


@pytest.mark.parametrize("rate", [1e-9, None])
def test_a_run_that_learned_no_more_is_not_invited_to_export_and_its_export_says_so(
    rate: float | None, tmp_path: Path, skewed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rate at which nothing moves; the other run learns the one word that each document repeats."""
    out, data = tmp_path / "run", skewed if rate else write_store(tmp_path / "data", draw=repeated)
    changes = {"learning_rate": rate} if rate else {"steps": 60, "batch_rows": 16, "micro_rows": 16}
    run = tiny_run("mlm", **changes)
    outcome = pretrain(run, data, out)
    assert outcome.word_frequencies_only is bool(rate)
    capsys.readouterr()
    assert run_pretrain(["--resume", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("no better than word frequencies" in said, "latemask export" in said) == (bool(rate), not rate)
    [start], loss = lines_of(out, "start"), dict(numbers(outcome.step, run))["validation loss"]
    assert (f"; no better than word frequencies alone ({start['unigram_loss']:.4f})" in loss) is bool(rate)
    warn_of_frequencies(outcome.step)
    assert ("no better than word frequencies alone" in capsys.readouterr().err) is bool(rate)


def test_a_finished_run_says_it_again_and_without_validation_nothing_is_said(
    skewed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(tiny_run(learning_rate=1e-9), skewed, tmp_path / "run")
    assert capsys.readouterr().err.count("warning: ") == 1
    pretrain(None, None, tmp_path / "run", resume="always")
    printed = capsys.readouterr().err
    assert "warning: " not in printed
    assert printed.rstrip().endswith("; no better than word frequencies")
    pretrain(tiny_run(validate_every=0), skewed, tmp_path / "never")
    [start], [end] = lines_of(tmp_path / "never", "start"), lines_of(tmp_path / "never", "end")
    assert start["unigram_loss"] is end["word_frequencies_only"] is None
    assert "frequencies" not in capsys.readouterr().err


def test_a_journal_that_is_gone_or_odd_stops_no_run(data: Path, tmp_path: Path) -> None:
    pretrain(tiny_run(steps=3), data, tmp_path / "run")
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_text('{"kind": "validation", "step": 3, "loss": "low"}\n{"kind": "validation"}\n{"step": 1}\n')
    pretrain(tiny_run(), data, tmp_path / "run", resume="always")
    journal.unlink()
    outcome = pretrain(tiny_run(steps=9), data, tmp_path / "run", resume="always")
    assert checkpoint.step_number(outcome.step) == 9


# The advice


@pytest.mark.parametrize("name", [f"{system.__name__}_{size}" for system in SYSTEMS for size in SIZES])
def test_its_flags_are_those_of_a_run_that_can_be_started(name: str) -> None:
    run = recipe(name)
    plateau = Plateau(run, 7.03)
    plateau.hear(run.updates, 7.03, 0.0)
    flags = [flag for group in re.findall(r"\((--[^)]*)\)", plateau.advice(run.updates)) for flag in shlex.split(group)]
    _, calmer = read([name, "--data", "data", "--out", "out", *flags])
    assert calmer is not None
    assert calmer.training.learning_rate == pytest.approx(run.training.learning_rate / 2)
    assert calmer.training.warmup_share == pytest.approx(2 * run.training.warmup_share)
    assert calmer.shape.positions == "rotary"
    if calmer.decoder is not None and "self" in calmer.decoder.sublayers:
        assert calmer.decoder.positions == "absolute+rotary"
    if calmer.decoder is not None:
        assert calmer.decoder.centred
    again = Plateau(calmer, 7.03)
    again.hear(calmer.updates, 7.03, 0.0)
    assert "sooner" not in again.advice(calmer.updates)


@pytest.mark.parametrize(("step", "loss", "says", "leaves_out"), [
    (6000, 7.03, "no better than word frequencies after 6,000 updates (7.03 against 7.03): the rate rose too fast or "
     "is too high for this depth. Start again with half the rate and twice the warm-up (--training.learning-rate "
     "0.00025 --training.warmup-share 0.2); it is left sooner with rotary positions (--shape.positions "
     "rotary --decoder.positions absolute+rotary) and a centred decoder (--decoder.centred True)", "too few"),
    (300, 7.03, "these updates are too few, or the rate rose too fast", "worse"),
    (6000, 10.4, "worse than word frequencies after 6,000 updates (10.40 against 7.03): too few updates, or a learning "
     "rate that is far too low or too high", "--"),
])  # fmt: skip
def test_it_says_what_applies(step: int, loss: float, says: str, leaves_out: str) -> None:
    plateau = Plateau(tiny_run("mae_lm", steps=6000, learning_rate=5e-4, warmup_share=0.1), 7.03)
    assert plateau.hear(6000, loss, 0.0)
    assert says in plateau.advice(step)
    assert leaves_out not in plateau.advice(step)


def test_no_centred_decoder_is_advised_where_documents_are_isolated() -> None:
    plateau = Plateau(replace(tiny_run("mae_lm", steps=6000), {"shape.isolate_documents": True}), 7.03)
    assert plateau.hear(6000, 7.03, 0.0)
    assert "centred" not in plateau.advice(6000)


@pytest.mark.parametrize(("share", "then"), [(0.0, "0.1"), (0.25, "0.5"), (0.3, None)])
def test_the_warm_up_is_doubled_up_to_half_of_the_run(share: float, then: str | None) -> None:
    plateau = Plateau(tiny_run(steps=6000, warmup_share=share), 7.03)
    plateau.hear(6000, 7.0, 0.0)
    found = re.search(r"and twice the warm-up \(.*--training.warmup-share (\S+)\);", plateau.advice(6000))
    assert (found and found[1]) == then

"""Fine-tuning learns, repeats itself bit for bit, continues a queue, and says when a result is worthless."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch

from latemask.config import replace
from latemask.downstream import runner, stepper
from latemask.downstream.bucketed import DeviceRows, epoch_batches, sorted_batches
from latemask.downstream.casts import Casts, used_once
from latemask.downstream.claims import claimed
from latemask.downstream.data import TextData, read_data
from latemask.downstream.evaluation import evaluate
from latemask.downstream.examples import Examples
from latemask.downstream.finetune import EVALUATION_TOKENS, Bench, Model, predict, result_of
from latemask.downstream.grid import points_of
from latemask.downstream.heads import FineTuned, losses
from latemask.downstream.inputs import Frame, Inputs, longest_first
from latemask.downstream.options import EvaluateOptions, FinetuneOptions
from latemask.downstream.problem import TextProblem, cosines
from latemask.downstream.runner import STOPPED, finetune, output_folder, run_finetune
from latemask.downstream.saving import load_finetuned
from latemask.downstream.settings import Settings
from latemask.downstream.tasks import NO_LABEL, own_task
from latemask.downstream.worker import Worker
from latemask.errors import Refusal
from latemask.model.encoder import Encoder
from latemask.recipes import recipe
from latemask.training import checkpoint
from latemask.training.loop import PREEMPTED
from latemask.writing import write_json
from trained import byte_level, write_run

CPU = torch.device("cpu")
TINY = {"shape.depth": 1, "shape.width": 32, "shape.heads": 2, "shape.feedforward": 64, "shape.row_tokens": 48,
        "shape.positions": "absolute"}  # fmt: skip
FAST = Settings(epochs=8, learning_rate=5e-3, batch_rows=8, sequence_tokens=48)


def tiny_model(seed=0, **shape):
    run = replace(recipe("mlm_tiny"), {**TINY, **shape})
    tokenizer = byte_level()
    torch.manual_seed(seed)
    part = dataclasses.replace(run.shape, vocabulary=tokenizer.vocabulary, specials=tokenizer.specials)
    return Model.of(Encoder(part), tokenizer, "random")


def animals(rows, seed=0):
    """Texts that say cat or dog, once."""
    noise = np.random.default_rng(seed)
    labels = noise.integers(0, 2, rows)
    texts = [
        ("the bird saw the " + ("dog", "cat")[label] + " and the bird" * int(noise.integers(0, 3)),) for label in labels
    ]
    return texts, labels.tolist()


def problem_of(
    model, kind="classification", texts=None, labels=None, settings=FAST, classes=("dog", "cat"), columns=("text",)
):
    if texts is None:
        texts, labels = animals(96)
    task = dataclasses.replace(own_task(kind, columns, "label", "train", "dev"), labels=classes)
    held = {split: Examples(split, split, texts, labels, len(texts)) for split in ("train", "dev")}
    return TextProblem(task, held, model.inputs(settings), settings)


def untimed(training):
    return [{**entry, "seconds_so_far": 0} for entry in training.history]


def test_learns_and_repeats_itself_bit_for_bit():
    model = tiny_model()
    problem = problem_of(model)
    bench = Bench(model, problem, FAST, CPU)
    first, other = bench.train(FAST), bench.train(dataclasses.replace(FAST, seed=1))
    again = bench.train(FAST)
    assert first.evaluation.scores["dev"]["accuracy"] > 0.95
    assert untimed(first) == untimed(again)
    assert untimed(first) != untimed(other)
    fresh = Bench(tiny_model(), problem_of(tiny_model()), FAST, CPU).train(FAST)
    assert untimed(fresh) == untimed(first)  # a bench that is used again changes nothing
    result = result_of(model, problem, FAST, first, CPU)
    assert not result["degenerate"]
    assert result["id2label"] == {"0": "dog", "1": "cat"}
    assert result["updates"] == 8 * 12
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("kind", ["classification", "tokens"])
def test_predictions_are_those_of_each_row_alone_and_the_host_waits_for_the_device_once(kind, monkeypatch):
    net = FineTuned(tiny_model().encoder, kind, 3, 0.0).eval()
    rows = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 3, 7, 7, 3, 11, 4)]
    monkeypatch.setitem(EVALUATION_TOKENS, "cpu", 14)
    found = predict(net, rows, 1, CPU, FAST)
    for row, output in zip(rows, found, strict=True):
        ids = torch.from_numpy(row)[None].long()
        with torch.no_grad():
            expected = net(ids, torch.ones_like(ids, dtype=torch.bool))[0]
        np.testing.assert_allclose(output, expected.numpy(), atol=1e-5)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which does not know the device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    asked = []
    net.register_forward_hook(lambda *_: asked.append(1))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        predict(net.to("meta"), rows, 1, torch.device("meta"), FAST)
    assert len(asked) == len(sorted_batches(np.array(list(map(len, rows))), 14)) > 3


def test_equals_a_plain_loop():
    """The same batches through torch's own AdamW, written down directly."""
    settings = dataclasses.replace(FAST, dropout=0.0, epochs=2, clip_norm=0.5, weight_decay=0.1)
    model = tiny_model()
    problem = problem_of(model, settings=settings)
    trained = Bench(model, problem, settings, CPU)
    trained.train(settings)
    plain = tiny_model()
    net = FineTuned(plain.encoder, "classification", 2, 0.0)
    net.begin(settings.seed)
    net.train()
    groups = [[p for p in net.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], weight_decay=0.1,
                                  betas=settings.betas, eps=settings.epsilon)  # fmt: skip
    lengths = np.array([len(row) for row in problem.train_rows])
    labels = torch.from_numpy(problem.train_labels)
    update = 0
    for epoch in range(2):
        for batch in epoch_batches(lengths, settings.batch_rows, 48, settings.seed, epoch):
            rows = batch.rows[batch.weight > 0]
            longest = max(lengths[rows])
            ids = torch.full((len(rows), longest), model.tokenizer.specials.pad)
            for place, row in enumerate(rows):
                ids[place, : lengths[row]] = torch.from_numpy(problem.train_rows[row])
            loss = torch.nn.functional.cross_entropy(net(ids, ids != model.tokenizer.specials.pad), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = settings.rate_at(update, 24)
            optimizer.step()
            update += 1
    for (name, one), two in zip(trained.net.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["classification", "regression", "tokens", "similarity"])
def test_weights_cast_at_once_are_weights_cast_one_by_one(kind):
    """bf16 on a CPU, with dropout: the same bits in every weight after as many updates, and as many losses."""
    settings = dataclasses.replace(FAST, precision="bf16", epochs=2, clip_norm=0.5)
    texts, labels = animals(40)
    classes, columns = ("dog", "cat"), ("text",)
    if kind == "tokens":
        texts = [(text.split(),) for (text,) in texts]
        labels, classes = [[int(word == "cat") for word in words] for (words,) in texts], ("O", "B-CAT")
    elif kind != "classification":
        labels, classes = [float(label) for label in labels], ()
    if kind == "similarity":
        texts, columns = [(text, "the cat") for (text,) in texts], ("a", "b")
    found = []
    for at_once in (True, False):
        model = tiny_model(**{"shape.positions": "absolute+relative"})
        bench = Bench(model, problem_of(model, kind, texts, labels, settings, classes, columns), settings, CPU)
        assert bench.stepper.casts is not None
        names = bench.stepper.casts.copies.keys()
        layers = {name for name, part in bench.net.named_modules() if isinstance(part, torch.nn.Linear)}
        assert names == {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")}
        if not at_once:
            bench.stepper.casts = None
        training = bench.train(settings)
        assert training.skipped == 0
        found.append((untimed(training), {name: p.detach() for name, p in bench.net.named_parameters()}))
    assert found[0][0] == found[1][0]
    for name, one in found[0][1].items():
        assert one.dtype == torch.float32
        assert torch.equal(one, found[1][1][name]), name


def test_layers_that_run_twice_or_share_weights_are_left_to_autocast():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.once, self.twice, self.never, self.tied = (torch.nn.Linear(4, 4) for _ in range(4))
            self.table = torch.nn.Embedding(4, 4)
            self.tied.weight = self.table.weight

        def forward(self, x):
            return self.tied(self.twice(self.twice(self.once(x)))).sum()

    net = Net()
    with torch.autocast("cpu", torch.bfloat16):
        assert used_once(net, lambda: net(torch.ones(1, 4)), CPU) == [net.once]
    assert used_once(net, lambda: net(torch.ones(1, 4)), CPU) == []  # outside of autocast
    assert not any(part._forward_hooks for part in net.modules())
    casts, x = Casts(net, [net.once, net.never]), torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        casts(x).backward()
    casts.give_gradients()
    assert net.never.weight.grad is None
    given = net.once.weight.grad
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        net(x).backward()
    assert torch.equal(given, net.once.weight.grad)


def test_the_learning_rate_rises_and_falls():
    rates = [Settings(learning_rate=1.0, warmup_share=0.1).rate_at(update, 100) for update in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (n + 1) for n in range(10)])
    assert rates[10:] == pytest.approx([(100 - n) / 90 for n in range(10, 100)])
    assert Settings(learning_rate=1.0, warmup_share=0.0).rate_at(0, 1) == 1.0


@pytest.mark.parametrize("rows", [1, 7, 8, 1000])
def test_batches_hold_every_row_once_and_little_padding(rows):
    lengths = np.random.default_rng(0).integers(5, 60, rows)
    batches = epoch_batches(lengths, 8, 64, seed=1, epoch=0)
    seen = np.concatenate([batch.rows[batch.weight > 0] for batch in batches])
    assert sorted(seen) == list(range(rows))
    assert all(len(batch.rows) == min(8, rows) and lengths[batch.rows].max() <= batch.width <= 64 for batch in batches)
    if rows == 1000:
        assert sum(batch.width * 8 for batch in batches) < 1.2 * lengths.sum()
        again = epoch_batches(lengths, 8, 64, seed=1, epoch=0)
        assert all((one.rows == two.rows).all() for one, two in zip(batches, again, strict=True))
        assert any(
            (one.rows != two.rows).any() for one, two in zip(batches, epoch_batches(lengths, 8, 64, 1, 1), strict=True)
        )
        firsts = [int(lengths[batch.rows].max()) for batch in batches[:20]]
        assert firsts != sorted(firsts)
    assert sorted(np.concatenate(sorted_batches(lengths, 200))) == list(range(rows))
    assert all(len(batch) * lengths[batch].max() <= 200 for batch in sorted_batches(lengths, 200))


def test_rows_are_gathered_on_the_device():
    rows = [np.array([4, 5, 6]), np.array([7]), np.array([8, 9])]
    ids, real = DeviceRows(rows, 1, CPU).gather(torch.tensor([2, 0]), 4)
    assert ids.tolist() == [[8, 9, 1, 1], [4, 5, 6, 1]]
    assert real.tolist() == [[True, True, False, False], [True, True, True, False]]


def test_pairs_are_framed_and_cut_longest_first():
    tokenizer = byte_level()
    frame = Frame.of(tokenizer)
    assert (frame.before, frame.between, frame.after, frame.after_single) == ((0,), (2, 2), (2,), (2,))
    inputs = Inputs(tokenizer, 12)
    [one, two] = tokenizer.encode_batch(["the extraordinary </s> cat saw", " dog"])
    assert len(one) > 12
    [row] = inputs.rows([("the extraordinary </s> cat saw", " dog")])
    room = 12 - 4 - len(two)
    assert row.tolist() == [0, *one[:room].tolist(), 2, 2, *two.tolist(), 2]
    assert inputs.cut == 1
    for first in range(12):
        for second in range(12):
            left, right, room = first, second, 9
            while left + right > room:
                left, right = (left - 1, right) if left > right else (left, right - 1)
            assert longest_first(first, second, room) == (left, right)


def test_words_keep_their_first_token_and_cut_words_count_as_wrong():
    inputs = Inputs(byte_level(), 10)
    words = ["Paris", "is", "extraordinarily", "big"]
    [row], [places] = inputs.word_rows([words])
    pieces = inputs.tokenizer.encode_batch(["Paris", " is", " extraordinarily", " big"])
    assert places == [1, 1 + len(pieces[0]), 1 + len(pieces[0]) + len(pieces[1]), -1]
    assert len(row) == 10
    assert row[-1] == 2


@pytest.mark.parametrize("kind", ["regression", "similarity", "tokens"])
def test_the_other_kinds_learn(kind):
    model = tiny_model()
    settings = FAST
    texts, labels = animals(96)
    if kind == "regression":
        problem = problem_of(model, kind, texts, [10.0 + 5 * label for label in labels], settings, ())
    elif kind == "similarity":
        pairs = [(text, "the cat") for (text,) in texts]
        problem = problem_of(model, kind, pairs, [float(label) for label in labels], settings, (), ("a", "b"))
    else:
        sentences = [(text.split(),) for (text,) in texts]
        tags = [["B-CAT" if word == "cat" else "O" for word in words] for (words,) in sentences]
        classes = ("B-CAT", "O")
        problem = problem_of(
            model, kind, sentences, [[classes.index(tag) for tag in row] for row in tags], settings, classes
        )
    training = Bench(model, problem, settings, CPU).train(settings)
    assert training.evaluation.scores["dev"][{"tokens": "span_f1"}.get(kind, "spearman")] > 0.8
    if kind == "regression":
        values = np.array(training.evaluation.files["predictions-dev.json"])
        assert abs(values.mean() - 12.5) < 1  # in the units of the labels
    assert problem.majority()["dev"][problem.task.metrics[0]] < 0.95


def test_losses_are_those_of_torch():
    torch.manual_seed(0)
    scores, labels = torch.randn(3, 5, 4), torch.randint(0, 4, (3, 5))
    labels[0, 2:] = NO_LABEL
    wanted = [
        torch.nn.functional.cross_entropy(one, two, ignore_index=NO_LABEL)
        for one, two in zip(scores, labels, strict=True)
    ]
    torch.testing.assert_close(losses("tokens", scores, labels), torch.stack(wanted))
    ends = torch.tensor([[0, 3], [1, 1], [4, 4]])
    cross = torch.nn.functional.cross_entropy
    wanted = [(cross(one[:, 0], two[0]) + cross(one[:, 1], two[1])) / 2 for one, two in zip(scores, ends, strict=True)]
    torch.testing.assert_close(losses("span", scores[..., :2], ends), torch.stack(wanted))
    assert cosines(np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[1.0, 1.0], [1.0, 0.0]])) == pytest.approx(
        [0.5**0.5, 0]
    )


def test_padding_and_a_filled_batch_change_nothing():
    model = tiny_model()
    net = FineTuned(model.encoder, "classification", 2, 0.0).eval()
    [row] = model.inputs(FAST).rows([("the cat",)])
    rows = DeviceRows([row], 1, CPU)
    alone, wide = (net(*rows.gather(torch.tensor([0]), width)) for width in (len(row), len(row) + 9))
    torch.testing.assert_close(alone, wide)


def test_a_worthless_result_is_flagged():
    model = tiny_model()
    still = dataclasses.replace(FAST, epochs=1, learning_rate=1e-12)
    texts, _ = animals(40)
    problem = problem_of(model, texts=texts, labels=[0] * 30 + [1] * 10)
    result = result_of(model, problem, still, Bench(model, problem, still, CPU).train(still), CPU)
    assert result["degenerate"]
    assert result["majority"] == {"dev": {"accuracy": 0.75, "macro_f1": pytest.approx(3 / 7)}}
    assert result["score"] <= 0.75
    assert "no better than always answering the training data's commonest class" in result["degenerate_because"]


def test_updates_that_are_not_finite_are_skipped_and_counted():
    model = tiny_model()
    with torch.no_grad():
        model.encoder.tokens.weight.fill_(float("nan"))
    broken = Model.of(model.encoder, model.tokenizer, "broken")
    problem = problem_of(broken)
    bench = Bench(broken, problem, FAST, CPU)
    before = [p.clone() for p in bench.net.head.parameters()]
    for batch in epoch_batches(bench.lengths, 8, 48, 0, 0)[:3]:
        bench.stepper.step(batch, 1.0)
    assert int(bench.stepper.skipped) == 3
    assert all((one == two).all() for one, two in zip(before, bench.net.head.parameters(), strict=True))


def test_early_stopping_keeps_the_best_weights():
    model = tiny_model()
    settings = dataclasses.replace(FAST, epochs=30, patience=2)
    bench = Bench(model, problem_of(model), settings, CPU)
    training = bench.train(settings)
    scores = [entry["scores"]["dev"]["accuracy"] for entry in training.history]
    assert len(scores) < 30
    assert scores.index(max(scores)) == len(scores) - 3
    assert training.evaluation.scores["dev"]["accuracy"] == max(scores)
    assert bench.evaluate(settings).scores == training.evaluation.scores


def test_two_checkpoints_give_different_outputs():
    one, two = tiny_model(0), tiny_model(1)
    assert one.facts["weights"] != two.facts["weights"] == tiny_model(1).facts["weights"]
    outputs = []
    for model in (one, two):
        net = FineTuned(model.encoder, "classification", 2, 0.0).eval()
        net.begin(0)
        outputs.append(net(torch.tensor([[0, 50, 2]]), torch.ones(1, 3, dtype=torch.bool)))
    assert not torch.allclose(*outputs)


# The command, on folders.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    run = replace(recipe("mlm_tiny"), TINY)
    step = write_run(folder / "runs" / "x", run, byte_level())
    for name, seed in (("train", 0), ("dev", 1)):
        lines = [json.dumps({"text": text, "animal": ("dog", "cat")[label]})
                 for (text,), label in zip(*animals(64, seed), strict=True)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder, step


def options_of(folder, out, **changes):
    values = {
        "model": str(folder / "runs" / "x"), "task": ("own",), "data": str(folder), "out": str(out),
        "train": "train.jsonl", "dev": "dev.jsonl", "label": "animal", "epochs": 3, "learning_rate": 3e-3,
        "batch_rows": 8, "warmup_share": 0.06, "seeds": 3, "sequence_tokens": 48,
    }  # fmt: skip
    return FinetuneOptions(**(values | changes))


@pytest.mark.parametrize("given", [
    {"kind": "similarity"}, {"texts": ("a", "b")}, {"label": "x"}, {"name": "x"}, {"metrics": ("f1",)},
])  # fmt: skip
def test_options_of_a_task_of_ones_own_are_refused_without_one(given):
    with pytest.raises(Refusal, match=rf"--{next(iter(given))}: found no --task own"):
        finetune(FinetuneOptions("no model", ("stsb",), "no data", **given))
    with pytest.raises(Refusal, match="--task own: found no --train"):
        finetune(FinetuneOptions("no model", ("stsb", "own"), "no data", **given))


def test_results_of_an_export_in_a_run_s_folder_are_that_run_s(tmp_path, monkeypatch):
    """Where ``latemask pretrain`` says to export to; ``runs/export`` would be the folder of every run's export."""
    run = tmp_path / "runs" / "x"
    for folder in (run / "step-0000003", run / "export", tmp_path / "out" / "export"):
        folder.mkdir(parents=True)
    (run / "step-0000003" / "run.json").write_text("{}")
    assert output_folder("", str(run / "export")) == run / "downstream"
    assert output_folder("", str(tmp_path / "out" / "export")).as_posix() == "runs/export/downstream"
    monkeypatch.chdir(run)
    (run / "linked").symlink_to(run / "step-0000003")
    for model, folder in (("export", "downstream"), ("../x/export", "../x/downstream"), ("linked", f"{run}/downstream"),
                          ("step-0000003", "downstream"), (".", "downstream")):  # fmt: skip
        assert output_folder("", model).as_posix() == folder, "as the model was given"
    monkeypatch.chdir(run / "export")
    assert output_folder("", ".").as_posix() == "../downstream"
    monkeypatch.chdir(run)
    assert output_folder("", "some/name-of-the-hub").as_posix() == "runs/name-of-the-hub/downstream"


def test_the_folder_is_the_queue(folders, tmp_path, capsys):
    folder, step = folders
    [row] = finetune(options_of(folder, tmp_path, seeds=2))
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("own-*.json")}
    assert len(done) == 2
    [row] = finetune(options_of(folder, tmp_path))
    assert row["runs"] == 3
    assert len(row["seeds"]) == 3
    assert row["median"] == sorted(row["seeds"].values())[1]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())  # not done twice
    assert not list(tmp_path.glob("*.claim*"))
    result = json.loads(next(iter(done)).read_text())
    assert result["model"]["step"] == 3
    assert result["model"]["run"] == "x"
    assert result["settings"]["epochs"] == 3
    assert {"torch", "transformers", "latemask"} <= result["versions"].keys()
    assert "median" in capsys.readouterr().out
    assert output_folder("", str(step)) == output_folder("", str(folder / "runs" / "x")).resolve()
    tuned = folder / "runs" / "x" / "downstream" / "some.model"
    tuned.mkdir(parents=True)
    assert output_folder("", str(tuned)) == output_folder("", str(step))
    gone = next(iter(done))
    gone.unlink()
    finetune(options_of(folder, tmp_path))
    again = json.loads(gone.read_text())
    for timed in (again, result):
        timed |= {"train_seconds": 0, "examples_per_second": 0}
        timed["history"] = [{**entry, "seconds_so_far": 0} for entry in timed["history"]]
    assert again == result


def test_a_point_that_somebody_is_at_is_left_to_them_and_said(folders, tmp_path, monkeypatch, capsys):
    folder, _ = folders
    monkeypatch.setattr(runner, "exit_when_told", lambda status: None)
    options = options_of(folder, tmp_path, seeds=2, epochs=1)
    assert run_finetune(options) == 0
    held = next(tmp_path.glob("own-*-s1-*.json"))
    result = held.read_text()
    held.unlink()
    capsys.readouterr()
    with claimed(tmp_path, held.stem):
        assert run_finetune(options) == PREEMPTED
        assert len(finetune(options)[0]["seeds"]) == 1
        somebody = f"process {os.getpid()} on {socket.gethostname()}"
        assert f"warning: {held.stem}: not in the table, for {somebody} is at it" in capsys.readouterr().err
        held.write_text(result)
    assert run_finetune(options) == 0
    assert "is at it" not in capsys.readouterr().err


def test_another_question_of_the_same_data_is_another_point(folders, tmp_path, capsys):
    folder, _ = folders
    short = {"epochs": 1, "seeds": 1}
    finetune(options_of(folder, tmp_path, **short))
    [row] = finetune(options_of(folder, tmp_path, **short, metrics=("matthews",)))
    assert row["metric"] == "matthews"
    for name in ("train", "dev"):
        held = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"a": one["text"], "b": "a cat", "score": float(one["animal"] == "cat")}) + "\n"
            for one in held))  # fmt: skip
    numbers = {**short, "data": str(tmp_path), "texts": ("a", "b"), "label": "score"}
    for kind in ("regression", "similarity"):
        finetune(options_of(folder, tmp_path / "numbers", **numbers, kind=kind))
    done = [json.loads(path.read_text()) for path in (tmp_path / "numbers").glob("own-*.json")]
    assert {result["task_kind"] for result in done} == {"regression", "similarity"}
    capsys.readouterr()
    finetune(options_of(folder, tmp_path, **short, save=True))
    assert "--save: 1 of 1 points were done before without it" in capsys.readouterr().err


def test_rows_are_those_of_the_tasks_asked_for_and_the_summary_has_all(folders, tmp_path, capsys):
    folder, _ = folders
    finetune(options_of(folder, tmp_path, name="earlier", epochs=1, seeds=1))
    finetune(options_of(folder, tmp_path, name="mood", epochs=1, seeds=1, train_rows=32))
    finetune(options_of(folder, tmp_path, name="mood", epochs=2, seeds=1))
    capsys.readouterr()
    [row] = finetune(options_of(folder, tmp_path, name="mood", epochs=1, seeds=2))
    assert (row["task"], row["subset"], row["points"], row["runs"]) == ("mood", {}, 2, 3)
    said = capsys.readouterr().out
    assert "mood" in said
    assert "earlier" not in said
    assert "subset" not in said
    summary = json.loads((tmp_path / "summary.json").read_text())["tasks"]
    assert sorted((entry["task"], bool(entry["subset"])) for entry in summary) == [
        ("earlier", False), ("mood", False), ("mood", True)]  # fmt: skip


def test_a_development_file_that_training_has_seen_is_said(folders, tmp_path, capsys):
    folder, _ = folders
    lines = (folder / "train.jsonl").read_text().splitlines()
    for rows, name in ((lines[5:20], "part.jsonl"), ([*lines[5:20], '{"text": "new", "animal": "cat"}'], "more.jsonl")):
        (tmp_path / name).write_text("\n".join(rows) + "\n")
        dev = str(tmp_path / name)
        finetune(options_of(folder, tmp_path / "out", dev=dev, epochs=1, seeds=1))
        assert ("every row is in the training data too" in capsys.readouterr().err) == (name == "part.jsonl")
    found = [json.loads(path.read_text())["data"]["dev"] for path in (tmp_path / "out").glob("own-*.json")]
    assert sorted((dev["in_training"], dev["read"]) for dev in found) == [(15, 15), (15, 16)]


@pytest.mark.parametrize("text", ["", "{", "{}", "null", '{"kind": "finetune"}'])
def test_a_broken_result_of_a_point_is_refused_by_its_name(text, folders, tmp_path):
    folder, _ = folders
    options = options_of(folder, tmp_path, epochs=1, seeds=1)
    finetune(options)
    [point] = tmp_path.glob("own-*.json")
    point.write_text(text)
    with pytest.raises(Refusal, match=rf"{point.name}: .*Take it out of the folder and start again"):
        finetune(options)
    point.unlink()
    assert finetune(options)[0]["runs"] == 1


def test_a_model_that_diverges_is_a_degenerate_result(folders, tmp_path, capsys):
    folder, _ = folders
    for name in ("train", "dev"):
        held = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps(one | {"animal": float(one["animal"] == "cat")}) + "\n" for one in held))  # fmt: skip
    wild = {"data": str(tmp_path), "epochs": 1, "seeds": 1, "learning_rate": 1e30}
    for kind, metric in (("regression", "spearman"), ("classification", "accuracy")):
        data = {} if kind == "regression" else {"data": str(folder)}
        [row] = finetune(options_of(folder, tmp_path / kind, **(wild | data), kind=kind))
        assert (row["metric"], row["degenerate"]) == (metric, 1)
        [path] = (tmp_path / kind).glob("own-*.json")
        because = json.loads(path.read_text())["degenerate_because"]
        assert any("outputs are not finite" in why for why in because)
        answer = {"regression": "the training data's mean", "classification": "the training data's commonest class"}[
            kind
        ]
        assert f"no better than always answering {answer}" in because
        told = capsys.readouterr().out
        assert f"(always {answer}: " in " ".join(told.split())
        assert f"Majority: the score of always answering {answer}." in " ".join(told.split())


def test_a_score_has_one_unit_wherever_it_is_read(folders, tmp_path, capsys):
    """A point's own line, the table, and the saved model's evaluation: times 100, while JSON holds the share."""
    folder, _ = folders
    [row] = finetune(options_of(folder, tmp_path, seeds=1, epochs=1, save=True))
    line, *table = capsys.readouterr().out.splitlines()
    score, majority = (f"{100 * value:.1f}" for value in (row["median"], row["majority"]["dev"]["accuracy"]))
    assert f": accuracy {score} (always the training data's commonest class: {majority}), " in line
    [cells] = (line.split() for line in table if line.split()[:1] == ["own"])
    assert cells[1:3] == ["accuracy", score]
    [saved] = tmp_path.glob("*.model")
    again = evaluate(EvaluateOptions(str(saved), "finetuned", str(folder), dev="dev.jsonl", out=f"{tmp_path}/x.json"))
    assert again["score"] == row["median"]
    assert f"{saved}, dev: accuracy {score}, " in capsys.readouterr().out


def test_a_batch_is_no_larger_than_its_data():
    model = tiny_model()
    settings = dataclasses.replace(FAST, batch_rows=1 << 40, epochs=1)
    training = Bench(model, problem_of(model, settings=settings), settings, CPU).train(settings)
    assert (training.updates, training.examples) == (1, 96)


@pytest.mark.slow
def test_rows_that_are_left_out_are_said(folders, tmp_path, capsys):
    folder, _ = folders
    spoilt = tmp_path / "data"
    spoilt.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        (spoilt / name).write_text((folder / name).read_text() + '{"text": "a dog"}\n{"text": "b", "animal": ""}\n')
    finetune(options_of(folder, tmp_path / "spoilt", data=str(spoilt), epochs=1, seeds=1))
    said = capsys.readouterr().err
    for name in ("train.jsonl", "dev.jsonl"):
        assert f"warning: {spoilt / name}: 2 of 66 rows left out, such as line 65: " in said
    finetune(options_of(folder, tmp_path / "whole", epochs=1, seeds=1))
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "cut", "texts", "most", "helps"), [
    ({"sequence_tokens": 512}, 10, "12 texts", 48, ": pretrain with --shape.row-tokens 128"),
    ({"sequence_tokens": 48}, 10, "12 texts", 48,
     ": pretrain with --shape.row-tokens 128, and fine-tune with --sequence-tokens 128"),
    ({"sequence_tokens": 512, "texts": ("text", "b")}, 10, "12 pairs", 48, ": pretrain with --shape.row-tokens 128"),
    ({"sequence_tokens": 40, "texts": ("text", "b"), "kind": "similarity"}, 11, "24 texts", 40, ""),
])  # fmt: skip
def test_texts_that_are_cut_are_said_with_the_length_that_held_and_what_helps(
    changes, cut, texts, most, helps, folders, tmp_path, capsys
):
    folder, _ = folders
    long = "a cat " * 40
    for name, count in (("train", 10), ("dev", 2)):
        rows = [{"text": long if number < count else "a dog", "b": "a" if number else long, "animal": number % 2}
                for number in range(12)]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finetune(options_of(folder, tmp_path / "out", data=str(tmp_path), epochs=1, seeds=1, **changes))
    assert [line for line in capsys.readouterr().err.splitlines() if "were cut" in line] == [
        f"warning: own {split}: {number} of {texts} are longer than {most} tokens and were cut{helps}"
        for split, number in (("train", cut), ("dev", cut - 8))
    ]
    [path] = (tmp_path / "out").glob("own-*.json")
    result = json.loads(path.read_text())
    assert result["settings"]["sequence_tokens"] == most
    assert [result["data"]["train"][name] for name in ("cut", "most_tokens")] == [cut, most]


def test_training_texts_are_given_up_before_training(folders, tmp_path, monkeypatch):
    """Of a task of 393,000 pairs they would take more memory than its rows."""
    folder, _ = folders
    texts: list[weakref.ref[Examples]] = []

    def read(task, options):
        found = read_data(task, options)
        assert isinstance(found, TextData)
        texts.append(weakref.ref(found.examples["train"]))
        return found

    def train(*_):
        alive.extend(text() for text in texts)
        yield

    alive: list[Examples | None] = []
    monkeypatch.setattr("latemask.downstream.data.read_data", read)
    monkeypatch.setattr(Worker, "_train", train)
    with pytest.raises(Refusal):  # no result was written
        finetune(options_of(folder, tmp_path))
    assert alive == [None]


def test_two_processes_share_a_queue_and_what_each_meets_is_said_once(folders, tmp_path, capfd):
    folder, step = folders
    shutil.copytree(step.parent, tmp_path / "run")
    shutil.copytree(step, tmp_path / "run" / "step-0000009")
    (tmp_path / "run" / "step-0000009" / checkpoint.RUN).write_text("{}")
    (tmp_path / "train.jsonl").write_text((folder / "train.jsonl").read_text() + "{}\n" + "never seen\n")
    (tmp_path / "dev.jsonl").write_text((folder / "dev.jsonl").read_text())
    options = options_of(tmp_path, tmp_path / "out", model=str(tmp_path / "run"), parallel=2, seeds=4, epochs=1,
                         save=True, sequence_tokens=10)  # fmt: skip
    [row] = finetune(options)
    assert row["runs"] == len(list((tmp_path / "out").glob("own-*.json"))) == 4
    assert not list((tmp_path / "out").glob("*.claim*"))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    words = ("passed over step-0000009", "every row is in the training data", "2 of 66 rows left out", "own train: ",
             "own dev: ")  # fmt: skip
    assert [[word for word in words if word in line] for line in said] == [[word] for word in words], said
    assert len(list((tmp_path / "out").glob("*.model"))) == 4
    with pytest.raises(Refusal, match="2 of 2 processes"):
        finetune(dataclasses.replace(options, label="mood"))
    assert capfd.readouterr().err.count("no 'mood'") == 1


def test_points_that_are_trained_together_are_those_of_one_after_the_other(folders, tmp_path):
    folder, _ = folders
    for name, together in (("one", 1), ("more", 3)):
        [row] = finetune(options_of(folder, tmp_path / name, together=together, seeds=4, epochs=2))
        assert row["runs"] == 4
    found = {
        name: {path.name: json.loads(path.read_text()) for path in (tmp_path / name).glob("own-*.json")}
        for name in ("one", "more")
    }
    assert sorted(found["one"]) == sorted(found["more"])
    for name, one in found["one"].items():
        assert (one["at_once"], found["more"][name]["at_once"]) == (1, 3)
        assert [entry["scores"] for entry in one["history"]] == [
            entry["scores"] for entry in found["more"][name]["history"]
        ]
        assert [entry["loss_so_far"] for entry in one["history"]] == [
            entry["loss_so_far"] for entry in found["more"][name]["history"]
        ]
    assert not list(tmp_path.glob("*/*.claim*"))


def test_tasks_with_one_point_each_are_trained_together(folders, tmp_path, monkeypatch):
    """In the order of the tasks; the data of a task go when the last lane has left it."""
    from latemask.downstream import worker

    folder, _ = folders
    for task, names in (("RTE", "sentence1\tsentence2"), ("QNLI", "question\tsentence")):
        (tmp_path / task).mkdir()
        for split, rows in (("train", 40), ("dev", 12)):
            lines = [f"{row}\tthe {split} cat {row}\tthe bird\t{('not_' * (row % 2))}entailment" for row in range(rows)]
            (tmp_path / task / f"{split}.tsv").write_text("\n".join([f"index\t{names}\tlabel", *lines]) + "\n")
    seen, updates = [], []

    class Watched(worker.Worker):
        def _task(self, number):
            found = super()._task(number)
            seen.append((number, sorted(self.held)))
            return found

    step = stepper.Stepper.step
    monkeypatch.setattr(worker, "Worker", Watched)
    monkeypatch.setattr(stepper.Stepper, "step", lambda self, *parts: (updates.append(id(self)), step(self, *parts)))
    given = {
        "task": ("rte", "qnli"),
        "data": str(tmp_path),
        "train": "",
        "dev": "",
        "label": "label",
        "seeds": 1,
        "epochs": 1,
    }
    rows = finetune(options_of(folder, tmp_path / "out", together=3, **given))
    assert [row["task"] for row in rows] == ["qnli", "rte"]
    assert [row["runs"] for row in rows] == [1, 1]
    assert seen == [(0, [0]), (0, [0]), (1, [0, 1]), (0, [0, 1]), (1, [0, 1]), (1, [1])]
    assert updates[0] == updates[2] != updates[1] == updates[3]  # by turns


def test_no_claim_is_left_where_one_of_those_trained_together_ends_by_an_interrupt(folders, tmp_path, monkeypatch):
    folder, _ = folders
    updates = []

    def interrupted(self, batch, rate):
        updates.append(batch)
        if len(updates) == 5:
            assert len(list(tmp_path.glob("*.claim*"))) == 3
            raise KeyboardInterrupt

    monkeypatch.setattr(stepper.Stepper, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(options_of(folder, tmp_path, together=3, seeds=4, epochs=2))
    assert not list(tmp_path.glob("*.claim*"))
    assert not list(tmp_path.glob("own-*.json"))


def test_a_killed_process_leaves_a_queue_that_goes_on(folders, tmp_path):
    folder, _ = folders
    program = f"""
import torch
torch.set_num_threads(1)
from latemask.downstream.runner import finetune
from latemask.downstream.options import FinetuneOptions
finetune({options_of(folder, tmp_path, epochs=200)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"})
    for _ in range(600):
        if list(tmp_path.glob("*.claim-0")):
            break
        time.sleep(0.1)
    process.kill()
    process.wait()
    [claim] = tmp_path.glob("*.claim-0")
    assert not list(tmp_path.glob("*.json"))
    name = claim.name.removesuffix(".claim-0")
    with claimed(tmp_path, name) as is_ours:  # at once: its owner is known to be dead
        assert is_ours
    assert [path.name for path in tmp_path.glob("*.claim*")] == [claim.name]


def test_told_to_end_it_gives_up_the_claims_of_all_its_lanes(folders, tmp_path):
    """One process; test_workers tells two."""
    folder, _ = folders
    command = [sys.executable, "-m", "latemask", "finetune", str(folder / "runs" / "x"), "--task", "own", "--data",
               str(folder), "--train", "train.jsonl", "--dev", "dev.jsonl", "--label", "animal", "--out", str(tmp_path),
               "--epochs", "2000", "--seeds", "5", "--together", "2"]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        for _ in range(1200):
            if len(list(tmp_path.glob("*.claim-0"))) == 2:
                break
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == STOPPED
    finally:
        process.kill()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("positions", ["absolute", "absolute+relative", "rotary"])
def test_a_saved_model_predicts_the_same(folders, tmp_path, positions):
    folder, _ = folders
    run = replace(recipe("mlm_tiny"), {**TINY, "shape.positions": positions})
    write_run(folder / "runs" / positions, run, byte_level())
    options = options_of(folder, tmp_path, model=str(folder / "runs" / positions), seeds=1, save=True, predictions=True)
    finetune(options)
    [saved] = tmp_path.glob("*.model")
    [written] = tmp_path.glob("*.files/predictions-dev.json")
    predicted = json.loads(written.read_text())
    rows = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    net, model, facts = load_finetuned(saved)
    ids = model.inputs(FAST).rows([(row["text"],) for row in rows])
    ours = [
        facts["labels"][int(net(torch.tensor(row[None]).long(), torch.ones(1, len(row)).bool()).argmax())]
        for row in ids
    ]
    assert ours == predicted
    if positions == "rotary":
        return  # no stock class
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    theirs, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(saved).eval(),
        AutoTokenizer.from_pretrained(saved),
    )
    assert theirs.config.id2label == {0: "cat", 1: "dog"}
    outputs = [theirs(**tokenizer(row["text"], return_tensors="pt")).logits for row in rows]
    assert [theirs.config.id2label[int(output.argmax())] for output in outputs] == predicted


def test_a_saved_model_reads_as_much_of_a_text_as_in_training(folders, tmp_path):
    from transformers import AutoTokenizer

    folder, _ = folders
    finetune(options_of(folder, tmp_path, seeds=1, epochs=1, save=True, sequence_tokens=8))
    [saved], [point] = tmp_path.glob("*.model"), tmp_path.glob("own-*.json")
    trained = json.loads(point.read_text())
    assert trained["data"]["dev"]["cut"] > 0
    for where in ({"data": str(folder), "dev": "dev.jsonl"}, {"data": str(folder / "dev.jsonl")}):
        again = evaluate(EvaluateOptions(str(saved), "finetuned", **where))
        assert again["data"]["dev"]["cut"] == trained["data"]["dev"]["cut"]
        assert again["scores"]["dev"] == pytest.approx(trained["scores"]["dev"])
    long = "a long word " * 99
    assert len(AutoTokenizer.from_pretrained(saved)(long, truncation=True)["input_ids"]) == 8


def test_unusable_options_are_refused(folders, tmp_path):
    folder, _ = folders
    for changes, found in (
        ({"task": ("xnli",)}, "'xnli'"),
        ({"task": ()}, "nothing"),
        ({"seeds": 0}, "at least 1"),
        ({"label": "none"}, "'none'"),
        ({"train": ""}, "no --train"),
        ({"model": str(folder / "nowhere")}, "no such folder"),
        ({"graphs": "on"}, "a CUDA GPU"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ):
        with pytest.raises(Refusal, match=found):
            finetune(options_of(folder, tmp_path, **changes))
    assert not list(tmp_path.glob("*.claim*"))


def test_results_that_are_gone_when_the_work_is_done_are_an_error(folders, tmp_path, monkeypatch):
    from latemask.downstream import worker

    def writes_and_loses(path, value):
        write_json(path, value)
        if path.name.startswith("own-") and "-s1-" in path.name:
            path.unlink()

    folder, _ = folders
    monkeypatch.setattr(worker, "write_json", writes_and_loses)
    with pytest.raises(Refusal, match="1 of 2 points without a result"):
        finetune(options_of(folder, tmp_path, seeds=2, epochs=1))
    monkeypatch.undo()
    [row] = finetune(options_of(folder, tmp_path, seeds=2, epochs=1))
    assert row["runs"] == 2


def test_compiling_pays_by_all_the_updates_that_a_process_makes(folders, tmp_path, monkeypatch):
    """A bench is told of the updates of all its points, and whether another one of this process has compiled."""
    folder, _ = folders
    told = []

    class Told(stepper.Stepper):
        def __init__(self, *parts):
            told.append(parts[-1])
            super().__init__(*parts)
            self.compiles = len(told) > 1

    def points(*parts):
        found = points_of(*parts)
        return [dataclasses.replace(point, batch_rows=rows) for rows in (8, 16, 32) for point in found]

    monkeypatch.setattr("latemask.downstream.finetune.Stepper", Told)
    monkeypatch.setattr("latemask.downstream.worker.points_of", points)
    finetune(options_of(folder, tmp_path, seeds=2, epochs=1, batch_rows=None))
    assert told == [2 * 64 / 8, 2 * 64 / 16, float("inf")]
    asked = []
    monkeypatch.setattr(stepper, "compiles", lambda setting, device, pays: asked.append(pays) or False)
    monkeypatch.setattr("latemask.downstream.finetune.Stepper", stepper.Stepper)
    monkeypatch.setattr(stepper, "COMPILE_FROM_UPDATES", 2 * 64 // 8)
    finetune(options_of(folder, tmp_path / "asked", seeds=2, epochs=1, batch_rows=None))
    assert asked == [True, False, False]  # of 16, 8 and 4 updates


def test_benches_have_encoders_of_their_own():
    """What one bench compiles or trains reaches neither the model nor the next bench."""

    def is_compiled(net):
        return any(module._compiled_call_impl is not None for module in net.modules())

    model, plain = tiny_model(), dataclasses.replace(FAST, epochs=1)
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    compiling = dataclasses.replace(plain, compile="on")
    assert is_compiled(Bench(model, problem_of(model, settings=compiling), compiling, CPU).net)
    bench = Bench(model, problem_of(model, settings=plain), plain, CPU)
    assert not is_compiled(model.encoder)
    assert not is_compiled(bench.net)
    bench.train(plain)
    for name, value in model.encoder.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", ["classification", "tokens", "similarity"])
def test_graphs_train_as_plain_launches_do(kind):
    cuda, histories = torch.device("cuda"), []
    for graphs in ("on", "off"):
        model = tiny_model()
        settings = dataclasses.replace(FAST, dropout=0.0, graphs=graphs, precision="fp32")
        texts, labels = animals(90)
        if kind == "tokens":
            texts, labels = [(text.split(),) for (text,) in texts], [[0] * len(text.split()) for (text,) in texts]
            labels = [[int(word == "cat") for word in words] for (words,) in texts]
            problem = problem_of(model, kind, texts, labels, settings, ("O", "B-CAT"))
        elif kind == "similarity":
            pairs = [(text, "the cat") for (text,) in texts]
            problem = problem_of(model, kind, pairs, [float(label) for label in labels], settings, (), ("a", "b"))
        else:
            problem = problem_of(model, texts=texts, labels=labels, settings=settings)
        bench = Bench(model, problem, settings, cuda)
        bench.train(dataclasses.replace(settings, seed=5))
        bench.train(settings)
        histories.append({name: p.detach().cpu() for name, p in bench.net.named_parameters()})
    for name, one in histories[0].items():
        torch.testing.assert_close(one, histories[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_take_the_copies_of_weights():
    cuda, losses_of = torch.device("cuda"), []
    settings = dataclasses.replace(FAST, dropout=0.0, precision="bf16", learning_rate=1e-3)
    for graphs, at_once in (("on", True), ("on", False), ("off", False)):
        model, settings = tiny_model(), dataclasses.replace(settings, graphs=graphs)
        bench = Bench(model, problem_of(model, settings=settings), settings, cuda)
        bench.stepper.casts = bench.stepper.casts if at_once else None
        losses_of.append([entry["loss_so_far"] for entry in bench.train(settings).history])
    assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-2)
    assert losses_of[0] == pytest.approx(losses_of[2], rel=1e-2)


def test_pairs_of_bert_have_two_types(tmp_path):
    import tokenizers
    from tokenizers import processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = byte_level()
    library = tokenizers.Tokenizer.from_str(tokenizer.library.to_str())
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    torch.manual_seed(0)
    config = BertConfig(vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=48, max_position_embeddings=48, pad_token_id=1)  # fmt: skip
    bert = BertModel(config).eval()
    bert.save_pretrained(tmp_path)
    names = {f"{role}_token": name for role, name in tokenizer.special_names.items()}
    theirs = PreTrainedTokenizerFast(tokenizer_object=library, **names)
    theirs.save_pretrained(tmp_path)
    model = Model.load(tmp_path)
    assert model.type_token() == 2
    net = FineTuned(model.encoder, "classification", 2, 0.0, model.type_token()).eval()
    pairs = [("the cat", "saw the bird"), ("Paris is the capital", "the")]
    rows = DeviceRows(model.inputs(FAST).rows(pairs), 1, CPU)
    ids, real = rows.gather(torch.tensor([0, 1]), int(rows.lengths.max()))
    encoded = theirs(
        *map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt", return_token_type_ids=True
    )
    assert encoded["input_ids"].tolist() == ids.tolist()
    assert encoded["token_type_ids"].any()
    torch.testing.assert_close(net.hidden(ids, real)[real], bert(**encoded).last_hidden_state[real])

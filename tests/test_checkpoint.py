"""A step folder is whole or not there: the newest whole one is always found, and no accident takes it away."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file

from latemask.config import replace
from latemask.errors import Refusal
from latemask.model.encoder import Encoder
from latemask.model.pretrainer import Pretrainer
from latemask.training import checkpoint
from latemask.training.checkpoint import State
from latemask.training.loop import pretrain
from latemask.training.optimizer import load_optimizer_tensors, make_optimizer, optimizer_tensors
from latemask.training.validation import Loss, Validation
from training_support import Process, assert_same_bits, lines_of, mounted_disk, tensors_of, tiny_run, wait_until

FILES = ("encoder.safetensors", "optimizer.safetensors", "rest.safetensors", "run.json", "state.json", "tokenizer.json")


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the steps 0, 2, 4 and 6."""
    out = tmp_path_factory.mktemp("runs") / "run"
    pretrain(tiny_run(save_every=2, validate_every=6), data, out)
    return out


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def write(out: Path, step: int, *, model: Pretrainer | None = None) -> Path:
    run = tiny_run()
    return checkpoint.write(out, run, State(updates=step), (model or Pretrainer(run)).state_dict(), {}, b"{}")


def empty_steps(out: Path, *steps: int) -> None:
    for step in steps:
        (out / checkpoint.step_name(step)).mkdir(parents=True)


def numbers(out: Path) -> list[int | None]:
    return [checkpoint.step_number(step) for step in checkpoint.steps(out)]


def test_what_a_step_folder_holds(finished: Path, data: Path) -> None:
    step = finished / "step-0000006"
    run = checkpoint.read_run(step)
    assert sorted(path.name for path in step.iterdir()) == list(FILES)
    fresh = Pretrainer(run).state_dict()
    assert load_file(step / "encoder.safetensors").keys() == Encoder(run.shape).state_dict().keys()
    assert load_file(step / "rest.safetensors").keys() == {name for name in fresh if not name.startswith("encoder.")}
    assert {tensor.dtype for tensor in tensors_of(step).values()} == {torch.float32}
    assert (step / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    assert run == tiny_run(save_every=2, validate_every=6)
    state = checkpoint.read_state(step)
    assert (state.updates, state.batch_index, state.skips_in_a_row, state.data) == (6, 6, 0, str(data))


def test_reading_gives_the_model_and_the_encoder_that_were_written(tmp_path: Path) -> None:
    run = tiny_run()
    model = Pretrainer(run)
    step = checkpoint.write(tmp_path, run, State(), model.state_dict(), {}, b"{}")
    ids = torch.randint(5, run.shape.vocabulary, (2, 9))
    with torch.no_grad():
        hidden = model.eval().encoder(ids)
        assert torch.equal(checkpoint.read_encoder(step)(ids), hidden)
        assert torch.equal(checkpoint.read_pretrainer(step).encoder(ids), hidden)
    read = checkpoint.read_pretrainer(step)
    assert not read.training
    assert not checkpoint.read_encoder(step).training
    assert all(torch.equal(read.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("positions", ["absolute", "absolute+relative", "rotary"])
def test_reading_draws_no_weights(positions: str, tmp_path: Path) -> None:
    """Nothing of what is read is made first, and all that no file holds is there."""
    run = replace(tiny_run("three_ml_self"), {"shape.positions": positions})
    model = Pretrainer(run)
    step = checkpoint.write(tmp_path / "run", run, State(), model.state_dict(), {}, b"{}")
    before = torch.get_rng_state()
    found, encoder = checkpoint.read_pretrainer(step), checkpoint.read_encoder(step)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in ((found, model), (encoder, model.encoder)):
        assert dict(one.named_buffers()).keys() == dict(other.named_buffers()).keys()
        for (name, tensor), wanted in zip([*one.named_parameters(), *one.named_buffers()],
                                          [*other.parameters(), *other.buffers()], strict=True):  # fmt: skip
            assert tensor.device.type == "cpu", name
            assert torch.equal(tensor, wanted), name
            assert tensor.requires_grad == wanted.requires_grad


@pytest.mark.parametrize("reverses", [False, True])
def test_the_newest_is_so_by_number_not_by_name_or_time(tmp_path: Path, reverses: bool) -> None:
    steps = [9800, 9900, 10_000, 10_100, 12_345_678]
    for number in steps:
        write(tmp_path, number)
    for age, step in enumerate(checkpoint.steps(tmp_path)):
        time = 1e9 + (-age if reverses else age) * 1000
        os.utime(step, (time, time))
    assert numbers(tmp_path) == steps
    assert checkpoint.newest(tmp_path).name == "step-12345678"
    (tmp_path / "step-0009900").rename(tmp_path / "step-9900")
    shutil.rmtree(tmp_path / "step-12345678")
    assert checkpoint.newest(tmp_path).name == "step-0010100"


def flip(path: Path, place: int, mask: int = 0x10) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_a_cut_and_an_altered_file_are_passed_over(name: str, run_folder: Path) -> None:
    whole = run_folder / "step-0000006"
    again = whole.with_name("kept")
    chance = random.Random(name)
    size = (whole / name).stat().st_size
    breaks = {
        "missing": lambda: (whole / name).unlink(),
        "empty": lambda: (whole / name).write_bytes(b""),
        "cut": lambda: os.truncate(whole / name, size - 2),
        "cut in half": lambda: os.truncate(whole / name, size // 2),
        "first byte": lambda: flip(whole / name, 0),
        "last byte": lambda: flip(whole / name, size - 1),
        "some byte": lambda: flip(whole / name, chance.randrange(size), 1 << chance.randrange(8)),
    }
    shutil.copytree(whole, again)
    for damage, break_it in breaks.items():
        break_it()
        passed_over: list[str] = []
        assert checkpoint.newest(run_folder, passed_over).name == "step-0000004"
        assert len(passed_over) == 1
        assert passed_over[0].startswith("step-0000006: ")
        assert name in passed_over[0]
        if (name, damage) != ("optimizer.safetensors", "missing"):
            with pytest.raises(Refusal, match="step-0000006"):
                checkpoint.resolve(whole)
        shutil.rmtree(whole)
        shutil.copytree(again, whole)
    assert checkpoint.newest(run_folder) == whole


def test_a_run_without_its_optimizer_s_state_is_still_a_model_and_is_not_gone_on_with(run_folder: Path) -> None:
    whole = run_folder / "step-0000006"
    (whole / "optimizer.safetensors").unlink()
    for folder in (run_folder, whole):
        assert checkpoint.resolve(folder, takes_older=False) == whole
    passed_over: list[str] = []
    assert checkpoint.newest(run_folder, passed_over).name == "step-0000004"
    assert passed_over == ["step-0000006: optimizer.safetensors is missing"]


def test_an_older_checkpoint_is_never_read_in_silence(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from latemask.hf.loading import Source

    whole = run_folder / "step-0000004"
    assert Source.of(run_folder, takes_older=False).step == run_folder / "step-0000006"
    assert capsys.readouterr().err == ""
    flip(run_folder / "step-0000006" / "encoder.safetensors", -1)
    for _ in range(2):
        assert Source.of(run_folder).step == whole
    assert capsys.readouterr().err == (
        f"warning: {run_folder}: passed over step-0000006: encoder.safetensors differs from its checksum; "
        "step-0000004 is read instead\n"
    )
    with pytest.raises(Refusal, match="step-0000006: encoder") as refused:
        Source.of(run_folder, takes_older=False)
    assert refused.value.do.endswith(str(whole))
    assert Source.of(whole, takes_older=False).step == whole


def test_no_altered_byte_of_the_state_goes_unseen(run_folder: Path) -> None:
    """Of ``state.json`` itself: a changed digit of the batch index would otherwise resume at another row."""
    step = run_folder / "step-0000006"
    content = (step / "state.json").read_bytes()
    state = checkpoint.read_state(step)
    chance = random.Random(0)
    for place in chance.sample(range(len(content)), 300):
        flip(step / "state.json", place, 1 << chance.randrange(8))
        unseen = checkpoint.fault(step) is None
        assert not unseen or checkpoint.read_state(step) == state
        (step / "state.json").write_bytes(content)


def test_partial_folders_and_other_things_are_never_chosen(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder / "step-0000006", run_folder / ".step-0000008.partial")
    shutil.copytree(run_folder / "step-0000006", run_folder / "step-0000008.old")
    (run_folder / "step-0000009").write_text("a file")
    empty_steps(run_folder, 10)
    passed_over: list[str] = []
    assert checkpoint.newest(run_folder, passed_over).name == "step-0000006"
    assert passed_over == ["step-0000010: state.json is missing"]
    assert checkpoint.resolve(run_folder).name == "step-0000006"
    assert checkpoint.resolve(run_folder / "step-0000004").name == "step-0000004"
    for nothing, do in ((tmp_path / "nowhere", ""), (tmp_path, f"Runs in it: {run_folder}")):
        with pytest.raises(Refusal, match="no step folder") as refused:
            checkpoint.newest(nothing)
        assert refused.value.do == do
    shutil.rmtree(run_folder / "step-0000006")
    for step in checkpoint.steps(run_folder):
        (step / "state.json").unlink(missing_ok=True)
    with pytest.raises(Refusal, match=r"step-0000004: state.json is missing; step-0000002"):
        checkpoint.newest(run_folder)


def test_a_foreign_state_is_refused_by_field(run_folder: Path) -> None:
    path = run_folder / "step-0000006" / "state.json"
    content = json.loads(path.read_text())
    for broken, named in [
        ("[1]", "a JSON object"),
        ("{", "state.json: found broken JSON"),
        (json.dumps(content | {"updates": "6"}), "updates"),
        (json.dumps(content | {"new": 1}), "new"),
        (json.dumps({"updates": 6}), "batch_index"),
    ]:
        path.write_text(broken)
        assert checkpoint.fault(path.parent) is not None
        with pytest.raises(Refusal, match=named):
            checkpoint.read_state(path.parent)
    path.write_text(json.dumps({"files": {}}))
    assert checkpoint.fault(path.parent) is not None


def test_keeping_some(tmp_path: Path) -> None:
    empty_steps(tmp_path, 9800, 9900, 10_000, 10_100)
    checkpoint.prune(tmp_path, keep=2, best_step=9800)
    assert numbers(tmp_path) == [9800, 10_000, 10_100]


@given(
    steps=some.sets(some.integers(0, 20_000), min_size=1, max_size=8),
    keep=some.integers(0, 4),
    best=some.integers(0, 7),
    times=some.lists(some.integers(1, 10**9), min_size=8, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_pruning_leaves_the_first_the_best_and_the_newest_whatever_the_times(
    steps: set[int], keep: int, best: int, times: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("run")
    ordered = sorted(steps)
    best_step = ordered[best % len(ordered)]
    empty_steps(out, *steps)
    for step, time in zip(checkpoint.steps(out), times, strict=False):
        os.utime(step, (time, time))
    checkpoint.prune(out, keep, best_step)
    kept = steps if keep == 0 else {step for step in steps if step in (0, best_step) or step in ordered[-keep:]}
    assert numbers(out) == sorted(kept)
    assert sorted(path.name for path in out.iterdir()) == [checkpoint.step_name(step) for step in sorted(kept)]


def test_a_run_keeps_its_best_saved_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validated at every step, saved at every second: the best is the lowest of those on disk, here step 4."""
    losses = iter([9.0, 5.0, 8.0, 1.0, 3.0, 2.0, 7.0, 6.0, 7.5])
    monkeypatch.setattr(Validation, "loss", lambda *_: Loss(next(losses), {}))
    pretrain(tiny_run(steps=8, save_every=2, validate_every=1, keep=1), data, tmp_path / "run")
    assert numbers(tmp_path / "run") == [0, 4, 8]
    state = checkpoint.read_state(tmp_path / "run" / "step-0000008")
    assert (state.best_step, state.best_loss) == (4, 3.0)


def test_writing_a_step_again_changes_its_state_alone(run_folder: Path) -> None:
    """After skipped updates: same tensors, a later batch."""
    step = run_folder / "step-0000006"
    before = {name: (step / name).read_bytes() for name in FILES}
    model = checkpoint.read_pretrainer(step)
    state = State(updates=6, batch_index=9, skips_in_a_row=3)
    assert checkpoint.write(run_folder, checkpoint.read_run(step), state, model.state_dict(), {}, b"{}") == step
    assert checkpoint.fault(step) is None
    assert checkpoint.read_state(step) == state
    assert {name for name in FILES if (step / name).read_bytes() != before[name]} == {"state.json"}
    assert not list(run_folder.glob(".*partial"))


def test_a_sweep_takes_what_a_kill_left_and_nothing_else(run_folder: Path) -> None:
    before = sorted(path.name for path in run_folder.iterdir())
    (run_folder / ".step-0000008.partial").mkdir()
    (run_folder / ".step-0000007.partial").write_text("a state")
    shutil.copytree(run_folder / "step-0000004", run_folder / ".step-0000003.deleted")
    checkpoint.sweep(run_folder)
    assert sorted(path.name for path in run_folder.iterdir()) == before


def test_a_folder_that_is_cleared_keeps_what_is_no_run_s(run_folder: Path) -> None:
    (run_folder / ".step-0000008.partial").mkdir()
    (run_folder / "downstream").mkdir()
    (run_folder / "notes.txt").write_text("years of work")
    checkpoint.clear(run_folder)
    kept = {path.name for path in run_folder.iterdir() if path.name != ".lock"}
    assert kept == {"downstream", "notes.txt"}


def test_keys_that_do_not_match_are_listed(run_folder: Path) -> None:
    step = run_folder / "step-0000006"
    tensors = load_file(step / "encoder.safetensors")
    name = "tokens.weight"
    moved = {key: tensor for key, tensor in tensors.items() if key != name} | {"module.tokens.weight": tensors[name]}
    save_file(moved, step / "encoder.safetensors")
    for read in (checkpoint.read_encoder, checkpoint.read_pretrainer):
        with pytest.raises(Refusal, match=r"missing (encoder\.)?tokens.weight, unexpected"):
            read(step)
    save_file(tensors | {name: tensors[name][:-1].clone()}, step / "encoder.safetensors")
    with pytest.raises(Refusal, match=r"tokens.weight \(\d+, 32\) instead of \(\d+, 32\)"):
        checkpoint.read_encoder(step)
    for kind in (torch.int64, torch.complex64):
        save_file(tensors | {name: tensors[name].to(kind)}, step / "encoder.safetensors")
        with pytest.raises(Refusal, match=f"tokens.weight of {kind}"):
            checkpoint.read_encoder(step)
    (step / "encoder.safetensors").write_bytes(b"no tensors")
    with pytest.raises(Refusal, match="a broken file"):
        checkpoint.read_encoder(step)


def test_optimizer_tensors_that_do_not_match_are_listed() -> None:
    run = tiny_run()
    model = Pretrainer(run)
    optimizer = make_optimizer(model, run.training)
    load_optimizer_tensors(model, optimizer, {})
    assert not optimizer.state
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = optimizer_tensors(optimizer)
    for odd, named in [
        ({name: tensor for name, tensor in tensors.items() if name != "head.bias.step"}, "head.bias.step missing"),
        (tensors | {"head.bias.more": torch.zeros(1)}, r"head.bias.more \(1,\)"),
        (tensors | {"head.bias.exp_avg": torch.zeros(3)}, r"head.bias.exp_avg \(3,\)"),
    ]:
        with pytest.raises(Refusal, match=named):
            load_optimizer_tensors(model, make_optimizer(model, run.training), odd)


def test_an_optimizer_in_half_precision_goes_on_in_single() -> None:
    run = tiny_run()
    model = Pretrainer(run)
    optimizer = make_optimizer(model, run.training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    half = {name: tensor.bfloat16() for name, tensor in optimizer_tensors(optimizer).items()}
    again = make_optimizer(model, run.training)
    load_optimizer_tensors(model, again, half)
    again.step()
    assert {tensor.dtype for state in again.state.values() for tensor in state.values()} == {torch.float32}
    assert {float(state["step"]) for state in again.state.values()} == {2.0}


def test_files_are_safetensors_and_json_never_pickles(finished: Path) -> None:
    for path in finished.rglob("*"):
        if path.is_file() and path.name != ".lock":
            content = path.read_bytes()
            if path.suffix == ".safetensors":
                (length,) = struct.unpack("<Q", content[:8])
                json.loads(content[8 : 8 + length])
            else:
                assert path.suffix in (".json", ".jsonl")
                for line in content.splitlines() if path.suffix == ".jsonl" else [content]:
                    json.loads(line)


def larger() -> Pretrainer:
    """Wide enough that writing takes a while."""
    return Pretrainer(replace(tiny_run(), {"shape.width": 128, "decoder.width": 128, "shape.feedforward": 512}))


def save_forever(out: Path) -> None:
    """Steps 1, 2, ... whose every weight is the step's number; only the newest two are kept."""
    model, step = larger(), 0
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        moments = {f"{name}.exp_avg": parameter.detach().clone() for name, parameter in model.named_parameters()}
        checkpoint.write(out, model.run, State(updates=step), model.state_dict(), moments, b"{}")
        checkpoint.prune(out, keep=2, best_step=0)


@pytest.mark.parametrize("kills", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_killed_while_saving(kills: int, tmp_path: Path) -> None:
    """SIGKILL at random moments of nothing but saving: the newest always loads, whole and of one step."""
    chance = random.Random(kills)
    left_over = 0
    for kill in range(kills):
        out = tmp_path / str(kill)
        process = Process(lambda out=out: save_forever(out))
        wait_until(lambda out=out: bool(checkpoint.steps(out)))
        process.process.join(chance.uniform(0, 0.15))
        assert process.is_alive
        process.kill()
        passed_over: list[str] = []
        step = checkpoint.newest(out, passed_over)
        assert passed_over == []
        assert step == checkpoint.steps(out)[-1]
        assert {tensor.float().unique().item() for tensor in tensors_of(step).values()} == {
            checkpoint.step_number(step)
        }
        left_over += bool(list(out.glob(".step-*")))
        checkpoint.sweep(out)
        assert {path.name for path in out.iterdir()} == {step.name for step in checkpoint.steps(out)}
        shutil.rmtree(out)
    assert left_over >= kills // 5, "hardly a kill fell into a save"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB; where none may be mounted, the test is skipped (limits on file sizes are tested below)."""
    with mounted_disk(tmp_path / "disk", "1m") as disk:
        yield disk


def assert_only_whole_steps(out: Path) -> None:
    for path in out.iterdir():
        assert path.name in (".lock", "journal.jsonl") or checkpoint.fault(path) is None, path


def test_a_full_disk(small_disk: Path, data: Path, tmp_path: Path) -> None:
    """The run stops with the place and the reason, the older checkpoints stay, and with room again it goes on."""
    run, out = tiny_run(save_every=1), small_disk / "run"
    with pytest.raises(Refusal, match=r"step-\d+: found .*No space left on device.* MB free; wanted a disk with room"):
        pretrain(run, data, out)
    newest = checkpoint.newest(out)
    assert checkpoint.step_number(newest) in range(1, 6)
    assert_only_whole_steps(out)
    shutil.rmtree(out / "step-0000000")
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert pretrain(None, None, out, resume="always").step.name == "step-0000006"
    pretrain(run, data, tmp_path / "whole")
    assert_same_bits(out / "step-0000006", tmp_path / "whole" / "step-0000006")
    assert lines_of(out, "train", "validation") == lines_of(tmp_path / "whole", "train", "validation")


def test_a_read_only_disk(small_disk: Path, data: Path, finished: Path) -> None:
    shutil.copytree(finished / "step-0000006", small_disk / "run" / "step-0000006")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for out, resume in ((small_disk / "new", "never"), (small_disk / "run", "always")):
        with pytest.raises(Refusal, match=r"cannot be written \(Read-only file system\)"):
            pretrain(tiny_run(), data, out, resume=resume)  # type: ignore[arg-type]
    assert checkpoint.read_pretrainer(checkpoint.newest(small_disk / "run")), "reading needs no right to write"


@pytest.mark.parametrize(
    ("largest_bytes", "named"),
    [(500, "journal.jsonl"), (5_000, "journal.jsonl"), (20_000, "step-0000008")],
)
def test_a_file_that_cannot_be_written(largest_bytes: int, named: str, run_folder: Path) -> None:
    """A limit on file sizes hits the journal as it is written again, as it grows, and the tensors in turn: refused by
    name, with nothing half-written."""
    run = replace(checkpoint.read_run(run_folder / "step-0000006"), {"training.steps": 8})
    if largest_bytes == 5_000:
        (run_folder / "journal.jsonl").write_text('{"kind": "train", "step": 1}\n' * 170)
    before = (run_folder / "journal.jsonl").read_bytes()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, largest_bytes))
        pretrain(run, None, run_folder, resume="always")

    name, message = Process(limited).error()
    assert name == "Refusal"
    assert named in message.partition(": found")[0]
    assert "File too large" in message
    assert (run_folder / "journal.jsonl").read_bytes().startswith(before)
    assert checkpoint.newest(run_folder).name == "step-0000006"
    assert_only_whole_steps(run_folder)
    assert pretrain(run, None, run_folder, resume="always").step.name == "step-0000008"


def test_the_last_run_is_that_of_the_newest_step_whose_run_json_is_whole(tmp_path: Path) -> None:
    assert checkpoint.last_run(tmp_path) is None
    for step in (3, 6):
        write(tmp_path, step)
    newest = tmp_path / "step-0000006"
    (newest / checkpoint.ENCODER).write_bytes(b"")
    assert checkpoint.last_run(tmp_path) == tiny_run()
    (newest / checkpoint.RUN).write_text(tiny_run(steps=99).to_json())
    assert checkpoint.last_run(tmp_path) == tiny_run()
    for step in checkpoint.steps(tmp_path):
        (step / checkpoint.STATE).write_text("[" * 100_000)
        assert "nested too deeply" in str(checkpoint.fault(step))
    assert checkpoint.last_run(tmp_path) is None

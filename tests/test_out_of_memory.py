"""Too little memory, in any command: one line that names the place and the flags to lower, and what is done stays."""

from __future__ import annotations

import errno
import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from latemask import __main__ as command_line
from latemask import demo, out_of_memory
from latemask.cli import pretrain as pretraining
from latemask.cli import sweep as sweeping
from latemask.downstream import runner, stepper
from latemask.downstream.heads import FineTuned
from latemask.downstream.options import FinetuneOptions
from latemask.errors import Refusal
from latemask.hf import loading
from latemask.model.encoder import Encoder
from latemask.model.masked_model import MaskedModel
from latemask.model.pretrainer import Pretrainer
from latemask.out_of_memory import is_out_of_memory, lower, out_of_memory_is_refused
from latemask.text import tokenizer
from latemask.text.prepare import prepare
from latemask.training import parts
from latemask.training.micro import rows_are_to_fit
from samples import small
from trained import TEXT, byte_level, verified_here, write_run
from training_support import tiny_run, wait_until, write_store

ON_CARD = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total capacity of "
                                 "139.80 GiB of which 1.38 MiB is free.\nProcess 7 has 9.00 GiB in use.")  # fmt: skip
GIVEN_UP = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
ON_HOST = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
HIDE = "hide the GPU with CUDA_VISIBLE_DEVICES= to run on the CPU"
KEPT = "finished points are kept, and the same command goes on with the rest"


# What it is


@pytest.mark.parametrize(("error", "is_it"), [
    (ON_CARD, True), (GIVEN_UP, True), (ON_HOST, True), (MemoryError("Unable to allocate 954. GiB"), True),
    (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"), True),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False), (RuntimeError("shapes"), False),
    (FileNotFoundError(errno.ENOENT, "No such file", "out of memory.txt"), False),
    (Refusal("--graphs", "out of memory", "off"), False),
])  # fmt: skip
def test_it_is_told_from_other_errors(error, is_it):
    assert is_out_of_memory(error) == is_it
    with pytest.raises(out_of_memory.OutOfMemory if is_it else type(error)), out_of_memory_is_refused("fill"):
        raise error


@pytest.mark.parametrize(("error", "cards", "said"), [
    (ON_CARD, 2, "on cuda:1 (0.5 of 150.1 GB free, 21.0 GB held by this process)"),
    (GIVEN_UP, 1, "on cuda:0 (0.5 of 150.1 GB free, 21.0 GB held by this process)"),
    (GIVEN_UP, 2, "on the GPU"), (ON_HOST, 2, "on the host"), (ON_CARD, 0, "on cuda:1"), (GIVEN_UP, 0, "on the GPU"),
])  # fmt: skip
def test_the_place_and_what_is_known_of_it_are_named(error, cards, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (int(5e8), int(150.1e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: int(21e9))
    with pytest.raises(Refusal) as refused, out_of_memory_is_refused("rank", "ask a friend", "for a row"):
        raise error
    assert str(refused.value) == (
        f"rank: found too little memory for a row {said}; wanted what fits. Free memory there, or ask a friend"
    )


def test_what_stands_at_its_least_is_not_to_be_lowered():
    flags = (("--together", 1, 1), ("--batch-rows", None, 1), ("--sequence-tokens", 1024, 8))
    assert lower(*flags) == "lower --batch-rows, then --sequence-tokens (1,024)"
    assert lower(flags[0]) == "take a smaller model"


# Every command


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a run, data prepared with its tokenizer, and tables for each suite."""
    folder = tmp_path_factory.mktemp("here")
    write_run(folder / "run", small("mlm"), byte_level())
    byte_level().save(folder / "tok")
    (folder / "text.txt").write_text("\n\n".join(f"{number} {TEXT}" for number in range(40)))
    prepare([folder / "text.txt"], folder / "tok", folder / "data", valid_share=0.5, workers=1)
    (folder / "pairs.jsonl").write_text('{"sentence_good": "the cat saw", "sentence_bad": "the saw cat"}\n')
    rows = [f"the cat {number},the dog {number},{number % 3}\n" for number in range(9)]
    (folder / "dev.csv").write_text("sentence1,sentence2,score\n" + "".join(rows))
    for split, count in (("train", 12), ("valid", 6)):
        rows = [f"the bird saw the {animal},{animal}\n" for animal in ("cat", "dog") * (count // 2)]
        (folder / f"{split}.csv").write_text("text,label\n" + "".join(rows))
    runner.finetune(FinetuneOptions(str(folder / "run"), ("own",), str(folder), str(folder / "tuning"), epochs=1,
                                    train="train.csv", dev="valid.csv", save=True))  # fmt: skip
    next((folder / "tuning").glob("*.model")).rename(folder / "tuned.model")
    return folder


@pytest.fixture
def latemask(here, tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with what ``here`` holds; its exit status and its last line of errors."""
    for path in here.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "exit_when_told", lambda status: None)
    for module in (pretraining, sweeping):
        monkeypatch.setattr(module, "exit_on_sigterm", lambda: None)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["latemask", *arguments])
        with verified_here(), pytest.raises(SystemExit) as ended:
            command_line.main()
        lines = capsys.readouterr().err.strip().splitlines()
        return ended.value.code or 0, lines[-1] if lines else ""

    return run


def breaks(patch: pytest.MonkeyPatch, holder: Any, name: str, error: Exception, after: int = 0) -> None:
    """From its call number ``after`` on, ``holder.name`` raises ``error``."""
    whole, calls = getattr(holder, name), []

    def broken(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise error
        return whole(*given, **named)

    patch.setattr(holder, name, broken)


FINETUNE = ["finetune", "run", "--task", "own", "--data", ".", "--train", "train.csv", "--dev", "valid.csv",
            "--epochs", "1", "--sequence-tokens", "12", "--out", "out"]  # fmt: skip
LEAST = ["--batch-rows", "1", "--sequence-tokens", "8"]
PRETRAIN = ["--data", "data", "--out", "out", "--training.batch-rows", "4", "--training.micro-rows", "4",
            "--shape.row-tokens", "36", "--shape.depth", "1", "--training.steps", "2"]  # fmt: skip
EVALUATE = ["evaluate", "run", "--out", "out/found.json", "--suite"]
TUNED = ["evaluate", "tuned.model", "--out", "out/found.json", "--suite", "finetuned"]
SIMILAR = ["similarity", "--task", "own", "--data", "dev.csv"]
STUDY = ["run", "--data", "data", "--tokens", "200", "--out", "out/found.json"]


@pytest.mark.parametrize(("arguments", "holder", "name", "said"), [
    (FINETUNE, stepper.Stepper, "step", "lower --batch-rows, then --sequence-tokens (12)"),
    ([*FINETUNE, "--together", "5", "--batch-rows", "8"], stepper.Stepper, "step",
     f"lower --together (5); {KEPT}"),
    ([*FINETUNE, *LEAST], FineTuned, "to", "take a smaller model"),
    ([*EVALUATE, "blimp", "--data", "pairs.jsonl"], MaskedModel, "forward", "lower --batch-tokens (4,096)"),
    ([*EVALUATE, "blimp", "--data", "pairs.jsonl"], MaskedModel, "to", HIDE),
    ([*EVALUATE, "masked-loss", "--data", "data"], MaskedModel, "forward", "lower --batch-tokens (4,096)"),
    ([*EVALUATE, "masked-loss", "--data", "data", "--batch-tokens", "36"], MaskedModel, "forward",
     "take a smaller model"),
    ([*EVALUATE, *SIMILAR], Encoder, "forward", HIDE),
    ([*TUNED, "--data", ".", "--dev", "valid.csv"], FineTuned, "forward", HIDE),
    (["rank", *STUDY], Encoder, "enter", "lower --micro-rows (8)"),
    (["theory", *STUDY, "--micro-rows", "1"], Encoder, "enter", "take a smaller model"),
    (["fill", "the <mask> saw", "--model", "run"], MaskedModel, "forward", HIDE),
    (["export", "run", "--out", "out"], Encoder, "forward", HIDE),
    (["doctor"], Pretrainer, "forward", HIDE),
    (["demo", "--out", "out"], demo, "prepared", HIDE),
    (["pretrain", "mlm_tiny", *PRETRAIN], Pretrainer, "forward",
     "set --training.micro-rows 2 --resume-if-present: the batch and"),
    (["pretrain", "mlm_tiny", *PRETRAIN, "--overwrite"], Pretrainer, "forward",
     "set --training.micro-rows 2: the batch and"),
    (["pretrain", "mlm_tiny", *PRETRAIN], parts, "make_optimizer", "choose a smaller recipe"),
    (["sweep", "mlm_tiny", "--vary", "training.seed=0,1", *PRETRAIN], Pretrainer, "forward",
     "set --training.micro-rows 2: the batch and"),
])  # fmt: skip
def test_a_command_says_where_and_which_of_its_flags_to_lower(
    arguments, holder, name, said, latemask, monkeypatch, tmp_path
):
    breaks(monkeypatch, holder, name, ON_CARD)
    status, line = latemask(*arguments)
    where = "training.micro_rows" if "micro-rows 2" in said else arguments[0].replace("sweep", "pretrain")
    assert status == 2
    assert re.match(rf"latemask: {where}: found too little memory (for \d rows at once )?on cuda:1; wanted", line), line
    assert f"; wanted what fits. Free memory there, or {said}" in line
    left = {path.name for kind in ("*.claim*", ".*.partial", "*.json") for path in (tmp_path / "out").glob(kind)}
    assert left <= {"sweep.json"}


@pytest.mark.parametrize("given", [[], ["--overwrite"], ["--resume-if-present"]])
def test_the_same_command_with_the_flags_that_are_advised_trains(given, latemask, monkeypatch, tmp_path):
    """Step 0 is saved before the first pass that is trained on."""
    command = ["pretrain", "mlm_tiny", *PRETRAIN, *given]
    with pytest.MonkeyPatch.context() as patch:
        breaks(patch, torch.Tensor, "backward", ON_CARD)
        status, line = latemask(*command)
    assert status == 2
    assert [path.name for path in (tmp_path / "out").glob("step-*")] == ["step-0000000"]
    _, rows, *flags = re.search(r", or set ([^:]*):", line)[1].split()
    command[command.index("--training.micro-rows") + 1] = rows
    with pytest.MonkeyPatch.context() as patch:
        breaks(patch, torch.Tensor, "backward", ON_CARD)
        assert f"{int(rows)} rows at once" in latemask(*command, *flags)[1]
    assert latemask(*command, *flags)[0] == 0


def test_what_makes_another_run_of_one_row_is_told_to_take_the_place_of_what_is_saved():
    with (
        pytest.raises(Refusal, match=r"or lower --shape\.row-tokens, with --overwrite$"),
        rows_are_to_fit(1, saved=True),
    ):
        raise ON_CARD


def test_of_the_host_too(latemask, monkeypatch):
    breaks(monkeypatch, tokenizer, "train_tokenizer", MemoryError())
    assert latemask("tokenizer", "text.txt", "--out", "out") == (
        2, "latemask: tokenizer: found too little memory on the host; wanted what fits. Free memory there, or ask for "
        "less")  # fmt: skip


def test_debug_shows_where_it_came_from(latemask, monkeypatch):
    breaks(monkeypatch, MaskedModel, "forward", ON_CARD)
    monkeypatch.setattr(sys, "argv", ["latemask", "fill", "the <mask> saw", "--model", "run", "--debug"])
    with pytest.raises(Refusal) as refused:
        command_line.main()
    assert refused.value.__cause__ is ON_CARD


def test_a_demo_names_no_flag_of_a_run(tmp_path, monkeypatch):
    write_store(tmp_path / "data")
    breaks(monkeypatch, Pretrainer, "forward", ON_CARD)
    run = tiny_run("mlm")
    with pytest.raises(Refusal, match=r"^demo: found too little memory for 4 rows at once on cuda:1; [^-]*$"):
        demo.train(run, tmp_path)


def test_a_model_of_transformers_that_does_not_fit_is_not_called_unreadable(tmp_path):
    with pytest.raises(MemoryError), loading.refusing(str(tmp_path)):
        raise MemoryError


# Fine-tuning goes on


def finished(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("own-*.json")}


def test_finished_points_are_kept_and_the_same_command_goes_on(latemask, tmp_path):
    """Two of four at once; each has two updates, and the sixth of all is one too many."""
    command = [*FINETUNE, "--together", "2", "--seeds", "4", "--batch-rows", "6"]
    with pytest.MonkeyPatch.context() as patch:
        breaks(patch, stepper.Stepper, "step", ON_CARD, after=5)
        status, line = latemask(*command)
    assert (status, KEPT in line) == (2, True)
    kept = finished(tmp_path / "out")
    assert len(kept) == 2
    assert not list(tmp_path.glob("out/*.claim*"))
    assert latemask(*command)[0] == 0
    assert len(done := finished(tmp_path / "out")) == 4
    assert kept.items() < done.items()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["tasks"][0]["runs"] == 4


def short_of_memory(options, source, out, place, writer):
    """A worker process; the second one's card is full, and the first one has a point left for it until it knows."""
    step, known = stepper.Stepper.step, out / "known"

    def stepped(self, *given):
        if place == 1:
            known.touch()
            raise ON_CARD
        wait_until(known.exists)
        step(self, *given)

    stepper.Stepper.step = stepped
    runner._worker(options, source, out, place, writer)


def test_a_worker_process_says_it_too_and_the_others_finish(latemask, tmp_path, monkeypatch, capsys):
    command = [*FINETUNE, "--parallel", "2", "--seeds", "4", "--batch-rows", "6"]
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_worker", short_of_memory)
        patch.setattr(runner.console, "warn", heard.append)
        status, line = latemask(*command)
    assert status == 2
    assert line.startswith("latemask: --parallel: found 1 of 2 processes that ended with an error (see above)")
    assert [said for said in heard if "memory" in said] == [
        "finetune: found too little memory on cuda:1; wanted what fits. Free memory there, or lower --parallel (2); "
        f"{KEPT}"
    ]
    kept = finished(tmp_path / "out")
    assert len(kept) >= 3  # the point that the second one gave up may have come too late for the first
    assert not list(tmp_path.glob("out/*.claim*"))
    assert latemask(*command, "--parallel", "1")[0] == 0
    assert kept.items() <= finished(tmp_path / "out").items()
    assert len(finished(tmp_path / "out")) == 4


def test_what_breaks_a_capture_is_told_though_the_capture_ends_with_another_error(monkeypatch):
    """In place of a graph's capture one that cannot be ended once it is broken."""

    @contextmanager
    def capture(*_: object, **__: object):
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    def short(self, width):
        raise ON_CARD

    for name, double in (("graph", capture), ("CUDAGraph", object), ("get_rng_state", lambda device: None),
                         ("current_stream", lambda device: None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(stepper.Stepper, "_backward", lambda self, width: None)
    monkeypatch.setattr(stepper.Stepper, "_update", short)
    made = object.__new__(stepper.Stepper)
    made.device, made.pool = "cuda", None
    made.optimizer = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(torch.OutOfMemoryError):
        made._captured(8)

"""Nothing is lost to SIGKILL or to a full disk: prepare, export and finetune, stopped at any moment and started again,
end as if never stopped, and at no moment does anything half-written stand under a final name.

The slow harness kills each 200 times and, where the environment variable LATEMASK_RESULTS names a folder, writes what
it saw to ``kill_<command>.json`` there. Killing pretraining is in test_kill.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from latemask.config import replace
from latemask.downstream.options import FinetuneOptions
from latemask.downstream.runner import finetune
from latemask.downstream.saved import FACTS
from latemask.downstream.saving import load_finetuned
from latemask.errors import Refusal
from latemask.hf import fresh, verification
from latemask.hf.checksums import SUMS
from latemask.hf.exporting import export
from latemask.hf.loading import load_encoder
from latemask.recipes import recipe
from latemask.text.prepare import prepare
from latemask.text.store import open_store
from trained import TEXT, byte_level, write_run
from training_support import Process, mounted_disk

NARROW = {"shape.depth": 1, "shape.width": 32, "shape.heads": 2, "shape.feedforward": 64, "shape.row_tokens": 48}
CLOCKED = {"train_seconds", "examples_per_second", "seconds_so_far", "seconds"}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that makes ``out`` (a folder) inside a folder of its own."""

    work: Callable[[Path], Any]
    """Run to the end; again after a kill."""
    before: Callable[[Path], Any]
    """What stands at ``out`` when it starts, for kills of odd number."""
    load: Callable[[Path], Any]
    """Open everything of ``out`` that stands under a final name. Raises where any of it is not whole."""
    is_saving: Callable[[Path], bool]
    """Whether it writes at this moment."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, replace(recipe("mlm_tiny"), NARROW | {"shape.positions": "absolute"}), byte_level())
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 KB in a few hundred documents, and the rows of a little task."""
    folder = tmp_path_factory.mktemp("texts")
    chance, words = random.Random(0), TEXT.split()
    documents = [" ".join(chance.choices(words, k=chance.randint(50, 400))) for _ in range(300)]
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    (folder / "old.txt").write_text("\n\n".join(documents[:20]))
    for name in ("train", "dev"):
        rows = [{"text": f"the bird saw the {animal}", "animal": animal} for animal in ("cat", "dog") * 8]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def preparing(run: Path, texts: Path) -> Command:
    def work(out: Path, name: str = "corpus.txt") -> None:
        prepare([texts / name], byte_level(), out / "en", valid_share=0.1, workers=1, overwrite=True)

    def load(out: Path) -> None:
        open_store(out / "en").check()

    return Command(work, partial(work, name="old.txt"), load, lambda out: (out / ".en.partial").exists())


def exporting(run: Path, texts: Path) -> Command:
    def work(out: Path) -> None:
        export(run, out / "hf", overwrite=True)

    def before(out: Path) -> None:
        work(out)
        with open(out / "hf" / "README.md", "a") as card:
            card.write("of old")

    def load(out: Path) -> None:
        load_encoder(out / "hf")
        json.loads((out / "hf" / "tokenizer.json").read_text())
        assert (out / "hf" / "README.md").read_text()

    return Command(work, before, load, lambda out: (out / ".hf.partial").exists())


def finetuning(run: Path, texts: Path) -> Command:
    def work(out: Path) -> None:
        finetune(FinetuneOptions(model=str(run), task=("own",), data=str(texts), out=str(out / "queue"),
                                 train="train.jsonl", dev="dev.jsonl", label="animal", seeds=2, epochs=1,
                                 learning_rate=5e-3, batch_rows=8, save=True, predictions=True))  # fmt: skip

    def load(out: Path) -> None:
        queue = out / "queue"
        for path in queue.rglob("*.json"):
            if not any(part.startswith(".") for part in path.relative_to(out).parts):
                assert json.loads(path.read_text())
        for model in queue.glob("*.model"):
            load_finetuned(model)
        for result in queue.glob("own-*.json"):
            assert result.with_suffix(".model").is_dir(), "a result before its model"

    return Command(work, lambda _: None, load, lambda out: any((out / "queue").glob(".*.partial")))


def answer_in_a_fork(folder: Path) -> None:
    """The fresh process of an export, without the seconds that an interpreter takes to start."""
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        for number in os.listdir("/proc/self/fd"):  # as for every process that subprocess starts: no lock is its own
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").endswith((".lock", ".partial")):
                    os.close(int(number))
        fresh.answer(folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def contents(folder: Path) -> dict[str, Any]:
    """Every file below, byte for byte; JSON without what a clock measured."""
    return {str(path.relative_to(folder)): unclocked(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def unclocked(path: Path) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name not in CLOCKED}
        return [plain(item) for item in value] if isinstance(value, list) else value

    if path.name == SUMS:  # one of the files that it is about has times in it
        return [line for line in path.read_text().splitlines() if not line.endswith(FACTS)]
    return plain(json.loads(path.read_text())) if path.suffix == ".json" else path.read_bytes()


def quietly(work: Callable[[Path], Any], out: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    work(out)


def kill(command: Command, out: Path, seconds: float, in_save: bool, chance: random.Random) -> str:
    """Start, and kill at a random moment within ``seconds``, or soon after it began to write; what was killed."""
    process = Process(partial(quietly, command.work, out))
    if in_save:
        while process.is_alive and not command.is_saving(out):
            time.sleep(0.0002)
        time.sleep(chance.choice((0, 0.002, 0.02)) * chance.random())
    else:
        process.process.join(seconds * chance.random())
    ended = not process.is_alive
    process.kill()
    return "after the end" if ended else "while writing" if command.is_saving(out) else "before or between writing"


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [preparing, exporting, finetuning], ids=["prepare", "export", "finetune"])
def test_killed_at_random_moments_and_started_again(
    make: Callable[[Path, Path], Command], kills: int, run: Path, texts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """After each kill all that has a final name is whole, and the same command ends with the same bytes and no other
    file; three of five kills are aimed at writing."""
    monkeypatch.setattr(verification, "_ask", answer_in_a_fork)
    command, chance, met = make(run, texts), random.Random(kills), Counter[str]()
    whole, old = tmp_path / "whole", tmp_path / "old"
    for folder, work in ((whole, command.work), (old, command.before)):
        folder.mkdir()
        work(folder)  # here, so that no process after it has to import anything
    began = time.monotonic()
    Process(partial(quietly, command.work, tmp_path / "timed")).join(200)
    seconds, began = time.monotonic() - began, time.monotonic()
    expected = contents(whole)
    assert contents(tmp_path / "timed") == expected
    command.load(whole)
    for number in range(kills):
        out = tmp_path / str(number)
        shutil.copytree(old, out) if number % 2 else out.mkdir()
        met[kill(command, out, seconds, number % 5 in (1, 2, 3), chance)] += 1
        if any(not name.startswith(".") for name in os.listdir(out)):
            command.load(out)
        else:
            assert not number % 2 or not os.listdir(old) or list(out.glob(".*.old")), "the old one is lost"
        Process(partial(quietly, command.work, out)).join(200)
        assert contents(out) == expected
        assert sorted(map(str, out.rglob(".*"))) == []
        shutil.rmtree(out)
    assert met["while writing"] >= kills // 5
    assert met["after the end"] <= kills // 2
    if kills >= 200 and (results := os.environ.get("LATEMASK_RESULTS")):
        name = request.node.callspec.id.split("-")[0]
        summary = {
            "what": f"{name} killed by SIGKILL, started again by the same call, compared with one never killed",
            "kills": kills,
            "killed": dict(sorted(met.items())),
            "whole_after_the_kill": kills,
            "equal_byte_for_byte": kills,
            "seconds": round(time.monotonic() - began, 1),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        Path(results).mkdir(parents=True, exist_ok=True)
        (Path(results) / f"kill_{name}.json").write_text(json.dumps(summary, indent=2) + "\n")


def test_between_the_two_renames_the_old_one_is_kept(run: Path, texts: Path, tmp_path: Path) -> None:
    """The only moment when nothing has the final name: the next command puts the old one back, and goes on."""
    command, out = preparing(run, texts), tmp_path / "out"
    out.mkdir()
    command.before(out)
    old = contents(out / "en")
    (out / "en").rename(out / ".en.old")
    shutil.copytree(out / ".en.old", out / ".en.partial")
    with pytest.raises(Refusal, match="something already there"):
        prepare([texts / "corpus.txt"], byte_level(), out / "en")
    assert contents(out) == {f"en/{name}": content for name, content in old.items()}


@pytest.mark.parametrize("make", [preparing, exporting], ids=["prepare", "export"])
def test_two_at_once_in_one_place(
    make: Callable[[Path, Path], Command], run: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused, and takes nothing from the first."""
    monkeypatch.setattr(verification, "_ask", lambda _: time.sleep(1000))
    command = make(run, texts)
    if make is preparing:
        monkeypatch.setattr("latemask.text.prepare.write_summary", lambda *_: time.sleep(1000), raising=False)
        monkeypatch.setattr("latemask.text.store.write_summary", lambda *_: time.sleep(1000))
    first = Process(partial(quietly, command.work, tmp_path))
    try:
        while not command.is_saving(tmp_path):
            time.sleep(0.01)
        before = sorted(map(str, tmp_path.iterdir()))
        with pytest.raises(Refusal, match=rf"another process that is writing it \(process {first.process.pid} on"):
            command.work(tmp_path)
        assert sorted(map(str, tmp_path.iterdir())) == before
        assert first.is_alive
    finally:
        first.kill()
    monkeypatch.undo()
    monkeypatch.setattr(verification, "_ask", answer_in_a_fork)
    command.work(tmp_path)
    command.load(tmp_path)
    assert not list(tmp_path.glob(".*"))


COMMANDS = {"prepare": preparing, "export": exporting, "finetune": finetuning}


def within(bytes_: int, work: Callable[[Path], Any], out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, bytes_))
    quietly(work, out)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("largest_bytes", [100, 6_000, 60_000])
def test_a_file_that_cannot_be_written(
    name: str, largest_bytes: int, run: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on file sizes hits one file after the other: refused by place, and what has a name is whole."""
    monkeypatch.setattr(verification, "_ask", answer_in_a_fork)
    command = COMMANDS[name](run, texts)
    process = Process(partial(within, largest_bytes, command.work, tmp_path))
    kind, message = process.error(100)
    assert kind in ("Refusal", "OSError")
    assert "File too large" in message
    assert str(tmp_path) in message or kind == "OSError"
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".") or "claim" in path.name] == []
    if any((tmp_path / place).exists() for place in ("en", "hf")):
        command.load(tmp_path)
    command.work(tmp_path)
    command.load(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 60 KB; where none may be mounted, the test is skipped (limits on file sizes are tested above)."""
    with mounted_disk(tmp_path / "disk", "60k") as disk:
        yield disk


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_and_a_read_only_one(
    name: str, run: Path, texts: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with the place and the reason and nothing left aside; with room again, the same command ends."""
    monkeypatch.setattr(verification, "_ask", answer_in_a_fork)
    command = COMMANDS[name](run, texts)
    with pytest.raises(Refusal, match=r"No space left on device|[kM]B free; wanted"):
        command.work(small_disk)
    assert [path for path in small_disk.rglob("*") if path.name.startswith(".") or "claim" in path.name] == []
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises((Refusal, OSError), match="Read-only file system"):
        command.work(small_disk)
    subprocess.run(["mount", "-o", "remount,rw,size=20m", str(small_disk)], check=True)
    command.work(small_disk)
    command.load(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    command.load(small_disk)

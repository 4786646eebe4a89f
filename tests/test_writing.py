"""Killed at any line of the code that writes: what has a name is whole, and after the same call again nothing else is
left."""

from __future__ import annotations

import functools
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from latemask import writing
from latemask.downstream import claims
from latemask.errors import Refusal
from latemask.training import journal
from latemask.writing import check_file, check_folder, check_free, write_json, write_whole, written_aside

WATCHED = {module.__file__ for module in (writing, claims, journal)}


def stopped(at_line: int, work: Callable[[], Any]) -> bool:
    """Run ``work`` in a process that ends without a word before the ``at_line``-th line; whether it came so far."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line" and next(lines) == at_line:
            os._exit(9)
        return trace

    sys.settrace(trace)
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def every_kill(work: Callable[[Path], Any], before: Callable[[Path], Any], folder: Path) -> Iterator[Path]:
    """A folder for each line of ``work``, made by ``before``, in which ``work`` was killed there."""
    for number in itertools.count():
        place = folder / str(number)
        place.mkdir()
        before(place)
        if not stopped(number, lambda place=place: work(place)):
            assert number > 10, "no line was seen"
            return
        yield place


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_a_small_process(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """``test`` in a process without torch, which forks in a tenth of the time: this file is its own program."""

    @functools.wraps(test)
    def asked(tmp_path: Path) -> None:
        command = [sys.executable, __file__, test.__name__, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return asked


@in_a_small_process
def test_a_file_that_has_its_name_has_nothing_beside_it(tmp_path: Path) -> None:
    met = set()
    for place in every_kill(
        lambda place: write_whole(place / "a", "new"), lambda place: write_whole(place / "a", "old"), tmp_path
    ):
        met.add(held := (place / "a").read_text())
        assert held in ("old", "new")
        assert held == "old" or names(place) == ["a"]
        write_whole(place / "a", "newer")
        assert names(place) == ["a"]
    assert met == {"old", "new"}


@in_a_small_process
def test_a_folder_is_whole_or_comes_back(tmp_path: Path) -> None:
    def work(place: Path, text: str = "new") -> None:
        check_free(place / "out", True, "mark")
        with written_aside(place / "out") as aside:
            (aside / "mark").write_text(text)

    met = set()
    for place in every_kill(work, lambda place: work(place, "old"), tmp_path):
        if (place / "out").exists():
            met.add(held := (place / "out" / "mark").read_text())
            assert held in ("old", "new")
        with pytest.raises(Refusal, match="something already there"):
            check_free(place / "out", False, "mark")
        assert names(place) == ["out"]
    assert met == {"old", "new"}


@in_a_small_process
def test_a_point_of_a_queue_is_done_once_and_leaves_its_result_alone(tmp_path: Path) -> None:
    def work(place: Path) -> None:
        with claims.claimed(place, "x") as is_ours:
            if is_ours:
                write_json(place / "x.json", {"kind": "finetune"})

    for place in every_kill(work, lambda place: None, tmp_path):
        work(place)
        assert names(place) == ["x.json"]
        assert claims.read_results(place) == {"x": {"kind": "finetune"}}


def test_a_signal_at_any_line_gives_a_claim_up(tmp_path: Path) -> None:
    """Before the work began, and after: nobody waits for a claim whose owner was told to stop."""

    def interrupted(at_line: int, place: Path) -> str:
        """Where the ``at_line``-th line was."""
        lines, where = itertools.count(), ["before"]

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != claims.__file__ or frame.f_code.co_name == "_keep_touching":
                return None
            if event == "line" and next(lines) == at_line:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with claims.claimed(place, "x") as is_ours:
                assert is_ours
                where[0] = "after"
            return "never"
        except KeyboardInterrupt:
            return where[0]
        finally:
            sys.settrace(before)

    for number in itertools.count():
        place = tmp_path / str(number)
        if interrupted(number, place) != "before":
            assert number > 10
            break
        assert not claims.who_is_at(place, "x")
        assert not list(place.glob("x.claim-?"))
        with claims.claimed(place, "x") as is_ours:
            assert is_ours
            write_json(place / "x.json", {"kind": "finetune"})
        assert names(place) == ["x.json"]


@in_a_small_process
def test_a_journal_loses_no_line_that_it_keeps(tmp_path: Path) -> None:
    def begin(place: Path) -> None:
        book = journal.Journal(place / "journal.jsonl")
        for step in range(4):
            book.add("save", step=step)
        book.close()

    for place in every_kill(lambda place: journal.Journal(place / "journal.jsonl", (2, 9)).close(), begin, tmp_path):
        lines = journal.read(place / "journal.jsonl")
        assert lines in ([{"kind": "save", "step": step} for step in range(count)] for count in (3, 4))
        journal.Journal(place / "journal.jsonl", (2, 9)).close()
        assert names(place) == ["journal.jsonl"]


def test_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    """Six processes write one file at once, over and over: at every look it is whole, and nothing is left beside it."""
    from training_support import Process, wait_until

    path, texts = tmp_path / "a", {letter * 100_000 for letter in "abcdef"}

    def work(text: str) -> None:
        for _ in range(30):
            write_whole(path, text)

    processes = [Process(lambda text=text: work(text)) for text in texts]
    wait_until(path.exists)
    while any(process.is_alive and not process.mine.poll() for process in processes):
        assert path.read_text() in texts
    for process in processes:
        process.join()
    assert names(tmp_path) == ["a"]


def test_a_disk_that_is_full_and_a_place_that_is_none_are_named(tmp_path: Path) -> None:
    from training_support import Process

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_whole(tmp_path / "a", "new" * 1000)

    write_whole(tmp_path / "a", "old")
    kind, told = Process(work).error()
    assert kind == "Refusal"
    assert told.startswith(f"{tmp_path / 'a'}: found File too large, ")
    assert (tmp_path / "a").read_text() == "old"
    for write in (
        lambda: write_whole(tmp_path / "a" / "b", ""),
        lambda: claims.claimed(tmp_path / "a", "x").__enter__(),
    ):
        with pytest.raises(Refusal, match=r"/a: found a path that cannot be written"):
            write()
    assert names(tmp_path) == ["a"]


def test_a_result_s_place_is_a_file_that_can_be(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for place in ("new.json", "new/folder/x.json", "file"):
        check_file(tmp_path / place)
    for place, found in ((".", "found the folder"), ("file/x.json", "file, a file; wanted a folder"),
                         ("file/a/x.json", "file, a file; wanted a folder"),
                         ("pipe", "found the device or pipe .*/pipe")):  # fmt: skip
        with pytest.raises(Refusal, match=found):
            check_file(tmp_path / place)
    with pytest.raises(Refusal, match=r"--json: found /proc/self, which cannot be written \("):
        check_file(Path("/proc/self/new/x.json"), "--json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_what_stands_where_a_folder_is_to_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out, found in ((tmp_path / "file", "a file"), (tmp_path / "link", "a link to nothing"),
                       (tmp_path / "file" / "below", f"{tmp_path / 'file'}, a file")):  # fmt: skip
        with pytest.raises(Refusal) as refused:
            check_folder(out)
        assert (refused.value.where, refused.value.found) == (str(out), found)
    check_folder(tmp_path / "new" / "below")


def test_places_are_named_as_they_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("full").mkdir()
    Path("full/thing").touch()
    for check, out in ((check_file, "file/x.json"), (check_folder, "file/below")):
        with pytest.raises(Refusal) as refused:
            check(Path(out))
        assert refused.value.found == "file, a file"
    for place in ("full", "./full/../full"):
        with pytest.raises(Refusal) as refused:
            check_free(Path(place), False, "mark")
        assert refused.value.where == str(Path(place))
    with pytest.raises(Refusal, match=r"^file: found a file; wanted a folder to write into$"):
        check_free(Path("file/below"), True, "mark")
    with written_aside(Path("new")), pytest.raises(Refusal, match=r"^new: found another process"), \
         written_aside(Path("new")):  # fmt: skip
        pass


if __name__ == "__main__":
    globals()[sys.argv[1]].__wrapped__(Path(sys.argv[2]))

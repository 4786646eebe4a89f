"""Jobs that are commands: each is run once, in a process of its own on one card; what is known so far is packed.

A job that is done is not done again, and each command goes on where it was stopped. ``OUT/evidence.tar.gz`` always
holds every journal, score and figure so far, without weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from latemask.workers import PREEMPTED
from latemask.writing import write_json

KEPT = (".json", ".jsonl", ".svg", ".log", ".html", ".md")
"""What comes home of a run folder."""
LEFT = ("tokenizer.json", "nbest", "predictions", "held-out")
"""What does not, by a part of its name."""
MOST_BYTES = 8_000_000
SAVED = "*.model"
"""The fine-tuned model in a folder of results."""
FASTER = ("--parallel", "--together")
"""Flags that change no result."""


@dataclass(frozen=True)
class Job:
    """One command; ``after`` is the job that must be done before."""

    name: str
    command: tuple[str, ...]
    """A word that ends in ``SAVED`` stands for what is there when the job begins."""
    after: str | None = None
    stop_at_seconds: float | None = None
    run: Path | None = None
    """The run folder, of a pretraining."""
    is_alone: bool = False
    """Its seconds are a result."""
    checkpoint: Path | None = None
    """What it measures, which the job before may have saved on its way."""

    @property
    def file_name(self) -> str:
        """Of its log and note, less the suffix."""
        return self.name.replace("/", "-")

    @property
    def needs_no_more(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.is_dir()


class Runner:
    """Runs a job's command, once: what it did is noted in ``OUT/jobs/STUDY``."""

    def __init__(self, jobs: Sequence[Job], out: Path, study: str, is_over: Callable[[], bool]):
        self.jobs, self.out, self.is_over = jobs, out, is_over
        self.notes, self.logs = (out / name / study for name in ("jobs", "logs"))
        self.collecting = threading.Lock()
        for folder in (self.notes, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job, card: int) -> bool:
        """Whether it is done; at once where it was before."""
        path = self.logs / f"{job.file_name}.log"
        with open(path, "ab") as log:
            is_alone, is_done = self._is_alone(job, log), self._is_done(job)
            if is_done or not is_alone:
                return is_done
            started = time.monotonic()
            print(f"card {card}: {job.name}", flush=True)
            status = self._status(job, card, log)
        seconds = time.monotonic() - started
        found = "" if status == 0 else f": {path}"
        print(f"card {card}: {job.name} ended with {status} after {seconds:.0f} s{found}", flush=True)
        if status == 0:
            write_json(self._note(job), {"kind": "job", "name": job.name, "command": list(job.command[1:]),
                                         "card": card, "seconds": seconds})  # fmt: skip
        with self.collecting:
            collect(self.out)
        return status == 0

    def _is_alone(self, job: Job, log: IO[bytes]) -> bool:
        """Wait until nobody else holds the job's log, which a command and all that it starts hold until they end, also
        where the program that began them was killed. False: it is over before."""
        waits = False
        while not self.is_over():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if not waits:
                print(f"{job.name}: waiting for its command that still runs, begun by another process", flush=True)
            waits = True
            time.sleep(0.2)
        return False

    def _is_done(self, job: Job) -> bool:
        """A pretraining whose weights are not here is, where all that was to be measured of it is done."""
        note = self._note(job)
        if not note.is_file() or asked(json.loads(note.read_text(encoding="utf-8"))["command"]) != asked(
            job.command[1:]
        ):
            return False
        has_weights = job.run is None or any(job.run.glob("step-*/*.safetensors"))
        return has_weights or all(self._is_done(other) for other in self.jobs if other.after == job.name)

    def _note(self, job: Job) -> Path:
        return self.notes / f"{job.file_name}.json"

    def _status(self, job: Job, card: int, log: IO[bytes]) -> int:
        """The exit status of its command."""
        started, stops_at, command = time.monotonic(), job.stop_at_seconds, said_in_full(job.command)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(card), "PYTHONUNBUFFERED": "1"}
        while True:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            told = False
            while process.poll() is None:
                if self.is_over() and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
                if stops_at is not None and time.monotonic() - started > stops_at:
                    process.send_signal(signal.SIGTERM)
                    stops_at = None
                time.sleep(0.2)
            if process.returncode != PREEMPTED or self.is_over():
                return process.returncode


def asked(command: Sequence[str]) -> list[str]:
    """A command without the flags that only say how fast it goes."""
    words = list(command)
    for flag in FASTER:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    return words


def said_in_full(command: Sequence[str]) -> list[str]:
    """The command with what is there now in place of ``SAVED``."""
    return [found for word in command for found in (glob.glob(word) if word.endswith(SAVED) else [word])]


def collect(out: Path) -> Path:
    """Pack what is known so far, without weights."""
    aside, kept = out / f".evidence-{os.getpid()}.tar.gz", out / "evidence.tar.gz"
    with tarfile.open(aside, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            is_wanted = path.is_file() and path.suffix in KEPT and not any(part in path.name for part in LEFT)
            if is_wanted and path.stat().st_size <= MOST_BYTES:
                archive.add(path, path.relative_to(out))
    aside.replace(kept)
    return kept

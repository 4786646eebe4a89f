"""A folder is the queue: one JSON for each point that is done, one claim for each that somebody is at. No torch.

Any number of processes, on any machines that share the folder, take points from it; each is done once. A claim is a
file that only one of them can make, ``NAME.claim-0``. Its owner touches it every 20 seconds; where that has stopped for
five minutes, or the owner is known to be dead (same machine, same process namespace), the next claim ``NAME.claim-1``
may be made: of all who see the stale one, one makes it. A result is written aside, synced and renamed; then its claims
are deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from latemask.errors import Refusal, unreadable
from latemask.writing import make_folder

TOUCH_EVERY_SECONDS = 20.0
STALE_AFTER_SECONDS = 300.0


ANEW = "Take it out of the folder and start again: a point whose result it was is then done anew"


def read_results(folder: Path, kind: str = "finetune", needed: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Every result of ``kind`` in the folder by its point's name, in the names' order.

    Raises ``Refusal`` for a file that is no JSON, and for a result that lacks a field that is ``needed``.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise Refusal(path, unreadable(error), "a result in JSON", ANEW) from None
        if isinstance(value, dict) and value.get("kind") == kind:
            if missing := [name for name in needed if name not in value]:
                raise Refusal(path, f"no {missing[0]}", "this field", ANEW)
            results[path.stem] = value
    return results


def is_done(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").is_file()


@contextlib.contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process has the point to itself now; False: it is done, or somebody else is at it.

    The claim is kept alive while the block runs, and given up at its end, whatever ends it.
    """
    make_folder(folder)
    claim = None if is_done(folder, name) else _free(folder, name)
    stop = threading.Event()
    toucher = threading.Thread(target=_keep_touching, args=(claim, stop), daemon=True)
    try:
        if claim is None or not _take(claim) or is_done(folder, name):  # done perhaps between the two looks
            yield False
        else:
            toucher.start()
            yield True
    finally:
        stop.set()
        if toucher.is_alive():
            toucher.join()
        _give_up(folder, name)
        if claim is not None and _is_own(claim):  # also where a signal came before it was known
            claim.unlink(missing_ok=True)


def who_is_at(folder: Path, name: str) -> str:
    """The process that is at this point and alive, in words; empty: none."""
    claims = _claims(folder, name)
    if not claims or _is_stale(claims[-1]):
        return ""
    try:
        owner = _owner(claims[-1].read_bytes())
    except FileNotFoundError:  # just given up
        return ""
    return f"process {owner['process']} on {owner['host']}" if "host" in owner else "another process"


def _give_up(folder: Path, name: str) -> None:
    """Delete the claims on a point that is done, also those of a process that was killed before it could."""
    if is_done(folder, name):
        for held in folder.glob(f"{_escaped(name)}.claim-*"):
            held.unlink(missing_ok=True)


def _claims(folder: Path, name: str) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob(f"{_escaped(name)}.claim-*")
             if (match := re.fullmatch(r".*\.claim-(\d+)", path.name))]  # fmt: skip
    return [path for _, path in sorted(found)]


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _free(folder: Path, name: str) -> Path | None:
    """The claim that may be made now; None where somebody is at the point."""
    claims = _claims(folder, name)
    if claims and not _is_stale(claims[-1]):
        return None
    number = int(claims[-1].name.rpartition("-")[2]) + 1 if claims else 0
    return folder / f"{name}.claim-{number}"


def _take(claim: Path) -> bool:
    aside = claim.with_name(f"{claim.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        aside.write_text(json.dumps(_identity(os.getpid())))
        # Whole or not there, and only one process succeeds. Who did the point meanwhile has deleted ``aside``, too.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(aside, claim)
            return True
    finally:
        aside.unlink(missing_ok=True)
    return False


def _is_own(claim: Path) -> bool:
    try:
        return _owner(claim.read_bytes()) == _identity(os.getpid())
    except OSError:
        return False


def _is_stale(claim: Path) -> bool:
    try:
        untouched = _now(claim.parent) - claim.stat().st_mtime
        text = claim.read_bytes()
    except FileNotFoundError:
        return False  # just given up: whoever asks again will find it free
    if untouched > STALE_AFTER_SECONDS:
        return True
    owner = _owner(text)
    return owner["machine"] == _machine() and _identity(owner["process"]) != owner


def _owner(text: bytes) -> dict[str, Any]:
    """The identity that a claim holds; of one that tells none (torn by a crash, or not ours) a nobody's, so that the
    clock alone makes it stale."""
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        owner = None
    if isinstance(owner, dict) and isinstance(owner.get("process"), int) and owner.keys() >= {"machine", "host"}:
        return owner
    return {"machine": None}


def _now(folder: Path) -> float:
    """The time of the file system, which is what claims are dated by, also where machines' clocks differ."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"0")
        probe.flush()
        return os.fstat(probe.fileno()).st_mtime


def _identity(process: int) -> dict[str, Any]:
    """Who owns a claim: the machine, the process, and when that process began (numbers of processes come again)."""
    began = ""
    with contextlib.suppress(OSError, IndexError):
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return {"machine": _machine(), "host": socket.gethostname(), "process": process, "began": began}


def _machine() -> str:
    """Boot and process namespace; "" where the system does not tell (then only the clock makes a claim stale)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {socket.gethostname()} {os.getpid()}"


def _keep_touching(claim: Path, stop: threading.Event) -> None:
    while not stop.wait(TOUCH_EVERY_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(claim)

"""A file or folder appears whole under its name, or not at all: written aside, synced, renamed.

Aside is ``.NAME.partial`` in the same folder. Who writes there holds a lock, so that two never write one place, and
what a killed process left aside is known for dead: the next to write there removes it. A folder's lock is
``.NAME.lock``; a file's is what stands aside itself, so that the renaming takes it away too: whenever a kill comes, a
file that has its new content has nothing beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from latemask.errors import Refusal

ESCAPED = "backslashreplace"
"""How text becomes bytes: lone surrogates, as of a file name that is not UTF-8, become escapes that JSON reads back."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
BROKEN = {errno.EROFS, errno.EIO}
"""What a disk says that is full, or read-only or failing."""


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write ``content`` (text as UTF-8) to ``path``, whose folder is made where it is missing, and return ``path``.

    Raises ``Refusal`` where the disk is full, read-only or broken.
    """
    make_folder(path.parent)
    aside = _partial(path)
    with disk_errors_are_refused(path), _held(path, aside, "writing it", waits=True):
        try:
            with aside.open("wb") as file:
                file.write(content.encode(errors=ESCAPED) if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    return path


def folder_of(path: Path) -> Path:
    """The folder that ``path`` lies in, a link where it leads to, in the words that ``path`` was given in."""
    if path.is_symlink():
        return path.resolve().parent
    return path / ".." if path.name in ("", "..") else path.parent


def make_folder(folder: Path) -> None:
    """Make ``folder`` and those it lies in, where they are missing. Raises ``Refusal`` where they cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"a path that cannot be written ({error.strerror})"
        raise Refusal(folder, found, "a folder to write into") from error


def write_json(path: Path, value: Any) -> Path:
    """Write ``value`` as indented JSON; numbers that are not finite are an error (``ValueError``)."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    return write_whole(path, text)


def json_checksum(value: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of ``value`` as canonical JSON: the same after it was written and read."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(out: Path, flag: str = "--out") -> None:
    """Raise ``Refusal`` where ``flag`` names no file that can be written: a folder, a device, what lies in a file, or
    a place where nothing may be written."""
    if out.exists() and not out.is_file():
        kind = "the folder" if out.is_dir() else "the device or pipe"
        raise Refusal(flag, f"{kind} {out}", "the name of a .json file")
    above = next(folder for folder in out.parents if folder.exists())
    if not above.is_dir():
        raise Refusal(flag, f"{above}, a file", "a folder to write into")
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise Refusal(flag, f"{above}, which cannot be written ({error.strerror})", "a folder to write into") from error


def check_folder(out: Path) -> None:
    """Raise ``Refusal`` where no folder can be at ``out``: a file is there, or above it."""
    there = next(path for path in (out, *out.parents) if os.path.lexists(path))
    if not there.is_dir():
        found = "a file" if there.exists() else "a link to nothing"
        raise Refusal(out, found if there == out else f"{there}, {found}", "a folder to write into")


def check_free(out: Path, overwrite: bool, mark: str, line: str = "") -> None:
    """Remove what a killed process left aside, and raise ``Refusal`` where ``out`` may not be written: another process
    is at it, or something is there, and it is not a folder that ``overwrite`` gives up: one with the file ``mark``, in
    which ``line`` stands where one is given."""
    place = Path(os.path.realpath(out))
    if place.parent.is_dir():
        with _locked(place, out):
            _clear(place)
    if not place.exists():
        check_folder(out.parent)
        return
    if os.path.ismount(place):
        raise Refusal(out, "a mounted disk itself", "a folder on it")
    if place.is_dir() and not any(place.iterdir()):
        return
    if not overwrite:
        raise Refusal(out, "something already there", "a new or empty folder", "Take another --out, or --overwrite")
    if not _is_marked(place / mark, line):
        missing = f"no {mark} with the line {line!r}" if line else f"no {mark}"
        raise Refusal(out, f"other things ({missing})", "a folder that may be overwritten")


def _is_marked(mark: Path, line: str) -> bool:
    return mark.is_file() and (not line or line in mark.read_text(encoding="utf-8", errors="replace").splitlines())


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A folder next to ``out`` that takes its name, and the place of what was there, when all went well; else it
    disappears.

    Raises ``Refusal`` where another process is writing ``out``, or the disk is full, read-only or broken.
    """
    given, out = out, Path(os.path.realpath(out))
    make_folder(out.parent)
    with disk_errors_are_refused(given), _locked(out, given):
        _clear(out)
        aside = _partial(out)
        try:
            aside.mkdir()
            yield aside
            _sync(aside)
            if out.exists():
                os.rename(out, _old(out))
            os.rename(aside, out)
            _fsync(out.parent)
        finally:
            _clear(out)


@contextmanager
def disk_errors_are_refused(path: Path, *, others: bool = False) -> Iterator[None]:
    """An error of the disk while ``path`` is written, as a ``Refusal`` that says whether it is full; with ``others``
    every error of the system, where all of them are about ``path``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not others and isinstance(error, OSError) and error.errno not in FULL | BROKEN:
            raise
        reason = getattr(error, "strerror", None) or str(error)
        if not any(os.strerror(number) in reason for number in FULL):
            raise Refusal(path, reason, "a place that can be written") from error
        free = f", {shutil.disk_usage(path.parent).free / 1e6:,.1f} MB free" if path.parent.is_dir() else ""
        raise Refusal(path, f"{reason}{free}", "a disk with room for it") from error


@contextmanager
def alone_at(path: Path, lock: Path, doing: str, *, waits: bool = False) -> Iterator[None]:
    """``path`` is this process's alone, by its hold on the file ``lock``, which says who it is and is deleted at the
    end, by its holder only.

    Raises ``Refusal`` where another process is ``doing`` something there (or, with ``waits``, waits for it), and where
    ``lock`` cannot be written.
    """
    with _held(path, lock, doing, waits) as file:
        try:
            with contextlib.suppress(OSError):  # on a full disk it is held without a name
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def _held(path: Path, lock: Path, doing: str, waits: bool) -> Iterator[RawIOBase]:
    """The file ``lock``, open, made where it is missing, and nobody else's; see ``alone_at``."""
    while True:
        try:
            file = lock.open("ab+", buffering=0)
        except OSError as error:
            found = f"a path that cannot be written ({error.strerror})"
            raise Refusal(path, found, "a folder to write into") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                break
        except FileNotFoundError:  # its last holder has just deleted or renamed it
            pass
        except BlockingIOError:
            file.seek(0)
            found = f"another process that is {doing} ({file.read().decode(errors='replace')})"
            file.close()
            raise Refusal(path, found, "a place of its own for each") from None
        file.close()
    with file:
        yield file


def remove(path: Path) -> None:
    """Delete a file or a folder; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _locked(folder: Path, called: Path) -> AbstractContextManager[None]:
    return alone_at(called, folder.with_name(f".{folder.name}.lock"), "writing it")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _clear(out: Path) -> None:
    """Remove what stands aside; what was at ``out`` returns to it where nothing new has come."""
    old = _old(out)
    if old.exists() and not out.exists():
        os.rename(old, out)
    remove(old)
    remove(_partial(out))


def _sync(folder: Path) -> None:
    """To disk, with everything below; files may be read by whoever may read the folder."""
    for path in folder.iterdir():
        if path.is_dir():
            _sync(path)
        else:
            path.chmod(folder.stat().st_mode & 0o666)
            _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

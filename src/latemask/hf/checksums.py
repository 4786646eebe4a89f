"""What each file of an export or a fine-tuned model was when it was written: ``SHA256SUMS``, as sha256sum has it.

``sha256sum -c SHA256SUMS`` checks a folder too. transformers does not look at this file.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from latemask.errors import Refusal, unreadable
from latemask.writing import file_checksum

SUMS = "SHA256SUMS"


def write_sums(folder: Path, *, free: tuple[str, ...] = ()) -> None:
    """Note every file below ``folder`` but those named in ``free``, which may be edited."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (SUMS, *free))
    lines = [f"{file_checksum(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Raise ``Refusal`` naming the first file that is missing or has changed; a folder without ``SHA256SUMS`` passes,
    as those of others do."""
    sums = folder / SUMS
    if not sums.exists():
        return
    do = f"Write the folder again; where you changed it yourself, delete {sums}"
    try:
        lines = sums.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(sums, unreadable(error), "lines of sha256sum", do) from None
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        inside = PurePosixPath(match[2]) if match else None
        if match is None or inside is None or inside.is_absolute() or ".." in inside.parts:
            raise Refusal(f"{sums}:{number}", repr(line[:80]), "the SHA-256 and the name of a file in this folder", do)
        path = folder / inside
        try:
            found = file_checksum(path) if path.is_file() else None
        except OSError as error:  # also of a name that no file can have
            raise Refusal(
                f"{sums}:{number}", f"a file that cannot be read ({error.strerror})", "one of these", do
            ) from None
        if found is None:
            raise Refusal(path, "no such file", f"what stands in {SUMS}", do)
        if found != match[1]:
            raise Refusal(path, f"a file that differs from its checksum in {SUMS}", "the file as it was written", do)

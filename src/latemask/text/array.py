"""Numbers in a file, with a CRC-32 for each 4 KB of them: what has changed since is refused before it is used.

A file is a header of 128 bytes (magic, version, kind of number, tokenizer's fingerprint, count, checksum of the
checksums, checksum of the header), the numbers, and the checksums, uint32; little-endian. A page is 4 KB because a row
is about 1 KB: to read one at random is to read and check a page or two, whatever the size of the file.
"""

from __future__ import annotations

import array
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from latemask.errors import Refusal

MAGIC = b"latemask"
VERSION = 2
HEADER = struct.Struct("<8sI4s32sQI64xI")
"""Magic, version, kind of number (numpy's ``<u2``), fingerprint, count, CRC-32 of the checksums, and of all before."""
PAGE_BYTES = 4096
PIECE_BYTES = 1024 * PAGE_BYTES
"""How much is read at once where all is checked."""
DO = "Copy it again, or prepare the text again; `latemask doctor --data FOLDER` finds every such place"


class ArrayWriter:
    """Appends numbers to a file whose header and checksums are written at ``close``."""

    def __init__(self, path: Path, kind: str, fingerprint: str):
        self.kind, self.fingerprint, self.count = np.dtype(kind), bytes.fromhex(fingerprint), 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(bytes(HEADER.size))
        self._checksums = array.array("I")
        self._checksum, self._filled = 0, 0

    def write(self, numbers: np.ndarray) -> None:
        """Append ``numbers``, which must fit the kind."""
        data = memoryview(np.ascontiguousarray(numbers, self.kind).data).cast("B")
        self.count += len(numbers)
        self._file.write(data)
        while len(data):
            piece = data[: PAGE_BYTES - self._filled]
            self._checksum, self._filled = zlib.crc32(piece, self._checksum), self._filled + len(piece)
            data = data[len(piece) :]
            if self._filled == PAGE_BYTES:
                self._end_page()

    def close(self) -> None:
        """Write checksums and header, and sync to disk."""
        if self._filled:
            self._end_page()
        checksums = np.array(self._checksums, "<u4").tobytes()
        self._file.write(checksums)
        self._file.seek(0)
        self._file.write(_header(self.kind.str.encode(), self.fingerprint, self.count, zlib.crc32(checksums)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _end_page(self) -> None:
        self._checksums.append(self._checksum)
        self._checksum, self._filled = 0, 0


class ArrayFile:
    """A file of numbers, open for reading; header and checksums are checked, the numbers as they are read.

    ``head`` tells its numbers from any others. Raises ``Refusal`` for another kind of file, version, kind of number,
    tokenizer, or a size that is not the count's.
    """

    def __init__(self, path: Path, kind: str, fingerprint: str):
        self.path, self.kind = path, np.dtype(kind)
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            found = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            raise Refusal(path, found, "a file of a prepared store", "Prepare the text again") from error
        weakref.finalize(self, os.close, self._handle)
        self.head = head = self._bytes(0, HEADER.size)
        size = os.fstat(self._handle).st_size
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            found = f"{size:,} bytes that do not begin with a store's header"
            raise Refusal(path, found, "a file made by latemask prepare")
        _, version, found_kind, found_fingerprint, self.count, checksum, of_header = HEADER.unpack(head)
        if version != VERSION:
            raise Refusal(path, f"store version {version}", f"version {VERSION}", "Prepare the text again")
        if zlib.crc32(head[:-4]) != of_header:
            raise Refusal(path, "a header that differs from its checksum", "the header that was written", DO)
        if found_kind.rstrip(b"\0") != kind.encode():
            raise Refusal(path, f"numbers of kind {found_kind.rstrip(bytes(1)).decode()}", f"kind {kind}")
        if found_fingerprint.hex() != fingerprint:
            raise Refusal(path, f"ids of tokenizer {found_fingerprint.hex()[:12]}", f"ids of {fingerprint[:12]}",
                          "Prepare the text again with this tokenizer")  # fmt: skip
        self._end = HEADER.size + self.count * self.kind.itemsize
        wanted = self._end + 4 * -(-(self._end - HEADER.size) // PAGE_BYTES)
        if size != wanted:
            raise Refusal(path, f"{size:,} bytes", f"{wanted:,} bytes for {self.count:,} numbers",
                          "Copy or prepare it again")  # fmt: skip
        data = self._bytes(self._end, wanted - self._end)
        self._checksums = np.frombuffer(data, "<u4")
        if zlib.crc32(data) != checksum:
            raise Refusal(path, "checksums that differ from their own checksum", "the checksums that were written", DO)

    @property
    def numbers(self) -> np.ndarray:
        """All of them, memory-mapped, read-only and unchecked."""
        if not self.count:
            return np.empty(0, self.kind)
        return np.memmap(self.path, self.kind, "r", HEADER.size, (self.count,))

    def read(self, begins: np.ndarray, length: int) -> np.ndarray:
        """``length`` numbers from each of ``begins`` [B] on: [B, length]. Raises ``Refusal`` where one of them does not
        agree with its checksum."""
        size = self.kind.itemsize
        found = np.empty((len(begins), length), self.kind)
        for row, begin in zip(found, (begins * size).tolist(), strict=True):
            first, last = begin // PAGE_BYTES, -(-(begin + length * size) // PAGE_BYTES)
            data = self._pages(first, last)
            for page in self._differing(first, data):
                raise Refusal(self._place(page), "numbers that differ from their checksum", "what was written", DO)
            row[:] = np.frombuffer(data, self.kind, length, begin - first * PAGE_BYTES)
        return found

    def check(self) -> None:
        """Raise ``Refusal`` where any number does not agree with its checksum."""
        for place in self.broken(lambda _: None):
            raise Refusal(place, "numbers that differ from their checksum", "what was written", DO)

    def broken(self, advance: Callable[[float], None]) -> Iterator[str]:
        """Every page that does not agree with its checksum; ``advance`` hears how many bytes were read."""
        for first in range(0, len(self._checksums), PIECE_BYTES // PAGE_BYTES):
            data = self._pages(first, first + PIECE_BYTES // PAGE_BYTES)
            yield from map(self._place, self._differing(first, data))
            advance(len(data))

    def _pages(self, first: int, last: int) -> bytes:
        begin, end = HEADER.size + first * PAGE_BYTES, min(HEADER.size + last * PAGE_BYTES, self._end)
        data = self._bytes(begin, end - begin)
        if len(data) != end - begin:
            raise Refusal(self.path, f"an end before byte {end:,}", f"numbers up to byte {self._end:,}", DO)
        return data

    def _bytes(self, begin: int, length: int) -> bytes:
        try:
            return os.pread(self._handle, length, begin)
        except OSError as error:
            raise Refusal(self.path, f"{error.strerror} at byte {begin:,}", "a readable file", DO) from error

    def _differing(self, first: int, data: bytes) -> Iterator[int]:
        view = memoryview(data)
        for page in range(-(-len(data) // PAGE_BYTES)):
            if zlib.crc32(view[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]) != self._checksums[first + page]:
                yield first + page

    def _place(self, page: int) -> str:
        begin = HEADER.size + page * PAGE_BYTES
        return f"{self.path}: bytes {begin:,} to {min(begin + PAGE_BYTES, self._end):,}"


def _header(kind: bytes, fingerprint: bytes, count: int, checksum: int) -> bytes:
    head = HEADER.pack(MAGIC, VERSION, kind, fingerprint, count, checksum, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))

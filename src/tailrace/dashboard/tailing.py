"""A file of lines that another process appends to, read a part at a time."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CHUNK_BYTES = 1 << 22
_BACK_BYTES = 1 << 18
_LONGEST_LINE_BYTES = 1 << 26
_FIRST_BYTES = 256
"""What a file is known by besides its inode, which the next file may have once it is gone."""


class Tail:
    """Whole lines of one file, each once. A line that has no end yet is left for later.

    Where the file is replaced or gets shorter (a resumed run takes back what it will do again), it starts over, and
    `generation` counts that, from a number of its own on: a page may go on with one reader where it began with another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = random.getrandbits(32)
        self._inode = -1
        self._first = b""
        """What it began with when its first line was read."""
        self.offset = 0
        """Where the next line begins."""

    def start_over_if_replaced(self) -> bool:
        """Whether what was read before is void now."""
        try:
            found = os.stat(self.path)
        except OSError:
            is_void = self.offset > 0
            self._inode, self.offset = -1, 0
            self.generation += is_void
            return is_void
        is_another = found.st_ino != self._inode or found.st_size < self.offset
        if self.offset > 0 and (is_another or _beginning(self.path, len(self._first)) != self._first):
            self._inode, self.offset = found.st_ino, 0
            self.generation += 1
            return True
        self._inode = found.st_ino
        return False

    def lines(self) -> Iterator[bytes]:
        """What was appended since: without line ends, and without lines that nobody can hold (over 64 MiB)."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            if not self.offset:
                self._first = file.read(_FIRST_BYTES)
            file.seek(self.offset)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    self.offset += len(line) + 1
                    if line:
                        yield line
                if len(rest) > _LONGEST_LINE_BYTES:
                    rest = self._skip_line(file.tell())
                    file.seek(self.offset)

    def _skip_line(self, from_offset: int) -> bytes:
        """Go behind the end of a line that is too long; where it has none yet, behind what there is."""
        with self.path.open("rb") as file:
            file.seek(from_offset)
            while chunk := file.read(_CHUNK_BYTES):
                if (end := chunk.find(b"\n")) >= 0:
                    self.offset = file.tell() - len(chunk) + end + 1
                    return b""
            self.offset = file.tell()
        return b""


def lines_backwards(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Whole lines from the end of a file on, the last one first, read as they are asked for and as far as they begin
    within so many bytes of the end; none without the file."""
    with suppress(OSError), path.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        least, rest, is_end = max(0, at - num_bytes), b"", True
        while at > least:
            start = max(least, at - _BACK_BYTES)
            file.seek(start)
            *whole, rest = reversed((file.read(at - start) + rest).split(b"\n"))
            if whole and is_end:  # what stands behind the last line's end is none yet
                whole, is_end = whole[1:], False
            yield from filter(None, whole)
            at = start
        if not at and not is_end and rest:
            yield rest


def last_lines(path: Path, num_bytes: int) -> list[bytes]:
    """Whole lines at the end of a file, of at most so many bytes, in order; none without the file."""
    return [*lines_backwards(path, num_bytes)][::-1]


def first_lines(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Whole lines of a file, read as they are asked for, that begin within its first so many bytes; none without it."""
    with suppress(OSError), path.open("rb") as file:
        while file.tell() < num_bytes and (line := file.readline(_LONGEST_LINE_BYTES)).endswith(b"\n"):
            if line != b"\n":
                yield line[:-1]


def stamp_of(path: Path) -> tuple[int, int]:
    """When it was changed, in nanoseconds, and how many bytes it has: 0 and 0 without the file."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _beginning(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError:
        return b""

"""The guard around whatever takes bytes apart that a disk or another process gave.

    bytes ── a parser (msgspec, NumPy, torch, ...) ──► records
                 └── raises what it likes ── `guarded` ──► one error of `tailrace.errors`, which says whose bytes

What parsers raise is no closed set: text that is no UTF-8, recursion, values, types, unpickling, memory. So the guard
takes every exception, and nothing but parsing belongs inside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import CorruptData, TailraceError


@contextmanager
def guarded(what: str, error: Callable[[str], TailraceError] = CorruptData) -> Iterator[None]:
    """Turn what bytes make a parser raise into `error(f"{what}: {why}")`; errors of Tailrace's own pass.

    >>> with guarded("a message's count"):
    ...     int("many")
    Traceback (most recent call last):
        ...
    tailrace.errors.CorruptData: a message's count: invalid literal for int() with base 10: 'many'
    """
    try:
        yield
    except TailraceError:
        raise
    except Exception as cause:
        raise error(f"{what}: {str(cause) or type(cause).__name__}") from cause


def read_at_most(path: Path, num_bytes: int) -> bytes:
    """A file that is small by its nature. Raises `OSError`, and `ValueError` for one that is larger."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > num_bytes:
            raise ValueError(f"it has {size:,} bytes, of {num_bytes:,} at most")
        return file.read(size)

"""The guard around whatever takes bytes apart that a disk or another process gave.

    bytes ── a parser (msgspec, NumPy, torch, ...) ──► records
                 └── raises what it likes ── `guarded` ──► one error of `tailrace.errors`, which says whose bytes

What parsers raise is no closed set: text that is no UTF-8, recursion, values, types, unpickling, memory. So the guard
takes every exception, and nothing but parsing belongs inside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from tailrace.errors import CorruptData, TailraceError

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")


class guarded:
    """Turn what bytes make a parser raise into `error(f"{what}: {why}")`; errors of Tailrace's own pass.

    >>> with guarded("a message's count"):
    ...     int("many")
    Traceback (most recent call last):
        ...
    tailrace.errors.CorruptData: a message's count: invalid literal for int() with base 10: 'many'

    No generator: every message between processes passes here, and that would cost as much as decoding it.
    """

    __slots__ = ("_error", "_what")

    def __init__(self, what: str, error: Callable[[str], TailraceError] = CorruptData) -> None:
        self._what, self._error = what, error

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, TailraceError):
            raise self._error(f"{self._what}: {str(cause) or type(cause).__name__}") from cause


def decoded(read: Callable[ParamT, ResultT], *args: ParamT.args, **kwargs: ParamT.kwargs) -> ResultT | None:
    """What a parser makes of bytes; None of such as it cannot take apart, whatever it raises, or a file that it cannot
    read.

    >>> decoded(int, "12"), decoded(int, "many")
    (12, None)
    """
    try:
        return read(*args, **kwargs)
    except Exception:  # noqa: BLE001 - of any kind, as above
        return None


def read_at_most(path: Path, num_bytes: int) -> bytes:
    """A file that is small by its nature. Raises `OSError`, and `ValueError` for one that is larger."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > num_bytes:
            raise ValueError(f"it has {size:,} bytes, of {num_bytes:,} at most")
        return file.read(size)

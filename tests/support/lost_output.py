"""Where a program's output goes that nobody takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def full_disk() -> Iterator[IO[bytes]]:
    """A file that takes nothing."""
    with Path("/dev/full").open("wb") as file:
        yield file


@contextmanager
def closed_pipe() -> Iterator[int]:
    """A pipe whose reader has left."""
    ours, its = os.pipe()
    os.close(ours)
    try:
        yield its
    finally:
        os.close(its)

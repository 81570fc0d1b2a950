"""How much memory is held at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most_at_once(num_bytes: int) -> Iterator[None]:
    """Of memory that Python and NumPy take within, beside what is held before."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_bytes, f"{peak:,} bytes at once"

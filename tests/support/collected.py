"""What reference counts did not free, and the collector would have to."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_to_collector(kind: type) -> Iterator[list[object]]:
    """On leaving, the list has the objects of this kind that became garbage meanwhile, and were not freed."""
    gc.collect()
    gc.disable()
    left: list[object] = []
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left += [one for one in gc.garbage if isinstance(one, kind)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

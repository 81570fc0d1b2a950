"""Garbage collection of a process whose event loop must not stand still.

With tens of thousands of rollouts in flight, CPython's collector scans millions of live objects again and again, which
costs a third of the process's time and blocks the loop for up to seconds. Reference counts free nearly everything here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000_000
"""More container objects than at the last collection that start one: a gigabyte, about, were all of them garbage."""
OBJECTS_PER_ROLLOUT = 200
"""A rollout in flight holds 120 or more. While many start they are new; to look at one takes half a microsecond."""


@contextmanager
def hold_old_objects(in_flight: int = 0) -> Iterator[None]:
    """Leave objects alone until there are `NEW_OBJECTS` more of them, or more than so many rollouts in flight hold.

    For a process that holds no tensors in cycles.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(NEW_OBJECTS, OBJECTS_PER_ROLLOUT * in_flight))
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

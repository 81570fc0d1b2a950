"""Garbage collection of a process whose event loop must not stand still.

CPython's collector looks at every old object whenever there are a quarter more of them than last time: with tens of
thousands of rollouts in flight, which are old objects and no garbage, it holds the loop for a second, again and again.
Reference counts free nearly everything here; the collector is for the few cycles, of which most die young.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 2_000
"""More objects than before that make it look at the youngest, in well under a millisecond."""
MIDDLE_COLLECTIONS = 10
"""Such looks after which it looks at those that survived them, too: some milliseconds."""
OLD_COLLECTIONS = 500
"""Those after which it looks at everything: when there are ten million objects more than before."""


@contextmanager
def hold_old_objects() -> Iterator[None]:
    """Leave old objects alone until there are millions more of them; what exists now is never looked at again.

    Young garbage is collected as ever.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_COLLECTIONS, OLD_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

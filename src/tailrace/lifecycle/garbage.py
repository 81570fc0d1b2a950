"""Garbage collection where it finds nothing: beside an event loop that must not stand still, and in imports.

With tens of thousands of rollouts in flight, CPython's collector scans millions of live objects again and again, which
costs a third of the process's time and blocks the loop for up to seconds. Reference counts free nearly everything here.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000_000
"""More container objects than at the last collection that start one: a gigabyte, about, were all of them garbage."""
OBJECTS_PER_ROLLOUT = 200
"""A rollout in flight holds 120 or more. While many start they are new; to look at one takes half a microsecond."""
_IMPORTING = threading.Lock()


@contextmanager
def hold_old_objects(in_flight: int = 0) -> Iterator[None]:
    """Leave objects alone until there are `NEW_OBJECTS` more of them, or more than so many rollouts in flight hold.

    For a process that holds no tensors in cycles.
    """
    before, others_are_held = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(NEW_OBJECTS, OBJECTS_PER_ROLLOUT * in_flight))
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not others_are_held:  # there is no letting go of ours alone
            gc.unfreeze()


def import_large(name: str) -> None:
    """Import a module that brings a million objects, all of which stay, and look for no garbage among them meanwhile.

    That took a sixth of the time of torch and transformers.
    """
    with _IMPORTING:  # else a second thread finds no collection, and leaves none
        collects = gc.isenabled()
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            if collects:
                gc.enable()

"""Long work in slices of a few milliseconds: a generator that yields now and then and returns its result.

Whoever shares an event loop with others awaits between two slices; whoever does not drains it. Slices are cut by
counts, never by the clock, so that a run in virtual time repeats itself.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")


def drained(work: Generator[None, None, ResultT]) -> ResultT:
    """Do all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result

"""Long work in slices of a few milliseconds: a generator that yields now and then and returns its result.

Slices are cut by counts, never by the clock, so that a run in virtual time repeats itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")

SAMPLES_AT_ONCE = 512
"""Samples that are counted in one slice: less than a millisecond."""


def drained(work: Generator[None, None, ResultT]) -> ResultT:
    """Do all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def in_turns(work: Generator[None, None, ResultT]) -> ResultT:
    """Do the work in slices, the event loop's other tasks in between."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        await asyncio.sleep(0)

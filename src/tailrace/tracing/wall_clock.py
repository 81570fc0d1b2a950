"""Times of this host's monotonic clock as Unix time, by which processes of several hosts can be compared."""

from __future__ import annotations

import time
from functools import cache


@cache
def monotonic_to_unix_ns() -> int:
    """Nanoseconds that make Unix time of a time of `time.monotonic_ns`, or of an event loop.

    Read once: where the clock is set meanwhile, the times of this process keep their order and their distances.
    """
    return time.time_ns() - time.monotonic_ns()

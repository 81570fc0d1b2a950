"""How many files a process may have open at once."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> None:
    """To what the system allows: each client of HTTP is one, and so are batches that are kept; 1,024 is a usual limit.

    Processes that are started from here inherit it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems refuse the limit that they tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

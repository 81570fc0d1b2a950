"""Processes that this one started, and those that they did."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil

_LOOK_S = 0.01


def still_run(processes: Sequence[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Which do so after this time; returns as soon as none does.

    One that has ended does not, though it is in the table of processes until whoever inherited it asks for its status:
    where that is the first process of a container, it may take seconds.
    """
    deadline_s = time.monotonic() + within_s
    while (left := [one for one in processes if _runs(one)]) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return left


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def descendants(fragment: str) -> list[list[str]]:
    """Command lines that hold the fragment."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = one.cmdline()
            found += [command] if fragment in " ".join(command) else []
    return found

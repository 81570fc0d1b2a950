"""Processes that this one started, and those that they did."""

from __future__ import annotations

import contextlib

import psutil


def descendants(fragment: str) -> list[list[str]]:
    """Command lines that hold the fragment."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = one.cmdline()
            found += [command] if fragment in " ".join(command) else []
    return found

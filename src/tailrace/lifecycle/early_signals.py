"""Ctrl-C and SIGTERM before there is anything that has to be ended in order. Imports next to nothing.

An exception out of a signal's handler, as Python's own for Ctrl-C raises, may be swallowed by whatever it interrupts: a
tentative import, a callback. So the process ends, at once; `signals` takes over where there is an event loop.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_at_once_when_asked() -> None:
    """From now on, with the exit status of the signal. In the main thread of a command."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)

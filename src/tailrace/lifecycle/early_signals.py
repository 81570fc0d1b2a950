"""Signals to stop before there is anything that has to be ended in order. Imports next to nothing.

An exception out of a signal's handler, as Python's own for Ctrl-C raises, may be swallowed by whatever it interrupts: a
tentative import, a callback. So the process ends, at once; `signals` takes over where there is an event loop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType

from tailrace.lifecycle.exit_codes import ExitCode

EXIT_CODES: Mapping[signal.Signals, ExitCode] = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGUSR1: ExitCode.PREEMPTED,
}
"""Of a process that such a signal ends."""


def end_at_once_when_asked() -> None:
    """From now on, with the exit status of the signal. In the main thread of a command."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:
            signal.signal(number, _end)


def leave_to_another_process() -> None:
    """From now on signals to stop do nothing here: whom they are sent to besides decides when this one ends.

    They are not ignored: what is started from here would inherit that.
    """
    for number in EXIT_CODES:
        signal.signal(number, lambda *_: None)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_CODES[signal.Signals(number)])

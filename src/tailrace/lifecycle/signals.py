"""Ctrl-C and SIGTERM: the first asks for an orderly stop, the second ends everything at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tailrace.lifecycle.exit_codes import ExitCode

_EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class StopSignals:
    """Handles SIGINT and SIGTERM while entered, with a running event loop; in another thread than the main one, none.

    The first calls `request_stop` on the loop; a later one `abort` in the signal handler, as the loop may be stuck.
    """

    def __init__(self, request_stop: Callable[[ExitCode], object], abort: Callable[[ExitCode], None]) -> None:
        self._request_stop = request_stop
        self._abort = abort
        self._previous: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code: ExitCode | None = None
        """Of the first signal; None while there was none."""

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()  # no other one may handle signals
        for number in _EXIT_CODES if is_main else ():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        exit_code = _EXIT_CODES[signal.Signals(number)]
        if self.exit_code is not None:
            self._abort(exit_code)
            return
        self.exit_code = exit_code
        if self._loop:
            self._loop.call_soon_threadsafe(self._request_stop, exit_code)

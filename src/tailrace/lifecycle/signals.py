"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: the first asks for an orderly stop, a second one ends everything at once.

A terminal that goes away sends SIGHUP more than once, so that this one only ever asks; where it is ignored (`nohup`) it
stays so. SIGUSR1 is a scheduler's notice of preemption, which only ever asks, too, and is followed by one SIGTERM that
does.

    early_signals ── ends the process ──► until_stopped ── cancels the work ──► a run's own ── a last save ──► ...
    before the event loop                 around all work of a command          once there is something to save
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, TypeVar

from tailrace.lifecycle.early_signals import EXIT_CODES
from tailrace.lifecycle.exit_codes import ExitCode

_ONLY_ASK = (ExitCode.HUNG_UP, ExitCode.PREEMPTED)

ResultT = TypeVar("ResultT")


class Stopped(BaseException):
    """A signal ended the work before it could end in order by itself."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


class StopSignals:
    """Handles signals to stop while entered, with a running event loop; in another thread than the main one, none.

    The first calls `request_stop` on the loop; a later one `abort` in the signal handler, as the loop may be stuck. One
    that came to those around these counts: what it interrupted may have taken no notice. One that came to these is a
    first one to those around them from then on, which ask for nothing any more.
    """

    def __init__(self, request_stop: Callable[[ExitCode], object], abort: Callable[[ExitCode], None]) -> None:
        self._request_stop = request_stop
        self._abort = abort
        self._previous: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._terminals: list[int] = []
        self._around: StopSignals | None = None
        self._token: Token[StopSignals | None] | None = None
        self._notice_was_followed = False
        self._first: ExitCode | None = None
        """Of the first signal to these, or to others within, which have answered it."""
        self.exit_code: ExitCode | None = None
        """Of the first signal to these; None while there was none."""

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()  # no other one may handle signals
        for number in EXIT_CODES if is_main else ():
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        self._around = _entered.get()
        self._token = _entered.set(self)
        if self._around is not None and self._around.exit_code is not None:
            self.ask(self._around.exit_code)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _entered.reset(self._token)
        if self._around is not None:
            self._around._first = self._around._first or self._first
            self._around._notice_was_followed |= self._notice_was_followed
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        exit_code = EXIT_CODES[signal.Signals(number)]
        if exit_code is ExitCode.HUNG_UP:
            self._leave_terminal()
        follows_notice = self._first is ExitCode.PREEMPTED and exit_code is ExitCode.TERMINATED
        if follows_notice and not self._notice_was_followed:
            self._notice_was_followed = True
        elif self._first is not None and exit_code not in _ONLY_ASK:
            self._abort(exit_code)
        else:
            self.ask(exit_code)

    def ask(self, exit_code: ExitCode) -> None:
        """As the first signal of this exit code does; the first of all counts."""
        if self._first is None:
            self._first = self.exit_code = exit_code
            if self._loop:
                self._loop.call_soon_threadsafe(self._request_stop, exit_code)

    def _leave_terminal(self) -> None:
        """What goes to a terminal that is gone would fail: it goes nowhere from now on."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)


_entered: ContextVar[StopSignals | None] = ContextVar("stop_signals", default=None)


async def until_stopped(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The work of a command: the first signal to stop cancels it, a second one ends the process at once.

    Raises `Stopped` where it was cancelled so, whatever error it made of that.
    """
    task = asyncio.current_task()
    assert task is not None
    with StopSignals(lambda code: task.cancel(), abort=os._exit) as signals:
        try:
            return await work
        except BaseException as error:
            if signals.exit_code is None:
                raise
            raise Stopped(signals.exit_code) from error

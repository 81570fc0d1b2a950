"""Deadlines of users' coroutines, also of those that ignore a deadline or a cancellation.

    deadline                     ─► `rollout_deadline` cancels what runs inside it, which can still be scored or counted
    ignored, or caller cancelled ─► `Attempts`: stop() ─► cancel ─► CANCEL_S ─► cancel again ─► CANCEL_S ─► left behind

Cancelling an attempt returns once it has ended: its agent, its tools, its reward. A coroutine that ignores both
cancellations is named in the log, with the line it waits in, and is no longer waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from tailrace.errors import EnvironmentFailed, RolloutTimeout
from tailrace.records import Task
from tailrace.tracing.stacks import frames_of

CANCEL_S = 2.0
"""Seconds that a coroutine has to end once it is cancelled, twice."""

ResultT = TypeVar("ResultT")
_logger = logging.getLogger(__name__)


class TimeLimit(NamedTuple):
    """How long something may take."""

    limit_s: float
    setting: str
    """That says so."""


class rollout_deadline:
    """Raise `RolloutTimeout` after the limit, or at `ends_s` where that limit began earlier.

    As `asyncio.timeout`, at half the cost to a rollout, since nothing of it awaits.
    """

    __slots__ = ("_cancelling", "_deadline", "_ends_s", "_limit", "_runner", "_task", "_waited_in")

    def __init__(self, limit: TimeLimit, task: Task, *, ends_s: float | None = None) -> None:
        self._limit, self._task, self._ends_s = limit, task, ends_s
        self._waited_in: str | None = None
        """The line that was waiting when the deadline passed."""

    def __enter__(self) -> None:
        runner = asyncio.current_task()
        assert runner is not None  # coroutines run in tasks
        loop = runner.get_loop()  # `get_running_loop` asks the system for the process id each time (Python 3.11)
        self._runner, self._cancelling = runner, runner.cancelling()
        ends_s = loop.time() + self._limit.limit_s if self._ends_s is None else self._ends_s
        self._deadline = loop.call_at(ends_s, self._expire)

    def _expire(self) -> None:
        self._waited_in = innermost_line(self._runner)
        self._runner.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline.cancel()
        if self._waited_in is None:
            return
        is_alone = self._runner.uncancel() <= self._cancelling  # nobody else has cancelled the task meanwhile
        if isinstance(error, TimeoutError) or (is_alone and kind is asyncio.CancelledError):
            raise RolloutTimeout(
                f"task {self._task.task_id}: not finished after {self._limit.limit_s:g} s ({self._limit.setting}); "
                f"it was waiting in {self._waited_in}"
            ) from error


class Attempts:
    """Runs attempts, any number at once."""

    def __init__(self, cancel_s: float = CANCEL_S) -> None:
        self._cancel_s = cancel_s
        self._left_behind: set[asyncio.Task[Any]] = set()  # an event loop itself keeps no task alive

    async def run(
        self,
        work: Coroutine[Any, Any, ResultT],
        *,
        what: str,
        limit_s: float,
        stop: Callable[[], None] = lambda: None,
    ) -> ResultT:
        """What `work` returns or raises. Where it has not ended after `limit_s`, calls `stop` and cancels it.

        Raises `RolloutTimeout` then, and `EnvironmentFailed` where it raised `CancelledError` and nobody cancelled it.
        """
        loop = asyncio.get_running_loop()
        task, ended = loop.create_task(work, name=what), loop.create_future()

        def wake(_: object = None) -> None:
            if not ended.done():
                ended.set_result(None)

        task.add_done_callback(wake)
        deadline = loop.call_later(limit_s + self._cancel_s, wake)
        try:
            await ended
        except asyncio.CancelledError:
            stop()
            await self._end(task)
            raise
        finally:
            deadline.cancel()
        if not task.done():
            stop()
            where = innermost_line(task)
            await self._end(task)
            raise RolloutTimeout(f"{what} did not end after {limit_s:g} s; it was waiting in {where}")
        if task.cancelled():
            raise EnvironmentFailed(f"{what} raised CancelledError although nobody cancelled it")
        try:
            return task.result()
        finally:
            del task  # what it raised holds this frame, which must not hold it: collections of garbage are rare

    async def _end(self, task: asyncio.Task[Any]) -> None:
        """Cancel, and wait until it has ended; when that is cut short, it is left behind at once."""
        task.add_done_callback(_take_exception)
        try:
            for _ in range(2):
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=self._cancel_s)
        finally:
            if not task.done():
                self._left_behind.add(task)
                task.add_done_callback(self._left_behind.discard)
                _logger.error(
                    "%s ignored its cancellation and is waited for no longer; it waits in %s. A coroutine must let "
                    "asyncio.CancelledError pass",
                    *(task.get_name(), innermost_line(task)),
                )


def _take_exception(task: asyncio.Task[Any]) -> None:
    """Mark what a cancelled attempt raised as retrieved, so that asyncio logs nothing."""
    if not task.cancelled():
        task.exception()


def innermost_line(task: asyncio.Task[Any]) -> str:
    """The innermost line of users' or our code that a suspended task waits in."""
    where = "an unknown place"
    for frame in frames_of(task):
        if "/asyncio/" not in frame.f_code.co_filename:
            where = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return where

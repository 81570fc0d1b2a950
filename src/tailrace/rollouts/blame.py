"""Whose fault a failure is, and when it has waited long enough: every error of users' code names its task."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from tailrace.errors import (
    EngineFailed,
    EnvironmentFailed,
    ErrorBudgetSpent,
    RequestRefused,
    RolloutError,
    RolloutTimeout,
    SettingsError,
    TransportError,
)
from tailrace.records import Task

_OURS = (EngineFailed, TransportError, SettingsError, RolloutError, RequestRefused)
"""Errors that already say what was lost; the first of them tell of more than one rollout."""


class within:
    """Raise `RolloutTimeout` after `limit_s`, or at `ends_s` where that limit began earlier.

    A timeout of the user's own code stays what it is, and so does a cancellation by somebody else, as with
    `asyncio.timeout`; this one costs a rollout half as much, since nothing of it awaits.
    """

    __slots__ = ("_cancelling", "_deadline", "_ends_s", "_has_expired", "_limit_s", "_runner", "_task")

    def __init__(self, limit_s: float, task: Task, *, ends_s: float | None = None) -> None:
        self._limit_s, self._task, self._ends_s = limit_s, task, ends_s
        self._has_expired = False

    def __enter__(self) -> None:
        loop, runner = asyncio.get_running_loop(), asyncio.current_task()
        assert runner is not None  # coroutines run in tasks
        self._runner, self._cancelling = runner, runner.cancelling()
        ends_s = loop.time() + self._limit_s if self._ends_s is None else self._ends_s
        self._deadline = loop.call_at(ends_s, self._expire)

    def _expire(self) -> None:
        self._has_expired = True
        self._runner.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline.cancel()
        if not self._has_expired:
            return
        is_alone = self._runner.uncancel() <= self._cancelling  # nobody else has cancelled the task meanwhile
        if isinstance(error, TimeoutError) or (is_alone and kind is asyncio.CancelledError):
            raise RolloutTimeout(
                f"task {self._task.task_id}: not finished after {self._limit_s:g} s (rollouts.timeout_s); it was "
                f"waiting in {_innermost(error)}"
            ) from error


def _innermost(error: BaseException | None) -> str:
    """The deepest line of users' or our code that was running when a deadline passed."""
    assert error is not None
    cancelled = error.__cause__ or error
    frames = [frame for frame in traceback.extract_tb(cancelled.__traceback__) if "/asyncio/" not in frame.filename]
    return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "an unknown place"


class blamed_on:
    """Turn what users' code raises into `failure` naming the task; let our own errors pass."""

    __slots__ = ("_failure", "_task")

    def __init__(self, task: Task, failure: type[RolloutError] = EnvironmentFailed) -> None:
        self._task, self._failure = task, failure

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, RolloutError):
            if self._task.task_id in str(error):
                return
            named = type(error)(f"task {self._task.task_id}: {error}")
            named.reason = error.reason
            raise named from error
        if isinstance(error, Exception) and not isinstance(error, (*_OURS, ErrorBudgetSpent)):
            self._blame(error)

    def _blame(self, error: Exception) -> NoReturn:
        if isinstance(error, ExceptionGroup) and (ours := _first_of_ours(error)) is not None:
            raise ours from error
        told: BaseException = error
        while isinstance(told, BaseExceptionGroup) and len(told.exceptions) == 1:
            told = told.exceptions[0]
        where = "".join(traceback.format_exception(error)).rstrip()
        raise self._failure(f"task {self._task.task_id}: {type(told).__name__}: {told}\n{where}") from error


def _first_of_ours(group: ExceptionGroup[Exception]) -> Exception | None:
    """The gravest of our own errors among those that an agent's parallel turns raised."""
    raised = list(leaves_of(group))
    return next((error for kind in _OURS for error in raised if isinstance(error, kind)), None)


def leaves_of(error: Exception) -> Iterator[Exception]:
    """The errors in nested groups of errors, in order."""
    if isinstance(error, ExceptionGroup):
        for part in error.exceptions:
            yield from leaves_of(part)
    else:
        yield error

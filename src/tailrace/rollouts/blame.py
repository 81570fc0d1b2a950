"""Whose fault a failure is, and when it has waited long enough: every error of users' code names its task."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

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


@asynccontextmanager
async def within(limit_s: float, task: Task, *, ends_s: float | None = None) -> AsyncIterator[None]:
    """Raise `RolloutTimeout` after `limit_s`, or at `ends_s` where that limit began earlier.

    A timeout of the user's own code stays what it is.
    """
    when = asyncio.get_running_loop().time() + limit_s if ends_s is None else ends_s
    try:
        async with asyncio.timeout_at(when) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RolloutTimeout(
            f"task {task.task_id}: not finished after {limit_s:g} s (rollouts.timeout_s); it was waiting in "
            f"{_innermost(error)}"
        ) from error


def _innermost(error: BaseException) -> str:
    """The deepest line of users' or our code that was running when a deadline passed."""
    cancelled = error.__cause__ or error
    frames = [frame for frame in traceback.extract_tb(cancelled.__traceback__) if "/asyncio/" not in frame.filename]
    return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "an unknown place"


@asynccontextmanager
async def blamed_on(task: Task, failure: type[RolloutError] = EnvironmentFailed) -> AsyncIterator[None]:
    """Turn what users' code raises into `failure` naming the task; let our own errors pass."""
    try:
        yield
    except RolloutError as error:
        if task.task_id in str(error):
            raise
        named = type(error)(f"task {task.task_id}: {error}")
        named.reason = error.reason
        raise named from error
    except (*_OURS, ErrorBudgetSpent):
        raise
    except Exception as error:
        if isinstance(error, ExceptionGroup) and (ours := _first_of_ours(error)) is not None:
            raise ours from error
        told: BaseException = error
        while isinstance(told, BaseExceptionGroup) and len(told.exceptions) == 1:
            told = told.exceptions[0]
        where = "".join(traceback.format_exception(error)).rstrip()
        raise failure(f"task {task.task_id}: {type(told).__name__}: {told}\n{where}") from error


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

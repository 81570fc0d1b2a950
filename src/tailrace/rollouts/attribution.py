"""Errors of users' code, with their task's name."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from tailrace.errors import (
    DataError,
    EngineFailed,
    EnvironmentFailed,
    ErrorBudgetSpent,
    RequestRefused,
    RolloutError,
    SettingsError,
    TransportError,
)
from tailrace.records import Task
from tailrace.rollouts.turn_options import InvalidArgument

_OURS = (EngineFailed, TransportError, SettingsError, RolloutError, RequestRefused)
"""Errors that already say what was lost; the first of them concern more than one rollout."""
_MISTAKES = (KeyError, AttributeError, NameError, TypeError, ImportError, InvalidArgument, SystemExit, DataError)
"""The last one is that of a column that a task lacks."""


class attribute_errors:
    """Turn what users' code raises into `failure` naming the task; let our own errors pass.

    So is all that is no `Exception`, as `sys.exit` and a panic of native code raise, except what cancels or ends a
    coroutine, and `KeyboardInterrupt`: here a user may mean it.
    """

    __slots__ = ("_failure", "_task")

    def __init__(self, task: Task, failure: type[RolloutError] = EnvironmentFailed) -> None:
        self._task, self._failure = task, failure

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)):
            return
        if isinstance(error, RolloutError):
            if self._task.task_id in (said := text_of(error)):
                return
            raise error.saying(_encodable(f"task {self._task.task_id}: {said}")) from error
        if isinstance(error, SystemExit):
            raise exit_refused(error, self._task, self._failure) from error
        if not isinstance(error, (*_OURS, ErrorBudgetSpent)):
            self._attribute(error)

    def _attribute(self, error: BaseException) -> NoReturn:
        if isinstance(error, BaseExceptionGroup) and (ours := _first_of_ours(error)) is not None:
            raise ours from error
        cause = error
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        said = f"task {self._task.task_id}: {type(cause).__name__}: {text_of(cause)}"
        failed = self._failure(_encodable(f"{said}\n{_where(error)}"))
        failed.is_mistake = is_mistake(cause)
        raise failed from error


def drop_frames(error: BaseException) -> None:
    """Let go of the frames that an error, and those that it came of, went through, and of all that they hold.

    Frames hold such errors in turn, by a name or by the task that runs them, and this process seldom collects cycles
    (`lifecycle.garbage`): what a rollout that failed held would stay.
    """
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) not in seen:
            seen.add(id(one))
            BaseException.with_traceback(one, None)  # a class of users' own may let nobody set its attributes
            errors += [earlier for earlier in (one.__cause__, one.__context__) if earlier is not None]
            errors += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def text_of(error: BaseException) -> str:
    """What it says; users' own classes may fail to say anything."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - what is told of is the error itself
        return f"<its text cannot be had: {type(failure).__name__}>"


def _encodable(text: str) -> str:
    """With halves of characters, which neither a message to another process nor a file can hold, as their numbers."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_mistake(error: BaseException) -> bool:
    """Whether wrong code brings it about, and what is away or slow seldom does."""
    return error.is_mistake if isinstance(error, RolloutError) else isinstance(error, _MISTAKES)


def exit_refused(error: BaseException, task: Task, failure: type[RolloutError]) -> RolloutError:
    """The `failure` of users' code that tried to end its process."""
    said = f"task {task.task_id}: users' code raised {error!r}, which ends no run"
    return failure(_encodable(f"{said}\n{_where(error)}")).as_mistake()


def _where(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> Exception | None:
    """The first in the order of `_OURS` among the errors that an agent's parallel turns raised."""
    found = (group.subgroup(kind) for kind in _OURS)
    return next((next(leaves_of(part)) for part in found if part is not None), None)


def leaves_of(error: Exception) -> Iterator[Exception]:
    """The errors in nested groups of errors, in order."""
    if isinstance(error, ExceptionGroup):
        for part in error.exceptions:
            yield from leaves_of(part)
    else:
        yield error

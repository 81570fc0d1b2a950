"""An event loop whose clock jumps to the next timer when nothing is ready, and raises when there is no timer.

    ready callbacks → run them;   none, but a timer → time() is the timer's;   neither → Deadlock

The same program runs the same way each time: tasks hash by the order in which they were made, so that even a set of
them is walked alike. There are no sockets, processes or threads; an executor's calls run at once, in no virtual time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from functools import partial
from typing import Any, NoReturn, TypeVar

from tailrace.errors import Deadlock

T = TypeVar("T")

_MOST_NAMED = 20


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own whose clock starts at 0; `asyncio.run` in virtual time.

    Tasks that are left are cancelled. Raises `Deadlock`, naming the waiting tasks, when every task waits.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run_in_virtual_time(nap())
    3600.0
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class VirtualTimeLoop(BaseEventLoop):
    """An asyncio event loop in virtual time. Use it through `run_in_virtual_time`."""

    def __init__(self) -> None:
        super().__init__()
        self._set_time(0.0)
        self._selector = self
        self._numbers = itertools.count()
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Seconds since the loop was made, in virtual time."""
        return self._now_s

    def run_in_executor(  # type: ignore[override]  # the base class returns a future as well, by another name
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call `func` at once; its result arrives in the next turn of the loop."""
        future: asyncio.Future[T] = self.create_future()
        try:
            settle = partial(future.set_result, func(*args))
        except Exception as error:  # noqa: BLE001  (the future's owner gets it)
            settle = partial(future.set_exception, error)
        self.call_soon(lambda: future.done() or settle())
        return future

    def select(self, timeout: float | None) -> list[Any]:
        """The base class calls this to wait: the clock moves instead."""
        if timeout is None:
            self._deadlock()
        if timeout > 0:
            when: float = self._scheduled[0].when()  # type: ignore[attr-defined]  # a heap of timers, as in CPython
            if when == math.inf:
                self._deadlock()
            self._set_time(when)
        return []

    def _set_time(self, now_s: float) -> None:
        self._now_s = now_s
        self._clock_resolution = math.ulp(now_s)  # the base class runs timers due before now + resolution

    def _deadlock(self) -> NoReturn:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"  {task.get_name()} in {_where(task.get_coro())}" for task in tasks[:_MOST_NAMED]]
        if len(tasks) > _MOST_NAMED:
            lines.append(f"  and {len(tasks) - _MOST_NAMED} more")
        raise Deadlock(
            f"at {self._now_s:g} s of virtual time nothing can happen any more, but {len(tasks)} tasks wait:\n"
            + "\n".join(lines)
        )

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T], **given: Any
    ) -> asyncio.Task[T]:
        return _NumberedTask(coroutine, loop, next(self._numbers), given.get("name"), given.get("context"))

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets, hence no events."""

    def _write_to_self(self) -> None:
        """Nothing sleeps, so nothing has to be woken."""


class _NumberedTask(asyncio.Task[T]):
    """A task that hashes by its number, so that sets of tasks are walked in the same order in every run."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        loop: asyncio.AbstractEventLoop,
        number: int,
        name: str | None,
        context: Context | None,
    ) -> None:
        self._number = number  # first: the base class puts the task in a set
        super().__init__(coroutine, loop=loop, name=name or f"Task-{number}", context=context)

    def __hash__(self) -> int:
        return self._number


def _where(coroutine: Any) -> str:
    """Name and line of the innermost coroutine that a suspended one waits in."""
    while getattr(getattr(coroutine, "cr_await", None), "cr_frame", None) is not None:
        coroutine = coroutine.cr_await
    frame = getattr(coroutine, "cr_frame", None)
    if frame is None:
        return repr(coroutine)
    return f"{coroutine.__qualname__} ({frame.f_code.co_filename}:{frame.f_lineno})"

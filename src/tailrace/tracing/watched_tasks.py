"""Tasks that report when they run and when they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Protocol


class Turns(Protocol):
    """Is called at each turn of a task, on the event loop, in the context of the task."""

    def begin_turn(self) -> None:
        """A task runs, alone until it waits."""
        ...

    def end_turn(self) -> None:
        """It waits, or has ended."""
        ...


class WatchedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that reports its turns; stacks and names are those of the one inside."""

    __slots__ = ("_coroutine", "_throw", "_turns", "_work")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], turns: Turns) -> None:
        self._coroutine, self._turns = coroutine, turns
        self._work, self._throw = coroutine.send, coroutine.throw

    def send(self, value: Any) -> Any:
        """One turn: to the next place where it waits."""
        turns = self._turns
        turns.begin_turn()
        try:
            return self._work(value)
        finally:
            turns.end_turn()

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        """One turn that begins with an exception: a cancellation, or what it waited for failed."""
        turns = self._turns
        turns.begin_turn()
        try:
            return self._throw(kind) if value is None and trace is None else self._throw(kind, value, trace)
        finally:
            turns.end_turn()

    def close(self) -> None:
        """End it where it waits."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """`cr_frame`, `cr_await`, `__qualname__` and the like, for stacks and names."""
        return getattr(self._coroutine, name)


def watching_task_factory(turns: Turns) -> Callable[..., asyncio.Task[Any]]:
    """Makes tasks that report to `turns`. For `loop.set_task_factory`."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(WatchedCoroutine(coroutine, turns), loop=loop, **options)  # what this Python has of them

    return make

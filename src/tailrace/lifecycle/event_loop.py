"""The event loop of a command: on uvloop where it is, and ended even where a coroutine refuses to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_END_S = 2.0
"""How long what is left running has to end, once the work is done and it was cancelled."""

_logger = logging.getLogger(__name__)


def run_on_event_loop(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` returns or raises, from a loop of its own.

    `asyncio.run` waits for ever for a task that ignores its cancellation. This names it in the log and leaves the loop
    as it is: the process is about to end.
    """
    runner = asyncio.Runner(loop_factory=loop_factory())
    refusing: set[asyncio.Task[Any]] = set()
    try:
        return runner.run(_to_its_end(work, refusing))
    finally:
        if refusing:
            runner.get_loop().set_exception_handler(lambda loop, context: None)
        else:
            runner.close()


async def _to_its_end(work: Coroutine[Any, Any, ResultT], refusing: set[asyncio.Task[Any]]) -> ResultT:
    """Waits for the work, then for what it left running; what does not end goes into `refusing`."""
    try:
        return await work
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            _, pending = await asyncio.wait(left, timeout=_END_S)
            refusing.update(pending)
        for task in refusing:
            _logger.error("left behind at the end of the process, as it ignores its cancellation: %s", task.get_name())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes this process's event loop: uvloop's where it is, else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

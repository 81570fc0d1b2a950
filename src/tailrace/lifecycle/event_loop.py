"""The event loop of a command: on uvloop where it is, and ended even where a coroutine or a thread refuses to end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")

_END_S = 2.0
"""How long what is left running has to end, once the work is done and it was cancelled."""

_MOST_THREADS = 1024

_logger = logging.getLogger(__name__)

_stuck: set[Future[Any]] = set()
"""Work in threads that did not end with its loop."""


class _Threads(ThreadPoolExecutor):
    """Those of the loop, and the work in them that has not ended.

    They are started as they are needed, and so many are allowed that users' calls which never return leave some for
    what the run itself does in threads: asyncio's own number is four more than there are processors.
    """

    def __init__(self) -> None:
        super().__init__(_MOST_THREADS, thread_name_prefix="tailrace-loop")
        self.working: set[Future[Any]] = set()

    def submit(self, fn: Callable[ParamT, ResultT], /, *args: ParamT.args, **kwargs: ParamT.kwargs) -> Future[ResultT]:
        future = super().submit(fn, *args, **kwargs)
        self.working.add(future)
        future.add_done_callback(self.working.discard)
        return future


def run_on_event_loop(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` returns or raises, from a loop of its own.

    `asyncio.run` waits for ever for a task that ignores its cancellation, and for a thread (`asyncio.to_thread`) that
    never returns. This names them in the log and leaves the loop as it is: the process is about to end (see
    `force_exit_if_threads_hang`).
    """
    runner = asyncio.Runner(loop_factory=loop_factory())
    threads = _Threads()
    runner.get_loop().set_default_executor(threads)
    refusing: set[asyncio.Task[Any]] = set()
    try:
        return runner.run(_to_its_end(work, refusing))
    finally:
        left = _left_of(threads)
        if refusing or left:
            runner.get_loop().set_exception_handler(lambda loop, context: None)
        else:
            runner.close()


def force_exit_if_threads_hang(status: int) -> None:
    """End the process with `status` where a thread that never returns would keep it for ever; else do nothing."""
    if _stuck:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _left_of(threads: _Threads) -> set[Future[Any]]:
    """What still runs in threads after it had its time."""
    threads.shutdown(wait=False, cancel_futures=True)
    left = concurrent.futures.wait([*threads.working], timeout=_END_S).not_done
    if left:
        _logger.error("left behind at the end of the process, as they do not return: %d calls in threads", len(left))
    _stuck.update(left)
    return left


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

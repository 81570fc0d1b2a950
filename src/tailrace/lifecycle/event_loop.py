"""The event loop of a command: on uvloop where installed, and closed even where a coroutine or thread never ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from tailrace.cancelling import cancelled
from tailrace.lifecycle.standard_streams import give_up_unwritable_streams, open_missing_streams

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")

_END_S = 2.0
"""How long tasks and threads that are left have to end, once they were cancelled."""

_EXIT_S = 10.0
"""How long the interpreter has to exit, which waits for threads that users' code started."""

_OF_ENGINES = ("tailrace-engine", "tailrace-staging")
"""Threads of `generation.engine_thread`."""

_MOST_THREADS = 1024

_logger = logging.getLogger(__name__)

_stuck: set[Future[Any]] = set()
"""Calls in threads that outlived their loop."""


class _Threads(ThreadPoolExecutor):
    """The loop's threads, more than asyncio's: users' calls that never return must leave some for the run's own."""

    def __init__(self) -> None:
        super().__init__(_MOST_THREADS, thread_name_prefix="tailrace-loop")
        self.working: set[Future[Any]] = set()

    def submit(self, fn: Callable[ParamT, ResultT], /, *args: ParamT.args, **kwargs: ParamT.kwargs) -> Future[ResultT]:
        future = super().submit(fn, *args, **kwargs)
        self.working.add(future)
        future.add_done_callback(self.working.discard)
        return future


def run_on_event_loop(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, but it does not wait for ever for a task that ignores its cancellation, or a thread that hangs.

    It names them in the log and leaves the loop open: the process is about to end (`force_exit_if_threads_hang`).
    """
    open_missing_streams()  # of a user's program, too
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


def force_exit_if_threads_hang(status: int, *, within_s: float = _EXIT_S) -> None:
    """End the process with `status` if a thread that never returns would keep it alive, or abort it; call it last.

    A call in the loop's own threads is known to hang by now. Threads that users' code started have `within_s` to end
    while the interpreter exits, which waits for them. It does not for an engine's, and one that is in torch's code then
    aborts the process.
    """
    of_engines = [thread.name for thread in threading.enumerate() if thread.name in _OF_ENGINES]
    if of_engines:
        _logger.warning("left behind at the end of the process: threads %s", ", ".join(of_engines))
    if _stuck or of_engines:
        _exit_now(status)
    threading.Thread(target=_exit_later, args=(status, within_s), daemon=True).start()


def _exit_later(status: int, within_s: float) -> None:
    """Waits, and ends the process unless it ended before."""
    time.sleep(within_s)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"]
    _logger.error("left behind at the end of the process, as they do not end: threads %s", ", ".join(left))
    _exit_now(status)


def _exit_now(status: int) -> None:
    logging.shutdown()
    give_up_unwritable_streams()
    os._exit(status)


def _left_of(threads: _Threads) -> set[Future[Any]]:
    """Calls that still run in threads after their deadline."""
    threads.shutdown(wait=False, cancel_futures=True)
    left = concurrent.futures.wait([*threads.working], timeout=_END_S).not_done
    if left:
        _logger.error("left behind at the end of the process, as they do not return: %d calls in threads", len(left))
    _stuck.update(left)
    return left


async def _to_its_end(work: Coroutine[Any, Any, ResultT], refusing: set[asyncio.Task[Any]]) -> ResultT:
    """Waits for the work, then for tasks that it left; those that do not end go into `refusing`."""
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


async def first_done(*work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run these at once; what the first one to end returns or raises. The others are cancelled, and end before."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancelled(*tasks)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where installed, else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

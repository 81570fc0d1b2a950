"""Into a payload store from an event loop: in one thread, in order, with one wake-up of the loop for many payloads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailrace.records import PayloadRef
from tailrace.transport.payloads.store import PayloadStore

PUTS_AT_ONCE = 16
"""Payloads put before their futures are resolved together: some milliseconds of work."""

_Put: TypeAlias = "asyncio.Future[PayloadRef]"


class PutQueue:
    """Safe across event loops; a future is resolved even where its awaiter was cancelled."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self._waiting: deque[tuple[NDArray[np.generic], _Put]] = deque()
        self._lock = threading.Lock()
        self._is_working = False
        self._unresolved: set[_Put] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tailrace-payloads")

    def put(self, array: NDArray[np.generic]) -> _Put:
        """Resolved with where the array lies, or with the `TransportError` of a store without room.

        Do not cancel it: who may be cancelled awaits a shield of it.
        """
        future: _Put = asyncio.get_running_loop().create_future()
        self._unresolved.add(future)
        future.add_done_callback(self._unresolved.discard)
        with self._lock:
            self._waiting.append((array, future))
            starts, self._is_working = not self._is_working, True
        if starts:
            self._thread.submit(self._work)
        return future

    async def close(self) -> None:
        """Wait for all that waits to be put, and until every future of this loop is resolved. Twice does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
        if own := [future for future in tuple(self._unresolved) if future.get_loop() is asyncio.get_running_loop()]:
            await asyncio.wait(own)

    def _work(self) -> None:
        while taken := self._take():
            results = [(future, self._try(array)) for array, future in taken]
            for loop in {future.get_loop() for future, _ in results}:
                _wake(loop, [pair for pair in results if pair[0].get_loop() is loop])

    def _take(self) -> list[tuple[NDArray[np.generic], _Put]]:
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), PUTS_AT_ONCE))]
            self._is_working = bool(taken)
            return taken

    def _try(self, array: NDArray[np.generic]) -> PayloadRef | Exception:
        try:
            return self._store.put(array)
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            return error


def _wake(loop: asyncio.AbstractEventLoop, results: list[tuple[_Put, PayloadRef | Exception]]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve_next, loop, deque(results))
    except RuntimeError:  # the loop is closed, and nothing awaits the futures
        if not loop.is_closed():
            raise


def _resolve_next(loop: asyncio.AbstractEventLoop, results: deque[tuple[_Put, PayloadRef | Exception]]) -> None:
    """One in each turn of the loop: the tasks that resume would together hold it for long."""
    future, result = results.popleft()
    if results:
        loop.call_soon(_resolve_next, loop, results)
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)

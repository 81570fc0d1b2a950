"""Puts what engines record beside tokens into a payload store: off the engine's thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from tailrace.errors import TransportError
from tailrace.generation.engine_thread.inbox import RecordedExperts
from tailrace.records import PayloadChunk, PayloadRef
from tailrace.transport.payloads.put_queue import PutQueue
from tailrace.transport.payloads.store import PayloadStore, ThrottledWarning


class PayloadPutter:
    """Without a store everything is dropped."""

    def __init__(self, store: PayloadStore | None) -> None:
        self._store = store
        self._queue = None if store is None else PutQueue(store)
        self._not_kept = ThrottledWarning()

    async def put(self, experts: Sequence[RecordedExperts]) -> tuple[PayloadChunk, ...]:
        """Where each stretch lies; those that found no room are logged and left out. Cancelled, it withdraws them."""
        if (store := self._store) is None or self._queue is None:
            return ()
        putting = [self._queue.put(recorded.array) for recorded in experts]
        try:
            await asyncio.wait(putting)
        except asyncio.CancelledError:
            for future in putting:
                future.add_done_callback(partial(self._take_back, store))
            raise
        return tuple(
            PayloadChunk(recorded.start, recorded.start + len(recorded.array), ref)
            for recorded, future in zip(experts, putting, strict=True)
            if (ref := self._result(future)) is not None
        )

    async def close(self) -> None:
        """Wait for puts in progress, and drop the rest. Closing twice does nothing."""
        self._store = None
        if self._queue is not None:
            await self._queue.close()

    def _result(self, future: asyncio.Future[PayloadRef]) -> PayloadRef | None:
        try:
            return future.result()
        except TransportError as error:
            self._not_kept.warn(error)
            return None

    def _take_back(self, store: PayloadStore, future: asyncio.Future[PayloadRef]) -> None:
        if (ref := self._result(future)) is not None:
            store.withdraw(ref)

"""Who holds which payloads: every one from the moment a completion names it until its owner has ended.

    completion ──► record(owner, chunks) ──► held ──► release(owner) ──► the store has room again
               └─► drop(chunks), where its request was cancelled
    keep(batch, owners): what they hold stays beyond their end, until let_go(batch)

An owner is a rollout. Deciding is O(payloads) on the event loop; the store is called in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import TransportError
from tailrace.recent import RecentTable
from tailrace.records import PayloadChunk, PayloadRef
from tailrace.transport.payloads.put_queue import PutQueue
from tailrace.transport.payloads.store import PayloadStore, ThrottledWarning

_logger = logging.getLogger(__name__)


class PayloadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of payloads since the run began. Always: recorded = released + held."""

    recorded_bytes: int = 0
    released_bytes: int = 0
    held_bytes: int = 0


class PayloadAccounts:
    """The ledger's side of a payload store. Not safe across threads: it belongs to the event loop."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self._held: dict[str, dict[str, PayloadRef]] = {}
        self._owners: dict[str, str] = {}  # of every payload that is held, by its URI
        self._ended = RecentTable[str, None]()  # owners of which something may still come
        self._keeping: dict[int, list[str]] = {}  # owners, by the batch that may be trained again
        self._kept: dict[str, bool] = {}  # whether such an owner has ended
        self._recorded_bytes = self._released_bytes = 0
        self._not_kept = ThrottledWarning()
        self._puts = PutQueue(store)
        self._is_closed = False
        self._releases = ThreadPoolExecutor(1, thread_name_prefix="tailrace-payload-releases")

    def record(self, owner: str | None, chunks: Iterable[PayloadChunk]) -> None:
        """A completion of `owner` names these; naming one again changes nothing.

        Those without an owner, or of one that has ended, are dropped.
        """
        if owner is None or owner in self._ended:
            self.drop(chunks)
            return
        for ref in self._unknown(chunks):
            self._owners[ref.uri] = owner
            self._held.setdefault(owner, {})[ref.uri] = ref
            self._recorded_bytes += ref.num_bytes

    async def put(self, owner: str | None, array: NDArray[np.generic]) -> PayloadRef | None:
        """Put what arrived by value into the store, in a thread. None without an owner, or (logged) without room."""
        if owner is None or self._is_closed:
            return None
        putting = self._puts.put(array)
        putting.add_done_callback(partial(self._record_put, owner))
        try:
            return await asyncio.shield(putting)  # it is recorded even where the caller was cancelled
        except TransportError as error:
            self._not_kept.warn(error)
            return None

    def drop(self, chunks: Iterable[PayloadChunk]) -> None:
        """A completion of a cancelled request names these. What an owner holds stays."""
        dropped = self._unknown(chunks)
        num_bytes = sum(ref.num_bytes for ref in dropped)
        self._recorded_bytes += num_bytes
        self._released_bytes += num_bytes
        self._release(dropped)

    def release(self, owner: str) -> None:
        """The owner has ended: what it held is not read any more. Ending twice does nothing."""
        self._ended[owner] = None
        if owner in self._kept:
            self._kept[owner] = True
        else:
            self._release_all_of([owner])

    def keep(self, batch: int, owners: Iterable[str]) -> int:
        """What these hold is needed for as long as their batch is retained; returns its bytes. Once for an owner."""
        kept = [owner for owner in owners if owner in self._held]
        if kept:
            self._keeping[batch] = kept
            self._kept |= dict.fromkeys(kept, False)
        return sum(ref.num_bytes for owner in kept for ref in self._held[owner].values())

    def let_go(self, batch: int) -> None:
        """The batch is not retained any more: what its owners hold ends with them. Twice does nothing."""
        self._release_all_of([owner for owner in self._keeping.pop(batch, ()) if self._kept.pop(owner)])

    def writer_ended(self, writer: str) -> None:
        """The process that put under this name is gone; what no message named is released, and the rest in time."""
        held = [ref for refs in self._held.values() for ref in refs.values()]
        self._in_background(lambda: self._store.abandon(writer, held))

    @property
    def figures(self) -> PayloadFigures:
        """A snapshot."""
        return PayloadFigures(
            recorded_bytes=self._recorded_bytes,
            released_bytes=self._released_bytes,
            held_bytes=self._recorded_bytes - self._released_bytes,
        )

    async def close(self) -> None:
        """Release everything, and wait until the store has done so. Closing twice does nothing."""
        self._is_closed = True
        await self._puts.close()
        await asyncio.sleep(0)  # so that the last of them are recorded
        for batch in [*self._keeping]:
            self.let_go(batch)
        for owner in [*self._held]:
            self.release(owner)
        await asyncio.to_thread(self._releases.shutdown)

    def _record_put(self, owner: str, putting: asyncio.Future[PayloadRef]) -> None:
        if not putting.cancelled() and putting.exception() is None:
            self.record(owner, [PayloadChunk(0, 0, putting.result())])

    def _unknown(self, chunks: Iterable[PayloadChunk]) -> list[PayloadRef]:
        """What the chunks refer to and no owner holds, each once."""
        refs = {chunk.ref.uri: chunk.ref for chunk in chunks if chunk.ref is not None}
        return [ref for uri, ref in refs.items() if uri not in self._owners]

    def _release_all_of(self, owners: Iterable[str]) -> None:
        refs = [ref for owner in owners for ref in self._held.pop(owner, {}).values()]
        for ref in refs:
            del self._owners[ref.uri]
            self._released_bytes += ref.num_bytes
        self._release(refs)

    def _release(self, refs: list[PayloadRef]) -> None:
        if refs:
            self._in_background(lambda: self._store.release(refs))

    def _in_background(self, what: Callable[[], None]) -> None:
        self._releases.submit(what).add_done_callback(_log_failure)


def _log_failure(done: Future[None]) -> None:
    """What could not be released stays until the run's end; nothing waits for it."""
    error = done.exception()
    if isinstance(error, TransportError | OSError):
        _logger.warning("payloads could not be released, and stay until the end of the run: %s", error)
    elif error is not None:
        _logger.error("releasing payloads failed", exc_info=error)

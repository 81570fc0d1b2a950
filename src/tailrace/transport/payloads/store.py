"""Big arrays on their way from the process that makes them to the one that uses them.

    put (generator) ──► PayloadRef ──► completions, branches, batches ──► open (trainer)
                                   └──► release (the ledger), once the rollout is terminal ──► room for others

Only the reference travels. Only `put` writes; what `open` lends is not copied. `PayloadAccounts` knows
who holds what; a store knows only how many of a file's payloads are released.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tailrace.errors import CorruptData, PayloadLost, TransportError
from tailrace.records import PayloadRef

_logger = logging.getLogger(__name__)


class PayloadStore(Protocol):
    """One process's end of a store. Safe across threads; every method may block."""

    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        """Leave a copy in the store. Raises `TransportError` where there is no room."""
        ...

    def open(self, ref: PayloadRef) -> NDArray[np.generic]:
        """The array, read-only, valid until it is released. Copies nothing where it can.

        Raises `PayloadLost` for what was released or never there, and `CorruptData` for a reference that cannot be
        meant: of another type or shape than what was put, or outside of the store.
        """
        ...

    def release(self, refs: Iterable[PayloadRef]) -> None:
        """These are not opened any more; their room may be used again. Each is released once, by one process."""
        ...

    def withdraw(self, ref: PayloadRef) -> None:
        """Take back what was put here and no reference was sent of."""
        ...

    def abandon(self, writer: str, held: Iterable[PayloadRef]) -> None:
        """The writer of this name is gone: release what it left but `held`; its files go with the last of those."""
        ...

    def close(self) -> None:
        """Release this end's files and memory. Closing twice does nothing."""
        ...


class ThrottledWarning:
    """Counts payloads that found no room, and logs the 1st, 2nd, 4th, 8th ... The completion goes on without them."""

    def __init__(self) -> None:
        self._count = 0

    def warn(self, error: TransportError) -> None:
        """One more was not kept."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            _logger.warning("%d payloads were not kept: %s", self._count, error)


class MemoryPayloadStore(PayloadStore):
    """A store within one process. It keeps the array that was put, which must not change any more.

    >>> store = MemoryPayloadStore()
    >>> ref = store.put(np.arange(3, dtype=np.uint8))
    >>> ref.uri, store.open(ref).tolist()
    ('memory:1', [0, 1, 2])
    >>> store.release([ref])
    >>> store.open(ref)
    Traceback (most recent call last):
    tailrace.errors.PayloadLost: there is no payload memory:1 (any more)
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.generic]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @override
    def put(self, array: NDArray[np.generic]) -> PayloadRef:
        kept = array.view()
        kept.flags.writeable = False
        with self._lock:
            uri = f"memory:{next(self._numbers)}"
            self._arrays[uri] = kept
        return PayloadRef(uri, str(kept.dtype), kept.shape)

    @override
    def open(self, ref: PayloadRef) -> NDArray[np.generic]:
        with self._lock:
            array = self._arrays.get(ref.uri)
        if array is None:
            raise PayloadLost(f"there is no payload {ref.uri} (any more)")
        if (str(array.dtype), array.shape) != (ref.dtype, tuple(ref.shape)):
            raise CorruptData(f"{ref.uri} is {array.dtype}{list(array.shape)}, not {ref.dtype}{list(ref.shape)}")
        return array

    def holds(self, ref: PayloadRef) -> bool:
        """Whether it was put here, and not released."""
        with self._lock:
            return ref.uri in self._arrays

    @override
    def release(self, refs: Iterable[PayloadRef]) -> None:
        with self._lock:
            for ref in refs:
                self._arrays.pop(ref.uri, None)

    @override
    def withdraw(self, ref: PayloadRef) -> None:
        self.release([ref])

    @override
    def abandon(self, writer: str, held: Iterable[PayloadRef]) -> None:
        """A process that is gone has taken its memory along."""

    @override
    def close(self) -> None:
        with self._lock:
            self._arrays.clear()

"""A stream of samples within one event loop: the orchestrator's end, and one for each rank that joins.

Ranks' ends promise what `RedisSampleReceiver` does, as coroutines; cancelling a wait loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from typing_extensions import override

from tailrace.errors import ConsumerRefused, PeerGone
from tailrace.records import (
    ConsumerJoined,
    ConsumerLost,
    FeedReport,
    FeedSample,
    SampleId,
    SamplesTaken,
    StopRequested,
)
from tailrace.transport.channels import wait_until
from tailrace.transport.samples.stream import SampleSender


class MemorySampleStream(SampleSender):
    """Samples stay the objects that they are. `join` is the trainer's side."""

    def __init__(self) -> None:
        self._offered: dict[SampleId, FeedSample] = {}
        """That nobody has, in the order of the offers."""
        self._consumers: dict[str, MemorySampleReceiver] = {}
        self._reports: deque[FeedReport] = deque()
        self._stop: StopRequested | None = None
        self._closed: str | None = None
        self._changed = asyncio.Event()

    # --- the orchestrator's end --------------------------------------------------------------------------------------

    @override
    async def offer(self, samples: Sequence[FeedSample]) -> None:
        self.require_open()
        for sample in samples:
            self._offered.setdefault(sample.sample_id, sample)
        self._changed.set()

    @override
    async def release(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            self._offered.pop(sample_id, None)

    @override
    async def reports(self) -> AsyncIterator[FeedReport]:
        while True:
            await wait_until(self._changed, lambda: bool(self._reports) or self._closed is not None)
            if not self._reports:
                return
            yield self._reports.popleft()

    @override
    async def request_stop(self, stop: StopRequested) -> None:
        self._stop = self._stop or stop
        self._changed.set()

    @override
    async def close(self, reason: str = "") -> None:
        if self._closed is None:
            self._closed = reason
        self._changed.set()

    # --- the trainer's side ------------------------------------------------------------------------------------------

    def join(self, name: str) -> MemorySampleReceiver:
        """A rank comes. Raises `ConsumerRefused` while one of that name is there."""
        self.require_open()
        if name in self._consumers:
            raise ConsumerRefused(f"a consumer called {name!r} is there already: give every rank a name of its own")
        self._consumers[name] = receiver = MemorySampleReceiver(self, name)
        self.tell(ConsumerJoined(consumer=name))
        return receiver

    def lose(self, name: str, reason: str) -> None:
        """A rank died or left: it is heard no more."""
        if self._consumers.pop(name, None) is not None:
            self.tell(ConsumerLost(consumer=name, reason=reason))

    # --- for receivers -----------------------------------------------------------------------------------------------

    def tell(self, report: FeedReport) -> None:
        """To the orchestrator, after all that was told before."""
        self._reports.append(report)
        self._changed.set()

    def knows(self, receiver: MemorySampleReceiver) -> bool:
        """Whether this one is the living consumer of its name."""
        return self._consumers.get(receiver.name) is receiver

    async def take(self, receiver: MemorySampleReceiver, at_most: int) -> list[FeedSample] | StopRequested:
        """As `RedisSampleReceiver.pull`."""
        await wait_until(
            self._changed,
            lambda: bool(self._offered or self._stop) or self._closed is not None or not self.knows(receiver),
        )
        receiver.require_known()
        if self._stop is not None:
            return self._stop
        taken = [self._offered.pop(sample_id) for sample_id in [*self._offered][:at_most]]
        self.tell(SamplesTaken(consumer=receiver.name, sample_ids=tuple(sample.sample_id for sample in taken)))
        return taken

    def require_open(self) -> None:
        """Raise `PeerGone` once the stream is closed."""
        if self._closed is not None:
            raise PeerGone(f"the stream of samples is closed{self._closed and ': '}{self._closed}")


class MemorySampleReceiver:
    """One rank's end. `MemorySampleStream.join` makes it."""

    def __init__(self, stream: MemorySampleStream, name: str) -> None:
        self.name = name
        self._stream = stream

    async def pull(self, at_most: int) -> list[FeedSample] | StopRequested:
        self.require_known()
        return await self._stream.take(self, at_most)

    async def report(self, report: FeedReport) -> None:
        self.require_known()
        self._stream.tell(report)

    async def leave(self) -> None:
        self._stream.lose(self.name, "left")

    def require_known(self) -> None:
        """Raise `PeerGone` once the stream is closed, and `ConsumerRefused` once this consumer was lost."""
        self._stream.require_open()
        if not self._stream.knows(self):
            raise ConsumerRefused(f"the consumer {self.name!r} was given up: join again")

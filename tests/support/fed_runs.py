"""A run that feeds trainers outside, as far as what carries samples knows it: its end, and what it was told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tailrace.records import FeedReport, FeedSample, SampleId, SamplesTaken, StreamedSample
from tailrace.transport.redis.channels import RedisPlace
from tailrace.transport.redis.sample_sender import RedisSampleSender
from tailrace.transport.redis.server import RedisServer
from tailrace.transport.redis.streams import Origin
from tailrace.transport.samples.codec import decode_samples, take_document
from tests.transport.transport_builders import handed, make_sample

PATIENCE_S = 60.0
"""For what comes in milliseconds on a quiet machine."""

ReportT = TypeVar("ReportT")


def feed_samples(count: int, *, first: int = 0) -> list[FeedSample]:
    random = np.random.default_rng(first)
    return [handed(make_sample(random, first + number, 5 + number)) for number in range(count)]


def as_received(samples: Sequence[FeedSample]) -> list[StreamedSample]:
    """Written, and read again."""
    left, received = deque(samples), list[StreamedSample]()
    while left:
        received += decode_samples(take_document(left, run="run", epoch="epoch"))
    return received


class FedRun:
    """The orchestrator's end, and what it was told."""

    def __init__(
        self, server: RedisServer, epoch: str = "epoch", lease_s: float = 20.0, url: str = "", outage_s: float = 60.0
    ) -> None:
        self.place = RedisPlace(url or server.url, Origin("run", epoch), outage_s)
        self.sender = RedisSampleSender(self.place, lease_s=lease_s)
        self.told: list[FeedReport] = []
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for report in self.sender.reports():
                self.told.append(report)
                self._changed.set()
        finally:
            self._changed.set()

    async def hears(self, kind: type[ReportT]) -> ReportT:
        """The first report of this kind; raises what ended the reports."""
        while not (found := [report for report in self.told if isinstance(report, kind)]):
            if self._reading.done():
                self._reading.result()
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), PATIENCE_S)
        return found[0]

    async def fails(self) -> None:
        """Wait for what ends the reports, and raise it."""
        await asyncio.wait_for(self._reading, PATIENCE_S)

    def taken_by(self, name: str) -> list[SampleId]:
        taken = [report for report in self.told if isinstance(report, SamplesTaken) and report.consumer == name]
        return [sample_id for report in taken for sample_id in report.sample_ids]

    async def close(self, reason: str = "") -> None:
        await self.sender.close(reason)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

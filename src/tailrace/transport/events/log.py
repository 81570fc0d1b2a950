"""The run's one log of events: its processes append to it, and all of them read it in one order.

A follower gets what was logged before, then every new event as it comes, woken by its append. Steps and what comes with
them leave memory once who follows has had them and newer ones came, so that no process grows with the length of its
run; a log in a file keeps them there. A log belongs to one epoch (one start of the run): events of another are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
from typing_extensions import override

from tailrace.errors import TransportError
from tailrace.records import (
    CheckpointWritten,
    Event,
    ModelStateDictPublished,
    StepSkipped,
    StepTrained,
    StopRequested,
    TrainerEnded,
)
from tailrace.transport.channels import wait_until

_logger = logging.getLogger(__name__)


class EventLog(Protocol):
    """An append-only, ordered log of events."""

    async def append(self, event: Event) -> None:
        """Return once the event is logged; every follower sees it.

        Raises `TransportError` when the log is closed, the event is of another epoch, cannot be stored or is a second
        terminal record, and `PeerGone` when the process that holds the log ended.
        """
        ...

    def follow(self) -> AsyncIterator[Event]:
        """Yield every event of this epoch: those logged already, then live ones.

        Of steps, their weights and checkpoints, who begins late gets the newest `KEPT_OF_STEPS` alone.
        Waits for the next append or for `close`, which ends the iteration. Raises `PeerGone` when the process that
        holds the log ended.
        """
        ...

    async def close(self) -> None:
        """End the log: followers get what was logged, then end. Closing twice does nothing."""
        ...


_READ_BACK_BYTES = 1 << 16
_HANGS_S = 5.0
"""How long the end of a run, or of its log, waits for a disk."""

_OfSteps: TypeAlias = ModelStateDictPublished | StepTrained | StepSkipped | CheckpointWritten
"""They come for as long as a run lasts. All others are few, and say how it stands."""

KEPT_OF_STEPS = 64
"""Events, of all four kinds together: processes begin to follow one after the other. A trainer that is started again
may be later; it reads nothing but requests to stop."""


class EventHistory:
    """The events of one epoch, for followers who begin at their own times and read at their own pace."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: dict[int, Event] = {}
        self._of_steps: deque[int] = deque()
        self._unread: list[deque[Event]] = []  # of each follower

    def append(self, event: Event) -> None:
        """The next one."""
        number = next(self._numbers)
        self._kept[number] = event
        if isinstance(event, _OfSteps):
            self._of_steps.append(number)
            if len(self._of_steps) > KEPT_OF_STEPS:
                del self._kept[self._of_steps.popleft()]
        for unread in self._unread:
            unread.append(event)

    @contextlib.contextmanager
    def follower(self) -> Iterator[deque[Event]]:
        """What the follower has not read, first what is kept; it takes from it what it reads."""
        unread = deque(self._kept.values())
        self._unread.append(unread)
        try:
            yield unread
        finally:
            self._unread = [others for others in self._unread if others is not unread]


class MemoryEventLog(EventLog):
    """An event log within one process."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        """Events of others are refused."""
        self.closed = False
        self._takes_more = self._takes_end = True
        self.has_ended = False
        """Whether the terminal record is there."""
        self.stop: StopRequested | None = None
        """The first request to stop, once there is one."""
        self._history = EventHistory()
        self._changed = asyncio.Event()

    @override
    async def append(self, event: Event) -> None:
        self._accept(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self._history.append(event)
        self.has_ended = self.has_ended or isinstance(event, TrainerEnded)
        if self.stop is None and isinstance(event, StopRequested):
            self.stop = event
        self._changed.set()

    @override
    async def follow(self) -> AsyncIterator[Event]:
        with self._history.follower() as unread:
            while True:
                await wait_until(self._changed, lambda: self.closed or bool(unread))
                if not unread:
                    return
                yield unread.popleft()

    @override
    async def close(self) -> None:
        self._takes_more, self.closed = False, True
        self._changed.set()

    def _accept(self, event: Event) -> None:
        """Raises `TransportError` for what is not taken: a second terminal record, too, while the first is written."""
        if not self._takes_more:
            raise TransportError(f"the event log is closed and takes no {type(event).__name__}")
        if event.epoch != self.epoch:
            raise TransportError(
                f"{type(event).__name__} of epoch {event.epoch!r} refused: this run's epoch is {self.epoch!r}"
            )
        if isinstance(event, TrainerEnded):
            if not self._takes_end:
                raise TransportError("the event log has its terminal record and takes no second one")
            self._takes_end = False


class FileEventLog(MemoryEventLog):
    """An event log kept in a file: one JSON object per line, only ever appended to, in a thread: disks get stuck.

    The thread is its own: tools and agents of users may fill those of the event loop for minutes.

    One process owns it (the orchestrator), and makes it on a running event loop. Lines that an earlier start of the run
    left are kept and not read: they are of another epoch, and a damaged one must not stop a resumed run. A last line
    torn by a crash is cut off.
    """

    def __init__(self, path: Path, epoch: str) -> None:
        super().__init__(epoch)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _cut_torn_line(self._file)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tailrace-events")
        self._closing: asyncio.Future[None] | None = None
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """What is not written once this is done will not be waited for."""

    @override
    async def append(self, event: Event) -> None:
        """The line is in the file before any follower sees the event, cancelled or not.

        On a disk that takes none, or hangs, what ends the run is told all the same: everybody waits for it.
        """
        await asyncio.shield(asyncio.ensure_future(self._write_and_tell(event)))

    @override
    async def close(self) -> None:
        """What is being written is told first, unless the disk hangs: then its append fails."""
        self._takes_more = False
        if self._closing is None:
            self._closing = asyncio.get_running_loop().run_in_executor(self._thread, os.close, self._file)
            self._thread.shutdown(wait=False)
        await asyncio.wait({self._closing}, timeout=_HANGS_S)
        if not self._given_up.done():
            self._given_up.set_result(None)
        await super().close()
        if self._closing.done():
            self._closing.result()

    async def _write_and_tell(self, event: Event) -> None:
        """The one thread keeps the order of events, in the file and, unless the disk hangs, as they are told."""
        self._accept(event)
        line = msgspec.json.encode(event) + b"\n"
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, line)
        is_end = isinstance(event, StopRequested | TrainerEnded)
        try:
            await self._written(writing, _HANGS_S if is_end else None)
        except TransportError as error:
            if not is_end:
                raise
            _logger.error("%s, which may lack the end of the run: %s", error, event)
        self._tell(event)

    async def _written(self, writing: asyncio.Future[None], within_s: float | None) -> None:
        """Wait for it, until the log is given up at most. Raises `TransportError`."""
        either = {writing, self._given_up}
        await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise TransportError(f"cannot append to the event log {self._path}: its disk hangs")
        writing.result()

    def _write(self, line: bytes) -> None:
        try:
            size = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, size)
        except OSError as error:
            raise TransportError(f"cannot append to the event log {self._path}: {error.strerror}") from error
        if written < len(line):
            raise TransportError(f"cannot append to the event log {self._path}: its disk is full")


def _cut_torn_line(file: int) -> None:
    """Truncate what follows the last newline."""
    size = end = os.fstat(file).st_size
    while end:
        start = max(0, end - _READ_BACK_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)

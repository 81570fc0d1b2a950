"""The event log of one process, appended to and followed from others.

    client                                server (beside the log)
      AppendEvent(id, event)    ─────►      log.append
                                ◄─────    AppendAnswered(id, refusal)
      FollowLog                 ─────►      log.follow
                                ◄─────    EventLogged(event) for every event, and LogEnded

A slow client's socket queues at most the log itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
import zmq
import zmq.asyncio
from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.errors import PeerGone, TransportError
from tailrace.records import Event
from tailrace.transport.channels import (
    CLOSE_LINGER_MS,
    Channel,
    Conversation,
    OpenChannel,
    decode,
    encode,
    received,
    wait_until,
)
from tailrace.transport.events.log import EventHistory, EventLog, MemoryEventLog
from tailrace.transport.keys import CurveKeys

_logger = logging.getLogger(__name__)


class AppendEvent(msgspec.Struct, frozen=True, tag=True):
    """Log this event."""

    id: int
    event: Event


class FollowLog(msgspec.Struct, frozen=True, tag=True):
    """Send every event there is and will be."""


class AppendAnswered(msgspec.Struct, frozen=True, tag=True):
    """The event is logged, or refused for this reason."""

    id: int
    refusal: str | None = None


class EventLogged(msgspec.Struct, frozen=True, tag=True):
    """The next event of the log."""

    event: Event


class LogEnded(msgspec.Struct, frozen=True, tag=True):
    """The log is closed: no event follows."""


_Request: TypeAlias = AppendEvent | FollowLog
_Answer: TypeAlias = AppendAnswered | EventLogged | LogEnded


class EventLogServer:
    """Gives other processes the log that this one owns. Make it on a running event loop; it binds `address`.

    Any role may append and follow, the trainer's ranks among them, so one socket serves many clients.
    """

    def __init__(self, log: MemoryEventLog, address: str, keys: CurveKeys | None = None) -> None:
        """With `keys` only clients that hold them are let in."""
        self._log = log
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if keys:
            keys.apply_to_server(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise TransportError(f"cannot open the event log's socket {address}: {error}") from error
        self._streams: dict[bytes, asyncio.Task[None]] = {}
        self._serving = asyncio.create_task(self._serve(), name="event log server")

    async def close(self) -> None:
        """Stop serving. Clients' followers get the rest and end if the log is closed; else they get `PeerGone`.

        Leaves the log as it is. Closing twice does nothing.
        """
        if not self._log.closed:
            for stream in self._streams.values():
                stream.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        await cancelled(self._serving)
        self._socket.close(linger=CLOSE_LINGER_MS)

    async def _serve(self) -> None:
        """Waits for requests; ends with the server. A request that cannot be decoded gets no answer."""
        while True:
            client, *frames = await received(self._socket)
            try:
                request: _Request = decode(b"".join(frames), _Request)  # type: ignore[arg-type]
            except TransportError:
                _logger.exception("the event log got a message that it does not understand")
                continue
            if isinstance(request, AppendEvent):
                await self._send(client, await answer(self._log, request))
            elif client not in self._streams:
                self._streams[client] = asyncio.create_task(self._stream(client), name="event log stream")

    async def _stream(self, client: bytes) -> None:
        """Waits for events; ends with the log or the server. What is sent to a client that has gone is dropped."""
        async for event in self._log.follow():
            await self._send(client, EventLogged(event))
        await self._send(client, LogEnded())

    async def _send(self, client: bytes, answer: _Answer) -> None:
        await self._socket.send_multipart([client, encode(answer)])


class ConversingEventLogServer:
    """The same, over a conversation of its own with each client. Make it on a running event loop."""

    def __init__(self, log: MemoryEventLog, addresses: Sequence[str], open_channel: OpenChannel) -> None:
        """One address for each client."""
        self._log, self._changed = log, asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: dict[int, asyncio.Task[None]] = {}
        self._channels: list[Conversation] = [
            open_channel(
                address,
                bind=True,
                on_message=partial(self._on_request, number),
                changed=self._changed,
                peer="event log's client",
            )
            for number, address in enumerate(addresses)
        ]

    async def close(self) -> None:
        """As `EventLogServer.close`."""
        if not self._log.closed:
            for following in self._following.values():
                following.cancel()
        await asyncio.gather(*self._tasks, *self._following.values(), return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _on_request(self, client: int, message: bytes) -> None:
        """Appends are taken in the order in which they came: the log keeps it."""
        request: _Request = decode(message, _Request)  # type: ignore[arg-type]
        if isinstance(request, AppendEvent):
            task = asyncio.create_task(self._append(client, request), name="append to the event log")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif client not in self._following:
            self._following[client] = asyncio.create_task(self._stream(client), name="event log stream")

    async def _append(self, client: int, request: AppendEvent) -> None:
        self._channels[client].send(encode(await answer(self._log, request)))

    async def _stream(self, client: int) -> None:
        """Waits for events; ends with the log or the client."""
        async for event in self._log.follow():
            self._channels[client].send(encode(EventLogged(event)))
        self._channels[client].send(encode(LogEnded()))


async def answer(log: MemoryEventLog, request: AppendEvent) -> AppendAnswered:
    """Append, and say how that went."""
    try:
        await log.append(request.event)
    except TransportError as error:
        return AppendAnswered(request.id, str(error))
    return AppendAnswered(request.id)


class EventLogClient(EventLog):
    """Another process's event log. Make it on a running event loop; it connects to `address`."""

    def __init__(self, address: str, epoch: str, open_channel: OpenChannel = Channel) -> None:
        self._epoch = epoch
        self._ids = itertools.count()
        self._waiting: set[int] = set()
        self._answers: dict[int, AppendAnswered] = {}
        self._history = EventHistory()
        self._is_following = False
        self._ended = False
        self._changed = asyncio.Event()
        self._channel = open_channel(
            address, bind=False, on_message=self._on_answer, changed=self._changed, peer="event log's server"
        )

    @override
    async def append(self, event: Event) -> None:
        """An append that is cancelled may be logged all the same."""
        request = AppendEvent(next(self._ids), event)
        self._waiting.add(request.id)
        try:
            self._channel.send(encode(request))
            await wait_until(self._changed, lambda: request.id in self._answers or bool(self._channel.failure))
        finally:
            self._waiting.remove(request.id)
            answer = self._answers.pop(request.id, None)
        if answer is None:
            raise self._gone()
        if answer.refusal is not None:
            raise TransportError(answer.refusal)

    @override
    async def follow(self) -> AsyncIterator[Event]:
        """Closing this client ends it, too."""
        if not self._is_following and not self._ended:
            self._is_following = True
            self._channel.send(encode(FollowLog()))
        with self._history.follower() as unread:
            while True:
                await wait_until(self._changed, lambda: bool(unread or self._ended or self._channel.failure))
                if unread:
                    yield unread.popleft()
                elif self._ended:
                    return
                else:
                    raise self._gone()

    @override
    async def close(self) -> None:
        """The server's log stays open. This client's followers end."""
        self._ended = True
        await self._channel.close()

    def _gone(self) -> TransportError:
        return self._channel.failure or PeerGone("the event log's server is gone")

    def _on_answer(self, message: bytes) -> None:
        answer: _Answer = decode(message, _Answer)  # type: ignore[arg-type]
        match answer:
            case EventLogged(event) if event.epoch == self._epoch:
                self._history.append(event)
            case LogEnded():
                self._ended = True
            case AppendAnswered(id) if id in self._waiting:
                self._answers[id] = answer
            case _:
                pass  # of another epoch, or for an append that was cancelled

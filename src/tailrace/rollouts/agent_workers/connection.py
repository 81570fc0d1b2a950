"""One end of the pair of sockets between the orchestrator and an agent worker: whole messages, in order.

What is sent within one turn of the event loop leaves in one write, unless that turn is long.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec
from typing_extensions import override

from tailrace.rollouts.workers.messages import LENGTH_BYTES
from tailrace.transport.channels import encode

_LONG_TURN_S = 0.005
"""What waits for the end of the event loop's turn waits no longer: with thousands of busy tasks that may be far off."""


class Connection(asyncio.Protocol):
    """Hands every message's body to `on_message`, and calls `on_end` once when the other end is gone, or on `abort`."""

    _transport: asyncio.Transport

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._waits_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._has_ended = False

    @classmethod
    async def over(
        cls, end: socket.socket, on_message: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> Connection:
        """Over this end of a pair, which the connection closes."""
        _, made = await asyncio.get_running_loop().create_unix_connection(lambda: cls(on_message, on_end), sock=end)
        return made

    def send(self, message: msgspec.Struct) -> None:
        """Send it soon. To an end that is gone nothing is sent. Raises `TypeError` for what msgpack does not know."""
        body = encode(message)
        if self._has_ended:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
            self._waits_since_s = self._loop.time()
        self._unsent += (len(body).to_bytes(LENGTH_BYTES, "little"), body)
        if self._loop.time() - self._waits_since_s > _LONG_TURN_S:
            self._flush()

    def abort(self) -> None:
        """End at once."""
        self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        place = 0
        while len(received) - place >= LENGTH_BYTES:
            start = place + LENGTH_BYTES
            end = start + int.from_bytes(received[place:start], "little")
            if len(received) < end:
                break
            self._on_message(bytes(memoryview(received)[start:end]))
            place = end
        del received[:place]

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = True
        self._unsent.clear()
        self._on_end()

    def _flush(self) -> None:
        if self._unsent and not self._has_ended:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

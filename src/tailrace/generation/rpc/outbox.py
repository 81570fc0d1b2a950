"""What one turn of the event loop sends to a peer, in one message: a system call for many, not for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import msgspec

from tailrace.generation.rpc.messages import Frames
from tailrace.transport.channels import encode

MOST_TOGETHER = 64
"""Parts of a message: what the peer decodes in one go, in about a millisecond."""

PartT = TypeVar("PartT", bound=msgspec.Struct)

SendMessage: TypeAlias = Callable[[bytes, Frames], None]
"""Hands a message and the frames that follow it to the socket. Never waits."""


class Outbox(Generic[PartT]):
    """Keeps the order of what is put. A part with frames goes alone."""

    def __init__(self, send: SendMessage) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._waiting: list[bytes] = []

    def put(self, part: PartT, frames: Frames = ()) -> None:
        """Send at the end of this turn, or at once with `frames`.

        Raises `TypeError` for what msgpack does not know, which costs no other part, and what sending raises where it
        is at once.
        """
        encoded = encode(part)
        if frames:
            self.flush()
            self._send(encoded, frames)
            return
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(encoded)
        if len(self._waiting) == MOST_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Send what waits. Raises what sending raises."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting[0] if len(waiting) == 1 else encode([msgspec.Raw(one) for one in waiting]), ())

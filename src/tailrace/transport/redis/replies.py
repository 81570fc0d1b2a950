"""What Redis answers, off its socket (RESP2): long values are received straight into the memory that they stay in.

redis-py's own buffer copies each byte of a long value several times, and grows by 64 KB: ten times the CPU time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol, cast

from redis.connection import DefaultParser
from redis.exceptions import ConnectionError as Gone
from redis.exceptions import InvalidResponse

from tailrace.transport.redis.connection import Reply

_AT_ONCE_BYTES = 1 << 16
"""Asked of the socket where what comes is short, or its length is not known."""
_LINE_BYTES = 1 << 16
"""No line of a reply is longer: an error, a number, a length."""
_MOST_BYTES = 1 << 29
"""Of a value: what Redis allows."""
_CLOSED = "Redis closed the connection"


_error_of = cast("Callable[[str], Exception]", DefaultParser.parse_error)
"""By what it begins with: OOM, LOADING, ..."""


class _Connected(Protocol):
    """What redis-py's connection tells its parser."""

    _sock: socket.socket
    socket_timeout: float | None


class ReplyParser:
    """For `redis.Connection(parser_class=...)`, which makes it, and calls it from one thread at a time."""

    def __init__(self, socket_read_size: int) -> None:
        self._socket: socket.socket | None = None
        self._timeout_s: float | None = None
        self._ahead = b""
        """Received, and of replies from `_at` on."""
        self._at = 0

    def on_connect(self, connection: _Connected) -> None:
        """Begin with a socket."""
        self._socket, self._timeout_s = connection._sock, connection.socket_timeout
        self._ahead, self._at = b"", 0

    def on_disconnect(self) -> None:
        """Let go of the socket."""
        self._socket = None
        self._ahead, self._at = b"", 0

    def read_response(self, *, disable_decoding: bool = False, timeout: object = None) -> Reply:
        """The next reply; each wait for more of it takes so long at most.

        An error is returned as it is, but for one after which there is no connection: that is raised.
        """
        if isinstance(timeout, int | float):
            self._wait_for(float(timeout))
        try:
            return self._reply()
        except (ValueError, RecursionError) as error:
            raise InvalidResponse(f"Redis answered what is no reply: {error}") from error

    def _wait_for(self, timeout_s: float) -> None:
        if self._socket is not None and timeout_s != self._timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _reply(self) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest
            case b":":
                return int(rest)
            case b"$":
                return None if rest == b"-1" else self._value(int(rest))
            case b"*":
                return None if rest == b"-1" else [self._reply() for _ in range(int(rest))]
            case b"-":
                error = _error_of(rest.decode(errors="replace"))
                if isinstance(error, Gone):
                    raise error
                return error
        raise InvalidResponse(f"Redis answered {line[:40]!r}, which is no reply")

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n", self._at)) < 0:
            if len(self._ahead) - self._at > _LINE_BYTES:
                raise InvalidResponse("Redis answered without an end")
            self._receive_more()
        line, self._at = self._ahead[self._at : end], end + 2
        return line

    def _value(self, length: int) -> bytes:
        """So many bytes, and the end of their line."""
        if not 0 <= length <= _MOST_BYTES:
            raise InvalidResponse(f"Redis answered a value of {length} bytes")
        end = self._at + length
        if end + 2 > len(self._ahead) and length > _AT_ONCE_BYTES:
            return self._long_value(length)
        while end + 2 > len(self._ahead):
            self._receive_more()
            end = self._at + length
        value, self._at = self._ahead[self._at : end], end + 2
        return value

    def _long_value(self, length: int) -> bytes:
        whole = bytearray(length + 2)
        num_bytes = len(self._ahead) - self._at
        whole[:num_bytes] = memoryview(self._ahead)[self._at :]
        self._ahead, self._at = b"", 0
        with memoryview(whole) as view:
            while num_bytes < len(whole):
                received = self._connected.recv_into(view[num_bytes:])
                if not received:
                    raise Gone(_CLOSED)
                num_bytes += received
            return bytes(view[:length])

    def _receive_more(self) -> None:
        received = self._connected.recv(_AT_ONCE_BYTES)
        if not received:
            raise Gone(_CLOSED)
        self._ahead, self._at = self._ahead[self._at :] + received, 0

    @property
    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise Gone(_CLOSED)
        return self._socket

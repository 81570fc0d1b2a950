"""Sockets at which generators ask the trainer for weights, which then go from GPU to GPU.

On one host they are in the run's own folder, which no other user can read. Between hosts they are TCP, at the one
address by which the trainer's node is known, for those who hold the run's key. What is said there is small: names,
shapes, and where the group of GPUs meets. It is authenticated and not encrypted, and so are the weights not.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path

from tailrace.errors import CorruptData, TransportError
from tailrace.transport.weights.stores import PUBLISHED_FILE

_TCP = "tcp://"
_GREETING_S = 10
"""How long the other end of a new connection may take to show that it holds the key."""
_IDLE_S, _PROBE_S, _PROBES = 5, 5, 2
"""A host that answers no probe for as long is gone: 15 s, as for the run's other sockets."""


@dataclass(frozen=True, slots=True)
class TransferPlace:
    """Where the trainer of a run listens, and how generators reach it."""

    folder: Path
    """For sockets of one host."""
    host: str = ""
    """The trainer's IPv4 address, where generators are on other hosts."""
    key: bytes = field(default=b"", repr=False)
    """Of the run, for connections between hosts."""
    life: int = 0
    """How often the trainer was started before."""


class TransferListener:
    """The trainer's socket. Raises `TransportError` where none can be opened."""

    def __init__(self, place: TransferPlace) -> None:
        self._key, path = (
            place.key if place.host else b"",
            str(place.folder / f"{PUBLISHED_FILE}{os.getpid()}-{place.life}-transfer"),
        )
        with as_transport_error(f"weights cannot be offered at {place.host or path}"):
            if place.host:
                self._listener = Listener((place.host, 0), family="AF_INET", backlog=64)
            else:
                self._listener = Listener(path, family="AF_UNIX", backlog=64)
        self._address, self._is_closed = self._listener.address, False

    @property
    def uri(self) -> str:
        """What generators open: a socket's name in the folder, or `tcp://host:port`."""
        address = self._address
        return Path(address).name if isinstance(address, str) else f"{_TCP}{address[0]}:{address[1]}"

    def accept(self) -> Connection | None:
        """Wait for the next connection, which `admit` has yet to let in; None once this is closed."""
        try:
            connection = self._listener.accept()
        except OSError:
            return None
        if self._is_closed:
            connection.close()
            return None
        return connection

    def admit(self, connection: Connection) -> None:
        """Raises `TransportError` for a peer without the key, or one that says nothing."""
        if self._key:
            _greet(connection, self._key, deliver_challenge, answer_challenge)

    def close(self) -> None:
        """Wake whoever accepts, and let nobody in any more. Closing twice does nothing."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):
                Client(self._address).close()
            self._listener.close()


def connect(place: TransferPlace, uri: str) -> Connection:
    """To a trainer that listens at `uri`. Raises `TransportError`, and `CorruptData` for what is no such place."""
    with as_transport_error(f"weights are not offered at {uri[:200]}"):
        if uri.startswith(_TCP):
            connection = Client(_host_and_port(uri), family="AF_INET")
            _greet(connection, place.key, answer_challenge, deliver_challenge)
            return connection
        if not uri or Path(uri).name != uri or not uri.isprintable():
            raise CorruptData(f"a model state dict's reference names no socket of its folder: {uri[:200]!r}")
        return Client(str(place.folder / uri), family="AF_UNIX")


@contextmanager
def as_transport_error(what: str) -> Iterator[None]:
    """Failures of a connection become a `TransportError` that says what failed."""
    try:
        yield
    except (EOFError, OSError, AuthenticationError) as error:
        raise TransportError(f"{what}: {str(error) or type(error).__name__}") from error


def _greet(connection: Connection, key: bytes, *steps: Callable[[Connection, bytes], None]) -> None:
    """Both ends show that they hold the key; afterwards a host that falls silent is noticed."""
    with as_transport_error("the other end of a weight transfer does not hold the run's key"):
        try:
            _receive_within(connection, _GREETING_S)
            for step in steps:
                step(connection, key)
            _receive_within(connection, 0)
            _probe(connection)
        except BaseException:
            connection.close()
            raise


def _host_and_port(uri: str) -> tuple[str, int]:
    host, _, port = uri.removeprefix(_TCP).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535 or not uri.isprintable():
        raise CorruptData(f"a model state dict's reference names no address: {uri[:200]!r}")
    return host, int(port)


def _receive_within(connection: Connection, seconds: int) -> None:
    """From now on; 0 for without a limit."""
    with _socket_of(connection) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _probe(connection: Connection) -> None:
    with _socket_of(connection) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


@contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The same socket, by another descriptor: options are the socket's."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        yield one

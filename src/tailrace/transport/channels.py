"""Sockets between the processes of a run: ZMQ over ipc, msgpack messages, nothing pickled.

A `Channel` is one end of a conversation of two. It says at once when the other end is gone: a socket's monitor reports
the disconnect that the kernel reports when a process dies, without polling.
"""

from __future__ import annotations

import asyncio
import functools
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_args

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from typing_extensions import override
from zmq.utils.monitor import recv_monitor_message

from tailrace.cancelling import cancelled
from tailrace.errors import CorruptData, PeerGone, SettingsError, TransportError
from tailrace.guards import guarded
from tailrace.transport.keys import CurveKeys, guard_all, keep_alive

MAX_ADDRESS_CHARS = 107
"""Longest path of a Unix socket that Linux takes (macOS takes 103)."""

_IPC = "ipc://"

MOST_WAITING = 1000
"""Messages of a channel, in each direction and at each end."""

SILENCE_MS = 15_000
"""How long a peer on another host may answer no heartbeat before it counts as gone."""

CLOSE_LINGER_MS = 1000
"""How long the last messages of a closed socket may still be on their way, in the background."""

_REFUSALS = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_REFUSALS |= zmq.Event.HANDSHAKE_FAILED_NO_DETAIL

MessageT = TypeVar("MessageT")


def runtime_folder() -> Path:
    """Where private folders of sockets belong: short, local to the host, writable. Not created.

    That is XDG_RUNTIME_DIR, and /tmp where that is missing or too long a path to put a socket under.
    """
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if folder and len(folder) <= MAX_ADDRESS_CHARS // 2 and os.access(folder, os.W_OK | os.X_OK):
        return Path(folder)
    return Path("/tmp")


def create_socket_folder() -> Path:
    """A fresh folder under `runtime_folder()` that only this user can enter. The caller removes it."""
    return Path(tempfile.mkdtemp(prefix="tailrace-", dir=runtime_folder()))


def require_listener(address: str) -> None:
    """Raise `TransportError` where the file of a socket is gone: to connect would be tried without end.

    For what listens before anybody is told of it.
    """
    if address.startswith(_IPC) and not Path(address.removeprefix(_IPC)).exists():
        raise TransportError(f"nobody can be reached at {address}: the file of the socket is gone")


def ipc_address(folder: Path, name: str) -> str:
    """The address of the socket `name` in `folder`. Raises `SettingsError` when its path is too long for a socket."""
    path = str(folder / name)
    if len(os.fsencode(path)) > MAX_ADDRESS_CHARS:
        raise SettingsError(
            f"the socket path {path} has {len(path)} characters, of {MAX_ADDRESS_CHARS} at most; "
            "set XDG_RUNTIME_DIR to a folder with a shorter path"
        )
    return f"{_IPC}{path}"


def encode(message: msgspec.Struct | Sequence[msgspec.Struct | msgspec.Raw]) -> bytes:
    """A message, or several, as msgpack. Arrays of the types that records declare are raw bytes: see `decode_array`.

    Raises `TypeError` for what msgpack does not know.
    """
    return _ENCODER.encode(message)


def _encode_array(value: object) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype in (np.int32, np.float32):
        return value.tobytes()
    raise TypeError(f"a message cannot hold a {type(value).__name__} of {getattr(value, 'dtype', 'anything')}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def decode_array(declared: object, data: bytes) -> NDArray[np.generic]:
    """The `dec_hook` of decoders of messages that hold arrays, which become read-only views of `data`."""
    return np.frombuffer(data, _scalar_type(declared))


@functools.cache
def _scalar_type(declared: object) -> type[np.generic]:
    """Of an array's numbers: `declared` is `NDArray[np.int32]`, or (from numpy 2.5 on) the array type it stands for."""
    while arguments := get_args(declared):
        declared = arguments[-1]
    return cast("type[np.generic]", declared)


def decode(frame: bytes, message_type: type[MessageT]) -> MessageT:
    """A message from msgpack. Raises `CorruptData` for bytes that are none of this type."""
    with guarded("a message is not what was agreed on"):
        return msgspec.msgpack.decode(frame, type=message_type)


async def wait_until(changed: asyncio.Event, condition: Callable[[], bool]) -> None:
    """Wait until `condition()` holds. What changes it calls `changed.set()`, on the same loop."""
    while not condition():
        changed.clear()
        await changed.wait()


async def received(socket: zmq.asyncio.Socket, *, copy: bool = True) -> list[Any]:
    """Wait for a message's frames. A sign of life of an encrypted peer wakes a socket, and is no message."""
    while True:
        try:
            frames: list[Any] = await socket.recv_multipart(copy=copy)
        except zmq.Again:
            continue
        return frames


class PeerMonitor:
    """Learns from a socket's monitor, without polling, that the peer has connected, and that it is gone."""

    def __init__(self, socket: zmq.Socket[Any], *, refusals: bool = False, strangers: bool = False) -> None:
        """`socket` belongs to a `zmq.asyncio.Context`. Make it before the socket is bound or connected.

        With `refusals` a failed handshake ends the watch, too. With `strangers` others than the peer may come and go at
        a socket that listens: who does not get in is none.
        """
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        self._socket, self._has_strangers = socket, strangers
        also = (_REFUSALS if refusals else 0) | (zmq.Event.ACCEPTED if strangers else 0)
        self._monitor = cast(zmq.asyncio.Socket, socket.get_monitor_socket(events | also))

    async def watch(self, on_connected: Callable[[], None]) -> bool:
        """Wait for the peer to go away; whether it had been there, or else refused the handshake."""
        was_connected = False
        accepted, may_be_peer = set[int](), set[int]()  # connections: an event of a handshake does not say of which
        while True:
            message = await recv_monitor_message(self._monitor)
            event, connection = message["event"], message["value"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                was_connected = True
                may_be_peer |= accepted
                accepted.clear()
                on_connected()
            elif event == zmq.Event.ACCEPTED:
                accepted.add(connection)
            elif not self._has_strangers or may_be_peer == {connection}:
                return was_connected
            else:
                accepted.discard(connection)
                may_be_peer.discard(connection)

    def close(self) -> None:
        """Before the socket itself is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)


class Listener:
    """A socket at which any number of others ask (ZMQ's ROUTER). Make it on a running event loop.

    With keys only holders of the client's key get in, and its context is its own then: a context has one guard.
    """

    def __init__(self, address: str, keys: CurveKeys | None) -> None:
        """Options of the `socket` may be set until it is to `bind`."""
        self._address = address
        self._context = zmq.asyncio.Context() if keys else zmq.asyncio.Context.instance()
        self.socket = self._context.socket(zmq.ROUTER)
        if address.startswith("tcp:"):
            keep_alive(self.socket)
        self._end_guard: Callable[[], None] = lambda: None
        if keys:
            keys.apply_to_server(self.socket)
            self._end_guard = guard_all(self._context, keys)

    def bind(self) -> None:
        """Raises `zmq.ZMQError`, and is closed then."""
        try:
            self.socket.bind(self._address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens; port 0 is resolved to the chosen one."""
        return cast(bytes, self.socket.get(zmq.LAST_ENDPOINT)).decode()

    def close(self) -> None:
        """Answers that were sent before still arrive. Closing twice does nothing."""
        if self.socket.closed:
            return
        self.socket.close(linger=CLOSE_LINGER_MS)
        self._end_guard()
        if self._context is not zmq.asyncio.Context.instance():
            self._context.term()


class Conversation(ABC):
    """One end of a conversation of two processes, in whole messages and in order."""

    def __init__(self) -> None:
        self.failure: TransportError | None = None
        """What ended it, for good."""
        self.connected = False
        """Whether the other end is there."""

    @abstractmethod
    def send(self, message: bytes, body: mmap.mmap | None = None) -> None:
        """Hand a message on, in the end to the other end. Never waits. A `body` is not copied.

        Raises what ended the conversation, and `TransportError` where nothing more is taken.
        """

    @property
    def num_sent(self) -> int:
        """How many messages were handed on; 0 where nobody keeps them."""
        return 0

    def release(self, number: int) -> None:  # noqa: B027 - most keep nothing
        """Messages up to this one need not be kept for the other end any more."""

    @abstractmethod
    async def close(self) -> None:
        """Close this end; the other end is notified. Messages sent before still arrive. Closing twice does nothing."""


class OpenChannel(Protocol):
    """How an end of a conversation is opened, whatever carries it."""

    def __call__(
        self,
        address: str,
        *,
        bind: bool,
        on_message: Callable[[bytes], None],
        changed: asyncio.Event,
        peer: str,
        on_body: Callable[[memoryview], None] | None = None,
    ) -> Conversation:
        """On a running event loop; see `Channel`."""
        ...


class Channel(Conversation):
    """One end of a conversation over a socket. Make it on a running event loop.

    Every message is handed to `on_message` on the event loop, and `changed` is set after it, as it is when the other
    end connects or is gone. What ended the channel is then in `failure`: a `PeerGone`, or the `TransportError` that
    `on_message` raised. The other end's last messages come before that.

    Over TCP a peer whose host fell silent is gone after `SILENCE_MS`. Without keys the sockets neither authenticate nor
    encrypt: use TCP without them on networks that only the run's own hosts can reach.
    """

    def __init__(
        self,
        address: str,
        *,
        bind: bool,
        on_message: Callable[[bytes], None],
        changed: asyncio.Event,
        peer: str,
        on_body: Callable[[memoryview], None] | None = None,
        keys: CurveKeys | None = None,
        most_waiting: int | None = MOST_WAITING,
    ) -> None:
        """A message may bring one body of bytes, which `on_body` gets before the message;
        a channel without ends with `CorruptData` at the first body. With `keys` only a peer that holds them is one.
        `most_waiting` messages may wait to be sent, and as many to be read; None: any number."""
        super().__init__()
        self._on_message, self._on_body, self._changed, self._peer = on_message, on_body, changed, peer
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._monitor = PeerMonitor(self._socket, strangers=bind and keys is not None)
        if keys:
            (keys.apply_to_server if bind else keys.apply_to_client)(self._socket)
        if address.startswith("tcp:"):
            self._socket.set(zmq.HEARTBEAT_IVL, SILENCE_MS // 3)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._socket.set_hwm(most_waiting or 0)
        try:
            (self._socket.bind if bind else self._socket.connect)(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise TransportError(f"cannot open the socket {address} to the {peer}: {error}") from error
        self._tasks = {
            asyncio.create_task(self._deliver(), name=f"messages from the {peer}"),
            asyncio.create_task(self._watch(), name=f"watch over the {peer}"),
        }

    @property
    def address(self) -> str:
        """Of its own end, where it binds; port 0 is resolved to the chosen one."""
        return cast(bytes, self._socket.get(zmq.LAST_ENDPOINT)).decode()

    @override
    def send(self, message: bytes, body: mmap.mmap | None = None) -> None:
        """Hand a message to the socket, which keeps it until the other end takes it. Never waits.

        A `body` is not copied: it must stay as it is until the other end says that it has it.

        Raises what ended the channel, and `TransportError` when the most that may wait do (or when this end binds and
        the other is not `connected` yet).
        """
        if self.failure:
            raise self.failure
        try:
            frames = [message] if body is None else [message, body]
            sent = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=body is None)
            cast("asyncio.Future[object]", sent).result()
        except zmq.Again:
            raise TransportError(f"the {self._peer} takes no messages") from None

    @override
    async def close(self) -> None:
        self._end(PeerGone(f"the channel to the {self._peer} is closed"))
        await cancelled(*self._tasks)
        self._close_sockets()

    async def _deliver(self) -> None:
        """Waits for messages; ends with the channel."""
        while not self.failure:
            self._handle(await received(self._socket, copy=False))

    async def _watch(self) -> None:
        """Waits for the other end to connect, and then to go away; ends then."""
        await self._monitor.watch(self._connect)
        self.connected = False
        self._changed.set()
        self._drain()
        self._end(PeerGone(f"the {self._peer} ended or closed its end"))

    def _connect(self) -> None:
        self.connected = True
        self._changed.set()

    def _drain(self) -> None:
        """Deliver what had arrived before the other end went away."""
        while not self.failure:
            received = cast("asyncio.Future[list[zmq.Frame]]", self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            if received.exception():
                return
            self._handle(received.result())

    def _handle(self, frames: list[zmq.Frame]) -> None:
        message, *bodies = frames
        try:
            if len(bodies) > (self._on_body is not None):
                raise CorruptData(f"a message of the {self._peer} brings {len(bodies)} bodies")
            if bodies and self._on_body is not None:
                self._on_body(bodies[0].buffer.toreadonly())
            self._on_message(message.bytes)
        except TransportError as error:
            self._end(error)
        self._changed.set()

    def _end(self, error: TransportError) -> None:
        self.failure = self.failure or error
        self._changed.set()

    def _close_sockets(self) -> None:
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close(linger=CLOSE_LINGER_MS)

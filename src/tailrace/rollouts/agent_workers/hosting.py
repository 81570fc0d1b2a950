"""An agent worker's processes on another machine: a host there starts them, and passes on what either side says.

    orchestrator: HostClient ── Begin, ToProcess, WriteStacks, Kill ──► WorkerHost ── a pair of sockets ──► the process
                             ◄──── FromProcess, SocketClosed, Stopped, Ended ────

The host is beside the process as the orchestrator is otherwise: it has its exit report and its signals, and holds the
run's keys, which users' code never sees. Branches go by value. Whoever loses the other ends what it had of it. A host
that was never reached breaks no connection: it is lost once it does not say that a process which was killed has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, cast

import msgspec
from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.errors import CorruptData, TransportError
from tailrace.rollouts.agent_workers.branches import BranchData
from tailrace.rollouts.agent_workers.places import KILLED_S, LocalPlace, LocalProcess, ProcessEnd, WorkerProcess
from tailrace.rollouts.agent_workers.segments import Placed
from tailrace.transport.channels import Channel, Conversation, decode, encode, wait_until
from tailrace.transport.keys import CurveKeys

_LOOK_S = 1.0
"""Between two looks whether a process is stopped."""
_LEAVE_S = 2.0
"""From a process's end to that of its socket."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Begin(_Message, frozen=True):
    """Start a process; the one before has ended."""


class ToProcess(_Message, frozen=True):
    """Bytes for its socket."""

    data: bytes


class WriteStacks(_Message, frozen=True):
    """Let it write into its log where it stands."""


class Kill(_Message, frozen=True):
    """End it at once."""


class FromProcess(_Message, frozen=True):
    """Bytes from its socket."""

    data: bytes


class SocketClosed(_Message, frozen=True):
    """It has closed its socket."""


class Stopped(_Message, frozen=True):
    """Whether it does not run (SIGSTOP); told when that changes."""

    is_so: bool


class Ended(_Message, frozen=True):
    """It has ended, and nothing more comes from it."""

    end: ProcessEnd


ToHost: TypeAlias = Begin | ToProcess | WriteStacks | Kill
FromHost: TypeAlias = FromProcess | SocketClosed | Stopped | Ended


# ---- the orchestrator's side


class HostClient:
    """The conversation with one host. Make it on a running event loop."""

    def __init__(self, address: str, keys: CurveKeys | None, name: str) -> None:
        self._changed = asyncio.Event()
        self._process: HostedProcess | None = None
        self._is_lost = False
        self._was_heard = False
        """Whether it ever said anything: then its channel notices its end."""
        self._channel = Channel(
            address,
            bind=False,
            on_message=self._receive,
            changed=self._changed,
            peer=name,
            keys=keys,
            most_waiting=None,
        )

    @property
    def is_alive(self) -> bool:
        """Whether processes can be started there."""
        return self._channel.failure is None and not self._is_lost

    def begin(self, protocol: asyncio.Protocol) -> HostedProcess:
        """Start a process, once the one before has ended."""
        self._process = HostedProcess(self._channel, protocol, self._lose_unheard)
        self._channel.send(encode(Begin()))
        return self._process

    async def lost(self) -> str:
        """Wait for the conversation to end; why it did. The caller `lose`s the host then."""
        await wait_until(self._changed, lambda: self._channel.failure is not None)
        return str(self._channel.failure)

    def lose(self, why: str) -> None:
        """The host is gone, and its process with it."""
        self._is_lost = True
        if self._process is not None:
            self._process.lose(why)

    def _lose_unheard(self, why: str) -> None:
        """Does nothing where the host was reached: it may take its time to end a process."""
        if not self._was_heard:
            self.lose(why)

    async def close(self) -> None:
        """End the conversation; the host ends what it still has."""
        await self._channel.close()
        self.lose("its host was let go of")

    def _receive(self, message: bytes) -> None:
        self._was_heard = True
        if self._process is not None:
            self._process.receive(decode(message, FromHost))  # type: ignore[arg-type]


class HostedProcess(WorkerProcess):
    """A process of another machine."""

    def __init__(self, channel: Conversation, protocol: asyncio.Protocol, lose_host: Callable[[str], None]) -> None:
        """`lose_host` is called, with the reason, where the host does not say in time that it has ended."""
        self._channel, self._lose_host = channel, lose_host
        self._loop = asyncio.get_running_loop()
        self._transport = _HostTransport(channel, protocol)
        self._end: asyncio.Future[ProcessEnd] = self._loop.create_future()
        self._deadline: asyncio.TimerHandle | None = None
        """By which it has ended, once it was killed."""
        self._is_stopped = False
        protocol.connection_made(self._transport)

    @property
    @override
    def pid(self) -> None:
        return None

    @property
    @override
    def has_ended(self) -> bool:
        return self._end.done()

    @property
    @override
    def is_stopped(self) -> bool:
        return self._is_stopped

    @override
    async def ended(self) -> ProcessEnd:
        return await asyncio.shield(self._end)

    @override
    def kill(self) -> None:
        self._tell(Kill())
        if self._deadline is None and not self.has_ended:
            why = f"its host does not answer: within {KILLED_S:g} s it did not say that what was killed has ended"
            self._deadline = self._loop.call_later(KILLED_S, self._lose_host, why)

    @override
    def write_stacks(self) -> None:
        self._tell(WriteStacks())

    @override
    def read_branches(self, placed: Placed) -> list[BranchData]:
        raise CorruptData("branches are said to lie in shared memory, and there is none between two machines")

    @override
    def close(self) -> None:
        """It left nothing here."""

    def receive(self, message: FromHost) -> None:
        """What its host says."""
        match message:
            case FromProcess(data):
                self._transport.deliver(data)
            case SocketClosed():
                self._transport.end()
            case Stopped(is_so):
                self._is_stopped = is_so
            case Ended(end):
                self._finish(end)

    def lose(self, why: str) -> None:
        """Its host is gone; does nothing where its end was seen."""
        self._finish(ProcessEnd(1, lost_with=why))

    def _tell(self, message: ToHost) -> None:
        with suppress(TransportError):  # then it is lost
            self._channel.send(encode(message))

    def _finish(self, end: ProcessEnd) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._end.done():
            self._end.set_result(end)
        self._transport.end()


class _HostTransport(asyncio.Transport):
    """What a protocol writes goes to the host's process; it is told of the end once."""

    def __init__(self, channel: Conversation, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._channel, self._protocol = channel, protocol
        self._has_ended = False

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._has_ended:
            with suppress(TransportError):  # then its process is lost
                self._channel.send(encode(ToProcess(bytes(data))))

    @override
    def abort(self) -> None:
        self.end()

    @override
    def close(self) -> None:
        self.end()

    def deliver(self, data: bytes) -> None:
        """Bytes that came."""
        if not self._has_ended:
            self._protocol.data_received(data)

    def end(self) -> None:
        """No more comes. Ending twice does nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._protocol.connection_lost(None)


# ---- the host's side


class WorkerHost:
    """Listens at `address`, and starts processes for the orchestrator that connects. `serve` is its life.

    Make it on a running event loop, in a context for sockets that is guarded where there are keys.
    """

    def __init__(self, address: str, keys: CurveKeys | None, place: LocalPlace) -> None:
        self._place = place
        self._changed = asyncio.Event()
        self._channel = Channel(
            address,
            bind=True,
            on_message=self._receive,
            changed=self._changed,
            peer="orchestrator",
            keys=keys,
            most_waiting=None,
        )
        self._relay: _Relay | None = None
        self._process: LocalProcess | None = None
        self._is_killed = False
        """The process that runs, or is being started."""
        self._running: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens; port 0 is resolved to the chosen one."""
        return self._channel.address

    async def serve(self) -> None:
        """Until the orchestrator is gone. No process outlives this."""
        try:
            await wait_until(self._changed, lambda: self._channel.failure is not None)
        finally:
            if self._running is not None:
                await cancelled(self._running)
            await self._channel.close()

    def _receive(self, message: bytes) -> None:
        decoded: ToHost = decode(message, ToHost)  # type: ignore[arg-type]
        match decoded:
            case Begin():
                relay = self._relay = _Relay(self._tell)
                self._is_killed = False
                self._running = asyncio.create_task(self._run(relay), name="process")
            case ToProcess(data):
                if self._relay is not None:
                    self._relay.write(data)
            case WriteStacks():
                if self._process is not None:
                    self._process.write_stacks()
            case Kill():
                self._is_killed = True
                if self._process is not None:
                    self._process.kill()

    async def _run(self, relay: _Relay) -> None:
        """One process, from its start to its end."""
        try:
            process = await self._place.start(relay)
        except OSError as error:
            self._tell(Ended(ProcessEnd(1, lost_with=f"it cannot be started: {error}")))
            return
        self._process = process
        if self._is_killed:
            process.kill()
        watching = asyncio.create_task(self._watch(process), name="watch over the process")
        try:
            await process.ended()
            process.kill()  # the rest of its group
            await asyncio.wait({relay.ended}, timeout=_LEAVE_S)  # what it had sent before is passed on first
        finally:
            watching.cancel()
            process.kill()
            end = await process.ended()
            relay.abort()
            process.close()
            self._process = self._relay = None
        self._tell(Ended(end))

    async def _watch(self, process: LocalProcess) -> None:
        """Tell whenever it is stopped, and when it goes on."""
        was_stopped = False
        while True:
            await asyncio.sleep(_LOOK_S)
            if process.is_stopped != was_stopped:
                was_stopped = not was_stopped
                self._tell(Stopped(was_stopped))

    def _tell(self, message: FromHost) -> None:
        with suppress(TransportError):  # the orchestrator is gone, which ends this
            self._channel.send(encode(message))


class _Relay(asyncio.Protocol):
    """The host's end of the pair of sockets: bytes as they come, either way."""

    def __init__(self, tell: Callable[[FromHost], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Once the process has closed its end."""
        self._tell = tell
        self._transport: asyncio.Transport | None = None
        self._is_over = False
        self._early = bytearray()
        """For a process that is not there yet."""

    def write(self, data: bytes) -> None:
        """To the process."""
        if self._transport is None:
            self._early += data
        else:
            self._transport.write(data)

    def abort(self) -> None:
        """End at once, and tell nothing more."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(bytes(self._early))
        self._early.clear()

    @override
    def data_received(self, data: bytes) -> None:
        self._tell(FromProcess(data))

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)
        if not self._is_over:
            self._tell(SocketClosed())

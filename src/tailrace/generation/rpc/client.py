"""The client of a generator in another process.

    GeneratorClient ── DEALER ──→ ROUTER ── GeneratorServer ──→ Generator
      generate()       [call, frames...]       one task per call
                  ←── [reply, frames...] ──    chunks, then the whole completion; reports at intervals

Replies repeat the id of their call and come in any order. Cancelling an awaiting task sends an abort. Errors keep their
type. When the server's process dies, the socket's monitor fails every call with `EngineFailed` at once; a server that
lives and is stuck fails them by the deadline for progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import msgspec
import zmq
import zmq.asyncio

from tailrace.cancelling import cancelled
from tailrace.errors import CorruptData, EngineFailed, SettingsError, TransportError
from tailrace.generation.completions import WORK_AT_ONCE, tail, work_of
from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.generation.rpc import messages
from tailrace.generation.rpc.messages import AnyCall, AnyReply, Frames, GenerateCall
from tailrace.generation.rpc.outbox import Outbox
from tailrace.generation.rpc.progress import ProgressDeadline
from tailrace.generation.rpc.uploads import PIECE_BYTES, PIECES_IN_FLIGHT, Upload
from tailrace.records import (
    Completion,
    GenerationRequest,
    ModelStateDictRef,
    OnChunk,
    PayloadChunk,
    RolloutId,
)
from tailrace.transport.channels import CLOSE_LINGER_MS, PeerMonitor
from tailrace.transport.keys import CurveKeys, keep_alive
from tailrace.transport.payloads.accounts import PayloadAccounts
from tailrace.transport.weights.lending import LentWeights

_log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", bound=AnyReply)

LendWeights: TypeAlias = Callable[[ModelStateDictRef, str], AbstractContextManager[LentWeights]]
"""`ModelStateDictLender.lend`."""

BringWeights: TypeAlias = Callable[[ModelStateDictRef], Awaitable[ModelStateDictRef]]
"""Brings weights to where they are read; the reference that names them there."""

ReportListener: TypeAlias = Callable[[EngineStatistics, int], None]
"""Gets the engine's statistics, and how many requests of this client had been received by then."""

LeaveListener: TypeAlias = Callable[[str], None]
"""Gets the reason for which a generator asks to be let go."""

_COPIED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call whose reply is awaited."""

    call: AnyCall
    future: asyncio.Future[tuple[AnyReply, Frames]]
    on_chunk: OnChunk | None

    @property
    def owner(self) -> RolloutId | None:
        """Of what the reply brings."""
        return self.call.request.owner if isinstance(self.call, GenerateCall) else None

    def deliver(self, chunk: Completion) -> None:
        """A listener that raises fails its own call alone."""
        try:
            if self.on_chunk is not None:
                self.on_chunk(chunk)
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self.future.set_exception(error)


class GeneratorClient:
    """A generator of another process. Its `generate` is a `records.Generate`. Make it on a running event loop."""

    def __init__(
        self,
        address: str,
        *,
        name: str = "generator",
        keys: CurveKeys | None = None,
        progress_deadline_s: float | None = None,
        on_report: ReportListener | None = None,
        lend: LendWeights | None = None,
        bring: BringWeights | None = None,
        payloads: PayloadAccounts | None = None,
        by_value: bool = False,
        on_leaving: LeaveListener = lambda reason: None,
    ):
        """Connect to the server at `address`, which may come later. `name` is for messages.

        Without a `progress_deadline_s` a stuck server is waited for. With `lend` weights are sent over the socket.
        With `bring` they come to the server's machine, or to this one to be lent, by another way before.
        `payloads` records every payload that completions name, or, `by_value`, keeps only those that come along.
        """
        self._payloads, self._by_value = payloads, by_value
        self._name, self.address, self._on_report = name, address, on_report
        self._lend, self._bring = lend, bring
        self._on_leaving = on_leaving
        self._held = ""
        """Digest of the weights that the server was sent last."""
        self._ids = itertools.count()
        self._calls: dict[int, _OpenCall] = {}
        self._failure: Exception | None = None
        self._connected, self._failed = asyncio.Event(), asyncio.Event()
        self._progress = ProgressDeadline(progress_deadline_s or float("inf"), lambda: self._stuck(progress_deadline_s))
        self._last_seen = (-1, -1)
        # A plain socket in the run's context: one of `zmq.asyncio` makes futures and wakes a task for each message.
        self._socket: zmq.Socket[bytes] = zmq.Socket(zmq.asyncio.Context.instance(), zmq.DEALER)
        self._readable = asyncio.Event()
        self._outbox = Outbox[AnyCall](self._send)
        self._socket.set_hwm(0)
        if keys:
            keys.apply_to_client(self._socket)
        if address.startswith("tcp:"):
            keep_alive(self._socket)
        self._monitor = PeerMonitor(self._socket, refusals=True)
        self._socket.connect(address)
        self._tasks = [
            asyncio.create_task(self._receive(), name=f"replies of {name}"),
            asyncio.create_task(self._watch(), name=f"watch over {name}"),
        ]

    async def connected(self) -> None:
        """Wait until the server is there, or the client failed: `hello` raises why."""
        await self._connected.wait()

    async def hello(self, epoch: str = "", seed: int | None = None) -> messages.WelcomeReply:
        """Introduce this client, and wait for the engine to be built. From then on the server reports.

        With a `seed` the random streams of requests that bring none begin there.

        Raises what building the engine raised, and `SettingsError` for a server that is none, or not for us.
        """
        call = messages.HelloCall(
            call_id=next(self._ids),
            protocol=messages.PROTOCOL,
            epoch=epoch,
            brings_weights=self._lend is not None,
            seed=seed,
        )
        try:
            welcome, _ = await self._call(call, messages.WelcomeReply)
        except CorruptData as error:
            raise SettingsError(
                f"generator.connect: what listens at {self.address} is no generator: {error}"
            ) from error
        except EngineFailed as error:
            raise self._failure if isinstance(self._failure, SettingsError) else error from error
        return welcome

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Sample one completion. See `records.Generate`."""
        streamed = request.prefix_tokens

        def deliver(chunk: Completion) -> None:
            nonlocal streamed
            streamed += chunk.num_tokens
            if on_chunk is not None:
                on_chunk(chunk)

        call = GenerateCall(call_id=next(self._ids), request=request, wants_chunks=on_chunk is not None)
        with self._watched():
            reply, frames = await self._call(call, messages.CompletionReply, on_chunk=deliver)
        completion = reply.completion
        if completion.num_tokens > streamed:  # the last tokens come with the completion alone
            deliver(tail(completion, streamed))
        if not self._by_value:
            return completion
        known = () if request.prefix is None else request.prefix.routed_experts
        return replace(completion, routed_experts=known + await self._keep(reply, frames, request.owner))

    async def _keep(
        self, reply: messages.CompletionReply, frames: Frames, owner: RolloutId | None
    ) -> tuple[PayloadChunk, ...]:
        """Put payloads that came along into this side's store; the other side's references mean nothing here."""
        kept = []
        for chunk, array in messages.unpack_payloads(reply, frames):
            ref = await self._payloads.put(owner, array) if self._payloads is not None else None
            if ref is not None:
                kept.append(msgspec.structs.replace(chunk, ref=ref))
        return tuple(kept)

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        """Install a published model state dict; the version installed. See `Generator.load_model_state_dict`."""
        if self._bring is not None:
            ref = await self._bring(ref)
        if self._lend is not None:
            ref = await self._send_weights(ref, self._lend)
        call = messages.LoadCall(call_id=next(self._ids), ref=ref)
        with self._watched():
            reply, _ = await self._call(call, messages.LoadedReply)
        return reply.version

    async def _send_weights(self, ref: ModelStateDictRef, lend: LendWeights) -> ModelStateDictRef:
        """What changed, where the server holds weights that are known here, or else all; the server's reference."""
        if self._held:
            try:
                return await self._send_lent(ref, lend)
            except TransportError as error:
                _log.warning("%s is sent all weights again: %s", self._name, error)
        return await self._send_lent(ref, lend)

    async def _send_lent(self, ref: ModelStateDictRef, lend: LendWeights) -> ModelStateDictRef:
        """The server's reference. A few pieces are on their way at once, never the whole file."""
        held, self._held = self._held, ""
        lending = ExitStack()  # what a thread still enters after a cancellation ends with the last reference
        try:
            lent = await asyncio.to_thread(lending.enter_context, lend(ref, held))
            upload = Upload(num_bytes=len(lent.content), digest=lent.digest, base=lent.base)
            uri, pieces = "", range(0, upload.num_bytes, PIECE_BYTES)
            with self._watched():
                for first in range(0, len(pieces), PIECES_IN_FLIGHT):
                    window = pieces[first : first + PIECES_IN_FLIGHT]
                    uri = (await asyncio.gather(*(self._send_piece(lent, upload, offset) for offset in window)))[-1]
        finally:
            await asyncio.to_thread(lending.close)
        self._held = lent.digest
        return ModelStateDictRef(version=lent.version, uri=uri, num_bytes=upload.num_bytes)

    async def _send_piece(self, lent: LentWeights, upload: Upload, offset: int) -> str:
        piece = bytes(lent.content[offset : offset + PIECE_BYTES])
        call = messages.UploadCall(call_id=next(self._ids), version=lent.version, upload=upload, offset=offset)
        reply, _ = await self._call(call, messages.UploadedReply, [piece])
        return reply.uri

    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        """Hand requests, all or these, back to their callers as they are; see `Generator.interrupt`."""
        ids = None if request_ids is None else frozenset(request_ids)
        with self._watched():
            reply, _ = await self._call(
                messages.InterruptCall(call_id=next(self._ids), request_ids=ids), messages.InterruptedReply
            )
        return reply.requests

    @property
    def failure(self) -> Exception | None:
        """Why every call fails, once that is so."""
        return self._failure

    async def failed(self) -> Exception:
        """Wait until the client fails; why."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    def fail(self, failure: Exception) -> None:
        """Fail every outstanding and every later call with `EngineFailed` from `failure`. The first failure stays."""
        if self._failure is None:
            self._failure = failure
            self._connected.set()
            self._failed.set()
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(self._as_failed())

    async def close(self, reason: str = "") -> None:
        """End the server, for as long as that takes, and this client; when cancelled, this client alone."""
        try:
            with contextlib.suppress(EngineFailed):
                call = messages.CloseCall(call_id=next(self._ids), reason=reason)
                await self._call(call, messages.ClosedReply)
        finally:
            await self.leave()

    async def dismiss(self, reason: str, *, in_order: bool) -> None:
        """Tell the server to end, and why, without waiting for that; and end this client, as `leave` does."""
        if not self._socket.closed:
            self._outbox.put(messages.CloseCall(call_id=next(self._ids), reason=reason, in_order=in_order))
            self._outbox.flush()
        self.fail(EngineFailed(reason))
        await self.leave()

    async def leave(self) -> None:
        """End this client; the server stays. Leaving twice does nothing."""
        if self._socket.closed:
            return
        if self._failure is None:
            self._outbox.put(messages.LeaveCall(call_id=next(self._ids)))
            self._outbox.flush()
        self.fail(EngineFailed("the client is closed"))
        self._progress.close()
        await cancelled(*self._tasks)
        self._monitor.close()
        self._socket.close(linger=CLOSE_LINGER_MS)

    async def _call(
        self,
        call: AnyCall,
        expected: type[ReplyT],
        frames: Frames = (),
        on_chunk: OnChunk | None = None,
    ) -> tuple[ReplyT, Frames]:
        """Send a call and wait for its reply; an error that came back is raised."""
        if self._failure is not None:
            raise self._as_failed()
        future: asyncio.Future[tuple[AnyReply, Frames]] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = _OpenCall(call, future, on_chunk)
        try:
            self._outbox.put(call, frames)
            reply, arrays = await future
        except BaseException:  # cancelled, or `on_chunk` raised: the server need not go on
            if self._failure is None:
                self._outbox.put(messages.AbortCall(call_id=call.call_id))
            raise
        finally:
            del self._calls[call.call_id]
        if isinstance(reply, messages.ErrorReply):
            raise messages.unpack_error(reply)
        if not isinstance(reply, expected):
            raise CorruptData(f"{self._name} answered a {type(call).__name__} with a {type(reply).__name__}")
        return reply, arrays

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Work that must make progress."""
        self._progress.begin()
        try:
            yield
        finally:
            self._progress.end()

    def _send(self, message: bytes, frames: Frames) -> None:
        """Never waits: what is connected, or will be, takes any number of messages."""
        if self._socket.closed:
            return
        self._socket.send_multipart([message, *frames], zmq.NOBLOCK)
        if self._has_message():  # sending may have taken the signal that something came
            self._readable.set()

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    async def _receive(self) -> None:
        """Takes replies, many for each time that it is woken; ends with the client."""
        loop, descriptor = asyncio.get_running_loop(), self._socket.FD
        loop.add_reader(descriptor, self._readable.set)
        try:
            while True:
                self._readable.clear()
                await self._take_waiting()
                await self._readable.wait()
        except (CorruptData, EngineFailed) as error:
            self.fail(error)
        finally:
            loop.remove_reader(descriptor)

    async def _take_waiting(self) -> None:
        """Take the replies that have come, a millisecond of their readers' work for each turn of the loop."""
        taken = 0
        while (message := self._next_message()) is not None:
            header, frames = message
            for reply in messages.unpack_replies(header):
                self._handle(reply, frames)
                taken += work_of(reply.completion if isinstance(reply, messages.CompletionReply) else None)
                if taken >= WORK_AT_ONCE:
                    taken = 0
                    await asyncio.sleep(0)

    def _next_message(self) -> tuple[bytes, Frames] | None:
        """What has come, if anything. Small frames are copied; big ones stay where the socket received them."""
        if not self._has_message():  # asking costs a tenth of the error
            return None
        try:
            if not self._by_value:
                header, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                return header, frames
            first, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return first.bytes, [frame.bytes if len(frame) < _COPIED_BYTES else frame.buffer for frame in rest]

    def _handle(self, reply: AnyReply, frames: Frames) -> None:
        if isinstance(reply, messages.ReportReply):
            self._take_report(reply)
            return
        if isinstance(reply, messages.LeavingReply):
            self._on_leaving(reply.reason)
            return
        self._progress.progress()
        if isinstance(reply, messages.ErrorReply) and reply.call_id == messages.TO_ALL:
            raise messages.unpack_error(reply)
        call = self._calls.get(reply.call_id)
        if call is not None and call.future.done():
            call = None
        if isinstance(reply, messages.ChunkReply):
            if call is not None:
                call.deliver(reply.chunk)
            return
        if self._payloads is not None and isinstance(reply, messages.CompletionReply) and not self._by_value:
            self._payloads.record(call.owner if call else None, reply.completion.routed_experts)
        if call is not None:
            call.future.set_result((reply, frames))

    def _take_report(self, report: messages.ReportReply) -> None:
        """An engine that stepped or took weights makes progress, whether or not a chunk was full."""
        seen = (report.statistics.steps_total, report.statistics.policy_version)
        if seen != self._last_seen:
            self._last_seen = seen
            self._progress.progress()
        if self._on_report is not None:
            self._on_report(report.statistics, report.received)

    async def _watch(self) -> None:
        """Waits for the server to go away, or to refuse this client's keys."""
        if await self._monitor.watch(self._connected.set):
            self.fail(EngineFailed(f"the process of {self._name} ended or closed its socket"))
            return
        self.fail(
            SettingsError(
                f"generator.connect_key: what listens at {self.address} (generator.connect) refuses the connection: "
                "give the file that `tailrace serve --key` was given, or none where it was given none"
            )
        )

    def _stuck(self, deadline_s: float | None) -> None:
        self.fail(
            EngineFailed(
                f"{self._name} is stuck: no progress for {deadline_s:g} s (generator.router.progress_deadline_s)"
            )
        )

    def _as_failed(self) -> EngineFailed:
        error = EngineFailed(str(self._failure))
        error.__cause__ = self._failure
        return error

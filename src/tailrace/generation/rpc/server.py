"""The server of a generator's process: answers calls, streams tokens back, reports its load.

One task per call; the next report finds a client that went away and cancels its calls. A stand-alone server cannot be
closed by clients, and serves one run at a time, each from the first weights. One that joined a run is closed by that
run, and ends when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import zmq
import zmq.asyncio

from tailrace.errors import CorruptData, EngineFailed, LifecycleError, SettingsError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.rpc import messages
from tailrace.generation.rpc.messages import AnyCall, AnyReply, Frames, GenerateCall
from tailrace.generation.rpc.outbox import MOST_TOGETHER, Outbox
from tailrace.generation.rpc.uploads import UploadedModelStateDicts
from tailrace.models.identity import ModelIdentity
from tailrace.records import Completion, FinishReason, ModelStateDictRef
from tailrace.tracing.phases import phase
from tailrace.transport.channels import Listener, received
from tailrace.transport.keys import CurveKeys
from tailrace.transport.payloads.store import MemoryPayloadStore

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

OpenModelStateDict: TypeAlias = "Callable[[ModelStateDictRef], AbstractContextManager[Mapping[str, torch.Tensor]]]"
"""`ModelStateDictStore.open`."""


@dataclass(frozen=True, slots=True)
class StandAlone:
    """What a server needs that no run started."""

    new_generator: Callable[[], Generator] | None
    """For the next run: with the first weights and an empty cache. None where there can be no other run."""
    uploads: UploadedModelStateDicts
    keys: CurveKeys | None = None


@dataclass(slots=True)
class _Client:
    epoch: str
    received: int = 0


class GeneratorServer:
    """Lets clients at `address` use a generator. `serve` is its life.

    Raises `SettingsError` when the address is in use or cannot be bound.
    """

    def __init__(
        self,
        generator: Generator,
        open_model_state_dict: OpenModelStateDict,
        address: str,
        *,
        model: ModelIdentity | None = None,
        report_every_s: float = 0.5,
        stand_alone: StandAlone | None = None,
        forwarded: MemoryPayloadStore | None = None,
        keys: CurveKeys | None = None,
        has_joined: bool = False,
    ):
        """`forwarded` is the generator's payload store where clients do not see it: payloads then go along.

        With `keys`, or those of a `stand_alone` server, only clients that hold them are let in.
        `has_joined`: the first client is the run that it joined.
        """
        self.closing: messages.CloseCall | None = None
        """By which a client closed it."""
        self.used = asyncio.Event()
        """Once a client was let in."""
        self._has_joined = has_joined
        self._generator, self._open, self._forwarded = generator, open_model_state_dict, forwarded
        self._model = model or ModelIdentity("")
        self._report_every_s, self._stand_alone = report_every_s, stand_alone
        self._outboxes: dict[bytes, Outbox[AnyReply]] = {}
        self._listener = Listener(address, stand_alone.keys if stand_alone else keys)
        self._socket = self._listener.socket
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._listener.bind()
        except zmq.ZMQError as error:
            raise SettingsError(f"the generator cannot listen at {address} (--address): {error}") from error
        self._clients: dict[bytes, _Client] = {}
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._epoch = ""
        self._leaves_for = ""
        self._welcoming, self._uploading = asyncio.Lock(), asyncio.Lock()

    @property
    def generator(self) -> Generator:
        """The one that serves now."""
        return self._generator

    @property
    def address(self) -> str:
        """Where it listens; port 0 is resolved to the chosen one."""
        return self._listener.address

    async def serve(self) -> None:
        """Answer calls until a client asks to close; the generator is closed then, and every call answered.

        A stand-alone server answers until it is cancelled; its generator is closed then. Raises `EngineFailed` at once
        when the engine fails, after every client was sent the error.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._watching = group.create_task(self._watch(self._generator))
                reports = group.create_task(self._report())
                while await self._take(group):
                    pass
                reports.cancel()
                self._watching.cancel()
        except ExceptionGroup as group_error:
            raise (self._failure or group_error) from group_error
        finally:
            if self._stand_alone:
                await self._generator.close()
            self.close()

    def ask_to_leave(self, reason: str) -> None:
        """Tell every client, now and later ones, that this generator wants to go; they close it once they can."""
        self._leaves_for = reason
        for client in [*self._clients]:
            self._reply(client, messages.LeavingReply(call_id=messages.TO_ALL, reason=reason))

    async def _take(self, group: asyncio.TaskGroup) -> bool:
        """Wait for one message; false when it ends the server."""
        client, header, *frames = await received(self._socket)
        try:
            calls = messages.unpack_calls(header)
        except CorruptData:
            calls = self._valid_calls(client, header)
        return all(self._begin(client, call, frames, group) for call in calls)

    def _valid_calls(self, client: bytes, header: bytes) -> list[AnyCall]:
        """Those of a message's calls that are some; each of the others is answered with what is wrong with it."""
        calls, parts = list[AnyCall](), messages.parts_of(header)
        for part in parts if len(parts) <= MOST_TOGETHER else [header]:
            try:
                calls += messages.unpack_calls(part)
            except CorruptData as error:
                _logger.warning("a client sent no valid call: %s", error)
                self._reply(client, messages.pack_error(messages.call_id_of(part), error))
        return calls

    def _begin(self, client: bytes, call: AnyCall, frames: Frames, group: asyncio.TaskGroup) -> bool:
        """A call's task; false where the call ends the server."""
        if isinstance(call, messages.AbortCall):
            if (aborted := self._tasks.get((client, call.call_id))) is not None:
                aborted.cancel()
            return True
        if isinstance(call, messages.LeaveCall):
            self._drop(client)
            return True
        if isinstance(call, GenerateCall) and client in self._clients:
            self._clients[client].received += 1
        task = group.create_task(self._answer(client, call, frames))
        self._tasks[client, call.call_id] = task
        task.add_done_callback(lambda _: self._tasks.pop((client, call.call_id), None))
        return not isinstance(call, messages.CloseCall) or not self._is_closed_by_clients

    @property
    def _is_closed_by_clients(self) -> bool:
        return self._stand_alone is None or self._has_joined

    def _drop(self, client: bytes) -> None:
        """The client is gone: cancel its calls."""
        self._clients.pop(client, None)
        self._outboxes.pop(client, None)
        for (asked_by, _), task in self._tasks.items():
            if asked_by == client:
                task.cancel()

    async def _answer(self, client: bytes, call: AnyCall, frames: Frames) -> None:
        reply: AnyReply
        call_id, arrays = call.call_id, list[memoryview]()
        try:
            match call:
                case messages.HelloCall():
                    reply = await self._welcome(client, call)
                case GenerateCall():
                    reply, arrays = await self._generate(client, call)
                case messages.LoadCall(ref=ref):
                    version = await self._generator.load_model_state_dict(lambda: self._open(ref), ref.version)
                    reply = messages.LoadedReply(call_id=call_id, version=version)
                case messages.UploadCall():
                    reply = await self._upload(call, frames)
                case messages.InterruptCall():
                    count = await self._generator.interrupt(call.request_ids)
                    reply = messages.InterruptedReply(call_id=call_id, requests=count)
                case messages.CloseCall() if self._is_closed_by_clients:
                    self.closing = call
                    await self._generator.close()
                    reply = messages.ClosedReply(call_id=call_id)
                case _:
                    raise SettingsError("a generator that no run started is not ended by one (generator.connect)")
            self._reply(client, reply, arrays)
        except Exception as error:  # noqa: BLE001 - raised to the caller, with its type
            self._reply(client, messages.pack_error(call_id, error))

    def _reply(self, client: bytes, reply: AnyReply, arrays: Frames = ()) -> None:
        outbox = self._outboxes.get(client)
        if outbox is None:
            outbox = self._outboxes[client] = Outbox(partial(self._send, client))
        outbox.put(reply, arrays)

    def _send(self, client: bytes, message: bytes, arrays: Frames) -> None:
        """Never waits: any number of messages may be on their way."""
        if self._socket.closed:
            return
        try:
            sent = self._socket.send_multipart([client, message, *arrays], zmq.NOBLOCK, copy=not arrays)
            cast("asyncio.Future[object]", sent).result()
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(client)

    async def _welcome(self, client: bytes, call: messages.HelloCall) -> messages.WelcomeReply:
        if call.protocol != messages.PROTOCOL:
            raise SettingsError(
                f"generator.connect: the generator speaks version {messages.PROTOCOL} of the protocol, this run "
                f"version {call.protocol}: install the same version of Tailrace on both sides"
            )
        async with self._welcoming:  # whoever waits with another run finds this one let in
            if self._stand_alone:
                await self._begin_run(call, self._stand_alone)
            await self._generator.ready()
            self._clients.setdefault(client, _Client(call.epoch)).epoch = call.epoch
        if call.seed is not None:
            self._generator.reseed(call.seed)
        self.used.set()
        if self._leaves_for:
            self.ask_to_leave(self._leaves_for)
        return messages.WelcomeReply(
            call_id=call.call_id,
            protocol=messages.PROTOCOL,
            model=self._model,
            limits=self._generator.limits,
            statistics=self._generator.statistics(),
        )

    async def _begin_run(self, call: messages.HelloCall, stand_alone: StandAlone) -> None:
        """Another run than the last one begins with the engine's first weights, and one that brings weights of its own
        with an empty cache. Raises while the last one is connected.
        """
        self._tell_load()
        await asyncio.sleep(0)  # the end of this turn, in which that is sent
        if any(client.epoch != call.epoch for client in self._clients.values()):
            raise SettingsError(
                "generator.connect: the generator is in use by another run: stop that run, or start a generator "
                "of your own with `tailrace serve`"
            )
        if not await self._suits(call, stand_alone):
            await self._begin_anew(stand_alone)
        self._epoch = call.epoch

    async def _suits(self, call: messages.HelloCall, stand_alone: StandAlone) -> bool:
        """Whether a run may begin with the engine as it is.

        Not with one that could not be built for a run before: what was in the way may be gone by now.
        """
        try:
            await self._generator.ready()
        except Exception:
            if stand_alone.new_generator is None:
                raise
            return False
        known = self._generator.statistics()
        is_used = known.loads_total > 0 or (call.brings_weights and known.sampled_tokens_total > 0)
        return call.epoch == self._epoch or not is_used

    async def _begin_anew(self, stand_alone: StandAlone) -> None:
        if stand_alone.new_generator is None:
            raise SettingsError(
                "generator.connect: the generator served a run already, and ranks in lockstep cannot begin anew: start "
                "it again"
            )
        await self._generator.close()
        self._generator = stand_alone.new_generator()
        assert self._group is not None
        assert self._watching is not None
        self._watching.cancel()
        self._watching = self._group.create_task(self._watch(self._generator))

    async def _generate(self, client: bytes, call: GenerateCall) -> tuple[messages.CompletionReply, list[memoryview]]:
        def stream(chunk: Completion) -> None:
            if chunk.finish_reason is FinishReason.RUNNING:  # the last one's tokens go with the completion
                self._reply(client, messages.ChunkReply(call_id=call.call_id, chunk=chunk))

        with phase("request", track="requests", about={"request": call.request.request_id}):
            completion = await self._generator.generate(call.request, stream if call.wants_chunks else None)
        payloads = self._take_payloads(completion)
        return messages.CompletionReply(
            call_id=call.call_id, completion=completion, payload_frames=len(payloads)
        ), payloads

    def _take_payloads(self, completion: Completion) -> list[memoryview]:
        """The memory of payloads just put, from a store that the client does not see."""
        if (store := self._forwarded) is None:
            return []
        own = [chunk.ref for chunk in completion.routed_experts if chunk.ref is not None and store.holds(chunk.ref)]
        payloads = [store.open(ref).reshape(-1).view(np.uint8).data for ref in own]
        store.release(own)
        return payloads

    async def _upload(self, call: messages.UploadCall, frames: Frames) -> messages.UploadedReply:
        if self._stand_alone is None:
            raise SettingsError("this generator shares memory with its trainer and takes no weights over its socket")
        async with self._uploading:  # in the order in which the pieces came
            uri = await asyncio.to_thread(self._stand_alone.uploads.write, call.upload, call.offset, bytes(frames[0]))
        return messages.UploadedReply(call_id=call.call_id, uri=uri)

    async def _watch(self, generator: Generator) -> None:
        """Waits for the engine to fail, which may be idle, and ends the server with that."""
        self._failure = await generator.failed()
        for client in [*self._clients]:
            self._reply(client, messages.pack_error(messages.TO_ALL, self._failure))
        raise self._failure

    async def _report(self) -> None:
        """Waits between reports; ends with the server. Raises `LifecycleError` once a run that it joined is gone."""
        while True:
            await asyncio.sleep(self._report_every_s)
            self._tell_load()
            if self._has_joined and self.used.is_set() and not self._clients:
                self._failure = LifecycleError("the run that this generator joined is gone")
                raise self._failure

    def _tell_load(self) -> None:
        """To every client, at the end of this turn; one that went away is dropped then. Nothing without an engine."""
        with contextlib.suppress(EngineFailed):
            statistics = self._generator.statistics()
            for client, state in [*self._clients.items()]:
                report = messages.ReportReply(call_id=messages.TO_ALL, statistics=statistics, received=state.received)
                self._reply(client, report)

    def close(self) -> None:
        """Stop listening. `serve` does so at its end. Closing twice does nothing."""
        if self._socket.closed:
            return
        for outbox in [*self._outboxes.values()]:
            outbox.flush()
        self._listener.close()

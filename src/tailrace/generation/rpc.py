"""A generator in another process, as if it were here.

    GeneratorClient ── DEALER ──→ ROUTER ── GeneratorServer ──→ Generator
      generate()       [call, prompt, ...]      one task per call
                  ←── [reply, arrays...] ──

Every call has an id, every reply repeats it; replies come in any order. Cancelling an awaiting task sends an abort.
Errors keep their type on the way. When the server's process dies the kernel closes its socket, the socket's monitor
tells, and every outstanding and every later call fails with `EngineFailed`, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tailrace.errors import CorruptData, EngineFailed
from tailrace.generation.engines.protocol import EngineStatistics
from tailrace.generation.generator import Generator
from tailrace.generation.rpc_messages import (
    AbortCall,
    AnyCall,
    AnyReply,
    CloseCall,
    ClosedReply,
    CompletionReply,
    ErrorReply,
    Frames,
    GenerateCall,
    LoadCall,
    LoadedReply,
    StatisticsCall,
    StatisticsReply,
    pack_array,
    pack_completion,
    pack_error,
    unpack_call,
    unpack_completion,
    unpack_error,
    unpack_reply,
)
from tailrace.records import Completion, Int32Array, ModelStateDictRef, SamplingParams, as_token_ids
from tailrace.transport.channels import CLOSE_LINGER_MS, encode

if TYPE_CHECKING:
    import torch

OpenModelStateDict: TypeAlias = "Callable[[ModelStateDictRef], AbstractContextManager[Mapping[str, torch.Tensor]]]"
"""`ModelStateDictStore.open`."""


class GeneratorServer:
    """Lets clients at `address` (ipc://...) use a generator. `serve` is its life."""

    def __init__(self, generator: Generator, open_model_state_dict: OpenModelStateDict, address: str):
        self._generator = generator
        self._open = open_model_state_dict
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer calls until a client asks to close; the generator is closed then, and every call answered."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    client, header, *frames = await self._socket.recv_multipart()
                    call = unpack_call(header)
                    if isinstance(call, AbortCall):
                        self._abort(client, call)
                        continue
                    task = group.create_task(self._answer(client, call, frames))
                    self._tasks[client, call.call_id] = task
                    task.add_done_callback(partial(self._forget, (client, call.call_id)))
                    if isinstance(call, CloseCall):
                        break
        finally:
            self._socket.close(linger=CLOSE_LINGER_MS)

    def _abort(self, client: bytes, call: AbortCall) -> None:
        task = self._tasks.get((client, call.call_id))
        if task is not None:
            task.cancel()

    def _forget(self, key: tuple[bytes, int], _: asyncio.Task[None]) -> None:
        del self._tasks[key]

    async def _answer(self, client: bytes, call: AnyCall, frames: Frames) -> None:
        try:
            reply, arrays = await self._result(call, frames)
        except Exception as error:  # noqa: BLE001 - told to the caller, with its type
            reply, arrays = pack_error(call.call_id, error), []
        await self._socket.send_multipart([client, encode(reply), *arrays])

    async def _result(self, call: AnyCall, frames: Frames) -> tuple[AnyReply, list[bytes]]:
        match call:
            case GenerateCall():
                header, arrays = pack_completion(await self._generate(call, frames))
                return CompletionReply(call_id=call.call_id, completion=header), arrays
            case LoadCall():
                ref = call.ref
                version = await self._generator.load_model_state_dict(lambda: self._open(ref), ref.version)
                return LoadedReply(call_id=call.call_id, version=version), []
            case StatisticsCall():
                await self._generator.ready()
                return StatisticsReply(call_id=call.call_id, statistics=self._generator.statistics()), []
            case _:
                await self._generator.close()
                return ClosedReply(call_id=call.call_id), []

    async def _generate(self, call: GenerateCall, frames: Frames) -> Completion:
        return await self._generator.generate(
            as_token_ids(memoryview(frames[0]).cast("i")),
            sampling=call.sampling,
            request_id=call.request_id,
            session_id=call.session_id,
            group_id=call.group_id,
            prefix=None if call.prefix is None else unpack_completion(call.prefix, frames[1:]),
        )


class GeneratorClient:
    """A generator of another process. Implements `records.Generate`. Make it on a running event loop."""

    def __init__(self, address: str, *, name: str = "generator"):
        """Connect to the server at `address`, which may come later. `name` is for messages."""
        self._name = name
        self._ids = itertools.count()
        self._replies: dict[int, asyncio.Future[tuple[AnyReply, Frames]]] = {}
        self._failure: Exception | None = None
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._monitor = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._socket.connect(address)
        self._tasks = [
            asyncio.create_task(self._receive(), name=f"replies of {name}"),
            asyncio.create_task(self._watch(), name=f"watch over {name}"),
        ]

    async def generate(
        self,
        prompt_token_ids: Int32Array,
        *,
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        group_id: str,
        prefix: Completion | None = None,
    ) -> Completion:
        """Sample one completion; see `Generator.generate`."""
        header, arrays = (None, []) if prefix is None else pack_completion(prefix)
        call = GenerateCall(
            call_id=next(self._ids),
            request_id=request_id,
            session_id=session_id,
            group_id=group_id,
            sampling=sampling,
            prefix=header,
        )
        reply, frames = await self._call(call, [pack_array(as_token_ids(prompt_token_ids)), *arrays])
        if not isinstance(reply, CompletionReply):
            raise self._unexpected(call, reply)
        return unpack_completion(reply.completion, frames)

    __call__ = generate

    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        """Install a published model state dict; the version installed. See `Generator.load_model_state_dict`."""
        call = LoadCall(call_id=next(self._ids), ref=ref)
        reply, _ = await self._call(call)
        if not isinstance(reply, LoadedReply):
            raise self._unexpected(call, reply)
        return reply.version

    async def statistics(self) -> EngineStatistics:
        """The engine's statistics, once it is built: also the way to wait for that. Raises what building it raised."""
        call = StatisticsCall(call_id=next(self._ids))
        reply, _ = await self._call(call)
        if not isinstance(reply, StatisticsReply):
            raise self._unexpected(call, reply)
        return reply.statistics

    def fail(self, failure: Exception) -> None:
        """Fail every outstanding and every later call with `EngineFailed` from `failure`. The first failure stays."""
        if self._failure is None:
            self._failure = failure
        for future in self._replies.values():
            if not future.done():
                future.set_exception(self._failed())

    async def close(self) -> None:
        """End the server, for as long as that takes, and this client; when cancelled, this client alone."""
        try:
            with contextlib.suppress(EngineFailed):
                await self._call(CloseCall(call_id=next(self._ids)))
        finally:
            self.fail(EngineFailed("the client is closed"))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=CLOSE_LINGER_MS)

    async def _call(self, call: AnyCall, frames: Frames = ()) -> tuple[AnyReply, Frames]:
        """Send a call and wait for its reply; an error that came back is raised."""
        if self._failure is not None:
            raise self._failed()
        future: asyncio.Future[tuple[AnyReply, Frames]] = asyncio.get_running_loop().create_future()
        self._replies[call.call_id] = future
        try:
            await self._socket.send_multipart([encode(call), *frames])
            reply, arrays = await future
        finally:
            del self._replies[call.call_id]
            if future.cancelled() and self._failure is None:
                self._socket.send_multipart([encode(AbortCall(call_id=call.call_id))])
        if isinstance(reply, ErrorReply):
            raise unpack_error(reply)
        return reply, arrays

    async def _receive(self) -> None:
        """Waits for replies; ends with the client."""
        try:
            while True:
                header, *frames = await self._socket.recv_multipart()
                reply = unpack_reply(header)
                future = self._replies.get(reply.call_id)
                if future is not None and not future.done():
                    future.set_result((reply, frames))
        except CorruptData as error:
            self.fail(error)

    async def _watch(self) -> None:
        """Waits for the server to go away."""
        await recv_monitor_message(self._monitor)
        self.fail(EngineFailed(f"the process of {self._name} ended or closed its socket"))

    def _failed(self) -> EngineFailed:
        error = EngineFailed(str(self._failure))
        error.__cause__ = self._failure
        return error

    def _unexpected(self, call: AnyCall, reply: AnyReply) -> CorruptData:
        return CorruptData(f"{self._name} answered a {type(call).__name__} with a {type(reply).__name__}")

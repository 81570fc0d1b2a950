"""The generator: one thread that owns an engine, and the coroutines that talk to it.

    event loop                                   engine's thread
    generate()               ──→ inbox ──→       arrivals → engine.add / engine.abort
    load_model_state_dict()  ──→ inbox ──→       between two steps: the newest wins
    futures  ←── one call_soon_threadsafe ──     engine.step()

The engine is built, stepped and closed in that very thread (OpenMP settings are per thread, and some engines mind).
Per iteration the thread takes one decision: close, before load, before step, before waiting for the inbox.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from tailrace.errors import EngineFailed, RequestRefused
from tailrace.generation.engines.protocol import Engine, EngineStatistics, SampledTokens
from tailrace.generation.inbox import Action, Call, ChunkListener, Inbox, Load, TensorsOpener
from tailrace.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupId,
    Int32Array,
    RequestId,
    SamplingParams,
    SessionId,
    as_token_ids,
)
from tailrace.transport.model_state_dicts import ModelStateDict

_log = logging.getLogger(__name__)


class Generator:
    """Serves `generate` from one engine. Implements `records.Generate` by `generate`, and by calling it.

    >>> async def example(factory):  # doctest: +SKIP
    ...     async with Generator(factory) as generator:
    ...         return await generator.generate(prompt, sampling=SamplingParams(), request_id="1",
    ...                                         session_id="a", group_id="g")
    """

    def __init__(self, engine_factory: Callable[[], Engine]):
        """Start the thread, which builds the engine; `ready` tells when it is, or why it never will be."""
        self._inbox = Inbox()
        self._worker = _Worker(engine_factory, self._inbox)
        self._thread = threading.Thread(target=self._worker.run, name="tailrace-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Generator:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ready(self) -> None:
        """Wait until the engine is built. Raises what building it raised (`ModelError`, ...)."""
        await asyncio.to_thread(self._worker.built.wait)
        if self._worker.build_error is not None:
            raise self._worker.build_error

    async def generate(
        self,
        prompt_token_ids: Int32Array,
        *,
        sampling: SamplingParams,
        request_id: str,
        session_id: str,
        group_id: str,
        prefix: Completion | None = None,
        on_chunk: ChunkListener | None = None,
    ) -> Completion:
        """Sample one completion, `prefix` included where one is given.

        `on_chunk` hears of tokens while the request goes on (those of the last chunk come with the completion alone).
        Raises `RequestRefused` for an impossible request and `EngineFailed` once the engine is gone. Cancelling the
        awaiting task aborts the request.
        """
        loop = asyncio.get_running_loop()
        request = GenerationRequest(
            request_id=RequestId(request_id),
            session_id=SessionId(session_id),
            group_id=GroupId(group_id),
            prompt_token_ids=as_token_ids(prompt_token_ids),
            sampling=sampling,
            prefix=prefix,
        )
        call = Call(request, loop, loop.create_future(), on_chunk)
        self._inbox.put_call(call)
        try:
            return await call.future
        finally:
            if call.future.cancelled():
                self._inbox.put_abort(call)

    __call__ = generate

    async def load_model_state_dict(self, tensors_opener: TensorsOpener, version: int) -> int:
        """Install new weights between two steps, requests going on; the version installed, which may be newer.

        Overlapping calls install only the newest of their versions. Raises what opening or installing raised, and then
        the old version stays.
        """
        loop = asyncio.get_running_loop()
        load = Load(tensors_opener, version, loop, loop.create_future())
        self._inbox.put_load(load)
        return await load.future

    def statistics(self) -> EngineStatistics:
        """The engine's, as of its last step. Raises `EngineFailed` when it was never built."""
        if self._worker.statistics is None:
            raise EngineFailed("the engine is not built yet")
        return self._worker.statistics

    async def close(self) -> None:
        """End the thread after its present step; what is outstanding fails with `EngineFailed`."""
        self._inbox.close()
        await asyncio.to_thread(self._thread.join)


class _Worker:
    """All that happens in the engine's thread."""

    def __init__(self, engine_factory: Callable[[], Engine], inbox: Inbox):
        self._engine_factory = engine_factory
        self._inbox = inbox
        self._calls: dict[str, Call] = {}
        self.built = threading.Event()
        self.build_error: Exception | None = None
        self.statistics: EngineStatistics | None = None

    def run(self) -> None:
        """Build, serve, close; a failure anywhere fails every outstanding and every later call."""
        try:
            engine = self._engine_factory()
        except Exception as error:  # noqa: BLE001 - told to every caller
            _log.debug("the engine could not be built", exc_info=True)
            self.build_error = error
            self._fail(error, "could not be built")
            self.built.set()
            return
        self.statistics = engine.statistics()
        self.built.set()
        try:
            self._serve(engine)
            engine.close()
        except Exception as error:  # noqa: BLE001 - told to every caller
            _log.error("the engine failed", exc_info=True)
            self._fail(error, "failed")
        else:
            self._fail(None, "is closed")

    def _serve(self, engine: Engine) -> None:
        while True:
            action = self._inbox.next_action(engine_has_work=engine.has_work)
            if action is Action.CLOSE:
                return
            if action is Action.LOAD:
                self._load(engine)
            else:
                self._hand_over(engine)
                chunks = engine.step()
                self.statistics = engine.statistics()
                self._resolve(chunks)

    def _hand_over(self, engine: Engine) -> None:
        arrivals = self._inbox.take_arrivals()
        for call in arrivals.calls:
            try:
                engine.add(call.request)
            except RequestRefused as error:
                _post(call.loop, _set_error, call.future, error)
            else:
                self._calls[call.request.request_id] = call
        for call in arrivals.aborted:
            if self._calls.get(call.request.request_id) is call:
                engine.abort(call.request.request_id)

    def _load(self, engine: Engine) -> None:
        """Install the newest; where that fails its caller is told, and the next newest is tried."""
        loads = self._inbox.take_loads()
        installed = engine.statistics().policy_version
        while loads and loads[-1].version >= installed:
            load = loads.pop()
            try:
                with load.opener() as tensors:
                    # a store may lend newer weights than those asked for: their tokens are of the newer policy
                    version = tensors.version if isinstance(tensors, ModelStateDict) else load.version
                    engine.load_model_state_dict(tensors, version)
            except Exception as error:  # noqa: BLE001 - told to its caller; the old weights are whole
                _post(load.loop, _set_error, load.future, error)
            else:
                installed = version
                loads.append(load)
                break
        self.statistics = engine.statistics()
        for load in loads:
            _post(load.loop, _set_result, load.future, installed)

    def _resolve(self, chunks: list[SampledTokens]) -> None:
        """Hand chunks and completions to their event loops: one wake-up per loop, however many there are."""
        results: dict[asyncio.AbstractEventLoop, list[tuple[Call, SampledTokens | Completion]]] = defaultdict(list)
        for chunk in chunks:
            call = self._calls[chunk.request_id]
            call.chunks.append(chunk)
            if chunk.finish_reason is not None:
                del self._calls[chunk.request_id]
                results[call.loop].append((call, _completion(call, chunk.finish_reason)))
            elif call.on_chunk is not None:
                results[call.loop].append((call, chunk))
        for loop, deliveries in results.items():
            _post(loop, _deliver, deliveries)

    def _fail(self, error: Exception | None, what: str) -> None:
        reason = "" if error is None else f": {type(error).__name__}: {error}"

        def failure() -> EngineFailed:
            failed = EngineFailed(f"the engine {what}{reason}")
            failed.__cause__ = error
            return failed

        arrivals, loads = self._inbox.fail(failure)
        for call in (*self._calls.values(), *arrivals.calls):
            _post(call.loop, _set_error, call.future, failure())
        for load in loads:
            _post(load.loop, _set_error, load.future, failure())
        self._calls.clear()


def _completion(call: Call, finish_reason: FinishReason) -> Completion:
    """The chunks in one piece, after the prefix where there was one."""
    prefix, chunks = call.request.prefix, call.chunks
    parts: list[SampledTokens | Completion] = [*chunks] if prefix is None else [prefix, *chunks]
    if len(parts) == 1:
        token_ids, logprobs, versions = parts[0].token_ids, parts[0].logprobs, parts[0].policy_versions
    else:
        token_ids = np.concatenate([part.token_ids for part in parts])
        logprobs = np.concatenate([part.logprobs for part in parts])
        versions = np.concatenate([part.policy_versions for part in parts])
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=finish_reason,
        metrics=chunks[-1].metrics,
    )


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    """Run `callback` on the loop; on a loop that was closed there is nobody left to tell."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _deliver(results: list[tuple[Call, SampledTokens | Completion]]) -> None:
    for call, result in results:
        if call.future.done():
            continue
        if isinstance(result, Completion):
            call.future.set_result(result)
        elif call.on_chunk is not None:
            call.on_chunk(result)


def _set_result(future: asyncio.Future[int], result: int) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Completion] | asyncio.Future[int], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

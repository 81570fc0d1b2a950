"""The generator: one thread that owns an engine, another that stages weights, and the coroutines that talk to them.

    event loop                                   engine's thread
    generate()               ──→ inbox ──→       arrivals → engine.add / engine.abort
    interrupt()              ──→ inbox ──→       engine.abort; what was sampled goes back
    load_model_state_dict()  ──→ staging ──→     engine.load_model_state_dict, between two steps
    futures  ←── one call_soon_threadsafe ──     engine.step(); many are handed out with pauses

One thread builds, steps and closes the engine: OpenMP settings are per thread, and some engines require it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from tailrace.errors import EngineFailed, TailraceError
from tailrace.generation.decisions import DEFAULT_WEIGHT_POLICY, WeightPolicy
from tailrace.generation.engine_thread.handover import Waiter
from tailrace.generation.engine_thread.inbox import Inbox, Interruption, RecordedExperts
from tailrace.generation.engine_thread.loop import EngineLoop, fail_inbox
from tailrace.generation.engine_thread.payload_putter import PayloadPutter
from tailrace.generation.engine_thread.staging import LoadCall, Stager, TensorsOpener
from tailrace.generation.engines.protocol import Engine, EngineLimits, EngineStatistics
from tailrace.records import Completion, GenerationRequest, OnChunk
from tailrace.transport.payloads.store import PayloadStore

_log = logging.getLogger(__name__)

_STAGING_END_S = 2.0
"""How long closing waits for a model state dict that is being opened."""

_STUCK_END_S = 2.0
"""How long closing waits for a step of an engine that failed from outside, which may never end."""


class Generator:
    """Serves `generate` from one engine. Its `generate` is a `records.Generate`.

    >>> async def example(factory, request):  # doctest: +SKIP
    ...     async with Generator(factory) as generator:
    ...         return await generator.generate(request, on_chunk=lambda chunk: print(chunk.token_ids))
    """

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        weights: WeightPolicy = DEFAULT_WEIGHT_POLICY,
        *,
        payloads: PayloadStore | None = None,
    ) -> None:
        """Start the thread, which builds the engine; `ready` waits for that.

        Routed experts that the engine recorded are left in `payloads`, and forgotten where there is none.
        """
        self._inbox = Inbox()
        self._payloads = PayloadPutter(payloads)
        self._stager = Stager(self._inbox)
        self._worker = _Worker(engine_factory, self._inbox, self._stager, weights)
        context = contextvars.copy_context()  # phases of the engine's thread are recorded
        self._thread = threading.Thread(
            target=context.run, args=(self._worker.run,), name="tailrace-engine", daemon=True
        )
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

    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Sample one completion. See `records.Generate`."""
        recorded: list[RecordedExperts] = []
        completion = await self._inbox.generate(request, on_chunk, recorded)
        if not recorded:
            return completion
        return replace(completion, routed_experts=completion.routed_experts + await self._payloads.put(recorded))

    async def load_model_state_dict(self, tensors_opener: TensorsOpener, version: int) -> int:
        """Install new weights between two steps, requests going on; the version installed, which may be newer.

        They are opened and prepared in a thread of their own, one load after the other. Raises what failed; the old
        version goes on serving. Cancelling withdraws the load, unless the engine is installing it.
        """
        load = LoadCall(tensors_opener, version, Waiter.on_current_loop())
        self._stager.put(load)
        try:
            return await load.waiter.future
        finally:
            if load.waiter.future.cancelled():
                self._stager.withdraw(load)

    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        """Hand requests, all or these, back to their callers as they are; how many there were.

        Their completions say `ABORTED` and are the `prefix` of a request that goes on.
        """
        waiter: Waiter[int] = Waiter.on_current_loop()
        ids = None if request_ids is None else frozenset(request_ids)
        self._inbox.put_interruption(Interruption(waiter, ids))
        return await waiter.future

    def reseed(self, seed: int) -> None:
        """Begin the random streams of requests that bring no seed, those of later calls at least, at this one."""
        self._inbox.put_seed(seed)

    @property
    def limits(self) -> EngineLimits:
        """Of the engine. Raises `EngineFailed` when it was never built."""
        return self._loop.limits

    def statistics(self) -> EngineStatistics:
        """The engine's, as of the last step, with the loads. Raises `EngineFailed` when it was never built."""
        return msgspec.structs.replace(self._loop.statistics, loads_total=self._stager.loads_total)

    @property
    def _loop(self) -> EngineLoop:
        if self._worker.loop is None:
            raise EngineFailed("the engine is not built yet")
        return self._worker.loop

    async def failed(self) -> Exception:
        """Wait for an engine that was built to end by itself, idle or not; why it did."""
        waiter: Waiter[Exception] = Waiter.on_current_loop()
        self._worker.tell_failure(waiter)
        return await waiter.future

    async def close(self) -> None:
        """End the thread after its present step; what is outstanding fails with `EngineFailed`."""
        self._inbox.close()
        await asyncio.to_thread(self._thread.join, _STUCK_END_S if self._worker.is_broken else None)
        await asyncio.to_thread(self._stager.join, _STAGING_END_S)
        await self._payloads.close()


class _Worker:
    """The engine's thread: builds the engine, runs the loop, reports the end."""

    def __init__(
        self, engine_factory: Callable[[], Engine], inbox: Inbox, stager: Stager, weights: WeightPolicy
    ) -> None:
        self._engine_factory, self._weights = engine_factory, weights
        self._inbox, self._stager = inbox, stager
        self.built = threading.Event()
        self.build_error: Exception | None = None
        self.loop: EngineLoop | None = None
        self.is_broken = False
        """Whether it was another thread that found the engine's end."""
        self._failing = threading.Lock()
        self._has_ended = False
        self._failure: Callable[[], EngineFailed] | None = None
        """Of an engine that was built."""
        self._to_tell: list[Waiter[Exception]] = []

    def run(self) -> None:
        """Build, serve, close; a failure anywhere fails every outstanding and every later call."""
        try:
            engine = self._engine_factory()
            loop = EngineLoop(engine, self._inbox, self._weights)
        except Exception as error:  # noqa: BLE001 - raised to every caller
            _log.log(
                logging.DEBUG if isinstance(error, TailraceError) else logging.ERROR,
                "the engine could not be built",
                exc_info=True,
            )
            self.build_error = error
            self._fail(error, "could not be built")
            self.built.set()
            return
        self.loop = loop
        self._stager.start(loop.statistics.policy_version, engine.prepare)
        engine.watch(self._broke)
        self.built.set()
        try:
            loop.run()
            engine.close()
        except Exception as error:  # noqa: BLE001 - raised to every caller
            if not self.is_broken:
                _log.error("the engine failed", exc_info=True)
            self._fail(error, "failed")
        else:
            self._fail(None, "is closed")

    def tell_failure(self, waiter: Waiter[Exception]) -> None:
        """Resolve it once the engine, which was built, failed."""
        with self._failing:
            failure = self._failure
            if failure is None:
                self._to_tell.append(waiter)
        if failure is not None:
            waiter.resolve(failure())

    def _broke(self, error: EngineFailed) -> None:
        """From any thread: the engine's own may be idle, or in a step that will never end."""
        _log.error("the engine failed: %s", error)
        self.is_broken = True
        self._fail(error, "failed")
        self._inbox.close()

    def _fail(self, error: Exception | None, what: str) -> None:
        """The first failure stays."""
        reason = "" if error is None else f": {type(error).__name__}: {error}"

        def failure() -> EngineFailed:
            failed = EngineFailed(f"the engine {what}{reason}")
            failed.__cause__ = error
            return failed

        with self._failing:
            if self._has_ended:
                return
            self._has_ended = True
            if error is not None and self.loop is not None:
                self._failure = failure
        if self.loop is not None:
            self.loop.fail(failure)
        else:
            fail_inbox(self._inbox, failure)
        self._stager.fail(failure)
        if self._failure is not None:
            for waiter in self._to_tell:
                waiter.resolve(failure())

"""A replica, modelled: the router's client over an `EngineModel` and one timer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from tailrace.errors import EngineFailed
from tailrace.generation.completions import as_chunk, assembled
from tailrace.generation.engines.protocol import EngineStatistics, SampledTokens
from tailrace.generation.router.replica import ReplicaClient
from tailrace.records import Completion, FinishReason, GenerationRequest, ModelStateDictRef, OnChunk, RequestId
from tailrace.simulation.engine_model import EngineModel, Sequence
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.settings import EngineSettings

CHUNK_TOKENS = 32
"""Tokens are streamed in chunks; what a replica sampled since the last one is lost when it dies."""

_LOGPROB = -1.0


@dataclass(slots=True, eq=False)
class _Call:
    """One request on the replica."""

    request: GenerationRequest
    future: asyncio.Future[Completion]
    limit: int
    """Tokens of the completion at most, prefix included."""
    on_chunk: OnChunk | None


class ModelledReplica(ReplicaClient):
    """The router's client, modelled. Make it on a running event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        lengths: LengthSource,
        on_report: Callable[[EngineStatistics, int], None],
        *,
        load_s: float,
        load_holds: bool,
    ) -> None:
        """Loading weights takes `load_s` seconds, during which the engine stands still if `load_holds`."""
        self._loop = asyncio.get_running_loop()
        self._report_every_s = settings.router.report_every_s
        self._reporting: asyncio.TimerHandle | None = None
        self._lengths, self._on_report = lengths, on_report
        self._load_s, self._load_holds = load_s, load_holds
        self.engine = EngineModel(settings)
        self._calls: dict[str, _Call] = {}
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._failed: asyncio.Future[Exception] = self._loop.create_future()

    # --- what the router asks ------------------------------------------------------------------------------------

    @property
    @override
    def failure(self) -> Exception | None:
        return self._failure

    @override
    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """The length is that of the whole completion, whatever was interrupted."""
        self._require_alive()
        self._advance()
        request_id, before, most = request.request_id, request.prefix_tokens, request.sampling.max_tokens
        length = self._lengths.draw(request.group_id.partition("#")[0], request_id.partition("+")[0])
        self.engine.add(
            request_id,
            context_tokens=len(request.prompt_token_ids) + before,
            length=max(1, min(length, most) - before),
            now_s=self._now(),
        )
        limit = most if length > most else length + 1
        call = self._calls[request_id] = _Call(request, self._loop.create_future(), limit, on_chunk)
        self._received += 1
        self._changed()
        try:
            return await call.future
        finally:
            if self._calls.pop(request_id, None) is not None and self._failure is None:
                self._take_off(request_id)
                self._changed()

    @override
    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        self._require_alive()
        if not self._load_holds:
            await self._unless_failed(self._load_s)
        self.engine.begin_load(ref.version, self._load_s if self._load_holds else 0.0, self._now())
        self._changed()
        while self.engine.is_loading:
            await self._unless_failed(max(0.0, self.engine.next_event_s() - self._now()))
        await self._unless_failed(self.engine.loaded_s - self._now())
        return ref.version

    @override
    async def interrupt(self, request_ids: Iterable[str] | None = None) -> int:
        self._require_alive()
        self._advance()
        ids = list(self._calls) if request_ids is None else sorted(set(request_ids) & set(self._calls))
        for request_id in ids:
            call = self._calls.pop(request_id)
            sampled = self._take_off(request_id)
            self._resolve(call, sampled, FinishReason.ABORTED)
        self._changed()
        return len(ids)

    @override
    async def failed(self) -> Exception:
        return await asyncio.shield(self._failed)

    @override
    def fail(self, failure: Exception) -> None:
        """Whole chunks have reached the router, the rest of what was sampled is lost."""
        if self._failure is not None:
            return
        self._advance()
        self._failure = failure
        self._failed.set_result(failure)
        if self._timer is not None:
            self._timer.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
        for request_id, call in self._calls.items():
            sampled = self._take_off(request_id)
            if call.on_chunk is not None and (whole := sampled.sampled // CHUNK_TOKENS * CHUNK_TOKENS):
                call.on_chunk(as_chunk(self._sampled(sampled, None, whole)))
            if not call.future.done():
                call.future.set_exception(EngineFailed(str(failure)))
        self._calls.clear()

    # --- the engine ----------------------------------------------------------------------------------------------

    @property
    def open_tokens(self) -> int:
        """Sampled of completions that are not finished, prefixes included."""
        before = sum(call.request.prefix_tokens for call in self._calls.values())
        return before + self.engine.open_tokens(self._now())

    def _changed(self) -> None:
        """After every change of the engine: set the timers to its next event and to the next report."""
        if self._reporting is None:
            self._reporting = self._loop.call_at(self._next_report_s(), self._report)
        due_s = self.engine.next_event_s()
        if self._timer is not None:
            if self._timer.when() == due_s and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = None if due_s == math.inf else self._loop.call_at(due_s, self._on_timer)

    def _next_report_s(self) -> float:
        """All replicas report at the same times, as generators do that started together."""
        return (math.floor(self._now() / self._report_every_s) + 1) * self._report_every_s

    def _report(self) -> None:
        """Once more as long as something runs; an idle replica has nothing new to say."""
        self._on_report(self.engine.statistics(self._now()), self._received)
        is_busy = self.engine.next_event_s() < math.inf
        self._reporting = self._loop.call_at(self._next_report_s(), self._report) if is_busy else None

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        self._changed()

    def _advance(self) -> None:
        for sequence in self.engine.advance(self._now()):
            call = self._calls.pop(sequence.request_id)
            self._resolve(call, sequence, None)

    def _take_off(self, request_id: str) -> Sequence:
        sequence = self.engine.abort(request_id, self._now())
        assert sequence is not None  # what the engine finished, `_advance` took out of the calls
        return sequence

    def _resolve(self, call: _Call, sequence: Sequence, reason: FinishReason | None) -> None:
        """Return what was sampled, all at once, unless the caller was cancelled."""
        if call.future.done():
            return
        prefix = call.request.prefix
        if reason is None:
            is_full = call.request.prefix_tokens + sequence.sampled >= call.limit
            reason = FinishReason.LENGTH if is_full else FinishReason.STOP
        sampled = self._sampled(sequence, reason, sequence.sampled)
        if call.on_chunk is not None and sequence.sampled:
            call.on_chunk(as_chunk(sampled))
        call.future.set_result(assembled(prefix, [sampled], reason))

    def _sampled(self, sequence: Sequence, reason: FinishReason | None, tokens: int) -> SampledTokens:
        return SampledTokens(
            request_id=RequestId(sequence.request_id),
            token_ids=np.zeros(tokens, np.int32),
            logprobs=np.full(tokens, _LOGPROB, np.float32),
            policy_versions=self.engine.versions_of(sequence)[:tokens],
            finish_reason=reason,
        )

    # --- time and failure ----------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._loop.time()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))

    async def _unless_failed(self, seconds: float) -> None:
        """Sleep. Raises `EngineFailed` when the replica fails meanwhile."""
        await asyncio.wait([self._failed], timeout=max(0.0, seconds))
        self._require_alive()

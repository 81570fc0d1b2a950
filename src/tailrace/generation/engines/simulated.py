"""An engine without a model, for measuring and testing everything around one: real bookkeeping, made-up tokens.

A running request samples one token per step, a function of its whole context, whatever the weights. Prompts cost
nothing. A "model state dict" is its version.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from typing_extensions import override

from tailrace.errors import GenerationError
from tailrace.generation.engines.protocol import (
    Engine,
    EngineCounts,
    EngineLimits,
    EngineStatistics,
    FailureListener,
    SampledTokens,
    request_metrics,
)
from tailrace.records import FinishReason, GenerationRequest, Int32Array

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    sampled: int
    """Tokens of the completion, those of the prefix included."""
    checksum: int
    """Of the whole context."""
    cache_version: int
    added_s: float
    started_s: float = 0.0
    first_token_s: float = 0.0
    preemptions: int = 0
    mixed: int = 0
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class SimulatedEngine(Engine):
    """A step takes `step_s` of wall time, whatever runs."""

    def __init__(
        self,
        *,
        slots: int = 32,
        vocab_size: int = 1000,
        max_model_tokens: int = 4096,
        chunk_tokens: int = 64,
        step_s: float = 0.0,
    ):
        self._slots, self._chunk_tokens, self._step_s = slots, chunk_tokens, step_s
        self._limits = EngineLimits(vocab_size=vocab_size, max_model_tokens=max_model_tokens)
        self._version = 0
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._outbox: list[SampledTokens] = []
        self._counts = EngineCounts()

    @property
    @override
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    @override
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._outbox)

    @override
    def watch(self, on_failure: FailureListener) -> None:
        pass

    @override
    def add(self, request: GenerationRequest) -> None:
        running = {one.request.request_id for one in (*self._waiting, *self._running)}
        self._limits.require_acceptable(request, running)
        sampled = request.prefix_tokens
        checksum = zlib.crc32(request.context_token_ids.astype(np.int32).tobytes())
        self._waiting.append(_Running(request, sampled, checksum, self._version, time.perf_counter()))

    @override
    def step(self) -> list[SampledTokens]:
        chunks, self._outbox = self._outbox, []
        self._place_waiting()
        if self._step_s:
            time.sleep(self._step_s)
        for one in self._running:
            self._sample(one)
            reason = self._reason_to_end(one)
            if reason is not None or len(one.token_ids) == self._chunk_tokens:
                chunks.append(_report(one, reason))
        ended = {chunk.request_id for chunk in chunks if chunk.finish_reason is not None}
        self._counts.sampled_tokens_total += len(self._running)
        self._running = [one for one in self._running if one.request.request_id not in ended]
        self._counts.steps_total += 1
        return chunks

    @override
    def abort(self, request_id: str) -> None:
        for queue in (self._waiting, self._running):
            for one in queue:
                if one.request.request_id == request_id:
                    queue.remove(one)
                    self._outbox.append(_report(one, FinishReason.ABORTED))
                    return

    @override
    def reseed(self, seed: int) -> None:
        pass

    @override
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tensors

    @override
    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._version = version

    @override
    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        if self._running and not preempt_running:
            raise GenerationError(f"the prefix cache is in use by {len(self._running)} running requests")
        for one in self._running:
            one.preemptions += 1
            one.cache_version = -1

    @override
    def statistics(self) -> EngineStatistics:
        tokens = sum(len(one.request.prompt_token_ids) + one.sampled for one in self._running)
        return EngineStatistics(
            policy_version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            running_tokens=tokens,
            kv_tokens=tokens,
            kv_capacity_tokens=self._slots * self._limits.max_model_tokens,
            **msgspec.structs.asdict(self._counts),
        )

    @override
    def close(self) -> None:
        pass

    def _place_waiting(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            one = self._waiting.popleft()
            one.started_s, one.cache_version = time.perf_counter(), self._version
            self._running.append(one)

    def _sample(self, one: _Running) -> None:
        if one.cache_version < 0:  # computed again, by the weights of this step
            one.cache_version = self._version
        token_id = zlib.crc32(bytes(4), one.checksum) % self._limits.vocab_size
        one.checksum = zlib.crc32(np.int32(token_id).tobytes(), one.checksum)
        one.token_ids.append(token_id)
        one.versions.append(self._version)
        one.sampled += 1
        one.first_token_s = one.first_token_s or time.perf_counter()
        one.mixed += one.cache_version < self._version

    def _reason_to_end(self, one: _Running) -> FinishReason | None:
        sampling = one.request.sampling
        if one.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        full = len(one.request.prompt_token_ids) + one.sampled >= self._limits.max_model_tokens
        return FinishReason.LENGTH if full or one.sampled >= sampling.max_tokens else None


def simulated_logprobs(token_ids: Int32Array) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What the engine gives as log-probabilities: a number in (-1, 0] for each token, the same wherever it stands."""
    return (-(token_ids % 7) / np.float32(7)).astype(np.float32)


def _report(one: _Running, reason: FinishReason | None) -> SampledTokens:
    token_ids = np.asarray(one.token_ids, np.int32)
    versions = np.asarray(one.versions, np.int32)
    mixed = one.mixed
    one.token_ids, one.versions, one.mixed = [], [], 0
    return SampledTokens(
        request_id=one.request.request_id,
        token_ids=token_ids,
        logprobs=simulated_logprobs(token_ids),
        policy_versions=versions,
        mixed_cache_tokens=mixed,
        finish_reason=reason,
        metrics={}
        if reason is None
        else request_metrics(
            time.perf_counter(),
            added_s=one.added_s,
            started_s=one.started_s,
            first_token_s=one.first_token_s,
            preemptions=one.preemptions,
        ),
    )

"""The engine: one packed forward pass per step, one wait for the device, no Python per token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel
from typing_extensions import override

from tailrace.errors import GenerationError
from tailrace.generation.decisions import KvCache
from tailrace.generation.engines.protocol import (
    Engine,
    EngineCounts,
    EngineLimits,
    EngineStatistics,
    FailureListener,
    SampledTokens,
    request_metrics,
)
from tailrace.generation.engines.torch.attention import Segment, SlotStep
from tailrace.generation.engines.torch.cache import SlotCache
from tailrace.generation.engines.torch.experts import ExpertStore, RouterTap
from tailrace.generation.engines.torch.model import SlotModel
from tailrace.generation.engines.torch.sampler import Sampled, sample, uniforms
from tailrace.generation.engines.torch.scoring import score_prompts
from tailrace.generation.engines.torch.slots import (
    Move,
    Placement,
    Reuse,
    RowState,
    SlotTable,
    front_moves,
    place,
    prefill_shares,
)
from tailrace.generation.engines.torch.supports import SupportLog
from tailrace.generation.engines.torch.weights import PreparedModelStateDict
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.models.devices import require_device
from tailrace.models.loading import load_causal_lm
from tailrace.records import FinishReason, GenerationRequest, RequestId

ROUND_TOKENS = 16
"""Attention reads multiples of this many positions: kernels that are made per shape see fewer shapes."""


_SCORED_TOKENS = 2048
"""That the cache of the prompts which one step scores has room for, unless a single one is longer."""


def torch_engine_factory(model: ModelSettings, generator: GeneratorSettings) -> Callable[[], TorchEngine]:
    """What the engine's thread calls to build its engine. The model is loaded there, and may raise `ModelError`."""

    def build() -> TorchEngine:
        torch.set_num_threads(generator.threads)
        require_device(generator.device, "generator.device")
        loaded = load_causal_lm(model.name, dtype=model.dtype, device=generator.device)
        return TorchEngine(
            loaded,
            slots=generator.slots,
            max_model_tokens=min(model.max_model_tokens or generator.max_cache_tokens, generator.max_cache_tokens),
            prefill_chunk_tokens=generator.prefill_chunk_tokens,
            chunk_tokens=generator.chunk_tokens,
            seed=generator.seed or 0,
            kv_cache=generator.kv_cache,
            share_prefix_across_versions=generator.share_prefix_across_versions,
            return_routed_experts=generator.return_routed_experts,
            native_kernels=generator.native_kernels,
        )

    return build


class TorchEngine(Engine):
    """Continuous batching over a transformers model, which becomes the engine's own (its attention is replaced).

    Raises `ModelError` for a model that it cannot run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 64,
        max_model_tokens: int = 4096,
        prefill_chunk_tokens: int = 512,
        chunk_tokens: int = 64,
        seed: int = 0,
        kv_cache: KvCache = "keep",
        share_prefix_across_versions: bool = False,
        return_routed_experts: bool = False,
        native_kernels: bool = True,
    ):
        self._model = SlotModel(model, native_kernels=native_kernels)
        capacity = min(max_model_tokens, self._model.max_positions() or max_model_tokens)
        self._limits = EngineLimits(
            vocab_size=self._model.vocab_size,
            max_model_tokens=capacity,
            returns_supports=True,
            returns_experts=return_routed_experts,
            scores_prompts=not return_routed_experts,  # routers are tapped for what runs in slots
        )
        self._table = SlotTable(slots=slots, capacity=capacity, chunk_tokens=chunk_tokens)
        self._supports = SupportLog(self._table)
        self._cache = SlotCache(
            self._model.layers, slots=slots, capacity=capacity, dtype=self._model.dtype, device=self._model.device
        )
        self._tap = RouterTap(model, self._model.device) if return_routed_experts else None
        self._experts = (
            ExpertStore(self._tap.shape, self._tap.dtype, slots=slots, capacity=capacity) if self._tap else None
        )
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._reuse = Reuse(0, kv_cache, share_prefix_across_versions)
        self._has_loaded = False
        self._seeds = np.random.default_rng(seed)
        self._waiting: deque[GenerationRequest] = deque()
        self._to_score: deque[GenerationRequest] = deque()
        self._added_s: dict[RequestId, float] = {}
        self._outbox: list[SampledTokens] = []
        self._counts = EngineCounts()

    @property
    @override
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    @override
    def has_work(self) -> bool:
        return bool(self._added_s or self._outbox)

    @override
    def watch(self, on_failure: FailureListener) -> None:
        pass  # nothing of it lives outside its thread

    @override
    def add(self, request: GenerationRequest) -> None:
        self._limits.require_acceptable(request, self._added_s)
        self._added_s[request.request_id] = time.perf_counter()
        (self._waiting if request.score_top_k is None else self._to_score).append(request)

    @override
    def abort(self, request_id: str) -> None:
        for queue in (self._waiting, self._to_score):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    del self._added_s[request.request_id]
                    self._outbox.append(_nothing_sampled(request.request_id))
                    return
        for row in self._table.running().tolist():
            held = self._table.requests[row]
            if held is not None and held.request_id == request_id:
                self._outbox.append(self._report(row, FinishReason.ABORTED, time.perf_counter()))
                return

    @torch.inference_mode()
    @override
    def step(self) -> list[SampledTokens]:
        started_s = time.perf_counter()
        chunks, self._outbox = self._outbox, []
        if self._to_score:
            chunks += self._score(started_s)
        self._place_waiting(started_s)
        self._bring_decoding_rows_to_front()
        count = self._table.num_decoding()
        shares = prefill_shares(self._table, self._prefill_chunk_tokens)
        if count or shares:
            logits = self._forward(shares, count)
            for row, start, end in shares:
                self._table.cached[row] = end
                if start == 0:
                    self._table.cache_version[row] = self._version
            self._counts.prefilled_tokens_total += sum(end - start for _, start, end in shares)
            sampled = self._sample(logits, count) if count else None
            if self._tap and self._experts:
                self._experts.note(self._tap.take(), shares, self._table.cached[:count])
            if sampled:
                chunks += self._record(sampled)
        self._counts.steps_total += 1
        return chunks

    @override
    def reseed(self, seed: int) -> None:
        self._seeds = np.random.default_rng(seed)

    @override
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._model.prepare(tensors)

    @override
    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._model.install(tensors if isinstance(tensors, PreparedModelStateDict) else self._model.prepare(tensors))
        if version == self._version and self._has_loaded:  # others of it; the first to come are the engine's own
            self._table.outdate(version)
        self._reuse, self._has_loaded = replace(self._reuse, version=version), True

    @override
    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        table = self._table
        running = table.running()
        if len(running) and not preempt_running:
            raise GenerationError(
                f"the prefix cache is in use by {len(running)} running requests; "
                "wait for them, or reset with preempt_running=True"
            )
        for row in np.flatnonzero(table.state == RowState.IDLE).tolist():
            table.forget(row)
        table.cached[running] = 0
        table.preempted[running] += 1
        table.state[running] = RowState.PREFILL

    @override
    def statistics(self) -> EngineStatistics:
        state = self._table.state
        running = int(np.count_nonzero(state >= RowState.PREFILL))
        return EngineStatistics(
            policy_version=self._version,
            running=running,
            waiting=len(self._waiting) + len(self._to_score),
            running_tokens=int(self._table.total[state >= RowState.PREFILL].sum()),
            kv_tokens=int(self._table.cached.sum()),
            kv_capacity_tokens=self._table.slots * self._table.capacity,
            **msgspec.structs.asdict(self._counts),
        )

    @override
    def close(self) -> None:
        del self._model, self._cache

    @property
    def _version(self) -> int:
        return self._reuse.version

    def _score(self, started_s: float) -> list[SampledTokens]:
        """Score the oldest prompts, as many as suit one step, and one at least."""
        chosen, longest = list[GenerationRequest](), 0
        while self._to_score:
            longest = max(longest, len(self._to_score[0].prompt_token_ids))
            if chosen and (len(chosen) + 1) * longest > _SCORED_TOKENS:  # each has room for the longest
                break
            chosen.append(self._to_score.popleft())
        scored, now_s = score_prompts(self._model, chosen), time.perf_counter()
        self._counts.prefilled_tokens_total += sum(len(one.prompt_token_ids) for one in chosen)
        return [
            replace(
                _nothing_sampled(request.request_id, FinishReason.LENGTH),
                scores=scores,
                metrics=request_metrics(
                    now_s, added_s=self._added_s.pop(request.request_id), started_s=started_s, first_token_s=now_s
                ),
            )
            for request, scores in zip(chosen, scored, strict=True)
        ]

    def _place_waiting(self, now_s: float) -> None:
        """Oldest first; one that waits for its group's prompt lets others pass."""
        passed = []
        while self._waiting and np.any(self._table.state <= RowState.IDLE):
            request = self._waiting.popleft()
            context = request.context_token_ids
            placement = place(self._table, request, context, self._reuse)
            if placement is None:
                passed.append(request)
            else:
                self._occupy(placement, request, now_s)
                self._table.tokens[placement.row, : len(context)] = context
        self._waiting.extendleft(reversed(passed))

    def _occupy(self, placement: Placement, request: GenerationRequest, now_s: float) -> None:
        """Give a row to a request: the columns, and the cache it starts with."""
        table, row, sampling = self._table, placement.row, request.sampling
        reused = placement.kept_tokens
        if placement.donor is not None:
            reused = placement.copied_tokens
            self._cache.copy_row(placement.donor, row, reused)
            table.cache_version[row] = table.cache_version[placement.donor]
        elif placement.kept_tokens == 0:
            table.cache_version[row] = self._version
        if self._experts:
            self._experts.occupy(placement, continues=request.prefix is not None)
        table.mixed[row] = table.preempted[row] = 0
        prompt = len(request.prompt_token_ids)
        sampled = request.prefix_tokens
        table.requests[row] = request
        table.cached[row] = table.reused[row] = reused
        table.total[row] = prompt + sampled
        table.completion_start[row] = prompt
        table.limit[row] = min(prompt + sampling.max_tokens, table.capacity)
        table.temperature[row], table.top_p[row], table.top_k[row] = (
            sampling.temperature,
            sampling.top_p,
            min(sampling.top_k, self._model.vocab_size),
        )
        table.returns_supports[row] = sampling.returns_supports and sampling.restricts
        seed = self._seeds.integers(2**63) if sampling.seed is None else sampling.seed % 2**64
        table.seed[row] = np.uint64(seed)
        table.widen_stop_ids(len(sampling.stop_token_ids))
        table.stop_ids[row] = -1
        table.stop_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        table.pending[row] = 0
        table.added_s[row], table.started_s[row] = self._added_s[request.request_id], now_s
        table.first_token_s[row] = 0
        table.state[row] = RowState.PREFILL

    def _bring_decoding_rows_to_front(self) -> None:
        table = self._table
        ready = (table.state == RowState.PREFILL) & (table.cached == table.total - 1)
        table.state[ready] = RowState.DECODE
        for move in front_moves(table):
            self._carry_out(move)

    def _carry_out(self, move: Move) -> None:
        held = int(self._table.cached[move.source])
        if move.exchange:
            self._cache.swap_rows(move.source, move.target, held, int(self._table.cached[move.target]))
        else:
            self._cache.copy_row(move.source, move.target, held)
        self._table.move(move)
        if self._experts:
            self._experts.exchange(move.source, move.target)

    def _forward(self, shares: list[tuple[int, int, int]], count: int) -> torch.Tensor:
        """Run the chunks `shares` and one token of each of the rows `[0, count)`; logits of the latter."""
        table = self._table
        segments, begin = [], 0
        for row, start, end in shares:
            segments.append(Segment(row, begin, start, end))
            begin += end - start
        packed = np.empty((3, begin + count), np.int64)  # token ids, rows, positions
        for segment in segments:
            part = packed[:, segment.begin : segment.begin + segment.end - segment.start]
            part[0] = table.tokens[segment.row, segment.start : segment.end]
            part[1] = segment.row
            part[2] = np.arange(segment.start, segment.end)
        rows = np.arange(count)
        positions = table.cached[:count]
        packed[0, begin:] = table.tokens[rows, positions]
        packed[1, begin:] = rows
        packed[2, begin:] = positions
        token_ids, token_rows, token_positions = torch.from_numpy(packed).to(self._model.device, non_blocking=True)
        self._cache.reserve(int(packed[2].max()) + 1)
        longest = -(int(positions.max(initial=-1)) + 1) // ROUND_TOKENS * -ROUND_TOKENS
        step = SlotStep(
            *(self._cache, token_rows, token_positions, segments, count),
            longest=min(longest, self._cache.room),
            dtype=self._model.dtype,
        )
        if self._tap:
            self._tap.begin(begin + count)
        return self._model.logits(token_ids, token_positions, step, keep=count)

    def _sample(self, logits: torch.Tensor, count: int) -> Sampled:
        table, acceleration = self._table, self._model.acceleration
        return sample(
            logits,
            temperatures=table.temperature[:count],
            top_ps=table.top_p[:count],
            top_ks=table.top_k[:count],
            draws=uniforms(table.seed[:count], table.total[:count] - table.completion_start[:count]),
            returns_supports=table.returns_supports[:count],
            sample_all=None if acceleration is None else acceleration.sample,
        )

    def _record(self, sampled: Sampled) -> list[SampledTokens]:
        """Note what the rows `[0, num_tokens)` sampled; chunks of those that finished or have enough to report."""
        token_ids, logprobs, supports = sampled
        if supports is not None:
            self._supports.note(supports)
        table, count, now_s = self._table, len(token_ids), time.perf_counter()
        rows = np.arange(count)
        table.tokens[rows, table.total[:count]] = token_ids
        table.logprobs[rows, table.pending[:count]] = logprobs
        table.versions[rows, table.pending[:count]] = self._version
        for column in (table.cached, table.total, table.pending):
            column[:count] += 1
        table.used_at[:count] = self._counts.steps_total
        fresh = table.first_token_s[:count] == 0
        table.first_token_s[:count][fresh] = now_s
        self._counts.sampled_tokens_total += count
        table.mixed[:count] += table.cache_version[:count] < self._version
        broken = ~np.isfinite(logprobs)
        stopped = (table.stop_ids[:count] == token_ids[:, None]).any(axis=1)
        long_enough = table.total[:count] >= table.limit[:count]
        full = table.pending[:count] == table.chunk_tokens
        chunks = []
        for row in np.flatnonzero(broken | stopped | long_enough | full).tolist():
            reason = None
            if broken[row]:
                reason = FinishReason.ERROR
            elif stopped[row]:
                reason = FinishReason.STOP
            elif long_enough[row]:
                reason = FinishReason.LENGTH
            chunks.append(self._report(row, reason, now_s))
        return chunks

    def _report(self, row: int, reason: FinishReason | None, now_s: float) -> SampledTokens:
        """The row's unreported tokens; with a reason, the row is released."""
        table = self._table
        request = table.requests[row]
        assert request is not None
        if reason is FinishReason.ERROR:  # the last token was drawn from logits that are not finite
            table.total[row] -= 1
            table.pending[row] -= 1
        pending, total = int(table.pending[row]), int(table.total[row])
        experts, experts_start = None, 0
        if self._experts and reason is not None and request.owner is not None:
            experts, experts_start = self._experts.report(row, aborted=reason is FinishReason.ABORTED)
        chunk = SampledTokens(
            request_id=request.request_id,
            token_ids=table.tokens[row, total - pending : total].copy(),
            logprobs=table.logprobs[row, :pending].copy(),
            policy_versions=table.versions[row, :pending].copy(),
            mixed_cache_tokens=min(pending, int(table.mixed[row])),
            finish_reason=reason,
            routed_experts=experts,
            routed_experts_start=experts_start,
            supports=self._supports.of(row),
            metrics={}
            if reason is None
            else request_metrics(
                now_s,
                added_s=float(table.added_s[row]),
                started_s=float(table.started_s[row]),
                first_token_s=float(table.first_token_s[row]),
                cached_prompt_tokens=int(table.reused[row]),
                preemptions=int(table.preempted[row]),
                nonfinite_logprobs=int(reason is FinishReason.ERROR),
            ),
        )
        table.pending[row] = table.mixed[row] = 0
        if reason is not None:
            del self._added_s[request.request_id]
            table.release(row)
        if reason is FinishReason.ERROR:
            self._cache.clear_row(row)
            table.forget(row)
        return chunk


def _nothing_sampled(request_id: RequestId, reason: FinishReason = FinishReason.ABORTED) -> SampledTokens:
    return SampledTokens(
        request_id=request_id,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        policy_versions=np.empty(0, np.int32),
        finish_reason=reason,
    )

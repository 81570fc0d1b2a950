"""The engine: one step of vLLM's core per step, its outputs turned into chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from tailrace.errors import EngineFailed, GenerationError, RequestRefused
from tailrace.generation.decisions import KvCache
from tailrace.generation.engines.protocol import (
    Engine,
    EngineCounts,
    EngineLimits,
    EngineStatistics,
    FailureListener,
    SampledTokens,
)
from tailrace.generation.engines.vllm.core import WORKER_DIED, as_numpy_seed, build_core
from tailrace.generation.engines.vllm.guiding import Guide
from tailrace.generation.engines.vllm.nodes import Nodes
from tailrace.generation.engines.vllm.progress import Progress
from tailrace.generation.engines.vllm.requests import (
    HIGHEST_TEMPERATURE,
    PrefixSalts,
    core_request,
)
from tailrace.generation.engines.vllm.routed_experts import DeliveredExperts, ReturnedExperts
from tailrace.generation.engines.vllm.weights import WeightInstaller
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.records import FinishReason, GenerationRequest

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.worker.worker_base import WorkerBase

_REASONS = {
    "STOP": FinishReason.STOP,
    "LENGTH": FinishReason.LENGTH,
    "ABORT": FinishReason.ABORTED,
    "ERROR": FinishReason.ERROR,
}
"""Ours by the name of vLLM's."""


def vllm_engine_factory(
    model: ModelSettings, generator: GeneratorSettings, nodes: Nodes | None = None
) -> Callable[[], VllmEngine]:
    """What the engine's thread calls to build its engine. May raise `SettingsError` and `ModelError`."""

    def build() -> VllmEngine:
        return VllmEngine(
            build_core(model, generator, nodes=nodes),
            chunk_tokens=generator.chunk_tokens,
            kv_cache=generator.kv_cache,
            share_prefix_across_versions=generator.share_prefix_across_versions,
            return_routed_experts=generator.return_routed_experts,
            shared_folder=nodes.folder if nodes is not None else None,
        )

    return build


class VllmEngine(Engine):
    """vLLM's core, stepped by our loop. After weights were left half installed every step raises `EngineFailed`.

    Every token is stamped with the version under which its forward pass was launched: with asynchronous scheduling
    vLLM keeps one step in flight, which is waited for before weights or caches change.
    """

    def __init__(
        self,
        core: InprocClient,
        *,
        chunk_tokens: int = 64,
        kv_cache: KvCache = "keep",
        share_prefix_across_versions: bool = False,
        return_routed_experts: bool = False,
        shared_folder: Path | None = None,
    ) -> None:
        """`shared_folder` is one that all workers see, where they are not on one machine."""
        config = core.engine_core.vllm_config
        self._client = core
        self._core = core.engine_core
        self._limits = EngineLimits(
            vocab_size=config.model_config.get_vocab_size(),
            max_model_tokens=config.model_config.max_model_len,
            returns_supports=config.model_config.return_sampling_mask,
            returns_experts=return_routed_experts,
            scores_prompts=True,
            guides=True,
            highest_temperature=HIGHEST_TEMPERATURE,
        )
        self._guide = Guide(core.engine_core)
        parallel = config.parallel_config
        in_process = parallel.world_size == 1 or parallel.distributed_executor_backend == "external_launcher"
        self._weights = WeightInstaller(
            core, config.model_config.hf_config, in_process=in_process, folder=shared_folder
        )
        self._kv_capacity_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        self._chunk_tokens = chunk_tokens
        self._version = 0
        self._installed_s = 0.0
        self._kv_cache = kv_cache
        self._salts = PrefixSalts(kv_cache, share_across_versions=share_prefix_across_versions)
        self._delivered_experts = DeliveredExperts() if return_routed_experts else None
        self._running: dict[str, Progress] = {}
        self._core_ids: dict[str, str] = {}
        self._outbox: list[SampledTokens] = []
        self._failure: EngineFailed | None = None
        self._accepted = 0
        self._counts = EngineCounts()

    @property
    @override
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    @override
    def has_work(self) -> bool:
        return bool(self._running or self._outbox)

    @override
    def watch(self, on_failure: FailureListener) -> None:

        def died() -> None:
            on_failure(EngineFailed(WORKER_DIED))

        self._core.model_executor.register_failure_callback(died)

    @override
    def add(self, request: GenerationRequest) -> None:
        self._limits.require_acceptable(request, self._core_ids)
        self._accepted += 1
        core_id = f"{request.request_id}#{self._accepted}"
        opens_session = not self._salts.knows(request.session_id)
        salt = self._salts.salt(request.session_id, self._version)
        experts, experts_start = None, 0
        if self._delivered_experts and request.owner is not None:
            experts_start = self._delivered_experts.start(request)
            experts = ReturnedExperts(request.context_token_ids, experts_start)
        progress = Progress(
            request,
            core_id,
            salt=salt,
            opens_session=opens_session,
            chunk_tokens=self._chunk_tokens,
            added_s=time.monotonic(),
            experts=experts,
        )
        self._hand_over(progress, experts_start)
        self._core_ids[request.request_id] = core_id
        self._running[core_id] = progress

    @override
    def abort(self, request_id: str) -> None:
        core_id = self._core_ids.get(request_id)
        if core_id is not None:
            self._client.abort_requests([core_id])
            self._outbox.append(self._end(self._running[core_id], FinishReason.ABORTED, time.monotonic()))

    @override
    def step(self) -> list[SampledTokens]:
        if self._failure is not None:
            raise self._failure
        self._step_core()
        chunks, self._outbox = self._outbox, []
        self._counts.steps_total += 1
        return chunks

    @override
    def reseed(self, seed: int) -> None:
        """On every worker: a step in flight has drawn its numbers."""
        self._client.collective_rpc(_reseed, args=(as_numpy_seed(seed),))

    @override
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._weights.prepare(tensors)

    @override
    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        self._drain()
        try:
            self._weights.install(tensors)
        except EngineFailed as error:
            self._failure = error
            raise
        if version == self._version and self._installed_s:  # others of it; the first to come are the engine's own
            self._salts.renew()
        self._version = version
        self._installed_s = time.monotonic()
        self._salt_waiting_again()

    @override
    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        self._drain()
        held = len(self._core.scheduler.running)
        if held and not preempt_running:
            raise GenerationError(
                f"the prefix cache is in use by {held} running requests; "
                "wait for them, or reset with preempt_running=True"
            )
        if not self._client.reset_prefix_cache(reset_running_requests=preempt_running):
            raise GenerationError("vLLM refused to reset its prefix cache: blocks of it are still in use")
        for progress in self._running.values():
            progress.forget_cache(time.monotonic())

    @override
    def statistics(self) -> EngineStatistics:
        scheduler = self._core.scheduler
        return EngineStatistics(
            policy_version=self._version,
            running=len(scheduler.running),
            waiting=len(self._running) - len(scheduler.running),
            running_tokens=sum(request.num_tokens for request in scheduler.running),
            kv_tokens=int(scheduler.kv_cache_manager.usage * self._kv_capacity_tokens),
            kv_capacity_tokens=self._kv_capacity_tokens,
            **msgspec.structs.asdict(self._counts),
        )

    @override
    def close(self) -> None:
        self._client.shutdown()

    def _hand_over(self, progress: Progress, experts_start: int) -> None:
        """Give a request to vLLM. Raises `RequestRefused` where that does not take it."""
        from vllm.exceptions import VLLMClientError

        request = progress.request
        adapter = None if self._weights.adapters is None else self._weights.adapters.request
        try:
            sent = core_request(
                request, core_id=progress.core_id, salt=progress.salt, experts_start=experts_start, adapter=adapter
            )
            self._guide.apply(request, sent.sampling_params)
            self._client.add_request(sent)
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(f"request {request.request_id}: vLLM refuses it: {error}") from error

    def _step_core(self) -> None:
        """Step, and put what is to be reported into the outbox."""
        outputs = self._client.get_output().outputs
        now_s = time.monotonic()
        for output in outputs:
            progress = self._running.get(output.request_id)
            if progress is not None:
                self._take(progress, output, now_s)

    def _take(self, progress: Progress, output: EngineCoreOutput, now_s: float) -> None:
        sampled = progress.take(output, self._version, now_s)
        self._counts.sampled_tokens_total += sampled
        if output.prefill_stats is not None:
            self._note_prefill(progress, output.prefill_stats)
        if progress.cache_s < self._installed_s:
            progress.mixed_cache_tokens += sampled
        if progress.nonfinite_logprobs:
            self._client.abort_requests([progress.core_id])
            self._salts.renew()  # what it cached are no numbers
            self._outbox.append(self._end(progress, FinishReason.ERROR, now_s))
        elif output.finish_reason is not None:
            reason = _REASONS.get(output.finish_reason.name, FinishReason.ERROR)
            self._outbox.append(self._end(progress, reason, now_s))
        elif progress.pending >= self._chunk_tokens:
            self._outbox.append(progress.report(None, now_s))

    def _note_prefill(self, progress: Progress, prefill: PrefillStats) -> None:
        self._counts.prefilled_tokens_total += prefill.num_computed_tokens
        if prefill.num_cached_tokens and self._salts.is_older(progress.salt, self._version):
            progress.found_older_prefix()

    def _end(self, progress: Progress, reason: FinishReason, now_s: float) -> SampledTokens:
        del self._running[progress.core_id], self._core_ids[progress.request.request_id]
        if self._delivered_experts and progress.experts:
            self._delivered_experts.note(progress.request, progress.experts, aborted=reason is FinishReason.ABORTED)
        return progress.report(reason, now_s)

    def _salt_waiting_again(self) -> None:
        """Requests that hold no keys and values yet will compute them under the new weights, and find only such."""
        scheduler = self._core.scheduler
        running = {request.request_id for request in scheduler.running}
        waiting = [progress for core_id, progress in self._running.items() if core_id not in running]
        for progress in waiting:
            session_id = progress.request.session_id
            if self._kv_cache == "keep" and not progress.opens_session:
                continue
            self._salts.begin_again(session_id)
            salt = self._salts.salt(session_id, self._version)
            if salt == progress.salt:
                continue
            progress.salt = salt
            progress.forget_cache(self._installed_s)
            request = scheduler.requests[progress.core_id]
            request.cache_salt = progress.salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def _drain(self) -> None:
        """Take in the step that asynchronous scheduling keeps in flight; nothing new is launched."""
        if not self._core.batch_queue:
            return
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        try:
            while self._core.batch_queue:
                self._step_core()
        finally:
            self._core.resume_scheduler()


def _reseed(worker: WorkerBase, seed: int) -> None:
    """Runs on every worker."""
    from vllm.utils.torch_utils import set_random_seed

    set_random_seed(seed)

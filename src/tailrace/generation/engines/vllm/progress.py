"""One request inside vLLM: its unreported tokens, and its times."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tailrace.errors import EngineFailed
from tailrace.generation.engines.protocol import SampledTokens, request_metrics
from tailrace.generation.engines.vllm.routed_experts import ReturnedExperts
from tailrace.records import FinishReason, Float32Array, GenerationRequest, Int32Array, Supports, TokenScores

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsTensors, SamplingMaskLists

_LONG_AGO_S = -1.0


@dataclass(slots=True)
class Progress:
    """The unreported tokens of one request, in arrays that grow to one chunk, and its times (monotonic, in s)."""

    request: GenerationRequest
    core_id: str
    """Its name inside vLLM, used once only."""
    salt: str
    """Under which vLLM looks for its prefix."""
    opens_session: bool
    """Whether no earlier request of its session left a prefix."""
    chunk_tokens: InitVar[int]
    added_s: float
    experts: ReturnedExperts | None = None
    """Where they are asked for."""
    started_s: float = 0.0
    first_token_s: float = 0.0
    cache_s: float = 0.0
    """When the oldest of the keys and values that it stands on were computed; 0 before any were."""
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    pending: int = 0
    mixed_cache_tokens: int = 0
    """Of the unreported tokens, the last ones."""
    nonfinite_logprobs: int = 0
    _forgotten_s: float = field(init=False, default=0.0)
    """When keys and values that it had were gone."""
    _token_ids: Int32Array = field(init=False)
    _logprobs: Float32Array = field(init=False)
    _versions: Int32Array = field(init=False)
    _scores: TokenScores | None = field(init=False, default=None)
    _supports: list[Int32Array] | None = field(init=False)
    """Their token ids, of each output with unreported tokens; None where they are not asked for."""
    _support_counts: Int32Array = field(init=False)
    """Of each unreported token."""

    def __post_init__(self, chunk_tokens: int) -> None:
        self._token_ids, self._versions = np.empty(chunk_tokens, np.int32), np.empty(chunk_tokens, np.int32)
        self._logprobs = np.empty(chunk_tokens, np.float32)
        sampling = self.request.sampling
        self._supports = [] if sampling.returns_supports and sampling.restricts else None
        self._support_counts = np.empty(0 if self._supports is None else chunk_tokens, np.int32)

    def take(self, output: EngineCoreOutput, version: int, now_s: float) -> int:
        """Note what one step sampled: the number of its tokens, without those from the first log-probability on that
        is not finite. Speculative decoding apart, a step samples one token.
        """
        self._note_events(output)
        if output.new_prompt_logprobs_tensors is not None:
            self._scores = as_scores(output.new_prompt_logprobs_tensors)
        sampled = len(output.new_token_ids)
        if sampled == 0:
            return 0
        if self.first_token_s == 0.0:
            self.first_token_s = now_s
        if self.experts is not None and output.routed_experts is not None:
            self.experts.take(output.routed_experts, sampled)
        logprobs = output.new_logprobs.logprobs[:sampled, 0]
        finite = np.isfinite(logprobs)
        if not finite.all():
            self.nonfinite_logprobs = sampled - int(np.count_nonzero(finite))
            sampled = int(np.argmin(finite))
        end = self.pending + sampled
        if end > len(self._token_ids):
            self._grow(end)
        self._token_ids[self.pending : end] = output.new_token_ids[:sampled]
        self._logprobs[self.pending : end] = logprobs[:sampled]
        self._versions[self.pending : end] = version
        if self._supports is not None:
            if output.new_sampling_mask is None:
                raise EngineFailed(
                    "vLLM sampled under top_p or top_k and did not say what they left of the vocabulary, though it was "
                    "asked to: leave rollouts.top_p and rollouts.top_k out"
                )
            ids, self._support_counts[self.pending : end] = _first_supports(output.new_sampling_mask, sampled)
            self._supports.append(ids)
        self.pending = end
        if self.experts is not None:
            self.experts.sampled(self._token_ids[end - sampled : end])
        return sampled

    def found_older_prefix(self) -> None:
        """Its first keys and values were computed by some older weights."""
        self.cache_s = _LONG_AGO_S

    def forget_cache(self, now_s: float) -> None:
        """Its keys and values are gone, and will be computed again."""
        self.cache_s, self._forgotten_s = 0.0, now_s

    def report(self, reason: FinishReason | None, now_s: float) -> SampledTokens:
        """The unreported tokens, which are reported by this."""
        end, self.pending = self.pending, 0
        mixed, self.mixed_cache_tokens = self.mixed_cache_tokens, 0
        experts = self.experts if reason is not None else None
        supports = None
        if self._supports:
            supports = Supports(np.concatenate(self._supports), self._support_counts[:end].copy())
            self._supports = []
        return SampledTokens(
            request_id=self.request.request_id,
            token_ids=self._token_ids[:end].copy(),
            logprobs=self._logprobs[:end].copy(),
            policy_versions=self._versions[:end].copy(),
            mixed_cache_tokens=mixed,
            finish_reason=reason,
            routed_experts=experts.whole() if experts else None,
            routed_experts_start=experts.start if experts else 0,
            supports=supports,
            scores=None if reason is None else self._scores,
            metrics={}
            if reason is None
            else request_metrics(
                now_s,
                added_s=self.added_s,
                started_s=self.started_s,
                first_token_s=self.first_token_s,
                cached_prompt_tokens=self.cached_prompt_tokens,
                preemptions=self.preemptions,
                nonfinite_logprobs=self.nonfinite_logprobs,
            ),
        )

    def _note_events(self, output: EngineCoreOutput) -> None:
        for event in output.events or ():
            if event.type.name == "SCHEDULED":
                self.started_s = self.started_s or event.timestamp
                if event.timestamp >= self._forgotten_s:  # vLLM tells events with the next token
                    self.cache_s = self.cache_s or event.timestamp
            elif event.type.name == "PREEMPTED":
                self.preemptions += 1
        if output.prefill_stats is not None and self.first_token_s == 0.0:
            self.cached_prompt_tokens = output.prefill_stats.num_cached_tokens

    def _grow(self, size: int) -> None:
        self._token_ids = np.resize(self._token_ids, size)
        self._logprobs = np.resize(self._logprobs, size)
        self._versions = np.resize(self._versions, size)
        if self._supports is not None:
            self._support_counts = np.resize(self._support_counts, size)


def as_scores(tensors: LogprobsTensors) -> TokenScores:
    """vLLM's of a prompt, [num_tokens - 1, 1 + k]: of each token after the first its own, then the likeliest."""
    scores = TokenScores.unknown(len(tensors.logprobs) + 1, tensors.logprobs.shape[1] - 1)
    logprobs = tensors.logprobs.float().cpu().numpy()
    scores.logprobs[1:], scores.top_logprobs[1:] = logprobs[:, 0], logprobs[:, 1:]
    scores.top_ids[1:] = tensors.logprob_token_ids[:, 1:].cpu().numpy()
    return scores


def _first_supports(mask: SamplingMaskLists, num_tokens: int) -> tuple[Int32Array, Int32Array]:
    """Token ids and counts, as `Supports` has them, of the first tokens of one output.

    vLLM's masks are token ids, and where those of each token begin if the output has several.
    """
    ids = mask.token_ids.astype(np.int32, copy=False)
    starts = np.array([0, len(ids)] if mask.offsets is None else mask.offsets)[: num_tokens + 1]
    return ids[: starts[-1]], np.diff(starts).astype(np.int32)

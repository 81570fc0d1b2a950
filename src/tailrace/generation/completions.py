"""Joins and cuts parts of completions, and says whether anything is left to sample after one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.generation.engines.protocol import EngineLimits, SampledTokens
from tailrace.records import Completion, FinishReason, Float32Array, GenerationRequest, Supports

ScalarT = TypeVar("ScalarT", bound=np.generic)

WORK_AT_ONCE = 64
"""Short replies that are handed to their readers before others have a turn of the event loop: about a millisecond."""
_TOKENS_PER_REPLY = 32
"""Reading so many tokens back into text takes whoever awaits a reply as long as all else that a short one costs."""
_ADDED = ("queue_s", "decode_s", "preemptions", "mixed_cache_tokens", "nonfinite_logprobs")
"""Metrics that add up over the parts of an interrupted completion."""
_OF_FIRST = ("time_to_first_token_s", "cached_prompt_tokens")
"""Those of the first part that sampled anything: the cache of a later one holds more than the prompt."""
_NONE_YET = dict.fromkeys((*_ADDED, "cached_prompt_tokens"), 0.0)


def as_chunk(sampled: SampledTokens) -> Completion:
    """What an engine sampled, as `on_chunk` is told of it."""
    size = len(sampled.token_ids)
    return Completion(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        policy_versions=sampled.policy_versions,
        finish_reason=sampled.finish_reason or FinishReason.RUNNING,
        mixed_spans=((size - sampled.mixed_cache_tokens, size),) if sampled.mixed_cache_tokens else (),
        supports=sampled.supports,
        scores=sampled.scores,
    )


def assembled(
    prefix: Completion | None, sampled: Sequence[SampledTokens], finish_reason: FinishReason, *, waited_s: float = 0.0
) -> Completion:
    """What an engine sampled of one request, in one piece, after the prefix where there was one.

    `waited_s` passed before the engine was given the request: it is queue time.
    """
    own = _NONE_YET | (sampled[-1].metrics if sampled else {})
    own["queue_s"] += waited_s
    if "time_to_first_token_s" in own:
        own["time_to_first_token_s"] += waited_s
    return joined(prefix, [as_chunk(one) for one in sampled], finish_reason, own)


def joined(
    prefix: Completion | None,
    chunks: Sequence[Completion],
    finish_reason: FinishReason,
    metrics: Mapping[str, float] | None = None,
) -> Completion:
    """Chunks in one piece, after the prefix where there was one. `metrics` are those of the chunks.

    Log-probabilities that are not finite are counted in `metrics["nonfinite_logprobs"]`, and stay what they are.
    """
    parts = [*chunks] if prefix is None else [prefix, *chunks]
    own = _NONE_YET | dict(metrics or {})
    own["mixed_cache_tokens"] += sum(end - start for chunk in chunks for start, end in chunk.mixed_spans)
    own["nonfinite_logprobs"] += sum(_count_nonfinite(chunk.logprobs) for chunk in chunks)
    own["preemptions"] += finish_reason is FinishReason.ABORTED
    return Completion(
        token_ids=_concatenated([part.token_ids for part in parts], np.int32),
        logprobs=_concatenated([part.logprobs for part in parts], np.float32),
        policy_versions=_concatenated([part.policy_versions for part in parts], np.int32),
        finish_reason=finish_reason,
        routed_experts=() if prefix is None else prefix.routed_experts,
        mixed_spans=_mixed_spans(parts),
        supports=_supports(parts),
        scores=next((part.scores for part in parts if part.scores is not None), None),
        metrics=own if prefix is None else _together(prefix, own),
    )


def tail(completion: Completion, start: int) -> Completion:
    """Its tokens from `start` on, as a chunk."""
    if not start and not completion.routed_experts:
        return completion
    return Completion(
        token_ids=completion.token_ids[start:],
        logprobs=completion.logprobs[start:],
        policy_versions=completion.policy_versions[start:],
        finish_reason=completion.finish_reason,
        mixed_spans=tuple((max(0, first - start), end - start) for first, end in completion.mixed_spans if end > start),
        supports=completion.supports and completion.supports.part(start, completion.num_tokens),
    )


def head(completion: Completion, end: int) -> Completion:
    """Its first `end` tokens, as if it had ended by itself there; without what was recorded beside them."""
    return Completion(
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        policy_versions=completion.policy_versions[:end],
        finish_reason=FinishReason.STOP,
        mixed_spans=tuple((first, min(last, end)) for first, last in completion.mixed_spans if first < end),
        supports=completion.supports and completion.supports.part(0, end),
        metrics=completion.metrics,
    )


def work_of(completion: Completion | None) -> int:
    """What whoever awaits a completion will do with it, in short replies; None stands for a chunk, or no reply."""
    return 1 if completion is None else 1 + completion.num_tokens // _TOKENS_PER_REPLY


def finished(request: GenerationRequest, limits: EngineLimits | None = None) -> Completion | None:
    """The request's prefix as its completion, where nothing is left to sample; None where something is.

    A completion may be interrupted after its last token and before anybody was told that it was the last.
    """
    saved, sampling = request.prefix, request.sampling
    if saved is None or saved.num_tokens == 0:
        return None
    if int(saved.token_ids[-1]) in sampling.stop_token_ids:
        return replace(saved, finish_reason=FinishReason.STOP)
    full = limits is not None and len(request.prompt_token_ids) + saved.num_tokens >= limits.max_model_tokens
    if full or saved.num_tokens >= sampling.max_tokens:
        return replace(saved, finish_reason=FinishReason.LENGTH)
    return None


def _count_nonfinite(logprobs: Float32Array) -> int:
    return len(logprobs) - int(np.count_nonzero(np.isfinite(logprobs)))


def _mixed_spans(parts: Sequence[Completion]) -> tuple[tuple[int, int], ...]:
    """Those of all parts, counted from the first one's start; what touches becomes one."""
    spans, offset = list[tuple[int, int]](), 0
    for part in parts:
        for start, end in part.mixed_spans:
            first = spans.pop()[0] if spans and spans[-1][1] == offset + start else offset + start
            spans.append((first, offset + end))
        offset += part.num_tokens
    return tuple(spans)


def _supports(parts: Sequence[Completion]) -> Supports | None:
    """Those of all parts; one part's as they are."""
    if not any(part.supports for part in parts):
        return None
    given = [part.supports or Supports.unrestricted(part.num_tokens) for part in parts]
    return given[0] if len(given) == 1 else Supports.concatenated(given)


def _concatenated(arrays: list[NDArray[ScalarT]], dtype: type[ScalarT]) -> NDArray[ScalarT]:
    """In one piece; one array as it is, no array as an empty one."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _together(prefix: Completion, own: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a completion whose first part was sampled before."""
    before = prefix.metrics
    metrics = {**before, **own, **{name: before.get(name, 0.0) + own[name] for name in _ADDED}}
    if prefix.num_tokens:
        metrics.update((name, before[name]) for name in _OF_FIRST if name in before)
    return metrics

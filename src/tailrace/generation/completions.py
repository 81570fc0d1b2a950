"""From an engine's chunks to a completion, and what an interrupted one still has to sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tailrace.generation.engines.protocol import EngineLimits, SampledTokens
from tailrace.records import Completion, FinishReason, GenerationRequest, Int32Array, SamplingParams

ScalarT = TypeVar("ScalarT", bound=np.generic)

_ADDED = ("queue_s", "decode_s", "cached_prompt_tokens", "preemptions", "mixed_cache_tokens", "nonfinite_logprobs")
"""Metrics that add up over the parts of an interrupted completion."""


def assembled(
    prefix: Completion | None, chunks: Sequence[SampledTokens], finish_reason: FinishReason, *, waited_s: float = 0.0
) -> Completion:
    """The chunks in one piece, after the prefix where there was one.

    `waited_s` passed before the engine was given the request: it is queue time. Log-probabilities that are not finite
    are counted in `metrics["nonfinite_logprobs"]`, and stay what they are.
    """
    parts: list[SampledTokens | Completion] = [*chunks] if prefix is None else [prefix, *chunks]
    token_ids = _joined([part.token_ids for part in parts], np.int32)
    logprobs = _joined([part.logprobs for part in parts], np.float32)
    versions = _joined([part.policy_versions for part in parts], np.int32)
    own = dict.fromkeys(_ADDED, 0.0) | (chunks[-1].metrics if chunks else {})
    own["queue_s"] += waited_s
    own["mixed_cache_tokens"] += sum(chunk.mixed_cache_tokens for chunk in chunks)
    own["nonfinite_logprobs"] += sum(count_nonfinite(chunk) for chunk in chunks)
    own["preemptions"] += finish_reason is FinishReason.ABORTED
    if "time_to_first_token_s" in own:
        own["time_to_first_token_s"] += waited_s
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=finish_reason,
        routed_experts=() if prefix is None else prefix.routed_experts,
        mixed_spans=_mixed_spans(prefix, chunks),
        metrics=own if prefix is None else _together(prefix, own),
    )


def count_nonfinite(chunk: SampledTokens) -> int:
    """Log-probabilities that are NaN or infinite."""
    return len(chunk.logprobs) - int(np.count_nonzero(np.isfinite(chunk.logprobs)))


def finished_by(
    prompt_token_ids: Int32Array, sampling: SamplingParams, saved: Completion | None, limits: EngineLimits | None = None
) -> FinishReason | None:
    """Why nothing is left to sample after `saved`; None where something is.

    A completion may be interrupted after its last token and before anybody was told that it was the last.

    >>> prompt = np.arange(4, dtype=np.int32)
    >>> saved = Completion(prompt[:3], np.zeros(3, np.float32), prompt[:3], FinishReason.ABORTED)
    >>> finished_by(prompt, SamplingParams(max_tokens=3), saved)
    <FinishReason.LENGTH: 'length'>
    >>> finished_by(prompt, SamplingParams(max_tokens=9), saved)
    """
    if saved is None or saved.num_tokens == 0:
        return None
    if int(saved.token_ids[-1]) in sampling.stop_token_ids:
        return FinishReason.STOP
    full = limits is not None and len(prompt_token_ids) + saved.num_tokens >= limits.max_model_tokens
    return FinishReason.LENGTH if full or saved.num_tokens >= sampling.max_tokens else None


def finished_already(request: GenerationRequest, limits: EngineLimits) -> Completion | None:
    """The request's prefix as its completion, where nothing is left to sample."""
    reason = finished_by(request.prompt_token_ids, request.sampling, request.prefix, limits)
    if reason is None or request.prefix is None:
        return None
    return assembled(request.prefix, [], reason)


def _mixed_spans(prefix: Completion | None, chunks: Sequence[SampledTokens]) -> tuple[tuple[int, int], ...]:
    """Those of the prefix and of the chunks; what touches becomes one."""
    spans, end = ([], 0) if prefix is None else ([*prefix.mixed_spans], prefix.num_tokens)
    for chunk in chunks:
        end += len(chunk.token_ids)
        start = end - chunk.mixed_cache_tokens
        if start == end:
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return tuple(spans)


def _joined(arrays: list[NDArray[ScalarT]], dtype: type[ScalarT]) -> NDArray[ScalarT]:
    """In one piece; one array as it is, no array as an empty one."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _together(prefix: Completion, own: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a completion whose first part was sampled before."""
    before = prefix.metrics
    metrics = {**before, **own, **{name: before.get(name, 0.0) + own[name] for name in _ADDED}}
    if prefix.num_tokens and "time_to_first_token_s" in before:
        metrics["time_to_first_token_s"] = before["time_to_first_token_s"]
    return metrics

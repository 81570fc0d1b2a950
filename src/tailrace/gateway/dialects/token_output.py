"""vLLM's tokens in, tokens out, the answer: sampled tokens as a choice with its log-probabilities and versions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tailrace.records import Completion, FinishReason, Json


def tokens(completion: Completion) -> dict[str, Json]:
    """What a choice tells of the tokens of a completion, or of a part of one."""
    return {
        "index": 0,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": {"content": _logprobs(completion)},
        "sampling_mask": _sampling_mask(completion),
    }


def ended(completion: Completion) -> dict[str, Json]:
    """What it tells of a whole one."""
    return {
        "finish_reason": "length" if completion.finish_reason is FinishReason.LENGTH else "stop",
        "weight_versions": _weight_versions(completion),
    }


def _logprobs(completion: Completion) -> list[Json]:
    pairs = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
    return [
        {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "top_logprobs": []}
        for token_id, logprob in pairs
    ]


def _sampling_mask(completion: Completion) -> list[list[int]] | None:
    """The tokens that each one was sampled from, where the run restricts sampling."""
    if completion.supports is None:
        return None
    ends = np.cumsum(completion.supports.counts).tolist()
    token_ids = completion.supports.token_ids.tolist()
    return [token_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _weight_versions(completion: Completion) -> list[Json]:
    """Stretches of one policy version."""
    versions = completion.policy_versions
    if not len(versions):
        return []
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [{"version": str(int(versions[start])), "start": start, "end": end} for start, end in pairwise(edges)]

"""What an interrupted request leaves, to be continued elsewhere: tokens, log-probabilities and versions, as sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.generation.engines.protocol import SampledTokens
from tailrace.records import Completion, FinishReason, SamplingParams


def joined(prefix: Completion | None, chunks: Sequence[SampledTokens]) -> Completion | None:
    """All that was sampled so far, as a prefix; None where nothing was."""
    if not chunks:
        return prefix
    parts: list[SampledTokens | Completion] = [*chunks] if prefix is None else [prefix, *chunks]
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        finish_reason=FinishReason.ABORTED,
    )


def finished_by(prefix: Completion, sampling: SamplingParams) -> FinishReason | None:
    """Why a request ends with this prefix, where it does: only the word of its end was lost."""
    if prefix.num_tokens and int(prefix.token_ids[-1]) in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if prefix.num_tokens >= sampling.max_tokens else None

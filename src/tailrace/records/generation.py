"""The request of one completion, and who answers it: one record from the policy to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from tailrace.records.arrays import Int32Array
from tailrace.records.completion import Completion
from tailrace.records.ids import GroupId, RequestId, RolloutId, SessionId
from tailrace.records.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One call of `generate`. Whoever passes it on passes on the record itself, or a copy with a longer `prefix`."""

    request_id: RequestId
    session_id: SessionId
    """Requests of one session share a growing prefix, whose cache an engine may keep; what follows the last completion
    may be replaced, where the request after it was cancelled."""
    group_id: GroupId
    """Requests of one group share a prompt, which an engine may compute once."""
    prompt_token_ids: Int32Array  # [num_prompt_tokens]
    sampling: SamplingParams
    owner: RolloutId | None = None
    """The rollout that may be trained on this completion; None (a judge, ...): routed experts are not kept."""
    prefix: Completion | None = None
    """Already sampled by an earlier, interrupted request; counts against `sampling.max_tokens`, never sampled again."""

    score_top_k: int | None = None
    """Score the prompt's tokens, naming so many that are likely in each one's place: the completion has `scores`, and
    what it sampled, a token at most, means nothing. None: no scores."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the completion that are there already."""
        return 0 if self.prefix is None else self.prefix.num_tokens

    @property
    def context_token_ids(self) -> Int32Array:
        """Every token that is known before sampling starts: the prompt, and the prefix where there is one."""
        if self.prefix is None:
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.prefix.token_ids])


OnChunk: TypeAlias = Callable[[Completion], None]
"""Gets the new tokens of a running request, on the event loop of its caller; what it raises aborts the request.

All chunks together are the completion without the request's `prefix`, in order, each token once, whatever interrupted
the request. A chunk's finish reason is `RUNNING`, or that of the stretch that it ends.
"""


class Generate(Protocol):
    """All that a rollout knows of generation.

    Interruption is below: preempting, moving to another replica and swapping weights only make the `await` take longer.
    Raises `RequestRefused` for an impossible request and `EngineFailed` when no engine can serve it; cancelling the
    awaiting task aborts the request.
    """

    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        """Sample one completion, `request.prefix` included."""

"""Conversations with a policy that nobody trains on: each request of a client is a rollout of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from tailrace.records import (
    Completion,
    Generate,
    GenerationRequest,
    GroupId,
    OnChunk,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.rollouts import ChatRenderer, RolloutPolicy


def asked_policies(
    renderer: ChatRenderer, generate: Generate, max_model_tokens: int | None
) -> Callable[[SamplingParams], RolloutPolicy]:
    """What makes the policy of one request. Its tokens are no run's: no scheduler counts them."""
    numbers = itertools.count()

    async def unowned(request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        return await generate(replace(request, owner=None), on_chunk)

    def new_policy(sampling: SamplingParams) -> RolloutPolicy:
        number = next(numbers)
        task = Task(TaskId(f"http/{number}"), "http", number, {})
        return RolloutPolicy(
            Rollout(RolloutId(f"http#{number}"), GroupId(f"http#{number}"), task, sampling),
            renderer=renderer,
            generate=unowned,
            max_turns=1,
            max_model_tokens=max_model_tokens,
        )

    return new_policy

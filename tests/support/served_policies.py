"""A rollout's policy behind a gateway, over scripted replies: what a test of HTTP begins with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrace.config.gateway import GatewaySettings
from tailrace.environments import Endpoint
from tailrace.gateway import Gateway
from tailrace.generation.completions import head, tail
from tailrace.records import (
    Completion,
    GenerationRequest,
    GroupId,
    Message,
    OnChunk,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.rollouts import ChatRenderer, RolloutPolicy
from tests.support.scripted_generate import Sampled, ScriptedGenerate


@dataclass
class StepwiseGenerate:
    """Scripted replies whose tokens come one by one, as often as `steps` is released; at once where it is None."""

    scripted: ScriptedGenerate
    steps: asyncio.Semaphore | None = None
    begun: int = 0
    cancelled: int = 0
    completions: list[Completion] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        self.begun += 1
        self.changed.set()
        try:
            completion = await self.scripted(request)
            for place in range(completion.num_tokens):
                if self.steps is not None:
                    await self.steps.acquire()
                if on_chunk is not None:
                    on_chunk(tail(head(completion, place + 1), place))
        except asyncio.CancelledError:
            self.cancelled += 1
            self.changed.set()
            raise
        self.completions.append(completion)
        return completion

    def allow(self, steps: int) -> None:
        """So many more tokens."""
        assert self.steps is not None
        for _ in range(steps):
            self.steps.release()

    async def until(self, *, begun: int = 0, cancelled: int = 0) -> None:
        """Wait until so many requests have begun, and so many were cancelled."""
        async with asyncio.timeout(30):
            while self.begun < begun or self.cancelled < cancelled:
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Served:
    """A policy, its rollout, its endpoint, and what the engine saw."""

    policy: RolloutPolicy
    rollout: Rollout
    endpoint: Endpoint
    gateway: Gateway
    generate: StepwiseGenerate
    renderer: ChatRenderer

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.endpoint.key}"}

    def prompt(self, call: int) -> str:
        """What the engine was asked, the how manieth time."""
        calls = self.generate.scripted.calls
        return self.renderer.tokenizer.decode(calls[call].prompt_token_ids.tolist())

    def assert_recorded_as_sampled(self) -> None:
        """Every token that bears loss is one that the engine sampled, in order, with its log-probability."""
        branches = self.rollout.branches
        recorded = [
            (branch.token_ids[start:end].tolist(), branch.logprobs[start:end].tolist())
            for branch in branches
            for start, end in branch.completion_spans
        ]
        sampled = [(one.token_ids.tolist(), one.logprobs.tolist()) for one in self.generate.completions]
        assert sorted(recorded) == sorted(sampled)
        assert sum(int(np.count_nonzero(branch.loss_mask)) for branch in branches) == sum(
            len(ids) for ids, _ in sampled
        )


@asynccontextmanager
async def served(
    renderer: ChatRenderer,
    replies: Sequence[str | Sampled | Exception] = ("Ada",),
    *,
    stepwise: bool = False,
    sampling: SamplingParams | None = None,
    max_turns: int = 9,
    max_tokens: int = 64,
    settings: dict[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[Served]:
    """A gateway with one rollout, until the context is left."""
    task = Task(TaskId("names/train/7"), "names", 7, {})
    rollout = Rollout(RolloutId("r7"), GroupId("g7"), task, sampling or SamplingParams(max_tokens=max_tokens))
    generate = StepwiseGenerate(
        ScriptedGenerate(renderer.tokenizer, replies), asyncio.Semaphore(0) if stepwise else None
    )
    async with Gateway(GatewaySettings.model_validate(settings or {})) as gateway:
        policy = RolloutPolicy(
            rollout, renderer=renderer, generate=generate, max_turns=max_turns, endpoints=gateway, **limits
        )
        async with policy.endpoint() as endpoint:
            yield Served(policy, rollout, endpoint, gateway, generate, renderer)


def user(content: str) -> Message:
    return {"role": "user", "content": content}

"""A `Generate` that remembers what was sampled, to compare branches with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.records import Completion, Generate, GenerationRequest, OnChunk, Rollout


@dataclass
class RecordedGenerate:
    """Passes requests on, with log-probabilities that no two tokens share."""

    inner: Generate
    sampled: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Prompts and completions."""
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    async def __call__(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        prompt = request.prompt_token_ids.tolist()
        completion = await self.inner(request, on_chunk)
        logprobs = -self.draw.random(completion.num_tokens, np.float32)
        completion = replace(completion, logprobs=logprobs)
        self.sampled.append((prompt, completion))
        return completion


def require_as_sampled(rollouts: Sequence[Rollout], generate: RecordedGenerate) -> None:
    """Every completion is in a branch exactly once, after the very prompt it was sampled from, and nothing else is."""
    found = []
    for rollout in rollouts:
        for branch in rollout.branches:
            for start, end in branch.completion_spans:
                assert branch.loss_mask[start:end].all()
                found.append(
                    (
                        branch.token_ids[:start].tolist(),
                        branch.token_ids[start:end].tolist(),
                        branch.logprobs[start:end].tolist(),
                    )
                )
    sampled = [(prompt, one.token_ids.tolist(), one.logprobs.tolist()) for prompt, one in generate.sampled]
    assert sorted(found) == sorted(sampled)
    assert sampled

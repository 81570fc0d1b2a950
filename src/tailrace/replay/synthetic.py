"""Made-up groups of any size, as a mixture-of-experts run with tools would make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    PayloadChunk,
    PayloadRef,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)

ENVIRONMENT = "synthetic"
_VOCABULARY = 32_000
_TOP_K = 8

PutExperts: TypeAlias = Callable[[NDArray[np.uint8]], PayloadRef | None]
"""Leaves [num_tokens, layers, top_k] in a payload store, or nowhere."""
_RecordExperts: TypeAlias = Callable[[int, int], tuple[PayloadChunk, ...]]


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """How much of everything. The defaults are the load of `benchmarks/step_boundary.py`: 2.6 million tokens.

    >>> load = SyntheticLoad(rollouts=64, turns=20, experts_bytes=10**9)
    >>> load.num_tokens, load.experts_layers
    (2600960, 48)
    """

    rollouts: int = 64
    turns: int = 20
    context_tokens: int = 1016
    """Of each turn: prompt or tool output."""
    completion_tokens: int = 1016
    group_size: int = 8
    experts_bytes: int = 0
    """Of all routed experts, about."""

    @property
    def num_tokens(self) -> int:
        """Of all rollouts."""
        return self.rollouts * self.turns * (self.context_tokens + self.completion_tokens)

    @property
    def experts_layers(self) -> int:
        """Mixture-of-experts layers that make up so many bytes, with 8 experts of one byte in each."""
        return round(self.experts_bytes / self.num_tokens / _TOP_K)


def synthetic_groups(load: SyntheticLoad, put: PutExperts | None = None) -> list[Group]:
    """Finished, scored groups without advantages; the last one may be smaller. The same ones every time.

    `put` is called once a turn, with the experts that a generator would put, in an array that is used again.
    """
    random = np.random.default_rng(0)
    record_experts = _experts_recorder(load, put, random)
    groups = []
    for index, first in enumerate(range(0, load.rollouts, load.group_size)):
        task = Task(TaskId(f"{ENVIRONMENT}/{index}"), ENVIRONMENT, index, {"question": f"question {index}"})
        group_id = GroupId(f"{task.task_id}#1")
        size = min(load.group_size, load.rollouts - first)
        rollouts = [
            _rollout(load, task, group_id, place, _branch(load, record_experts, random)) for place in range(size)
        ]
        groups.append(Group(group_id, task, rollouts))
    return groups


def _experts_recorder(load: SyntheticLoad, put: PutExperts | None, random: np.random.Generator) -> _RecordExperts:
    """Puts experts for positions `start` to `end`: the same values every time."""
    if put is None or not load.experts_layers:
        return lambda start, end: ()
    shape = (load.context_tokens + load.completion_tokens, load.experts_layers, _TOP_K)
    values = random.integers(128, size=shape, dtype=np.uint8)

    def record(start: int, end: int) -> tuple[PayloadChunk, ...]:
        ref = put(values[: end - start])
        return () if ref is None else (PayloadChunk(start, end, ref),)

    return record


def _branch(load: SyntheticLoad, record_experts: _RecordExperts, random: np.random.Generator) -> Branch:
    branch = Branch()
    seen = 0  # positions that a forward pass ran over: all but the last token
    for _ in range(load.turns):
        branch.extend_context(random.integers(_VOCABULARY, size=load.context_tokens, dtype=np.int32))
        end = branch.num_tokens + load.completion_tokens - 1
        completion = Completion(
            token_ids=random.integers(_VOCABULARY, size=load.completion_tokens, dtype=np.int32),
            logprobs=-random.random(load.completion_tokens, dtype=np.float32),
            policy_versions=np.zeros(load.completion_tokens, np.int32),
            finish_reason=FinishReason.STOP,
            routed_experts=record_experts(seen, end),
        )
        branch.extend_completion(completion)
        seen = end
    return branch


def _rollout(load: SyntheticLoad, task: Task, group_id: GroupId, place: int, branch: Branch) -> Rollout:
    rollout = Rollout(RolloutId(f"{group_id}.{place}"), group_id, task, SamplingParams(), [branch], turns=load.turns)
    for turn in range(load.turns):
        rollout.messages.append({"role": "user", "content": f"turn {turn}"})
        rollout.messages.append({"role": "assistant", "content": f"reply {turn}"})
    rollout.reward = Reward(float(place % 2), {"correct": float(place % 2)})
    return rollout

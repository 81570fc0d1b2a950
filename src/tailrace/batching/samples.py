"""Finished branches to training samples: advantages per token, stale tokens masked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailrace.records import BoolArray, Branch, Float32Array, Group, Rollout, TrainingSample

STALE = "stale"
NOTHING_SAMPLED = "nothing_sampled"


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroup:
    """One group's samples, and the rollouts of it that bear no loss, each with its reason."""

    group: Group
    samples: list[TrainingSample]
    trained: list[Rollout]
    filtered: list[tuple[Rollout, str]]
    masked_tokens: int


def sample_group(group: Group, *, judged_version: int, max_staleness: int) -> SampledGroup:
    """Make the samples of a group for a batch that a trainer of at most `judged_version` will train on.

    Tokens older than `max_staleness` versions then stay as context and carry no loss (`on_stale = mask`); a rollout
    masked entirely is left out as `filtered(stale)`. All branches of a rollout go together.
    """
    if group.advantages is None:
        raise ValueError(f"group {group.group_id} has no advantages yet")
    samples: list[TrainingSample] = []
    trained: list[Rollout] = []
    filtered: list[tuple[Rollout, str]] = []
    masked_tokens = 0
    oldest = judged_version - max_staleness
    for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
        masks = [branch.loss_mask & (branch.policy_versions >= oldest) for branch in rollout.branches]
        masked_tokens += rollout.num_completion_tokens - sum(int(mask.sum()) for mask in masks)
        if any(mask.any() for mask in masks):
            trained.append(rollout)
            samples += _samples_of(rollout, masks, advantage)
        else:
            filtered.append((rollout, STALE if rollout.num_completion_tokens else NOTHING_SAMPLED))
    return SampledGroup(group, samples, trained, filtered, masked_tokens)


def _samples_of(rollout: Rollout, masks: list[BoolArray], advantage: float | Float32Array) -> list[TrainingSample]:
    if isinstance(advantage, np.ndarray) and len(rollout.branches) != 1:
        raise ValueError(
            f"rollout {rollout.rollout_id} has {len(rollout.branches)} branches; advantages per token need exactly one"
        )
    return [
        TrainingSample(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            environment=rollout.task.environment,
            temperature=rollout.sampling.temperature,
            branch=branch,
            advantages=_per_token(advantage, branch),
            loss_mask=mask,
        )
        for branch, mask in zip(rollout.branches, masks, strict=True)
        if mask.any()
    ]


def _per_token(advantage: float | Float32Array, branch: Branch) -> Float32Array:
    values: Float32Array = np.broadcast_to(np.asarray(advantage, np.float32), (branch.num_tokens,))
    return values

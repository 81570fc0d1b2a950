"""Finished branches to training samples: advantages per token, stale tokens masked."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.batching.advantages import required_advantages
from tailrace.records import Branch, Float32Array, Group, Rollout, TrainingSample

STALE = "stale"
NOTHING_SAMPLED = "nothing_sampled"


@dataclass(slots=True, eq=False)
class SampledGroup:
    """One group's samples, and the rollouts of it that bear no loss, each with its reason."""

    group: Group
    samples: list[TrainingSample] = field(default_factory=list)
    trained: list[Rollout] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
    """Tokens that bear loss, of each trained rollout."""
    filtered: list[tuple[Rollout, str]] = field(default_factory=list)
    masked_tokens: int = 0
    """Stale tokens of the trained rollouts, which bear no loss; those of filtered rollouts are wasted, not masked."""


def sample_group(group: Group, *, oldest_version: int, drop_stale: bool = False) -> SampledGroup:
    """Make the samples of a group for a batch in which tokens of `oldest_version` and newer may bear loss.

    Older ones stay as context and carry no loss but cross-entropy. A rollout that bears none then, and with
    `drop_stale` every rollout with such a token, is left out as `filtered(stale)`. All branches of a rollout that bear
    any loss go together.
    """
    sampled = SampledGroup(group)
    for rollout, advantage in zip(group.rollouts, required_advantages(group), strict=True):
        _sample(sampled, rollout, advantage, oldest=oldest_version, drop_stale=drop_stale)
    return sampled


def _sample(
    sampled: SampledGroup, rollout: Rollout, advantage: float | Float32Array, *, oldest: int, drop_stale: bool
) -> None:
    fresh = [_num_fresh(branch, oldest) for branch in rollout.branches]
    num_fresh, num_tokens = sum(fresh), rollout.num_completion_tokens
    bears_cross_entropy = any(branch.num_weighted for branch in rollout.branches)
    if not (num_fresh or bears_cross_entropy) or (drop_stale and num_fresh < num_tokens):
        sampled.filtered.append((rollout, STALE if num_tokens else NOTHING_SAMPLED))
        return
    sampled.trained.append(rollout)
    sampled.loss_tokens.append(num_fresh)
    sampled.masked_tokens += num_tokens - num_fresh
    sampled.samples += [
        TrainingSample(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            temperature=rollout.sampling.temperature if branch.temperature is None else branch.temperature,
            branch=branch,
            advantages=advantage if branch.num_completion_tokens else 0.0,
            oldest_version=oldest,
            branch_index=index,
            environment=rollout.task.environment,
        )
        for index, (branch, count) in enumerate(zip(rollout.branches, fresh, strict=True))
        if count or branch.num_weighted
    ]


def _num_fresh(branch: Branch, oldest: int) -> int:
    """Tokens of version `oldest` or newer that a policy sampled."""
    oldest_version = branch.oldest_version
    if oldest_version is None or oldest_version >= oldest:  # all but always
        return branch.num_completion_tokens
    return sum(count for version, count in branch.version_counts.items() if version >= oldest)

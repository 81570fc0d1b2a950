"""Advantages of a scored group, and whether they carry a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tailrace.batching.settings import AdvantageName
from tailrace.errors import SettingsError
from tailrace.records import DISTILLATION_WEIGHTS, TEACHER_LOGPROBS, Branch, Float32Array, Group, Rollout

INCREMENTAL: frozenset[AdvantageName] = frozenset({"mean", "rloo"})
"""Advantages that are a reward less a baseline of the siblings, so that they mean something before all are known.

Released early, both are a reward less the mean of the siblings known by then: there a rollout has no part in its own
baseline in either.
"""

ZERO_SPREAD = "zero_spread"
EPSILON = 1e-6
"""Against division by a deviation of 0."""


def group_advantages(rewards: Sequence[float], name: AdvantageName) -> list[float]:
    """Advantages of n rollouts with rewards r_i; 0 where all rewards are equal, but for `reward`.

    mean      r_i - m, m the mean reward: the baseline of GRPO without its division, which weighs groups by their
              difficulty (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, §3.2: Dr. GRPO)
    mean_std  (r_i - m) / s, s the deviation of the rewards (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300,
              section 4.1.2: GRPO)
    rloo      r_i less the mean of the other n - 1, which is n / (n - 1) (r_i - m) (Ahmadian et al. 2024, "Back to
              Basics", arXiv:2402.14740; Kool, van Hoof and Welling 2019): unbiased, as a rollout has no part in its
              own baseline
    maxrl     (r_i - m) / m: the gradient of the logarithm of the success rate in place of the rate, so that hard tasks
              weigh more (Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710)
    reward    r_i, whose baseline is the whole batch's where its advantages are whitened (Hu et al. 2025,
              "REINFORCE++", arXiv:2501.03262): groups of equal rewards teach, too

    Raises `SettingsError` for maxrl with a reward below 0.

    >>> group_advantages([1.0, 0.0, 0.5, 0.5], "mean")
    [0.5, -0.5, 0.0, 0.0]
    >>> group_advantages([1.0, 0.0, 0.0, 0.0], "maxrl")
    [3.0, -1.0, -1.0, -1.0]
    """
    if name == "maxrl" and min(rewards, default=0.0) < 0:
        raise SettingsError(
            f"scheduling.advantage = 'maxrl' is for rewards of 0 and above, and a rollout has {min(rewards)}: shift "
            "the rewards, or write scheduling.advantage = 'mean'"
        )
    if name == "reward":
        return [*rewards]
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    # a group is small: NumPy would take longer to be called than to compute
    count = len(rewards)
    mean = math.fsum(reward / count for reward in rewards)
    centred = [reward - mean for reward in rewards]
    match name:
        case "mean":
            return centred
        case "mean_std":
            deviation = math.sqrt(math.fsum(value * value for value in centred) / count)
            return [value / (deviation + EPSILON) for value in centred]
        case "rloo":
            return [value * count / (count - 1) for value in centred]
        case "maxrl":
            return [value / mean for value in centred]


def compute_advantages(group: Group, name: AdvantageName) -> None:
    """Fill `group.advantages` from its rewards, unless its scorer set them already."""
    if group.advantages is None:
        group.advantages = list(group_advantages(group.rewards, name))


def required_advantages(group: Group) -> list[float | Float32Array]:
    """The group's advantages. Raises `ValueError` unless each rollout has one, finite, and of its tokens' shape."""
    if group.advantages is None:
        raise ValueError(f"group {group.group_id} has no advantages yet")
    if len(group.advantages) != len(group.rollouts):
        raise ValueError(
            f"group {group.group_id} has {len(group.advantages)} advantages for {len(group.rollouts)} rollouts"
        )
    for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
        if not (np.isfinite(advantage).all() if isinstance(advantage, np.ndarray) else math.isfinite(advantage)):
            raise ValueError(f"rollout {rollout.rollout_id} has an advantage that is not finite")
        if isinstance(advantage, np.ndarray) and rollout.num_completion_tokens:
            _require_one_each(rollout, advantage)
    return group.advantages


def _require_one_each(rollout: Rollout, advantages: Float32Array) -> None:
    """Advantages of tokens are of those of the only branch that was sampled."""
    sampled = [branch for branch in rollout.branches if branch.num_completion_tokens]
    if len(sampled) != 1:
        raise ValueError(
            f"rollout {rollout.rollout_id} has {len(sampled)} branches; advantages per token need exactly one"
        )
    if advantages.shape != (sampled[0].num_tokens,):
        raise ValueError(
            f"rollout {rollout.rollout_id} has {sampled[0].num_tokens} tokens; its advantages per token have the shape "
            f"{advantages.shape}"
        )


def filter_reason(group: Group, *, filter_zero_spread: bool) -> str | None:
    """Why a group with advantages carries no gradient, or None where it does: by other losses than rewards', too."""
    if not filter_zero_spread or group.advantages is None:
        return None
    for advantage in group.advantages:
        if advantage.any() if isinstance(advantage, np.ndarray) else advantage:
            return None
    return None if any(map(teaches_anyway, group.rollouts)) else ZERO_SPREAD


def teaches_anyway(rollout: Rollout) -> bool:
    """Whether some of its tokens bear another loss than that of rewards: cross-entropy, or a teacher's."""
    return any(branch.num_weighted or _is_taught(branch) for branch in rollout.branches)


def _is_taught(branch: Branch) -> bool:
    """By a teacher, at one of its sampled tokens at least."""
    weightless = sum(branch.weightless(DISTILLATION_WEIGHTS).values())
    return TEACHER_LOGPROBS in branch.columns and weightless < branch.num_completion_tokens

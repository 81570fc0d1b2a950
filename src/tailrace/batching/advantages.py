"""Advantages of a scored group, and whether they carry a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tailrace.batching.settings import AdvantageName
from tailrace.records import Group

INCREMENTAL: frozenset[AdvantageName] = frozenset({"mean"})
"""Advantages that are a reward less a baseline of the siblings, so that they mean something before all are known."""

ZERO_SPREAD = "zero_spread"
_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], name: AdvantageName) -> list[float]:
    """GRPO's group-relative advantages (Shao et al. 2024, DeepSeekMath, section 4.1.2).

    `mean` leaves the division by the standard deviation out (Liu et al. 2025, Dr. GRPO, equation 3): it weighs groups
    by their difficulty.

    >>> group_advantages([1.0, 0.0, 0.5, 0.5], "mean")
    [0.5, -0.5, 0.0, 0.0]
    """
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    # a group is small: NumPy would take longer to be called than to compute
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    centred = [reward - mean for reward in rewards]
    if name == "mean":
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (deviation + _EPSILON) for value in centred]


def compute_advantages(group: Group, name: AdvantageName) -> None:
    """Fill `group.advantages` from its rewards, unless its scorer set them already."""
    if group.advantages is None:
        group.advantages = list(group_advantages(group.rewards, name))


def filter_reason(group: Group, *, filter_zero_spread: bool) -> str | None:
    """Why a group with advantages carries no gradient, or None where it does."""
    if not filter_zero_spread or group.advantages is None:
        return None
    for advantage in group.advantages:
        if advantage.any() if isinstance(advantage, np.ndarray) else advantage:
            return None
    return ZERO_SPREAD

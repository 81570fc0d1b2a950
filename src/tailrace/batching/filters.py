"""Which scored groups are worth training on."""

from __future__ import annotations

import numpy as np

from tailrace.records import Group

ZERO_SPREAD = "zero_spread"


def filter_reason(group: Group, *, filter_zero_spread: bool) -> str | None:
    """Why a group with advantages carries no gradient, or None where it does."""
    if not filter_zero_spread or group.advantages is None:
        return None
    for advantage in group.advantages:
        if advantage.any() if isinstance(advantage, np.ndarray) else advantage:
            return None
    return ZERO_SPREAD

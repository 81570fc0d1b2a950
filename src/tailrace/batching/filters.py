"""Which scored groups are worth training on."""

from __future__ import annotations

import numpy as np

from tailrace.records import Group

ZERO_SPREAD = "zero_spread"


def filter_reason(group: Group, *, filter_zero_spread: bool) -> str | None:
    """Why a group with advantages carries no gradient, or None where it does."""
    if not filter_zero_spread or group.advantages is None:
        return None
    return None if any(np.any(advantage) for advantage in group.advantages) else ZERO_SPREAD

"""Rewards: finite numbers, or an error that says what they were. An exception never becomes a number."""

from __future__ import annotations

import math
from numbers import Real

from tailrace.errors import InvalidReward
from tailrace.records import Json, Reward, Rollout


def require_number(value: object, what: str) -> float:
    """`value` as a float. Raises `InvalidReward` unless it is a finite number (a bool counts as 0 or 1).

    >>> require_number(True, "the reward")
    1.0
    """
    if type(value) is float and math.isfinite(value):  # all but always
        return value
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, Real):
        raise InvalidReward(f"{what} is {value!r:.200} ({type(value).__name__}); it must be a number")
    result = float(number)
    if not math.isfinite(result):
        raise InvalidReward(f"{what} is {result}; it must be finite")
    return result


def require_reward(value: object, what: str) -> Reward:
    """What an agent or reward function returned, as a `Reward` with finite numbers. Raises `InvalidReward`."""
    if not isinstance(value, Reward):
        return Reward(require_number(value, what))
    components = {name: require_number(part, f"{what}, component {name!r},") for name, part in value.components.items()}
    columns: dict[str, Json] = dict(value.columns)
    return Reward(require_number(value.value, what), components=components, columns=columns)


def is_sound(reward: Reward) -> bool:
    """Whether all of its numbers are finite floats, as `require_reward` leaves them."""
    if not (type(reward.value) is float and math.isfinite(reward.value)):
        return False
    return all(type(part) is float and math.isfinite(part) for part in reward.components.values())


def unscore(rollout: Rollout) -> None:
    """Take its reward away, which is not the one that was asked for; what came with it is kept beside the rollout."""
    if isinstance(rollout.reward, Reward):
        rollout.metrics = {**rollout.reward.components, **rollout.metrics}
        rollout.metadata = {**rollout.reward.columns, **rollout.metadata}
    rollout.reward = None

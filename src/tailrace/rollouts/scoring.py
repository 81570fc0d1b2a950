"""Rewards: finite numbers, or an error that says what they were. An exception never becomes a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from tailrace.environments import EnvironmentSpec
from tailrace.errors import EnvironmentFailed, InvalidReward
from tailrace.records import Group, Json, Reward, Rollout


def require_number(value: object, what: str) -> float:
    """`value` as a float. Raises `InvalidReward` unless it is a finite number (a bool counts as 0 or 1).

    >>> require_number(True, "the reward")
    1.0
    """
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


async def score_group(group: Group, spec: EnvironmentSpec) -> list[Group]:
    """Let the environment rescore, split or discard a complete group. Raises for the whole group, never for a part.

    Raises:
        EnvironmentFailed: `score_group` raised, or returned something else than groups.
        InvalidReward: A rollout is left without a finite reward.
    """
    groups = [group]
    if spec.score_group is not None:
        groups = _as_groups(await spec.score_group(group), spec)
    for member in (rollout for scored in groups for rollout in scored.rollouts):
        member.reward = _final_reward(member)
    return groups


def _as_groups(result: object, spec: EnvironmentSpec) -> list[Group]:
    if result is None:
        return []
    groups = [result] if isinstance(result, Group) else result
    if not isinstance(groups, Sequence) or not all(isinstance(scored, Group) for scored in groups):
        raise EnvironmentFailed(
            f"score_group of environment {spec.name!r} returned a {type(result).__name__}; "
            "it returns a Group, a list of them, or None"
        )
    return [scored for scored in groups if scored.rollouts]


def _final_reward(rollout: Rollout) -> Reward:
    where = f"task {rollout.task.task_id}: the reward of rollout {rollout.rollout_id}"
    if rollout.reward is None:
        raise InvalidReward(f"{where} is missing; return it from the agent, its observations or `reward`")
    return require_reward(rollout.reward, where)

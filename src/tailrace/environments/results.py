"""What a rollout earned, as agents, reward functions and judges report it.

The forms that users' code may return become an `AgentResult` in `as_agent_result`, and `finite_number` is the one check
of a number. An exception never becomes a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import cast

import numpy as np

from tailrace.errors import InvalidReward
from tailrace.records import Json, Reward


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent reports of its rollout. A number is short for one with nothing but a reward."""

    reward: float | None = None
    """None where something else scores the rollout: a reward function, `score_group` or a judge."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Become components of the rollout's reward, whatever gives it that; metrics of the rollout while it has none."""
    info: dict[str, Json] = field(default_factory=dict)
    """Anything JSON-friendly to save beside the rollout."""

    def over(self, earlier: AgentResult) -> AgentResult:
        """This result, with the metrics and info of an earlier one where it has none of that name.

        >>> AgentResult(1.0, {"judge": 1.0}).over(AgentResult(0.2, {"turns": 3.0}))
        AgentResult(reward=1.0, metrics={'turns': 3.0, 'judge': 1.0}, info={})
        """
        return AgentResult(self.reward, {**earlier.metrics, **self.metrics}, {**earlier.info, **self.info})

    def with_info_keys(self, keys: Sequence[str] | None) -> AgentResult:
        """This result with only these keys of its info; None keeps all."""
        if keys is None:
            return self
        return replace(self, info={key: self.info[key] for key in keys if key in self.info})


def as_agent_result(returned: object) -> AgentResult:
    """Whatever an agent, reward function or `play` returned. Its numbers are checked where the reward is set.

    Raises `InvalidReward` where what comes with the reward is no mapping.

    >>> as_agent_result(0.5), as_agent_result(None).reward, as_agent_result(Reward(1.0)).reward
    (AgentResult(reward=0.5, metrics={}, info={}), None, 1.0)
    """
    if isinstance(returned, AgentResult):
        _require_mapping(returned.metrics, "AgentResult.metrics")
        _require_mapping(returned.info, "AgentResult.info")
        return returned
    if isinstance(returned, Reward):
        _require_mapping(returned.components, "Reward.components")
        _require_mapping(returned.columns, "Reward.columns")
        return AgentResult(returned.value, returned.components, returned.columns)
    return AgentResult(cast(float | None, returned))


def _require_mapping(value: object, field_name: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidReward(f"{field_name} is {value!r:.200} ({type(value).__name__}); it must be a dict").as_mistake()


def finite_number(value: object, what: str) -> float:
    """`value` as a float. Raises `InvalidReward` unless it is a number that float32, as advantages are, has too.

    A bool counts as 0 or 1.

    >>> finite_number(True, "the reward")
    1.0
    """
    if type(value) is float and -_LARGEST <= value <= _LARGEST:  # nearly always
        return value
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, Real):
        raise InvalidReward(f"{what} is {value!r:.200} ({type(value).__name__}); it must be a number").as_mistake()
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InvalidReward(f"{what} is {result}; it must be finite")
    if abs(result) > _LARGEST:
        raise InvalidReward(f"{what} is {result:.3g}; at most {_LARGEST:.3g}, the largest float32, can be trained on")
    return result


_LARGEST = float(np.finfo(np.float32).max)

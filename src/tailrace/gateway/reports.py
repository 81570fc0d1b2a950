"""What an agent says of its rollout: `POST /rollouts/{key}/reward`.

{"reward": 1.0, "metrics": {"steps": 3}, "info": {"log": "..."}}
"""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.environments import AgentResult
from tailrace.environments.results import finite_number
from tailrace.errors import InvalidReward
from tailrace.gateway.dialects.fields import of_type, require_sendable
from tailrace.gateway.dialects.protocol import RequestInvalid
from tailrace.records import Json

_FIELDS = ("reward", "metrics", "info")


def read_report(body: Mapping[str, Json]) -> AgentResult:
    """As an agent would have returned it. Raises `RequestInvalid`.

    >>> read_report({"reward": 1})
    AgentResult(reward=1.0, metrics={}, info={})
    """
    for name in body:
        if name not in _FIELDS:
            raise RequestInvalid(f"unknown field {name!r}; a report has {', '.join(_FIELDS)}", parameter=name)
    reward, info = body.get("reward"), of_type(body.get("info") or {}, dict, "info")
    require_sendable(info, "info")
    metrics = of_type(body.get("metrics") or {}, dict, "metrics")
    try:
        return AgentResult(
            None if reward is None else finite_number(reward, "reward"),
            {name: finite_number(value, f"metrics.{name}") for name, value in metrics.items()},
            info,
        )
    except InvalidReward as error:
        raise RequestInvalid(str(error)) from error

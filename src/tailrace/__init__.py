"""Tailrace: asynchronous reinforcement learning of language models.

The command `tailrace` does it all; so do `train` and `evaluate` from a program (docs/python.md). Without a run or a
trainer: `gather_groups` and `stream_groups`. All of them are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.api import RunResult, evaluate, evaluate_async, train, train_async
    from tailrace.environments import AgentResult, EnvironmentSpec, Observation, Policy
    from tailrace.records import Group, Message, Reward, Rollout, Task
    from tailrace.reporting.metrics import StepMetrics
    from tailrace.rollouts.error_budget import ErrorBudget
    from tailrace.rollouts.gathering import GroupCounts, gather_groups, stream_groups

__version__ = "0.1.0"

__all__ = [
    "AgentResult",
    "EnvironmentSpec",
    "ErrorBudget",
    "Group",
    "GroupCounts",
    "Message",
    "Observation",
    "Policy",
    "Reward",
    "Rollout",
    "RunResult",
    "StepMetrics",
    "Task",
    "__version__",
    "evaluate",
    "evaluate_async",
    "gather_groups",
    "stream_groups",
    "train",
    "train_async",
]

_ROOMS = ("records", "environments", "rollouts.error_budget", "rollouts.gathering", "reporting.metrics", "api")
"""Where the public names are defined, the quickest to import first."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `import tailrace` itself loads nothing."""
    for room in _ROOMS if name in __all__ else ():
        module = importlib.import_module(f"tailrace.{room}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

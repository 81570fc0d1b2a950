"""Tailrace: asynchronous reinforcement learning of language models.

Most is done by the command `tailrace`. For use as a library, without a run or a trainer: `gather_groups` and
`stream_groups`, imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.environments import AgentResult
    from tailrace.records import Group, Message, Reward, Rollout, Task
    from tailrace.rollouts.error_budget import ErrorBudget
    from tailrace.rollouts.gathering import GroupCounts, gather_groups, stream_groups

__version__ = "0.1.0"

__all__ = [
    "AgentResult",
    "ErrorBudget",
    "Group",
    "GroupCounts",
    "Message",
    "Reward",
    "Rollout",
    "Task",
    "__version__",
    "gather_groups",
    "stream_groups",
]

_ROOMS = ("records", "environments", "rollouts.error_budget", "rollouts.gathering")
"""Where the public names are defined, the quickest to import first."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `import tailrace` itself loads nothing."""
    for room in _ROOMS if name in __all__ else ():
        module = importlib.import_module(f"tailrace.{room}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

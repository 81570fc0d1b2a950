"""One task to one scored group: the policy that agents talk to, agents, killable workers, rewards.

In: a `Task`, its `LoadedEnvironment`, and `Generate`. Out: a `Rollout` whose branches hold every sampled token once,
with its reward, and scored groups; or an error that costs that rollout or group alone. Tokens that were sampled are
never tokenized again, an exception never becomes a reward, and nothing here knows of schedules, weights or torch.
"""

from tailrace.rollouts.chat import ChatRenderer, ChatTokenizer
from tailrace.rollouts.endpoints import Endpoints
from tailrace.rollouts.environment import LoadedEnvironment
from tailrace.rollouts.error_budget import ErrorBudget
from tailrace.rollouts.gathering import gather_groups, stream_groups
from tailrace.rollouts.policy import RolloutPolicy
from tailrace.rollouts.rollouter import Rollouter
from tailrace.rollouts.settings import RolloutSettings
from tailrace.rollouts.workers import WorkerPool

__all__ = [
    "ChatRenderer",
    "ChatTokenizer",
    "Endpoints",
    "ErrorBudget",
    "LoadedEnvironment",
    "RolloutPolicy",
    "RolloutSettings",
    "Rollouter",
    "WorkerPool",
    "gather_groups",
    "stream_groups",
]

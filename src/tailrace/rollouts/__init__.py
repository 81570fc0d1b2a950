"""One task to one scored rollout: chat rendering, the policy that agents talk to, rewards, killable workers.

In: a `Task`, its `EnvironmentSpec`, and `Generate`. Out: a `Rollout` whose branches hold every sampled token once, with
its reward; or an error that costs that rollout alone. Tokens that were sampled are never tokenized again, an exception
never becomes a reward, and nothing here knows of schedules, weights or torch.
"""

from tailrace.rollouts.agents import EnvironmentHost, environment_agent, hosted_agent
from tailrace.rollouts.budgets import ErrorBudget
from tailrace.rollouts.chat.rendering import ChatRenderer, Renderer
from tailrace.rollouts.chat.replies import ParsedReply
from tailrace.rollouts.chat.tokenizer import ChatTokenizer
from tailrace.rollouts.gathering import gather_groups, stream_groups
from tailrace.rollouts.groups import GroupScorer
from tailrace.rollouts.policy import RolloutBudget, RolloutPolicy
from tailrace.rollouts.rollouter import Rollouter, needs_workers
from tailrace.rollouts.scoring.rewards import require_number, require_reward
from tailrace.rollouts.settings import EvaluationSampling, RolloutSettings
from tailrace.rollouts.workers.pool import WorkerPool

__all__ = [
    "ChatRenderer",
    "ChatTokenizer",
    "EnvironmentHost",
    "ErrorBudget",
    "EvaluationSampling",
    "GroupScorer",
    "ParsedReply",
    "Renderer",
    "RolloutBudget",
    "RolloutPolicy",
    "RolloutSettings",
    "Rollouter",
    "WorkerPool",
    "environment_agent",
    "gather_groups",
    "hosted_agent",
    "needs_workers",
    "require_number",
    "require_reward",
    "stream_groups",
]

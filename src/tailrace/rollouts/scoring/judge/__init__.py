"""A language model that scores the rollouts of a group relative to each other.

In: a complete group. Out: the same group, each rollout's reward the judge's score of it. `RelativeJudge` is a
`score_group` like any other; it calls a `Chat`: an OpenAI-compatible endpoint, or the policy's own engine. What cannot
be read as valid scores is requested again and then fails; it never becomes a reward.
"""

from tailrace.rollouts.scoring.judge.chat import Chat
from tailrace.rollouts.scoring.judge.endpoint import EndpointChat
from tailrace.rollouts.scoring.judge.engine import EngineChat
from tailrace.rollouts.scoring.judge.relative import RelativeJudge

__all__ = ["Chat", "EndpointChat", "EngineChat", "RelativeJudge"]

"""Rewards of rollouts and groups: the one place that sets them, reward functions and judges.

In: a rollout that ended with its `AgentResult`, or a complete group. Out: the same with `reward` set, or an error that
an error budget has counted. Reward functions and judges only return results; `Scorer` alone sets them, finite numbers
all, and never makes a number of an error.
"""

from tailrace.rollouts.scoring.functions import RewardFunctions
from tailrace.rollouts.scoring.judge import RelativeJudge
from tailrace.rollouts.scoring.scorer import Scorer
from tailrace.rollouts.scoring.teacher import EndpointScorer, EngineScorer, Teacher, TeacherPlan
from tailrace.rollouts.scoring.usage import JudgeUsage, ModelUsage, TeacherUsage

__all__ = [
    "EndpointScorer",
    "EngineScorer",
    "JudgeUsage",
    "ModelUsage",
    "RelativeJudge",
    "RewardFunctions",
    "Scorer",
    "Teacher",
    "TeacherPlan",
    "TeacherUsage",
]

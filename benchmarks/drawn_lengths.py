"""The environment of benchmarks/simulation_vs_run.py: replies as long as a simulation of the same seed draws them."""

from __future__ import annotations

from tailrace.environments import AgentResult, EnvironmentSpec, Policy, Task
from tailrace.records import session_of
from tailrace.rollouts import RolloutPolicy
from tailrace.simulation.draws import standard_normal
from tailrace.simulation.environment import ENVIRONMENT
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.settings import LognormalLengths

TASKS = 4096
PROMPT = "one two three"


def drawn(seed: int, mean_log: float, sigma: float, task_sigma: float, cap: int) -> EnvironmentSpec:
    """Tasks, rollouts and completions have the names that they have in a simulation: so lengths and rewards are its."""
    lengths = LengthSource(LognormalLengths(mean_log=mean_log, sigma=sigma, task_sigma=task_sigma, cap=cap), seed=seed)

    async def agent(task: Task, policy: Policy) -> AgentResult:
        assert isinstance(policy, RolloutPolicy)
        length = lengths.draw(task.task_id, f"{session_of(policy.rollout_id, 0)}/1")
        reply = await policy.chat([{"role": "user", "content": PROMPT}], max_tokens=length)
        reward = standard_normal(seed, "reward", policy.rollout_id)
        return AgentResult(reward, info={"drawn": length, **reply.completion.metrics})

    return EnvironmentSpec(name=ENVIRONMENT, agent=agent, train_tasks=[{}] * TASKS)

"""Agent workers: processes in which agents and environments of rollouts run, each with an event loop of its own.

In: a rollout to play, by the settings of its environment. Out: its branches and what it reported, or why it is lost.
The orchestrator keeps scheduling, requests and accounts: a worker that blocks, crashes, exits or vanishes costs the
rollouts that it held, each of which is told by its name; nothing that users wrote runs beside the scheduler.
"""

from tailrace.rollouts.agent_workers.held import PlayedRollout
from tailrace.rollouts.agent_workers.places import WorkerPlace
from tailrace.rollouts.agent_workers.pool import AgentWorkers
from tailrace.rollouts.agent_workers.watching import WorkerWatch

__all__ = ["AgentWorkers", "PlayedRollout", "WorkerPlace", "WorkerWatch"]

"""An agent elsewhere: each rollout that is admitted waits until a client outside claims it, plays it and ends it.

    admitted ─► offered ─► claimed (POST /rollouts) ─► requests ─► POST /rollouts/{id}/reward or /end
                              a client that is silent for longer than its lease ─► `ClientLost`, tried again

Waiting costs nothing and is no failure: a rollout's time counts from when it is claimed. The task is the run's, or the
client's own where the environment's `train_tasks` are `brought_tasks()`. All are claimed from the orchestrator; they
are played, as those of other agents, there or in agent workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tailrace.environments.results import AgentResult
from tailrace.environments.rows import ClientRows
from tailrace.errors import EnvironmentFailed, SettingsError
from tailrace.records import Json, Task

if TYPE_CHECKING:
    from tailrace.environments.protocol import Policy


AnswerClient: TypeAlias = Callable[[bytes], bool]
"""Answers the client that has claimed a rollout: JSON with its address, its key, its task and its limits.

False where that client is known to have gone: the rollout is another one's then.
"""

_CLIENT_TASKS = 4096
"""Of an epoch, which means nothing here."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A rollout that a client may claim."""

    task: Task
    lease_s: float
    """Seconds that its client may be silent."""
    limit_s: float
    """Seconds from when it is claimed to its end."""
    limits: Mapping[str, Json] = field(default_factory=dict)
    """What the client is told of what its requests may cost."""
    tell: AnswerClient | None = None
    """Its client, which has claimed it in another process and waits to be told; None: it waits for a client."""


@dataclass(frozen=True, slots=True, eq=False)
class OutsideAgent:
    """What `outside_agent` returns."""

    lease_s: float

    async def __call__(self, task: Task, policy: Policy) -> AgentResult:
        """One rollout, of at most an hour."""
        return await self.play(policy, Offer(task, self.lease_s, limit_s=3600.0))

    async def play(self, policy: Policy, offer: Offer) -> AgentResult:
        """One rollout; what its client said that it earned.

        Raises `ClientLost` and `RolloutTimeout` where its client does not end it in time, and `EnvironmentFailed` where
        it ended it without a turn.
        """
        async with policy.endpoint() as endpoint:
            await endpoint.play_outside(offer)
            if not policy.messages:
                raise EnvironmentFailed(
                    f"task {offer.task.task_id}: the client that claimed it ended it without a reply of the model"
                )
            return endpoint.reported or AgentResult()


def outside_agent(*, lease_s: float = 120.0) -> OutsideAgent:
    """An agent that runs elsewhere, and asks for its rollouts by `POST /rollouts`: see `docs/agents.md`.

    A client that sends no request for `lease_s`, while none of its own is being answered, has lost its rollout.

    >>> outside_agent(lease_s=30)
    OutsideAgent(lease_s=30)
    """
    if not lease_s > 0:
        raise SettingsError(f"outside_agent(lease_s={lease_s}): no client could ever keep a rollout; give more than 0")
    return OutsideAgent(lease_s)


def brought_tasks(*columns: str) -> ClientRows:
    """`train_tasks` of an environment whose clients outside bring the task with their claim: see `docs/agents.md`.

    Each task must have these `columns`, and may have others.

    >>> len(brought_tasks("ticket")[0])
    0
    """
    return ClientRows(_CLIENT_TASKS, columns)

"""What a worker holds, and what is left of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace

from tailrace.environments import AgentResult
from tailrace.environments.outside import AnswerClient
from tailrace.records import Branch, Completion, Rollout, SessionId
from tailrace.rollouts.agent_workers.messages import Failure, Played, Scored


@dataclass(frozen=True, slots=True)
class PlayedRollout:
    """What came of a rollout that was played to its end."""

    reported: AgentResult
    scored: AgentResult | None
    """By reward functions in place of it; None where there are none."""
    score_failure: Failure | None

    def scored_or_raise(self) -> AgentResult:
        """What reward functions said. Raises what they raised."""
        if self.score_failure is not None:
            raise self.score_failure.error()
        return self.scored or self.reported


@dataclass(slots=True)
class Held:
    """A rollout that the worker plays, or a group that it scores."""

    what: str
    """For people."""
    number: int
    ended: asyncio.Future[Played | Scored]
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """That are being sampled, by the worker's number for them."""
    enough: set[int] = field(default_factory=set)
    """Those whose next chunk ends them."""
    sampled: defaultdict[SessionId, list[Completion]] = field(default_factory=lambda: defaultdict(list))
    """What it was sent so far: all that is left of it where the worker dies."""
    tell: AnswerClient | None = None
    """The client outside that has claimed it."""


def fill_with_known(rollout: Rollout, held: Held) -> None:
    """What was sampled for a rollout whose worker says nothing of it any more: completions, without their context."""
    rollout.branches = []
    for completions in held.sampled.values():
        branch = Branch()
        for completion in completions:
            branch.extend_completion(replace(completion, routed_experts=()))
        rollout.branches.append(branch)
        rollout.turns += len(completions)

"""What a worker holds, and what is left of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from tailrace.environments import AgentResult
from tailrace.environments.outside import AnswerClient
from tailrace.errors import CorruptData
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
        """What the rollout earned: by reward functions, or as reported. Raises why that is none."""
        if self.score_failure is not None:
            raise self.score_failure.error()
        return self.scored or self.reported


ReplyT = TypeVar("ReplyT", Played, Scored)


@dataclass(slots=True)
class Held(Generic[ReplyT]):
    """A rollout that the worker plays, or a group that it scores."""

    what: str
    """For people."""
    number: int
    reply: type[ReplyT]
    """What ends it."""
    ended: asyncio.Future[ReplyT]
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """That are being sampled, by the worker's number for them."""
    enough: set[int] = field(default_factory=set)
    """Those whose next chunk ends them."""
    sampled: defaultdict[SessionId, list[Completion]] = field(default_factory=lambda: defaultdict(list))
    """What it was sent so far: all that is left of it where the worker dies."""
    tell: AnswerClient | None = None
    """The client outside that has claimed it."""

    def end(self, report: Played | Scored) -> None:
        """The worker says that it has ended. Raises `CorruptData` where that is said of something else."""
        if not isinstance(report, self.reply):
            raise CorruptData(f"{self.what} was answered with {type(report).__name__}")
        if not self.ended.done():
            self.ended.set_result(report)


AnyHeld: TypeAlias = Held[Played] | Held[Scored]


def fill_with_known(rollout: Rollout, held: Held[Played]) -> None:
    """What was sampled for a rollout whose worker says nothing of it any more: completions, without their context."""
    rollout.branches = []
    for completions in held.sampled.values():
        branch = Branch()
        for completion in completions:
            branch.extend_completion(replace(completion, routed_experts=()))
        rollout.branches.append(branch)
        rollout.turns += len(completions)

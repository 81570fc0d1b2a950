"""The stage of scoring that calls a teacher, until it answers or the calls are used up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tailrace.errors import ChatFailed, ScoringFailed, TeacherFailed
from tailrace.records import (
    NO_TOKEN,
    TEACHER_LOGPROBS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    Branch,
    Group,
    Int32Array,
    TokenScores,
)
from tailrace.rollouts.scoring.usage import TeacherUsage
from tailrace.timeouts import timeout


class TokenScorer(Protocol):
    """A model that scores tokens."""

    async def ready(self) -> None:
        """Wait until it can be asked."""

    async def score(self, token_ids: Int32Array) -> TokenScores:
        """Of [num_tokens]. Raises `ChatFailed`; has no time limit of its own."""

    async def close(self) -> None:
        """Close its connections, where it has any."""


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    """How long a teacher is waited for."""

    timeout_s: float = 60.0
    retries: int = 2
    retry_pause_s: float = 0.5


class Teacher:
    """Scores the groups of a run, any number at once."""

    def __init__(self, scorer: TokenScorer, plan: TeacherPlan) -> None:
        self._scorer, self._plan = scorer, plan
        self.usage = TeacherUsage()

    async def __call__(self, group: Group) -> Group:
        """The group, each sampled branch with its columns. Raises `ScoringFailed`, and `TeacherFailed` in a group."""
        branches = [one for rollout in group.rollouts for one in rollout.branches if one.num_completion_tokens]
        if odd := next((one for one in branches if one.temperature not in (None, 1.0)), None):
            raise ScoringFailed(
                f"task {group.task.task_id}: a turn was sampled at temperature {odd.temperature}, and a teacher tells "
                "its log-probabilities at 1: leave chat(temperature=...) out"
            )
        spent = TeacherUsage()
        try:
            async with asyncio.TaskGroup() as asking:
                for branch in branches:
                    asking.create_task(self._score(branch, group, spent))
        except* TeacherFailed:
            spent.failed_groups = 1
            raise
        finally:
            self.usage.add(spent)
            group.metrics.update(spent.metrics())
        return group

    async def ready(self) -> None:
        """Wait until it can be asked."""
        await self._scorer.ready()

    async def close(self) -> None:
        """Close its connections."""
        await self._scorer.close()

    async def _score(self, branch: Branch, group: Group, spent: TeacherUsage) -> None:
        """Ask until it answers. Waits for the teacher, and before a retry."""
        plan, failure, may_pass = self._plan, "", False
        for attempt in range(plan.retries + 1):
            pause_s = 0.0
            spent.calls += 1
            spent.retries += attempt > 0
            try:
                async with timeout(plan.timeout_s):
                    scores = await self._scorer.score(branch.token_ids)
            except TimeoutError:
                failure, may_pass = f"no answer within {plan.timeout_s:g} s (distillation.timeout_s)", True
            except ChatFailed as error:
                failure, may_pass = str(error), error.may_recover
                pause_s = max(error.pause_s, plan.retry_pause_s * 2**attempt)
                if not may_pass:
                    break
            else:
                spent.scored_tokens += branch.num_tokens
                _set_columns(branch, scores)
                return
            if pause_s and attempt < plan.retries:
                await asyncio.sleep(pause_s)
        failed = TeacherFailed(f"task {group.task.task_id}: the teacher scored nothing; the last answer: {failure}")
        failed.may_pass = may_pass
        raise failed


def _set_columns(branch: Branch, scores: TokenScores) -> None:
    """Those of sampled tokens alone."""
    sampled = branch.loss_mask
    branch.set_column(TEACHER_LOGPROBS, np.where(sampled, scores.logprobs, 0))
    if scores.top_ids.shape[1]:
        branch.set_column(TEACHER_TOP_IDS, np.where(sampled[:, None], scores.top_ids, NO_TOKEN))
        branch.set_column(TEACHER_TOP_LOGPROBS, np.where(sampled[:, None], scores.top_logprobs, 0))

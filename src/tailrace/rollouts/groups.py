"""The one way from rollouts to scored groups, shared by runs and by `gather_groups`.

    rollout ends ──► its own reward (`GroupScorer.reward`) ──┐
    rollout ends ──► its own reward ─────────────────────────┼──► `GroupScorer.score`: score_group, in its turn
    rollout fails ── the rollouts' error budget              ┘         └── fails: the scores' error budget

A group waits for its own rollouts and for a place among `concurrency` scores, for nothing else. What is handed on is
what came in: rollouts in submission order, with their metadata, metrics and tokens; only rewards are new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from tailrace.environments import ScoreGroup
from tailrace.errors import InvalidReward, ScoringFailed
from tailrace.records import Group, Reward, Rollout
from tailrace.rollouts.budgets import RAISE, ErrorBudget, ErrorTally
from tailrace.rollouts.scoring.rewards import is_sound, require_reward, unscore


class GroupScorer:
    """Scores rollouts when they end and groups when they are complete.

    Failed rewards and failed groups are counted apart, so that a working reward does not hide a judge that is down.
    """

    def __init__(self, *, concurrency: int | None = None, errors: ErrorBudget = RAISE) -> None:
        """At most `concurrency` groups are scored at once; None: as many as there are."""
        self._rewards = ErrorTally(errors, "rewards", "score_errors")
        self._groups = ErrorTally(errors, "groups' scores", "score_errors")
        self._keeps_unscored = errors.on_error == "keep_unscored"
        self._places: AbstractAsyncContextManager[object] = (
            nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )

    async def reward(self, rollout: Rollout, score: Callable[[], Awaitable[Reward | None]]) -> None:
        """Give a rollout that has just ended the reward that `score` returns.

        Raises what `score` raises, or `ErrorBudgetSpent`. Where the budget keeps what is unscored, a failure leaves the
        rollout without a reward.
        """
        self._rewards.started += 1
        try:
            rollout.reward = await score()
        except Exception as error:
            self._rewards.fail(error)
            if not self._keeps_unscored:
                raise
            unscore(rollout)

    def has_counted(self, error: Exception) -> bool:
        """Whether this very error was counted here just now."""
        return error in self._rewards or error in self._groups

    def end(self) -> None:
        """Nothing more will be scored. Raises `ErrorBudgetSpent` where too large a share failed."""
        self._rewards.end()
        self._groups.end()

    async def score(self, group: Group, score_group: ScoreGroup | None) -> list[Group]:
        """A complete group as `score_group` rescored, split or (an empty list) discarded it.

        Without `score_group` the rollouts' own rewards stand. An empty group is discarded at once.

        Raises:
            ScoringFailed: `score_group` returned something else than groups of this group's rollouts.
            InvalidReward: A rollout is left without a finite reward.
            ErrorBudgetSpent: This failure is one too many. What `score_group` raises is raised as it is otherwise.
        """
        members = list(group.rollouts)
        if not members:
            return []
        own = [rollout.reward for rollout in members]
        self._groups.started += 1
        try:
            groups = [group] if score_group is None else await self._asked(score_group, group, members)
            self._require_rewards(groups)
        except Exception as error:
            group.rollouts = members
            for rollout, reward in zip(members, own, strict=True):
                rollout.reward = reward
            self._groups.fail(error)
            if not self._keeps_unscored:
                raise
            for rollout in members:
                unscore(rollout)
            return [group]
        return groups

    async def _asked(self, score_group: ScoreGroup, group: Group, members: Sequence[Rollout]) -> list[Group]:
        clock = asyncio.get_running_loop().time
        async with self._places:
            since = clock()
            returned = await score_group(group)
            group.metrics["score_group_s"] = clock() - since
        return _adopted(returned, group, members)

    def _require_rewards(self, groups: Iterable[Group]) -> None:
        for group in groups:
            for rollout in group.rollouts:
                if rollout.reward is not None and is_sound(rollout.reward):
                    continue
                where = f"task {rollout.task.task_id}: the reward of rollout {rollout.rollout_id}"
                if rollout.reward is not None:
                    rollout.reward = require_reward(rollout.reward, where)
                elif not self._keeps_unscored:
                    raise InvalidReward(f"{where} is missing; return it from the agent, its observations or `reward`")


def _adopted(returned: object, group: Group, members: Sequence[Rollout]) -> list[Group]:
    """What `score_group` returned, as groups that know where they come from, their rollouts in submission order."""
    groups = [part for part in _as_groups(returned, group) if part.rollouts]
    places = {rollout.rollout_id: place for place, rollout in enumerate(members)}
    seen: set[str] = set()
    for number, part in enumerate(groups):
        for rollout in part.rollouts:
            if rollout.rollout_id not in places or rollout.rollout_id in seen:
                what = "twice" if rollout.rollout_id in seen else "which is not of this group"
                raise ScoringFailed(
                    f"task {group.task.task_id}: score_group returned rollout {rollout.rollout_id} {what}"
                )
            seen.add(rollout.rollout_id)
        part.rollouts = sorted(part.rollouts, key=lambda rollout: places[rollout.rollout_id])
        if part is not group:
            part.index = group.index
            part.metadata = {**group.metadata, **part.metadata}
            own = {} if part.metrics is group.metrics else part.metrics
            part.metrics = {**group.metrics, **own} if number == 0 else own  # sums: told once
    return groups


def _as_groups(returned: object, group: Group) -> Sequence[Group]:
    if returned is None:
        return []
    groups = [returned] if isinstance(returned, Group) else returned
    if not isinstance(groups, list | tuple) or not all(isinstance(part, Group) for part in groups):
        held = f" of {type(groups[0]).__name__}" if isinstance(groups, list | tuple) and groups else ""
        raise ScoringFailed(
            f"task {group.task.task_id}: score_group returned a {type(returned).__name__}{held}; "
            "it returns a Group, a list of them, or None"
        )
    return groups

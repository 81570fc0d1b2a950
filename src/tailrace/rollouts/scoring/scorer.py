"""The one way from rollouts to scored groups, shared by runs and by `gather_groups`.

    rollout ends ──► `Scorer.score_rollout`: its own reward ──┐
    rollout ends ──► its own reward ──────────────────────────┼──► `Scorer.score_group`: judge or score_group, in turn
    rollout fails ── the rollouts' error budget               ┘         └── fails: the scores' error budget

A group waits for its own rollouts and for a slot among `concurrency` scores, for nothing else. What is handed on is
what came in: rollouts in submission order, with their metadata, metrics and tokens; only rewards are new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from copy import copy
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from tailrace.batching import required_advantages
from tailrace.environments import AgentResult, ScoreGroup
from tailrace.environments.results import as_agent_result, finite_number
from tailrace.errors import InvalidReward, ScoringFailed
from tailrace.records import Group, Reward, Rollout, RolloutId
from tailrace.rollouts.attribution import attribute_errors, drop_frames
from tailrace.rollouts.error_budget import RAISE, ErrorBudget, ErrorTally

ScoreRollout: TypeAlias = Callable[[Rollout, AgentResult], Awaitable[AgentResult]]
"""Scores a rollout that ended, in place of what its agent reported."""
WithDeadline: TypeAlias = Callable[[Coroutine[Any, Any, object]], Awaitable[object]]
"""Runs the scoring of one group within a deadline."""


class Scorer:
    """Scores rollouts when they end and groups when they are complete; no other code sets a reward.

    Failed rewards and failed groups are counted apart, so that a working reward does not hide a judge that is down.
    """

    def __init__(
        self, *, concurrency: int | None = None, errors: ErrorBudget = RAISE, setting: str = "score_errors"
    ) -> None:
        """At most `concurrency` groups are scored at once; None or 0: as many as there are. `setting` is what people
        know the budget of `errors` by.
        """
        self._setting = setting
        self._count_by(errors)
        self._keeps_unscored = errors.on_error == "keep_unscored"
        self._slots: AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(concurrency) if concurrency else nullcontext()
        )

    def _count_by(self, errors: ErrorBudget) -> None:
        self._rewards = ErrorTally(errors, "rewards", self._setting)
        self._groups = ErrorTally(errors, "groups' scores", self._setting)

    def without_limits(self) -> Scorer:
        """One with the same places whose failures end nothing, and are not counted here."""
        other = copy(self)
        other._count_by(ErrorBudget())
        return other

    def has_counted(self, error: Exception) -> bool:
        """Whether this very error was counted here just now."""
        return error in self._rewards or error in self._groups

    def end(self) -> None:
        """Nothing more will be scored. Raises `ErrorBudgetSpent` where too large a share failed."""
        self._rewards.end()
        self._groups.end()

    async def score_rollout(
        self,
        rollout: Rollout,
        reported: AgentResult,
        score: ScoreRollout | None = None,
        *,
        is_group_scored: bool = False,
    ) -> None:
        """Set the reward of a rollout that has just ended: what was `reported`, or what `score` says in its place.

        Without a reward it stays unscored where its group will be scored, or where the error budget keeps what is
        unscored; metrics and info are then kept beside the rollout, and those of one whose group will be scored are
        added to the reward that it gets there, also where `score` failed. Raises what `score` raises, `InvalidReward`
        where the reward is missing or it, or a metric, is no finite number, and `ErrorBudgetSpent` where this failure
        is one too many.
        """
        self._rewards.started += 1
        try:
            result = reported if score is None else await score(rollout, reported)
            reward: Reward | None = None
            if is_group_scored and result.reward is None:
                _keep_reported(rollout, result)
            else:
                reward = _checked(result, rollout)
        except Exception as error:
            self._rewards.fail(error)
            if not self._keeps_unscored:
                raise
            drop_frames(error)
            result, reward = AgentResult(None, finite_metrics(reported), dict(reported.info)), None
            if is_group_scored:
                rollout.reported_metrics, rollout.reported_info = result.metrics, result.info
        if reward is None:
            _leave_unscored(rollout, result)
        else:
            rollout.reward = reward

    async def score_group(
        self,
        group: Group,
        stages: Sequence[ScoreGroup] = (),
        *,
        deadline: WithDeadline | None = None,
        named: Collection[str] = (),
    ) -> list[Group]:
        """A complete group as the `stages`, one after another, rescored, split or (an empty list) discarded it.

        Without stages the rollouts' own rewards stand. An empty group is discarded at once. `deadline` is asked to run
        the stages once a slot among `concurrency` is free. Reward functions are `named`, none of which need apply to a
        rollout.

        Raises what a stage raises, `ScoringFailed` where it returned something else than groups of these rollouts or
        results for them, `InvalidReward` where a rollout is left without a finite reward, and `ErrorBudgetSpent`.
        """
        members = list(group.rollouts)
        if not members:
            return []
        own = [rollout.reward for rollout in members]
        self._groups.started += 1
        try:
            groups = await self._staged(group, stages, members, deadline) if stages else [group]
            self._check(groups, named)
        except Exception as error:
            group.rollouts = members
            for rollout, reward in zip(members, own, strict=True):
                rollout.reward = reward
            self._groups.fail(error)
            if not self._keeps_unscored:
                raise
            drop_frames(error)
            for rollout in members:
                _leave_unscored(rollout, as_agent_result(rollout.reward))
            return [group]
        return groups

    async def _staged(
        self, group: Group, stages: Sequence[ScoreGroup], members: Sequence[Rollout], deadline: WithDeadline | None
    ) -> list[Group]:
        clock = asyncio.get_running_loop().time
        async with self._slots:
            since = clock()
            work = _run_stages(group, stages, members)
            returned = await (work if deadline is None else deadline(work))
            group.metrics["score_group_s"] = clock() - since
        return adopted(returned, group, members)

    def _check(self, groups: Iterable[Group], named: Collection[str]) -> None:
        for group in groups:
            for rollout in group.rollouts:
                if rollout.reward is not None:
                    rollout.reward = _checked(rollout.reward, rollout)
                elif not self._keeps_unscored:
                    raise missing_reward(rollout, named)


def missing_reward(rollout: Rollout, named: Collection[str]) -> InvalidReward:
    """Of a rollout that nothing gave one: no mistake where there are `named` functions, which may not apply."""
    if named:
        return InvalidReward(f"{_of(rollout)} is missing: none of {', '.join(named)} applies to it")
    return InvalidReward(
        f"{_of(rollout)} is missing; return it from the agent, its observations or `reward`"
    ).as_mistake()


def _checked(returned: object, rollout: Rollout) -> Reward:
    """Of whatever `as_agent_result` takes, over what was reported before there was a reward.

    Its values may fail to become numbers or text.
    """
    with attribute_errors(rollout.task):
        result = with_finite_numbers(as_agent_result(returned), rollout)
        components = {**rollout.reported_metrics, **result.metrics}
        columns = {**rollout.reported_info, **result.info}
        # The number was checked above: what is refused here is none at all.
        return Reward(finite_number(result.reward, _of(rollout)), components, columns)


def _keep_reported(rollout: Rollout, result: AgentResult) -> None:
    """For the reward that its group's score will give it. Raises as `_checked` does."""
    with attribute_errors(rollout.task):
        rollout.reported_metrics, rollout.reported_info = _components(result, rollout), dict(result.info)


def with_finite_numbers(result: AgentResult, rollout: Rollout) -> AgentResult:
    """It with floats for its reward, unless that is None, and its metrics.

    Raises `InvalidReward` for one that is no finite number, and whatever a value of a user's own class raises.
    """
    reward = None if result.reward is None else finite_number(result.reward, _of(rollout))
    return AgentResult(reward, _components(result, rollout), result.info)


def _components(result: AgentResult, rollout: Rollout) -> dict[str, float]:
    """Its metrics. Raises `InvalidReward` for one that is no finite number."""
    what = _of(rollout)
    return {name: finite_number(part, f"{what}, component {name!r},") for name, part in result.metrics.items()}


def finite_metrics(result: AgentResult) -> dict[str, float]:
    """Its metrics without those that are no finite numbers."""
    metrics: dict[str, float] = {}
    for name, part in result.metrics.items():
        with suppress(Exception):  # a number of a user's own class may raise anything
            metrics[name] = finite_number(part, name)
    return metrics


def _of(rollout: Rollout) -> str:
    return f"task {rollout.task.task_id}: the reward of rollout {rollout.rollout_id}"


def _leave_unscored(rollout: Rollout, result: AgentResult) -> None:
    """Without a reward; what came with it is kept beside the rollout."""
    rollout.metrics = {**result.metrics, **rollout.metrics}
    rollout.metadata = {**result.info, **rollout.metadata}
    rollout.reward = None


async def _run_stages(group: Group, stages: Sequence[ScoreGroup], members: Sequence[Rollout]) -> object:
    """Run them in order; each sees what those before it set. What the last returned, or one that returned more or less
    than the group or results for it.
    """
    for stage in stages:
        returned: object = await stage(group)
        if returned is group:
            continue
        results = results_in(returned)
        if results is None:
            return returned
        if len(results) != len(members):
            raise ScoringFailed(
                f"task {group.task.task_id}: score_group returned {len(results)} results for {len(members)} rollouts"
            )
        for rollout, result in zip(members, results, strict=True):
            own = as_agent_result(rollout.reward)
            merged = result.over(own)
            reward = own.reward if result.reward is None else result.reward
            if reward is None:
                _leave_unscored(rollout, result)
            else:
                rollout.reward = Reward(reward, merged.metrics, merged.info)
    return group


def results_in(returned: object) -> list[AgentResult] | None:
    """The results for rollouts that `score_group` returned, short forms of them too; None where it returned groups.

    Raises as `as_agent_result` does.

    >>> results_in([0.5, None])
    [AgentResult(reward=0.5, metrics={}, info={}), AgentResult(reward=None, metrics={}, info={})]
    """
    forms = AgentResult | Reward | Real | np.bool_ | None
    if not isinstance(returned, list | tuple) or not any(isinstance(one, forms) for one in returned):
        return None
    return [as_agent_result(one) for one in returned]


def adopted(returned: object, group: Group, members: Sequence[Rollout]) -> list[Group]:
    """What `score_group` returned, as groups that know where they come from, their rollouts in submission order."""
    groups = [part for part in _as_groups(returned, group) if part.rollouts]
    order = {rollout.rollout_id: number for number, rollout in enumerate(members)}
    seen: set[str] = set()
    for number, part in enumerate(groups):
        for rollout in part.rollouts:
            if rollout.rollout_id not in order or rollout.rollout_id in seen:
                what = "twice" if rollout.rollout_id in seen else "which is not of this group"
                raise ScoringFailed(
                    f"task {group.task.task_id}: score_group returned rollout {rollout.rollout_id} {what}"
                )
            seen.add(rollout.rollout_id)
        _adopt_advantages(part)
        _sort(part, order)
        if part is not group:
            part.index = group.index
            part.metadata = {**group.metadata, **part.metadata}
            own = {} if part.metrics is group.metrics else part.metrics
            part.metrics = {**group.metrics, **own} if number == 0 else own  # sums: counted once
    return groups


def _adopt_advantages(part: Group) -> None:
    """What `score_group` set may be any numbers and arrays. Raises `ScoringFailed` where no batch can be made of it."""
    if part.advantages is None:
        return
    try:
        arrays = [np.asarray(advantage, np.float32) for advantage in part.advantages]
        part.advantages = [array if array.ndim else float(array) for array in arrays]
        required_advantages(part)
    except (TypeError, ValueError) as error:
        raise ScoringFailed(f"task {part.task.task_id}: the advantages that score_group set: {error}") from error


def _sort(part: Group, order: Mapping[RolloutId, int]) -> None:
    """Its rollouts, and each one's advantage with it."""
    places = sorted(range(len(part.rollouts)), key=lambda place: order[part.rollouts[place].rollout_id])
    part.rollouts = [part.rollouts[place] for place in places]
    if part.advantages is not None:
        part.advantages = [part.advantages[place] for place in places]


def _as_groups(returned: object, group: Group) -> Sequence[Group]:
    if returned is None:
        return []
    groups = [returned] if isinstance(returned, Group) else returned
    if not isinstance(groups, list | tuple) or not all(isinstance(part, Group) for part in groups):
        held = f" of {type(groups[0]).__name__}" if isinstance(groups, list | tuple) and groups else ""
        raise ScoringFailed(
            f"task {group.task.task_id}: score_group returned a {type(returned).__name__}{held}; "
            "it returns a Group, a list of them, one AgentResult per rollout, or None"
        ).as_mistake()
    return groups

"""One group from its first rollout to its advantages: members, attempts, retries, scoring, early end.

    task ─► members run, each over its attempts ─► scored together ─► advantages ─► filtered, or ready for a batch
                        └─ early release: each finished rollout is ready once enough siblings have finished

A failed attempt is followed by up to `max_retries` more, and by another one wherever some other rollout was to blame
for its end. Stopping a group cancels its running attempts and what they
wait for (agents, tools, rewards, requests); the group ends once all of them have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.batching import ZERO_SPREAD, compute_advantages, filter_reason, teaches_anyway
from tailrace.errors import RequestRefused, RolloutError, WorkerLost
from tailrace.records import Float32Array, Group, GroupId, Outcome, Rollout, RolloutId, Task
from tailrace.scheduling.backoff import Backoff, Part
from tailrace.scheduling.ledger import Accounts, UntrainableStreak
from tailrace.scheduling.mistakes import Mistakes
from tailrace.scheduling.outstanding import Member, OpenGroup, Outstanding, apportion
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.staleness import RESTARTED
from tailrace.scheduling.stragglers import REQUEUED, STRAGGLER
from tailrace.scheduling.tasks import TaskStream
from tailrace.timeouts import timeout
from tailrace.tracing.phases import phase

GROUP_TOO_SMALL = "group_too_small"
PARTIAL_GROUP = "partial_group"
SCORE_DROPPED = "score_dropped"
UNSCORED = "unscored"


class GroupRunner(Protocol):
    """Runs and scores rollouts for the scheduler."""

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        """One attempt at a task. Raises `RolloutError` or `RequestRefused` when this rollout alone is lost."""

    async def score(self, group: Group) -> list[Group]:
        """Score a complete group; what the result leaves out is dropped. Raises `RolloutError` for the whole group."""


class GroupPlayer:
    """Runs groups. Rollouts that are put in no batch end here, each with its reason."""

    def __init__(
        self,
        runner: GroupRunner,
        tasks: TaskStream,
        outstanding: Outstanding,
        accounts: Accounts,
        settings: SchedulingSettings,
        *,
        backoff: Backoff,
        untrainable: UntrainableStreak,
        whole_groups: Collection[str],
    ) -> None:
        """`whole_groups` are environments whose groups are dropped when a member is lost."""
        self._runner, self._tasks, self._outstanding = runner, tasks, outstanding
        self._accounts, self._observer, self._settings = accounts, accounts.observer, settings
        self._whole_groups = frozenset(whole_groups)
        self._backoff, self._now_s = backoff, asyncio.get_running_loop().time
        self._resumes = asyncio.Event()
        """Set when an environment may work again, or another group may try it."""
        self._untrainable = untrainable
        self._mistakes = Mistakes(lambda environment: tasks.reward_range(environment) is not None)

    async def play(self, group: OpenGroup) -> None:
        """Waits for the group's task, rollouts and scoring, and nothing else.

        Raises `TrainingError` when nothing trainable comes for too long, and what an engine's failure raises.
        """
        self._mistakes.began(group.key)
        task = await self._tasks.make(group.key)
        await self._run_members(group, task)
        rollouts = [member.rollout for member in group.members if member.rollout is not None]
        if group.stop is not None:
            self._end_stopped(group, group.stop.reason)
        elif group.release is not None:
            self._close_parts(group, Group(group.group_id, task, rollouts))
        else:
            await self._score(group, Group(group.group_id, task, rollouts))
        self._outstanding.end(group)
        if self._backoff.group_ended(group.key.environment, group.group_id):
            self._resumes.set()
        if group.released:
            self._untrainable.reset()
        else:
            self._extend_streak(group)
        if group.stop is not None and group.stop.restarts_task and not group.released:
            self._tasks.restart(group.key, is_stale=group.stop.reason == RESTARTED)
        else:
            self._outstanding.give_up(group)
        self._outstanding.wake()

    def expire(self, group: OpenGroup) -> None:
        """Under early release: the next batch is the last for the oldest tokens, so release what has finished."""
        if group.release is not None and group.stop is None and (released := group.release.expire()):
            self._release(group, released)

    # --- rollouts ------------------------------------------------------------------------------------------------

    async def _run_members(self, group: OpenGroup, task: Task) -> None:
        async with asyncio.TaskGroup() as running:
            for number, member in enumerate(group.members):
                member.task = running.create_task(self._run_member(task, group, member, number))
                member.task.add_done_callback(lambda _: self._outstanding.member_ended(group))

    async def _run_member(self, task: Task, group: OpenGroup, member: Member, number: int) -> None:
        """The first attempt that succeeds, or none after `max_retries` more; what others ended is no failure of it."""
        for attempt in itertools.count():
            if member.failures > self._settings.max_retries:
                return
            if attempt and not self._may_try(group):
                await self._until_it_may_try(group)
            if group.stop is not None:
                return
            if member.rollout_id is None:
                member.rollout_id = self._accounts.admit(RolloutId(f"{group.group_id}.{number}.{attempt}"))
                self._backoff.try_again(task.environment, group.group_id, member.rollout_id)
            member.rollout = await self._attempt(task, group, member, attempt)
            if member.rollout is not None:
                self._finish(group, member, member.rollout)
                return
            member.rollout_id = None

    async def _until_it_may_try(self, group: OpenGroup) -> None:
        """Waits while the group's environment pauses, and then while another group tries whether it works again."""
        with self._outstanding.member_waits(group):
            while not self._may_try(group):
                pause_s = self._backoff.pause_left_s(group.key.environment, now_s=self._now_s())
                self._resumes.clear()
                with contextlib.suppress(TimeoutError):
                    async with timeout(pause_s or None):
                        await self._resumes.wait()

    def _may_try(self, group: OpenGroup) -> bool:
        return self._backoff.may_try(group.key.environment, group.group_id, now_s=self._now_s())

    def _finish(self, group: OpenGroup, member: Member, rollout: Rollout) -> None:
        self._observer.rollout_finished(rollout)
        if group.release is not None and rollout.reward is None:  # its reward failed, and no group's score comes later
            self._accounts.end([rollout], Outcome.filtered(UNSCORED))
            member.rollout_id = member.rollout = None
            return
        group.finished.append(member)
        self._learn(group, rollout)

    async def _attempt(self, task: Task, group: OpenGroup, member: Member, attempt: int) -> Rollout | None:
        rollout_id = member.rollout_id
        assert rollout_id is not None  # it was admitted
        try:
            rollout = await self._runner.run(task, group_id=group.group_id, rollout_id=rollout_id, attempt=attempt)
        except RolloutError as error:
            self._lose(task, rollout_id, error)
            member.failures += not error.is_blameless
            self._back_off(group, error, "rollouts")
            return None
        except RequestRefused as error:
            self._lose(task, rollout_id, error)
            member.failures += 1
            return None
        self._came_back(task.environment, "rollouts")
        self._untrainable.came_back()
        return rollout

    def _lose(self, task: Task, rollout_id: RolloutId, error: RolloutError | RequestRefused) -> None:
        self._accounts.lose(rollout_id, Outcome.failed(error.reason), str(error))
        if self._backoff.attempt_failed(task.environment, rollout_id):
            self._resumes.set()

    def _back_off(self, group: OpenGroup, error: RolloutError, part: Part) -> None:
        """A rollout or a group's score failed: where that may pass and goes on, its environment pauses.

        A lost worker took all that it held with it, which says nothing of the rest; whoever replaces it pauses.
        Raises `TrainingError` where the environment's code never worked.
        """
        self._mistakes.failed(group.key, part, error)
        if error.may_pass:
            group.failure = str(error).partition("\n")[0]
            if isinstance(error, WorkerLost):
                return
            if pause_s := self._backoff.failed(group.key.environment, part, now_s=self._now_s()):
                asyncio.get_running_loop().call_later(pause_s, self._outstanding.wake)

    def _came_back(self, environment: str, part: Part) -> None:
        if self._backoff.came_back(environment, part, now_s=self._now_s()):
            self._resumes.set()
        self._mistakes.came_back(environment, part)

    def _end_stopped(self, group: OpenGroup, reason: str) -> None:
        """Members that ran were cancelled; those that had finished are filtered."""
        for member in group.members:
            if member.rollout is None and member.rollout_id is not None:
                self._accounts.lose(member.rollout_id, Outcome.cancelled(reason))
            elif member.rollout is not None and not member.is_released:
                self._accounts.end([member.rollout], Outcome.filtered(reason))

    # --- scores and advantages -----------------------------------------------------------------------------------

    async def _score(self, group: OpenGroup, complete: Group) -> None:
        """Waits for the group's scoring; what is trainable becomes ready."""
        scored = [one for one in await self._scored(complete, group) if self._is_trainable(one)]
        sizes = apportion(group.size, [len(one.rollouts) for one in scored])
        for one, size in zip(scored, sizes, strict=True):
            self._outstanding.push(group, one, size)

    async def _scored(self, complete: Group, group: OpenGroup) -> list[Group]:
        reason = self._reason_not_to_score(complete, group.size)
        if reason is not None:
            self._accounts.end(complete.rollouts, Outcome.filtered(reason))
            return []
        members = list(complete.rollouts)  # scoring may change the list
        try:
            scored = sort_scored(members, await self._runner.score(complete))
        except RolloutError as error:
            self._accounts.end(members, Outcome.failed(error.reason), str(error))
            self._back_off(group, error, "scores")
            return []
        group.failure = ""
        self._untrainable.scored()
        self._came_back(complete.task.environment, "scores")
        self._accounts.end(scored.unscored, Outcome.filtered(UNSCORED))
        self._accounts.end(scored.dropped, Outcome.filtered(SCORE_DROPPED))
        return scored.groups

    def _reason_not_to_score(self, group: Group, full_size: int) -> str | None:
        """Why a group that lost members is filtered; None where it is scored."""
        size = len(group.rollouts)
        if size < min(self._settings.min_group_size, full_size):
            return GROUP_TOO_SMALL
        is_whole = self._settings.partial_groups == "drop" or group.task.environment in self._whole_groups
        return PARTIAL_GROUP if is_whole and size < full_size else None

    def _is_trainable(self, group: Group) -> bool:
        with phase("advantages"):
            compute_advantages(group, self._settings.advantage)
            reason = filter_reason(group, filter_zero_spread=self._settings.leaves_out_equal_rewards)
        self._observer.group_scored(group, reason)
        if reason is not None:
            self._accounts.end(group.rollouts, Outcome.filtered(reason))
        self._note_rewards(group, trainable=reason is None)
        if reason == ZERO_SPREAD:
            self._untrainable.equal(group)
        return reason is None

    def _note_rewards(self, group: Group, *, trainable: bool) -> None:
        self._tasks.scored(group.task.environment, group.rewards, trainable=trainable)

    def _extend_streak(self, group: OpenGroup) -> None:
        """Nothing of the group will be trained on."""
        if group.stop is None and group.failure:
            self._untrainable.fail(group.failure, "scores" if group.finished else "rollouts", now_s=self._now_s())
        elif group.stop is None or group.stop.reason not in (REQUEUED, STRAGGLER):
            self._untrainable.extend(group.size)

    # --- early release -------------------------------------------------------------------------------------------

    def _learn(self, group: OpenGroup, rollout: Rollout) -> None:
        """A rollout has finished: release what may now be trained on before the group is complete."""
        if group.release is not None and group.stop is None:
            reward = Group(group.group_id, rollout.task, [rollout]).rewards[0]
            self._release(group, group.release.learn(reward))

    def _close_parts(self, group: OpenGroup, complete: Group) -> None:
        """Every member has ended: release the rest, unless there is nothing to compare it with."""
        assert group.release is not None
        if not group.released and len(complete.rollouts) < min(self._settings.min_group_size, group.size):
            self._accounts.end(group.unreleased, Outcome.filtered(GROUP_TOO_SMALL))
            return
        self._release(group, group.release.close())
        waiting = [group.finished[number].rollout for number in group.release.waiting]
        teaches_nothing = self._settings.leaves_out_equal_rewards and not any(
            rollout is not None and teaches_anyway(rollout) for rollout in waiting
        )
        reason = ZERO_SPREAD if waiting and teaches_nothing else None
        group.failure = ""
        self._untrainable.scored()
        if reason is not None:
            self._accounts.end(group.unreleased, Outcome.filtered(reason))
            if not group.released:
                self._note_rewards(complete, trainable=False)
                self._untrainable.equal(complete)
        else:
            self._release(group, [(number, 0.0) for number in group.release.waiting])
        self._observer.group_scored(complete, reason)

    def _release(self, group: OpenGroup, released: Sequence[tuple[int, float]]) -> None:
        """Make ready for training: (number among those that have finished, advantage)."""
        if not released:
            return
        members = [group.finished[number] for number, _ in released]
        rollouts = [member.rollout for member in members if member.rollout is not None]
        advantages: list[float | Float32Array] = [advantage for _, advantage in released]
        for member in members:
            member.is_released = True
        part = Group(group.group_id, rollouts[0].task, rollouts, advantages)
        self._note_rewards(part, trainable=True)
        self._observer.part_released(part)
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            self._outstanding.push(group, Group(group.group_id, rollout.task, [rollout], [advantage]), 1)


@dataclass(frozen=True, slots=True)
class Scored:
    """The members of one scored group; each is in exactly one of these."""

    groups: list[Group]
    """Only of rollouts with a reward, none empty."""
    unscored: list[Rollout]
    """Without a reward: their scoring failed and `on_error = keep_unscored` keeps them to be read."""
    dropped: list[Rollout]
    """In none of the returned groups."""


def sort_scored(members: Sequence[Rollout], groups: Sequence[Group]) -> Scored:
    """Sort the `members` that were scored by what scoring returned, the `groups`."""
    unscored = [rollout for group in groups for rollout in group.rollouts if rollout.reward is None]
    kept = {rollout.rollout_id for group in groups for rollout in group.rollouts}
    for group in groups if unscored else ():
        kept_places = [place for place, rollout in enumerate(group.rollouts) if rollout.reward is not None]
        group.rollouts = [group.rollouts[place] for place in kept_places]
        if group.advantages is not None:
            group.advantages = [group.advantages[place] for place in kept_places]
    dropped = [rollout for rollout in members if rollout.rollout_id not in kept]
    return Scored([group for group in groups if group.rollouts], unscored, dropped)

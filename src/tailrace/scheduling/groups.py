"""One group from its first rollout to its scores: places, attempts, retries, and how it is given up.

    place    one of the group's seats: holds a slot of the staleness budget until its rollout ends
    attempt  one rollout in a place; after a failure the next one, up to `max_retries` more

A group that is given up has its running attempts cancelled, which reaches whatever they wait for (agents, tools,
rewards, requests), and ends only when all of them have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tailrace.errors import RequestRefused, RolloutError
from tailrace.records import Group, GroupId, Outcome, Rollout, RolloutId, Task
from tailrace.scheduling.accounts import Accounts
from tailrace.scheduling.release import EarlyRelease
from tailrace.scheduling.scored import SCORE_DROPPED, UNSCORED, sort_scored
from tailrace.scheduling.settings import SchedulingSettings
from tailrace.scheduling.tasks import TaskKey

GROUP_TOO_SMALL = "group_too_small"
PARTIAL_GROUP = "partial_group"


class GroupRunner(Protocol):
    """Runs and scores rollouts for the scheduler."""

    async def run(self, task: Task, *, group_id: GroupId, rollout_id: RolloutId, attempt: int) -> Rollout:
        """One attempt at a task. Raises `RolloutError` or `RequestRefused` when this rollout alone is lost."""
        ...

    async def score(self, group: Group) -> list[Group]:
        """Score a complete group; what the result leaves out is dropped. Raises `RolloutError` for the whole group."""
        ...


class HoldsGroups(Protocol):
    """Sets the requests of whole groups aside, tokens kept: see `generation.holding.HoldingGenerate`."""

    async def hold(self, group_id: str) -> None:
        """Free the group's slots and start none of its requests; returns once none of them runs."""
        ...

    def release(self, group_id: str) -> None:
        """Let them go on."""
        ...


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Why a group is stopped, and whether its task is started again."""

    reason: str
    again: bool


@dataclass(slots=True, eq=False)
class Place:
    """One seat of a group."""

    name: str
    rollout_id: RolloutId | None = None
    """Of the attempt that runs, or of the last one."""
    rollout: Rollout | None = None
    """Of the attempt that succeeded."""
    is_released: bool = False
    """That rollout went on to be trained before the group was complete."""
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether an agent may still run in it."""
        return self.task is not None and not self.task.done()


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was started and that no batch took yet."""

    group_id: GroupId
    key: TaskKey
    places: list[Place]
    floor: int
    """Oldest version that any of its tokens may be of."""
    restarts: int = 0
    given_up: GivenUp | None = None
    is_held: bool = False
    """Set aside at the edge of a step: it takes no slot of the engines, and goes on in the next one."""
    release: EarlyRelease | None = None
    """Where its rollouts may be trained before it is complete."""
    known: list[Place] = field(default_factory=list)
    """Places whose rollouts have finished, in that order."""
    released: int = 0
    """Rollouts that went on to be trained."""
    taken: int = 0
    """Of those, the ones in batches."""
    unfinished: int = 0
    """Places whose end was not told yet."""
    is_over: bool = False
    """Nothing more of it will be released."""

    @property
    def size(self) -> int:
        """Rollouts that were asked for."""
        return len(self.places)

    @property
    def left(self) -> int:
        """Rollouts that may still go into a batch."""
        if self.is_over:
            return self.released - self.taken
        running = sum(place.rollout is None and place.is_running for place in self.places)
        return running + len(self.known) - self.taken

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def is_playing(self) -> bool:
        """Whether an agent may still run in one of its places."""
        return any(place.is_running for place in self.places)

    def give_up(self, given_up: GivenUp) -> None:
        """Stop its attempts, where some run. Whoever plays the group sees to the rest once they have ended."""
        if self.given_up is None and self.is_playing:
            self.given_up = given_up
            for place in self.places:
                if place.task is not None:
                    place.task.cancel()


class GroupPlayer:
    """Plays and scores groups; every rollout that does not come back ends here, with its reason."""

    def __init__(
        self,
        runner: GroupRunner,
        accounts: Accounts,
        settings: SchedulingSettings,
        *,
        whole_groups: Collection[str],
        on_place_ended: Callable[[OpenGroup], None],
        on_known: Callable[[OpenGroup, Task], None],
    ) -> None:
        """`whole_groups` are environments whose groups are dropped when a member is lost.

        `on_known` is told when a rollout has finished.
        """
        self._runner, self._accounts, self._settings = runner, accounts, settings
        self._whole_groups = frozenset(whole_groups)
        self._on_place_ended, self._on_known = on_place_ended, on_known

    async def play(self, group: OpenGroup, task: Task) -> list[Rollout]:
        """Waits for every place; the rollouts that came back, none of a group that was given up."""
        ended = partial(self._place_ended, group)
        async with asyncio.TaskGroup() as playing:
            for place in group.places:
                place.task = playing.create_task(self._play_place(task, group, place))
                place.task.add_done_callback(ended)
        if group.given_up is not None:
            self._end_given_up(group, group.given_up.reason)
            return []
        return [place.rollout for place in group.places if place.rollout is not None]

    def end_rest(self, group: OpenGroup, reason: str) -> None:
        """What finished and was not released will not be trained on."""
        rest = [place.rollout for place in group.known if place.rollout is not None and not place.is_released]
        self._accounts.end(rest, Outcome.filtered(reason))

    async def score(self, group: Group, full_size: int) -> list[Group]:
        """Score a group. Waits for its own scoring and nothing else."""
        reason = self._unfit(group, full_size)
        if reason is not None:
            self._accounts.end(group.rollouts, Outcome.filtered(reason))
            return []
        members = list(group.rollouts)  # what scores it may change the list
        try:
            scored = sort_scored(members, await self._runner.score(group))
        except RolloutError as error:
            self._accounts.end(members, Outcome.failed(error.reason), str(error))
            return []
        self._accounts.end(scored.unscored, Outcome.filtered(UNSCORED))
        self._accounts.end(scored.dropped, Outcome.filtered(SCORE_DROPPED))
        return scored.groups

    def _unfit(self, group: Group, full_size: int) -> str | None:
        """Why a group that lost members is not scored."""
        size = len(group.rollouts)
        if size < min(self._settings.min_group_size, full_size):
            return GROUP_TOO_SMALL
        is_whole = self._settings.partial_groups == "drop" or group.task.environment in self._whole_groups
        return PARTIAL_GROUP if is_whole and size < full_size else None

    async def _play_place(self, task: Task, group: OpenGroup, place: Place) -> None:
        """The first attempt that succeeds, or none after `max_retries` more."""
        for attempt in range(self._settings.max_retries + 1):
            if group.given_up is not None:
                return
            place.rollout_id = RolloutId(f"{place.name}.{attempt}")
            self._accounts.ledger.admit(place.rollout_id)
            place.rollout = await self._attempt(task, group, place.rollout_id, attempt)
            if place.rollout is not None:
                self._accounts.finished(place.rollout, place.name)
                group.known.append(place)
                self._on_known(group, task)
                return
            place.rollout_id = None
        self._accounts.budget.release(place.name)

    async def _attempt(self, task: Task, group: OpenGroup, rollout_id: RolloutId, attempt: int) -> Rollout | None:
        try:
            return await self._runner.run(task, group_id=group.group_id, rollout_id=rollout_id, attempt=attempt)
        except RolloutError as error:
            outcome, message = Outcome.failed(error.reason), str(error)
        except RequestRefused as error:
            outcome, message = Outcome.failed("request_refused"), str(error)
        self._accounts.lost(rollout_id, outcome, message)
        return None

    def _end_given_up(self, group: OpenGroup, reason: str) -> None:
        """What ran was cancelled; what had finished is filtered; every slot is given back."""
        for place in group.places:
            if place.is_released:
                continue
            if place.rollout is not None:
                self._accounts.end([place.rollout], Outcome.filtered(reason))
                continue
            if place.rollout_id is not None:
                self._accounts.lost(place.rollout_id, Outcome.cancelled(reason))
            self._accounts.budget.release_if_held(place.name)

    def _place_ended(self, group: OpenGroup, task: asyncio.Task[None]) -> None:
        group.unfinished -= 1
        self._on_place_ended(group)

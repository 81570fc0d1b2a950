"""Groups that were started and are not wholly in batches: the one place that holds and counts them.

    start ─► running ─► ended: scored, or its parts released ─► ready ─► taken into a batch, oldest tokens first
                                                               │ ▲  └─► discarded
                                                               ▼ │
                                                             doubtful: perhaps nothing of it can be trained on

Each change wakes the loops that wait for it. A group's task ends here where nothing of the group is left to train on.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tailrace.records import Group, GroupId, Rollout, RolloutId
from tailrace.scheduling.release import EarlyRelease
from tailrace.scheduling.staleness import Floors, Stop
from tailrace.scheduling.tasks import TaskKey, TaskStream


@dataclass(slots=True, eq=False)
class Member:
    """One member of a group: a rollout, over all attempts at it."""

    rollout_id: RolloutId | None
    """Of the newest attempt; None once that failed."""
    rollout: Rollout | None = None
    """Of the attempt that succeeded."""
    failures: int = 0
    """Attempts that failed by a fault of its own."""
    is_released: bool = False
    """Before the group was complete."""
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether an agent may still run in it."""
        return self.task is not None and not self.task.done()


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that was started and is not wholly in batches."""

    group_id: GroupId
    key: TaskKey
    members: list[Member]
    floor: int
    """Oldest version that any of its tokens may have."""
    release: EarlyRelease | None = None
    """Where its rollouts may be trained before it is complete."""
    stop: Stop | None = None
    """Why it was stopped while it ran."""
    failure: str = ""
    """The newest failure that may pass, of a rollout or of its score; empty where there was none, or it was scored."""
    is_held: bool = False
    """Set aside at the edge of a step, without a slot of the engines, until the next one."""
    finished: list[Member] = field(default_factory=list)
    """Members whose rollouts have finished, in that order."""
    released: int = 0
    """Rollouts that went on to be trained."""
    unfinished: int = 0
    """Members that have not ended."""
    waiting: int = 0
    """Of those, members that wait until they may be tried again."""
    parts: int = 1
    """Parts that wait for a batch, and one more until the group is over."""
    trainable: int = 1
    """Rollouts that are trained on, or may be, and one more until the group is over."""
    playing: asyncio.Task[None] | None = None
    """Runs it, from its task to its scores."""

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def size(self) -> int:
        """Rollouts that it started with."""
        return len(self.members)

    @property
    def unreleased(self) -> list[Rollout]:
        """Rollouts that have finished and were not released early."""
        return [member.rollout for member in self.finished if member.rollout is not None and not member.is_released]

    @property
    def is_running(self) -> bool:
        """Whether an agent may still run in one of its members."""
        return any(member.is_running for member in self.members)

    @property
    def num_running(self) -> int:
        """Members whose agents run, and may have slots of the engines."""
        return 0 if self.is_held else self.unfinished - self.waiting

    def stop_running(self, stop: Stop) -> None:
        """Cancel its attempts, where some run. `GroupPlayer.play` does the rest once they have ended."""
        if self.stop is None and self.is_running:
            self.stop = stop
            for member in self.members:
                if member.task is not None:
                    member.task.cancel()


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """A group, or a part of one, with advantages."""

    group: Group
    opened: OpenGroup
    """What it came from."""
    size: int
    """In a batch, in rollouts, with the members that it lost."""
    oldest_version: int
    """That any of its tokens may have: the floor, or less where a generator lagged behind."""


class Outstanding:
    """Groups and running sums over them.

    What is ready is taken oldest tokens first, then in order of arrival: what stays behind only becomes older, so
    nothing starves.
    """

    def __init__(self, tasks: TaskStream) -> None:
        self._tasks = tasks
        self.groups: dict[OpenGroup, None] = {}
        self.waiting = Counter[str]()
        """Rollouts that wait until they may be tried again, by environment."""
        self.floors = Floors[OpenGroup]()
        """Of groups that run or are scored."""
        self.ready: list[tuple[int, int, ReadyGroup]] = []
        """A heap of (oldest version, arrival, group)."""
        self.ready_size = 0
        """Of all that is ready, in rollouts of a batch."""
        self.ready_rollouts = 0
        self.doubtful = deque[ReadyGroup]()
        """Waits to be judged, and is not ready meanwhile: some of its tokens may be too old for the next batch, or it
        sampled none."""
        self._oldest_allowed = 0
        self._arrivals = 0
        self.running = 0
        """Rollouts whose agents run: the sum of `num_running`."""
        self.untaken = 0
        """Rollouts of started groups that are in no batch."""
        self.admission_wake, self.batches_wake = asyncio.Event(), asyncio.Event()

    def wake(self) -> None:
        """Something changed: admission and the forming of batches look again."""
        self.admission_wake.set()
        self.batches_wake.set()

    def start(self, group: OpenGroup) -> None:
        """A group starts."""
        self.groups[group] = None
        self.floors.add(group, group.floor)
        self.running += group.size
        self.untaken += group.size

    def member_ended(self, group: OpenGroup) -> None:
        """No agent runs in a member any more."""
        self.running -= group.num_running
        group.unfinished -= 1
        self.running += group.num_running
        self.wake()

    @contextlib.contextmanager
    def member_waits(self, group: OpenGroup) -> Iterator[None]:
        """No agent runs in a member until it is tried again: other groups have its slot meanwhile."""
        self._set_waiting(group, 1)
        try:
            yield
        finally:
            self._set_waiting(group, -1)

    def hold(self, group: OpenGroup, is_held: bool) -> None:
        """A group is set aside, or goes on."""
        self.running -= group.num_running
        group.is_held = is_held
        self.running += group.num_running

    def push(self, group: OpenGroup, part: Group, size: int) -> None:
        """A part of a group, or all of it, waits for its batch; it counts for `size` rollouts."""
        group.parts += 1
        group.released += size
        group.trainable += len(part.rollouts)
        versions = list(_versions(part))
        ready = ReadyGroup(part, group, size, min([group.floor, *versions]))
        if not versions or ready.oldest_version < self._oldest_allowed:
            self.doubtful.append(ready)
        else:
            self.keep(ready)
        self.wake()

    def allow(self, oldest: int) -> None:
        """The next batch takes tokens of version `oldest` and newer: what may hold older ones becomes doubtful."""
        if oldest > self._oldest_allowed:
            while self.ready and self.ready[0][0] < oldest:
                self.doubtful.append(self._pop())
        self._oldest_allowed = oldest

    def keep(self, ready: ReadyGroup) -> None:
        """The next batch can train on it."""
        self._arrivals += 1
        heapq.heappush(self.ready, (ready.oldest_version, self._arrivals, ready))
        self.ready_size += ready.size
        self.ready_rollouts += len(ready.group.rollouts)

    def discard(self, ready: ReadyGroup) -> None:
        """What was doubtful is in no batch, and something else may start."""
        self._leave(ready)
        self.wake()

    def take(self) -> ReadyGroup:
        """The oldest of what is ready goes into a batch."""
        ready = self._pop()
        self._leave(ready)
        return ready

    def end(self, group: OpenGroup) -> None:
        """Nothing more of it will be released."""
        self.floors.remove(group, group.floor)
        self.untaken -= group.size - group.released
        self._close_part(group)

    def give_up(self, group: OpenGroup, rollouts: int = 1) -> None:
        """So many of what counts as trainable will not be trained on; with the last of it its task ends as untrained.

        It has ended by then where any of the group was trained on.
        """
        group.trainable -= rollouts
        if not group.trainable:
            self._tasks.end(group.key, trained=False)

    def _set_waiting(self, group: OpenGroup, more: int) -> None:
        self.running -= group.num_running
        group.waiting += more
        self.running += group.num_running
        self.waiting[group.key.environment] += more
        self.wake()

    def _pop(self) -> ReadyGroup:
        ready = heapq.heappop(self.ready)[2]
        self.ready_size -= ready.size
        self.ready_rollouts -= len(ready.group.rollouts)
        return ready

    def _leave(self, ready: ReadyGroup) -> None:
        self.untaken -= ready.size
        self._close_part(ready.opened)

    def _close_part(self, group: OpenGroup) -> None:
        group.parts -= 1
        if not group.parts:
            del self.groups[group]


def _versions(group: Group) -> Iterator[int]:
    """The oldest that sampled a token, of each branch that has one."""
    for rollout in group.rollouts:
        for branch in rollout.branches:
            if (version := branch.oldest_version) is not None:
                yield version


def apportion(size: int, members: Sequence[int]) -> list[int]:
    """What each part of a group counts for in a batch: together as much as the whole group.

    >>> apportion(8, [4, 3]), apportion(8, [7])
    ([5, 3], [8])
    """
    shares = [size * count // max(1, sum(members)) for count in members]
    if shares:
        shares[0] += size - sum(shares)
    return shares

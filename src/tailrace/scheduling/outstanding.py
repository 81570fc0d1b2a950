"""What was started and is in no batch yet: the one place that holds it and counts it.

    start ─► running ─► ended: scored, or its parts released ─► ready ─► taken into a batch, oldest tokens first

Whoever changes something here wakes the loops that wait for it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.records import Group, GroupId, Rollout, RolloutId
from tailrace.scheduling.release import EarlyRelease
from tailrace.scheduling.staleness import Floors, Stop
from tailrace.scheduling.tasks import TaskKey


@dataclass(slots=True, eq=False)
class Member:
    """One member of a group: a rollout, over all attempts at it."""

    rollout_id: RolloutId | None
    """Of the newest attempt; None once that failed."""
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
    """A group that was started and is not wholly in batches."""

    group_id: GroupId
    key: TaskKey
    members: list[Member]
    floor: int
    """Oldest version that any of its tokens may be of."""
    release: EarlyRelease | None = None
    """Where its rollouts may be trained before it is complete."""
    stop: Stop | None = None
    """Why it was stopped while it ran."""
    is_held: bool = False
    """Set aside at the edge of a step: it takes no slot of the engines, and goes on in the next one."""
    finished: list[Member] = field(default_factory=list)
    """Members whose rollouts have finished, in that order."""
    released: int = 0
    """Rollouts that went on to be trained."""
    taken: int = 0
    """Of those, the ones in batches."""
    unfinished: int = 0
    """Members whose end was not told yet."""
    parts: int = 1
    """That wait for a batch, and one more until the group is over."""
    is_over: bool = False
    """Nothing more of it will be released."""

    def __post_init__(self) -> None:
        self.unfinished = self.size

    @property
    def size(self) -> int:
        """Rollouts that were asked for."""
        return len(self.members)

    @property
    def left(self) -> int:
        """Rollouts that may still go into a batch."""
        if self.is_over:
            return self.released - self.taken
        running = sum(member.rollout is None and member.is_running for member in self.members)
        return running + len(self.finished) - self.taken

    @property
    def unreleased(self) -> list[Rollout]:
        """Rollouts that have finished and were not released early."""
        return [member.rollout for member in self.finished if member.rollout is not None and not member.is_released]

    @property
    def is_running(self) -> bool:
        """Whether an agent may still run in one of its members."""
        return any(member.is_running for member in self.members)

    def stop_running(self, stop: Stop) -> None:
        """Cancel its attempts, where some run. Whoever plays the group sees to the rest once they have ended."""
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
    """What it counts for in a batch, in rollouts: the members that it lost included."""


class ReadyQueue:
    """Scored groups that wait for their batch: those with the oldest tokens first, then in arrival order.

    Where more than a batch's worth waits, what would be past the bound soonest goes along. What stays behind only
    becomes older, so nothing starves.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ReadyGroup]] = []
        self._arrivals = 0
        self.size = 0
        """What all of it counts for in batches, in rollouts."""
        self.rollouts = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, ready: ReadyGroup) -> None:
        """A group has been scored."""
        self._arrivals += 1
        heapq.heappush(self._heap, (ready.opened.floor, self._arrivals, ready))
        self.size += ready.size
        self.rollouts += len(ready.group.rollouts)

    def pop(self) -> ReadyGroup:
        """The next one to be trained on."""
        ready = heapq.heappop(self._heap)[2]
        self.size -= ready.size
        self.rollouts -= len(ready.group.rollouts)
        return ready


class Outstanding:
    """The groups that were started and are not wholly in batches, with running sums."""

    def __init__(self) -> None:
        self.groups: dict[OpenGroup, None] = {}
        self.floors = Floors[OpenGroup]()
        """Of those that run or are scored."""
        self.ready = ReadyQueue()
        self.running = 0
        """Rollouts whose agents run."""
        self.untaken = 0
        """Rollouts of groups that were started and that no batch took yet."""
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
        group.unfinished -= 1
        self.running -= not group.is_held
        self.wake()

    def push(self, group: OpenGroup, part: Group, size: int) -> None:
        """A part of a group, or all of it, waits for its batch; it counts for `size` rollouts."""
        group.parts += 1
        group.released += size
        self.ready.push(ReadyGroup(part, group, size))
        self.wake()

    def take(self) -> ReadyGroup:
        """The oldest of what is ready goes into a batch."""
        ready = self.ready.pop()
        self.untaken -= ready.size
        ready.opened.taken += ready.size
        self._close_part(ready.opened)
        return ready

    def end(self, group: OpenGroup) -> None:
        """Nothing more of it will be released."""
        group.is_over = True
        self.floors.remove(group, group.floor)
        self.untaken -= group.size - group.released
        self._close_part(group)

    def _close_part(self, group: OpenGroup) -> None:
        group.parts -= 1
        if not group.parts:
            del self.groups[group]


def apportion(size: int, members: Sequence[int]) -> list[int]:
    """What each part of a group counts for in a batch: together as much as the whole group.

    >>> apportion(8, [4, 3]), apportion(8, [7])
    ([5, 3], [8])
    """
    shares = [size * count // max(1, sum(members)) for count in members]
    if shares:
        shares[0] += size - sum(shares)
    return shares

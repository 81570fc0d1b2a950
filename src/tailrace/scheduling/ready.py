"""Scored groups that wait for their batch: those with the oldest tokens first, then in arrival order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.records import Group
from tailrace.scheduling.groups import OpenGroup


@dataclass(frozen=True, slots=True, eq=False)
class ReadyGroup:
    """A group, or a part of one, with advantages."""

    group: Group
    opened: OpenGroup
    """What it came from."""
    size: int
    """What it counts for in a batch, in rollouts: the members that it lost included."""


class ReadyQueue:
    """A priority queue with running sums.

    Oldest tokens first: where more than a batch's worth waits, what would outlive the bound soonest goes along. What
    stays behind only becomes older, so nothing starves.
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


def shared_out(size: int, members: Sequence[int]) -> list[int]:
    """What each part of a group counts for in a batch: together as much as the whole group.

    >>> shared_out(8, [4, 3]), shared_out(8, [7])
    ([5, 3], [8])
    """
    shares = [size * count // max(1, sum(members)) for count in members]
    if shares:
        shares[0] += size - sum(shares)
    return shares

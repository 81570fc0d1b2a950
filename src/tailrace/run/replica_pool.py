"""Which generators a run has, whom it takes in, and what it starts itself. Pure: names in, decisions out; no clock, no
I/O.

    own names     free ──→ coming ──→ serving ──→ leaving ──→ free ...        started while fewer than `aim` are there
                    └────→ given up
    guests' names free ──→ coming ──→ serving ──→ leaving ──→ free            taken in while fewer than `most` are there

Who starts processes asks `wants`; who lets replicas in asks `take_in`; who has machines for more `grow`s and `shrink`s.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Standing(enum.Enum):
    """Where a name of the pool stands."""

    FREE = enum.auto()
    COMING = enum.auto()
    """Its process starts, loads its model or its first weights."""
    SERVING = enum.auto()
    LEAVING = enum.auto()
    """It leaves in order: it counts as gone already, so that others may take its place."""
    GIVEN_UP = enum.auto()
    """It ended too often to be started again."""


_THERE = (Standing.COMING, Standing.SERVING)


@dataclass(frozen=True, slots=True)
class Place:
    """What a guest is given."""

    name: str
    """In logs, metrics and errors."""
    life: int
    """How many guests had the name before."""


class ReplicaPool:
    """The generators of one run, by name.

    >>> pool = ReplicaPool(["a", "b"], ["c", "d", "e"], least=2, most=3)
    >>> [name for name in "ab" if pool.wants(name)]
    ['a', 'b']
    >>> pool.begins("a"), pool.begins("b"), pool.take_in(), pool.take_in()
    (None, None, Place(name='c', life=0), None)
    >>> pool.ended("a"), pool.wants("a"), pool.ended("b"), pool.wants("a")
    (None, False, None, True)
    """

    def __init__(self, own: Sequence[str], guests: Sequence[str] = (), *, least: int, most: int) -> None:
        """`own` are names of replicas that the run starts (or connects to); `guests` of those that join it."""
        self.least, self.most = least, most
        self.aim = least
        """The run starts its own while fewer are there."""
        self._own, self._guests = tuple(own), tuple(guests)
        self._standing = dict.fromkeys((*own, *guests), Standing.FREE)
        self._lives = dict.fromkeys(guests, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that there may be."""
        return tuple(self._standing)

    @property
    def present(self) -> int:
        """That serve, or come."""
        return sum(standing in _THERE for standing in self._standing.values())

    @property
    def serving(self) -> int:
        """That take requests, or did and are starved of weights for a while."""
        return sum(standing is Standing.SERVING for standing in self._standing.values())

    @property
    def on_the_way(self) -> int:
        """That come, or leave."""
        return sum(standing in (Standing.COMING, Standing.LEAVING) for standing in self._standing.values())

    @property
    def has_spare(self) -> bool:
        """Whether the run has names for more of its own than it begins with."""
        return len(self._own) > self.least

    @property
    def remaining(self) -> int:
        """That are there, or that the run would start again; with none, it waits for no guest that may never come."""
        own = sum(self._standing[name] is not Standing.GIVEN_UP for name in self._own)
        return own + sum(self._standing[name] is not Standing.FREE for name in self._guests)

    def is_guest(self, name: str) -> bool:
        """Whether the name is one of those that others join by."""
        return name in self._lives

    def standing(self, name: str) -> Standing:
        """Of one name."""
        return self._standing[name]

    def wants(self, name: str) -> bool:
        """Whether the run is to start this one of its own now."""
        missing = self.aim - self.present
        free = [own for own in self._own if self._standing[own] is Standing.FREE]
        return name in free[: max(0, missing)]

    def grow(self, count: int) -> bool:
        """There is work for so many more than are there; whether there may be any more."""
        before, self.aim = self.aim, max(self.aim, min(self.most, self.present + count))
        return self.aim > before

    def shrink(self) -> str | None:
        """The one of its own that is to leave, where there is work for one less; None where none is to spare."""
        own = [name for name in self._own if self._standing[name] is Standing.SERVING]
        return own[-1] if own and self.present > self.least else None

    def does_without(self) -> bool:
        """Whether those which are there are enough to go on with: then no more are started until it grows again."""
        is_enough = self.present >= self.least
        if is_enough:
            self.aim = self.present
        return is_enough

    def take_in(self) -> Place | None:
        """A place for one that asks to join, which counts as coming from now on; None where there is no room."""
        free = [name for name in self._guests if self._standing[name] is Standing.FREE]
        if self.present >= self.most or not free:
            return None
        name = free[0]
        self._standing[name] = Standing.COMING
        life, self._lives[name] = self._lives[name], self._lives[name] + 1
        return Place(name, life)

    def begins(self, name: str) -> None:
        """One of its own is being started."""
        self._standing[name] = Standing.COMING

    def serves(self, name: str) -> bool:
        """It takes requests; whether that is news."""
        is_news = self._standing[name] is Standing.COMING
        if is_news:
            self._standing[name] = Standing.SERVING
        return is_news

    def leaves(self, name: str) -> None:
        """It was asked to leave, or asks to."""
        if self._standing[name] in _THERE:
            self._standing[name] = Standing.LEAVING
            if name in self._own:  # one that is let go is not missed
                self.aim = max(self.least, self.aim - 1)

    def ended(self, name: str) -> None:
        """Nothing is left of it."""
        self._standing[name] = Standing.FREE

    def gives_up(self, name: str) -> None:
        """It will not be started again."""
        self._standing[name] = Standing.GIVEN_UP

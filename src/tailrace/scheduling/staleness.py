"""How old is what still runs, and what follows from it. Pure: versions in, decisions out.

A group's floor is the oldest version that a generator served when the group started: none of its tokens is older. So a
group of floor f fits a batch judged at version j whole while `j - f <= max_staleness`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Generic, TypeVar

GroupT = TypeVar("GroupT")


class Floors(Generic[GroupT]):
    """The groups that run, by floor. There are as many floors as versions in use: a handful.

    >>> floors = Floors[str]()
    >>> floors.add("a", 3); floors.add("b", 4)
    >>> floors.oldest, list(floors.below(4))
    (3, ['a'])
    """

    def __init__(self) -> None:
        self._groups: defaultdict[int, dict[GroupT, None]] = defaultdict(dict)

    def add(self, group: GroupT, floor: int) -> None:
        """A group starts."""
        self._groups[floor][group] = None

    def remove(self, group: GroupT, floor: int) -> None:
        """It has ended."""
        del self._groups[floor][group]
        if not self._groups[floor]:
            del self._groups[floor]

    @property
    def oldest(self) -> int | None:
        """The lowest floor; None while nothing runs."""
        return min(self._groups, default=None)

    def below(self, version: int) -> Iterator[GroupT]:
        """Groups whose floor is below `version`, oldest first."""
        for floor in sorted(floor for floor in self._groups if floor < version):
            yield from list(self._groups[floor])


def oldest_allowed(judged_version: int, max_staleness: int) -> int:
    """Tokens of this version and newer may bear loss in a batch judged at `judged_version`."""
    return judged_version - max_staleness


def must_hold(oldest_floor: int | None, *, judged_version: int, max_staleness: int) -> bool:
    """Whether the step of a batch judged at `judged_version` would push a group that runs past the bound.

    The next batch is judged one version higher.

    >>> must_hold(3, judged_version=6, max_staleness=4), must_hold(3, judged_version=7, max_staleness=4)
    (False, True)
    """
    return oldest_floor is not None and oldest_floor < oldest_allowed(judged_version + 1, max_staleness)

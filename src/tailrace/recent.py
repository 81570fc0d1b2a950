"""A table that remembers what was used last."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")

REMEMBERED = 1 << 16
"""As many as the slots of the largest generator; as a table of ids and numbers 20 MB at most."""


class RecentTable(Generic[KeyT, ValueT]):
    """At least the `least` keys that were used last, and at most twice as many.

    Two dictionaries: once the new one has `least` keys, it becomes the old one, and what the old one held is forgotten.
    One dictionary whose first key goes for each that comes would step over all that went before, 50 µs at 65,536 keys.

    >>> table = RecentTable[str, int](2)
    >>> for number, key in enumerate("abc"):
    ...     table[key] = number
    >>> table.get("a")
    0
    >>> [key for key in "abc" if key in table]
    ['a', 'c']
    """

    def __init__(self, least: int = REMEMBERED) -> None:
        self._least = least
        self._new: dict[KeyT, ValueT] = {}
        self._old: dict[KeyT, ValueT] = {}

    def __contains__(self, key: KeyT) -> bool:
        """Asking is no use."""
        return key in self._new or key in self._old

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        self._old.pop(key, None)
        self._new[key] = value
        if len(self._new) >= self._least:
            self._old, self._new = self._new, {}

    def get(self, key: KeyT) -> ValueT | None:
        """Its value, which is used by that; None where it is forgotten."""
        if key in self._old:
            value = self[key] = self._old[key]
            return value
        return self._new.get(key)

    def forget(self, key: KeyT) -> None:
        """Nothing where it is not there."""
        self._new.pop(key, None)
        self._old.pop(key, None)

    def forget_all(self, where: Callable[[ValueT], bool]) -> None:
        """Keys whose value is such a one."""
        self._new = {key: value for key, value in self._new.items() if not where(value)}
        self._old = {key: value for key, value in self._old.items() if not where(value)}

    def clear(self) -> None:
        """Forget everything."""
        self._new, self._old = {}, {}

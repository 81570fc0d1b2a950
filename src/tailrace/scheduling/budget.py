"""The staleness budget: how many rollouts may be admitted and not yet trained."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.errors import AccountingError


class StalenessBudget:
    """Slots held by identity and given back exactly once.

    The ceiling is `(max_staleness + 1) * batch_size` rollouts. A group is admitted whenever any slot is free and may
    overdraw by its size less one, so that no pattern of failures deadlocks.

    >>> budget = StalenessBudget(ceiling=3)
    >>> budget.acquire(["a", "b"]); budget.acquire(["c", "d"])
    >>> budget.free
    -1
    >>> budget.release("a"); budget.release("b"); budget.free
    1
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self._held: set[str] = set()

    @property
    def free(self) -> int:
        """Slots left; below 0 while overdrawn. Above 0, a group may be admitted."""
        return self.ceiling - len(self._held)

    def acquire(self, slots: Iterable[str]) -> None:
        """Hold one slot per name. Raises `AccountingError` for a name that holds one already."""
        for slot in slots:
            if slot in self._held:
                raise AccountingError(f"{slot} already holds a slot of the staleness budget")
            self._held.add(slot)

    def release(self, slot: str) -> None:
        """Give one slot back. Raises `AccountingError` when it is not held."""
        if slot not in self._held:
            raise AccountingError(f"{slot} gives back a slot of the staleness budget that it does not hold")
        self._held.remove(slot)

    def release_if_held(self, slot: str) -> None:
        """Give one slot back, unless its place gave it up before."""
        self._held.discard(slot)

"""The ledger and the staleness budget, moved together: whatever ends a rollout gives its slot back."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.records import Outcome, Rollout, RolloutId
from tailrace.scheduling.budget import StalenessBudget
from tailrace.scheduling.ledger import Ledger
from tailrace.scheduling.observer import SchedulerObserver


class Accounts:
    """Where every rollout is written down. A place of a group holds one slot, over all its attempts."""

    def __init__(self, ceiling: int, observer: SchedulerObserver) -> None:
        self.ledger = Ledger()
        self.budget = StalenessBudget(ceiling)
        self._observer = observer
        self._slots: dict[RolloutId, str] = {}
        """Places of finished rollouts."""

    def finished(self, rollout: Rollout, place: str) -> None:
        """An attempt succeeded; the place's slot stays held until the rollout ends."""
        self._slots[rollout.rollout_id] = place
        self._observer.rollout_finished(rollout)

    def lost(self, rollout_id: RolloutId, outcome: Outcome, message: str = "", rollout: Rollout | None = None) -> None:
        """An attempt ended without a result; its place goes on or is given up. `rollout` is what there is of it."""
        self.ledger.end(rollout_id, outcome)
        self._observer.rollout_ended(rollout_id, rollout, outcome, message)

    def end(self, rollouts: Sequence[Rollout], outcome: Outcome, message: str = "") -> None:
        """Finished rollouts reach their terminal state."""
        for rollout in rollouts:
            self.ledger.end(rollout.rollout_id, outcome)
            self.budget.release(self._slots.pop(rollout.rollout_id))
            self._observer.rollout_ended(rollout.rollout_id, rollout, outcome, message)

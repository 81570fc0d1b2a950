"""When nothing trainable comes for too long, the run says so instead of waiting for ever."""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.errors import TrainingError
from tailrace.records import TerminalState
from tailrace.scheduling.ledger import Ledger


class BarrenCount:
    """Rollouts in a row that held nothing to train on.

    >>> count = BarrenCount(limit=16)
    >>> count.barren(8, Ledger()); count.fruitful(); count.barren(8, Ledger())
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rollouts = 0

    def fruitful(self) -> None:
        """Something to train on came."""
        self._rollouts = 0

    def barren(self, rollouts: int, ledger: Ledger) -> None:
        """A group of so many held nothing. Raises `TrainingError` with the reasons once the limit is reached."""
        self._rollouts += rollouts
        if self._rollouts >= self._limit:
            raise TrainingError(
                f"the last {self._rollouts} rollouts held nothing to train on; so far failed: "
                f"{_counted(ledger.reasons(TerminalState.FAILED))}; filtered: "
                f"{_counted(ledger.reasons(TerminalState.FILTERED))}. The log tells the first failure of each "
                "kind; where rewards never differ inside a group, the task is too hard or too easy for this model"
            )


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"

"""Every rollout from admission to exactly one terminal state."""

from __future__ import annotations

from collections import Counter

from tailrace.errors import AccountingError
from tailrace.records import Outcome, RolloutId, TerminalState


class Ledger:
    """Knows every rollout. Its invariant: `admitted = terminal + in flight`.

    >>> ledger = Ledger()
    >>> ledger.admit(RolloutId("a"))
    >>> ledger.end(RolloutId("a"), Outcome.trained(step=1))
    >>> print(ledger)
    1 admitted = 1 trained + 0 filtered + 0 failed + 0 cancelled + 0 in flight
    """

    def __init__(self) -> None:
        self._admitted = 0
        self._in_flight: set[RolloutId] = set()
        self._terminal: Counter[tuple[TerminalState, str]] = Counter()

    def admit(self, rollout_id: RolloutId) -> None:
        """A rollout starts its life. Raises `AccountingError` when it is in flight already."""
        if rollout_id in self._in_flight:
            raise AccountingError(f"rollout {rollout_id} was admitted twice")
        self._admitted += 1
        self._in_flight.add(rollout_id)

    def end(self, rollout_id: RolloutId, outcome: Outcome) -> None:
        """A rollout reaches its terminal state. Raises `AccountingError` when it is not in flight."""
        if rollout_id not in self._in_flight:
            raise AccountingError(f"rollout {rollout_id} ends as {outcome.state} but is not in flight")
        self._in_flight.remove(rollout_id)
        self._terminal[outcome.state, outcome.reason] += 1

    def count(self, rollouts: int, outcome: Outcome) -> None:
        """So many rollouts of an earlier run, admitted there, ended like this; nobody knows their names any more."""
        if rollouts:
            self._admitted += rollouts
            self._terminal[outcome.state, outcome.reason] += rollouts

    def check(self) -> None:
        """Raise `AccountingError` unless the invariant holds."""
        if self._admitted != self._terminal.total() + len(self._in_flight):
            raise AccountingError(f"the ledger does not balance: {self}")

    @property
    def admitted(self) -> int:
        """Rollouts ever admitted."""
        return self._admitted

    @property
    def in_flight(self) -> int:
        """Rollouts admitted and not yet terminal."""
        return len(self._in_flight)

    def in_flight_ids(self) -> list[RolloutId]:
        """Which those are, for ending them all."""
        return sorted(self._in_flight)

    def total(self, state: TerminalState) -> int:
        """Rollouts that ended in `state`, whatever the reason."""
        return sum(count for (ended, _), count in self._terminal.items() if ended is state)

    def reasons(self, state: TerminalState) -> dict[str, int]:
        """Rollouts that ended in `state`, by reason."""
        return {reason: count for (ended, reason), count in sorted(self._terminal.items()) if ended is state}

    def __str__(self) -> str:
        terminal = " + ".join(f"{self.total(state)} {state}" for state in TerminalState)
        return f"{self._admitted} admitted = {terminal} + {self.in_flight} in flight"

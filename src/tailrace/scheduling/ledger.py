"""Every rollout from admission to exactly one terminal state, and the staleness budget that follows from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from tailrace.errors import AccountingError, NothingLeft, TrainingError
from tailrace.records import NOTHING_TRAINABLE, Group, Outcome, Rollout, RolloutId, TerminalState
from tailrace.scheduling.backoff import Part
from tailrace.scheduling.equal_rewards import EqualRewards
from tailrace.scheduling.observer import SchedulerObserver

_MISSING: dict[Part, str] = {
    "rollouts": "rollouts failed and none came back",
    "scores": "groups failed and none was scored",
}


class Ledger:
    """Counts every rollout. Its invariant: `admitted = terminal + in flight`.

    >>> ledger = Ledger()
    >>> ledger.admit(RolloutId("a"))
    >>> ledger.end(RolloutId("a"), Outcome.trained(step=1))
    >>> print(ledger)
    1 admitted = 1 trained + 0 filtered + 0 failed + 0 cancelled + 0 in flight
    """

    def __init__(self) -> None:
        self.admitted = 0
        """Rollouts ever admitted."""
        self._in_flight: set[RolloutId] = set()
        self._terminal: Counter[tuple[TerminalState, str]] = Counter()

    def admit(self, rollout_id: RolloutId) -> None:
        """A rollout starts. Raises `AccountingError` when it is in flight already."""
        if rollout_id in self._in_flight:
            raise AccountingError(f"rollout {rollout_id} was admitted twice")
        self.admitted += 1
        self._in_flight.add(rollout_id)

    def end(self, rollout_id: RolloutId, outcome: Outcome) -> None:
        """A rollout reaches its terminal state. Raises `AccountingError` when it is not in flight."""
        if rollout_id not in self._in_flight:
            raise AccountingError(f"rollout {rollout_id} ends as {outcome.state} but is not in flight")
        self._in_flight.remove(rollout_id)
        self._terminal[outcome.state, outcome.reason] += 1

    def end_rest(self, outcome: Outcome) -> None:
        """All that are in flight reach the same terminal state."""
        if self._in_flight:
            self._terminal[outcome.state, outcome.reason] += len(self._in_flight)
            self._in_flight.clear()

    def check(self) -> None:
        """Raise `AccountingError` unless the invariant holds."""
        if self.admitted != self._terminal.total() + len(self._in_flight):
            raise AccountingError(f"the ledger does not balance: {self}")

    @property
    def in_flight(self) -> int:
        """Rollouts admitted and not yet terminal."""
        return len(self._in_flight)

    def total(self, state: TerminalState) -> int:
        """Rollouts that ended in `state`, whatever the reason."""
        return sum(count for (ended, _), count in self._terminal.items() if ended is state)

    def reasons(self, state: TerminalState) -> dict[str, int]:
        """Rollouts that ended in `state`, by reason."""
        return {reason: count for (ended, reason), count in sorted(self._terminal.items()) if ended is state}

    def __str__(self) -> str:
        terminal = " + ".join(f"{self.total(state)} {state}" for state in TerminalState)
        return f"{self.admitted} admitted = {terminal} + {self.in_flight} in flight"


class Accounts:
    """The ledger, the budget and the observer, changed together.

    The slots of the staleness budget are the rollouts in flight, so each is given back exactly once, whatever the
    outcome. A group is admitted whenever any slot is free and may overdraw the budget by its size less one, so that no
    pattern of failures deadlocks.
    """

    def __init__(self, budget: int, observer: SchedulerObserver) -> None:
        """`budget` is the most rollouts that may be in flight: `SchedulingSettings.staleness_budget`."""
        self.ledger = Ledger()
        self.budget = budget
        self.observer = observer

    @property
    def budget_free(self) -> int:
        """Slots left; below 0 while overdrawn. Above 0, a group may be admitted."""
        return self.budget - self.ledger.in_flight

    def admit(self, rollout_id: RolloutId) -> RolloutId:
        """A rollout takes a slot; its id again."""
        self.ledger.admit(rollout_id)
        return rollout_id

    def lose(self, rollout_id: RolloutId, outcome: Outcome, message: str = "") -> None:
        """An attempt ended without a result; `message` says why, for people."""
        self.ledger.end(rollout_id, outcome)
        self.observer.rollout_ended(rollout_id, None, outcome, message)

    def end(self, rollouts: Iterable[Rollout], outcome: Outcome, message: str = "") -> None:
        """Finished rollouts reach their terminal state."""
        for rollout in rollouts:
            self.ledger.end(rollout.rollout_id, outcome)
            self.observer.rollout_ended(rollout.rollout_id, rollout, outcome, message)


class UntrainableStreak:
    """Rollouts in a row with nothing to train on; too many, or failures for too long, end the run.

    There are three streaks: of what came back, of what was ready and had become too old for its batch, and of what was
    in batches of which the trainer's loss kept nothing. Failures that may pass count by time: an outage fails thousands
    in a second. What comes back while an environment pauses does not count: it is of others, and that one may have
    something to teach once it works again.

    >>> streak = UntrainableStreak(limit=16, ledger=Ledger())
    >>> streak.extend(8); streak.reset(); streak.extend(8); streak.expire(8)
    """

    def __init__(
        self,
        limit: int,
        ledger: Ledger,
        *,
        reward_range: Callable[[str], tuple[float, float] | None] = lambda environment: None,
        max_failing_s: float = math.inf,
        outages_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`limit` counts rollouts, `max_failing_s` seconds in which groups fail and nothing comes back.

        `reward_range` of an environment is None while none of its tasks was trained; `outages_s` are the environments
        that pause, and for how many seconds each has failed: none is waited for beyond `max_failing_s`.
        """
        self._limit, self._ledger, self._max_failing_s = limit, ledger, max_failing_s
        self._rollouts = self._expired = self._rejected = 0
        self._failing_since_s: dict[Part, float] = {}
        self._equal = EqualRewards(reward_range)
        self._outages_s = outages_s

    def reset(self) -> None:
        """A group was trainable."""
        self._rollouts = 0
        self._failing_since_s.clear()
        self._equal.clear()

    def scored(self) -> None:
        """A group was scored, trainable or not: its environment works."""
        self._failing_since_s.clear()

    def came_back(self) -> None:
        """A rollout did; its group may take long yet, and its score may fail."""
        self._failing_since_s.pop("rollouts", None)

    def equal(self, group: Group) -> None:
        """The rewards of a scored group are all equal."""
        if not self._waits_for_an_environment:
            self._equal.add(group)

    def extend(self, rollouts: int) -> None:
        """A group of `rollouts` came back not trainable. Raises `TrainingError` with the reasons at the limit.

        Raises `NothingLeft` where nearly all that were scored earned the highest reward there was, or hardly less, and
        no environment pauses.
        """
        if self._waits_for_an_environment:
            return
        self._rollouts += rollouts
        if self._rollouts < self._limit:
            return
        outages_s, found = self._outages_s(), self._equal.describe()
        if self._equal.have_converged(self._rollouts):
            found = f": {self._equal.describe_converged()}"
            if not outages_s:
                raise NothingLeft(f"converged{found}: nothing is left to learn")
        away = [f"environment {name!r} has failed for {lasted_s:.0f} s" for name, lasted_s in outages_s.items()]
        raise TrainingError(
            f"{', '.join(away)}{' (scheduling.max_failing_s), and ' if away else ''}the last {self._rollouts} rollouts "
            f"held nothing to train on{found}.{self._reasons('the log tells the first failure of each kind')}"
        )

    def formed(self) -> None:
        """A batch was formed."""
        self._expired = 0

    def expire(self, rollouts: int) -> None:
        """A group of `rollouts` was ready, and too old for its batch. Raises `TrainingError` at the limit."""
        self._expired += rollouts
        if self._expired >= self._limit:
            raise TrainingError(
                f"there was nothing to train on in the last {self._expired} rollouts that were ready once their batch "
                f"was formed: it is older than scheduling.max_staleness allows, or empty.{self._reasons()}"
            )

    def step_ended(self, rollouts: int, *, taught: bool) -> None:
        """The trainer is done with a batch of so many, and whether anything of it bore a gradient."""
        self._rejected = 0 if taught else self._rejected + rollouts

    def require_taught(self) -> None:
        """Raise `TrainingError` where the trainer's steps have taught nothing up to the limit."""
        if self._rejected >= self._limit:
            raise TrainingError(
                f"there was nothing to train on in the batches of the last {self._rejected} rollouts: the trainer "
                f"skipped their steps as {NOTHING_TRAINABLE}, since its loss, or a mask of "
                f"trainer.loss.masks, rejected all of their tokens.{self._reasons()}"
            )

    def fail(self, failure: str, part: Part, *, now_s: float) -> None:
        """A group failed in a way that may pass: none of its rollouts came back, or they could not be scored.

        Raises `TrainingError` with the reasons when that goes on too long.
        """
        lasted_s = now_s - self._failing_since_s.setdefault(part, now_s)
        if lasted_s >= self._max_failing_s:
            raise TrainingError(
                f"there is nothing to train on: for {lasted_s:.0f} s (scheduling.max_failing_s) {_MISSING[part]}. The "
                f"newest failure: {failure}.{self._reasons('the log has a traceback of each kind')}"
            )

    @property
    def _waits_for_an_environment(self) -> bool:
        return any(lasted_s < self._max_failing_s for lasted_s in self._outages_s().values())

    def _reasons(self, where: str = "") -> str:
        """A sentence about what failed and was filtered so far; `where` says where failures are told of."""
        failed, filtered = (self._ledger.reasons(state) for state in (TerminalState.FAILED, TerminalState.FILTERED))
        told = [_counted("failed", failed), _counted("filtered", filtered), where if failed else ""]
        return f" So far {'; '.join(filter(None, told))}" if failed or filtered else ""


def _counted(state: str, reasons: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return counts and f"{state}: {counts}"

"""Environments that fail pause: an outage of what one calls costs some rollouts, not the run.

    8 failures in a row ─► pause 1 s ─► one group tries ─┬─ something came back ─► on as before
                             ▲                           └─ failed again ─► twice the pause, at most 30 s ─┐
                             └───────────────────────────────────────────────────────────────────────────┘

Only failures that may pass count (`RolloutError.may_pass`): those of rollouts and those of groups' scores apart, since
rollouts come back while a judge is away. So each has a turn to try of its own, which one group has at a time: that of
rollouts while attempts run that began with it, until something comes back, all of them have failed or the group ends;
that of scores from the group's start to its end. What began before the outage has no turn, so nothing waits for it.

Decides over plain numbers; the caller knows the time.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from tailrace.records import GroupId, RolloutId

FAILURES_IN_A_ROW: Final = 8
"""So many, and nothing that came back between them: then an environment pauses."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0

Part: TypeAlias = Literal["rollouts", "scores"]
"""What fails: rollouts, or the scores of groups."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outage:
    """Failures of one environment since something of it came back."""

    since_s: float
    failures: int = 0
    pause_s: float = 0.0
    """The newest pause; 0 while there was none."""
    ends_s: float = 0.0
    """When that one ends."""
    trying: GroupId | None = None
    """The group that has the turn to try whether the outage is over."""
    attempts: set[RolloutId] = field(default_factory=set[RolloutId])
    """Of it, those that began with the turn and have not failed."""

    def give(self, group_id: GroupId, attempts: Collection[RolloutId]) -> None:
        """These try, of the one group that does."""
        self.trying = group_id
        self.attempts.update(attempts)

    def take_back(self) -> None:
        """Any group may try next."""
        self.trying = None
        self.attempts.clear()


class Backoff:
    """Which environments pause, and for how long.

    >>> backoff = Backoff()
    >>> [backoff.failed("shop", "rollouts", now_s=0.0) for _ in range(9)][-2:]
    [1.0, 0.0]
    >>> backoff.failed("shop", "rollouts", now_s=1.0), backoff.pause_left_s("shop", now_s=1.5)
    (2.0, 1.5)
    >>> backoff.came_back("shop", "rollouts", now_s=3.0), backoff.paused
    (True, [])
    """

    def __init__(self) -> None:
        self._outages: dict[tuple[str, Part], _Outage] = {}

    def failed(self, environment: str, part: Part, *, now_s: float) -> float:
        """One more failed. Returns the seconds of the pause that begins with it; 0 where none does."""
        outage = self._outages.setdefault((environment, part), _Outage(now_s))
        outage.failures += 1
        if outage.failures < FAILURES_IN_A_ROW or now_s < outage.ends_s:
            return 0.0
        if not outage.pause_s:
            _logger.warning(
                "the last %d %s of environment %r all failed: it pauses for %g s and is tried again, then after ever "
                "longer pauses of at most %g s",
                *(outage.failures, part, environment, FIRST_PAUSE_S, LONGEST_PAUSE_S),
            )
        outage.pause_s = min(2 * outage.pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        outage.ends_s = now_s + outage.pause_s
        return outage.pause_s

    def came_back(self, environment: str, part: Part, *, now_s: float) -> bool:
        """One succeeded: the environment goes on as before. Returns whether it had paused."""
        outage = self._outages.pop((environment, part), None)
        if outage is None or not outage.pause_s:
            return False
        _logger.warning("environment %r works again, after %.0f s", environment, now_s - outage.since_s)
        return True

    def may_try(self, environment: str, group_id: GroupId, *, now_s: float) -> bool:
        """Whether a group may try again what failed of it: after a pause one does, and goes on while its attempts run.

        >>> backoff, first, second = Backoff(), GroupId("a"), GroupId("b")
        >>> _ = [backoff.failed("shop", "rollouts", now_s=0.0) for _ in range(8)]
        >>> backoff.try_again("shop", first, RolloutId("a.0.1"))
        >>> [backoff.may_try("shop", one, now_s=1.0) for one in (first, second)]
        [True, False]
        >>> backoff.attempt_failed("shop", RolloutId("a.0.1")), backoff.may_try("shop", second, now_s=1.0)
        (True, True)
        """
        if self.pause_left_s(environment, now_s=now_s):
            return False
        outage = self._outages.get((environment, "rollouts"))
        return outage is None or not outage.pause_s or outage.trying in (None, group_id)

    def may_start(self, environment: str, *, now_s: float) -> bool:
        """Whether a new group may try, where none has anything to try again."""
        return not self.pause_left_s(environment, now_s=now_s) and all(
            outage.trying is None for outage in self._paused(environment)
        )

    def try_again(self, environment: str, group_id: GroupId, attempt: RolloutId) -> None:
        """A group tries again what failed of it, as it may."""
        outage = self._outages.get((environment, "rollouts"))
        if outage is not None and outage.pause_s:
            outage.give(group_id, [attempt])

    def start(self, environment: str, group_id: GroupId, attempts: Collection[RolloutId]) -> None:
        """A group starts, with these attempts: of an environment that has paused it is the one that tries."""
        for outage in self._paused(environment):
            outage.give(group_id, attempts)

    def attempt_failed(self, environment: str, attempt: RolloutId) -> bool:
        """One failed, whatever the reason. Returns whether another group may try now, or once the pause is over."""
        outage = self._outages.get((environment, "rollouts"))
        if outage is None or attempt not in outage.attempts:
            return False
        outage.attempts.remove(attempt)
        if outage.attempts:
            return False
        outage.take_back()
        return True

    def group_ended(self, environment: str, group_id: GroupId) -> bool:
        """A group did. Returns whether another one may try instead."""
        tried = [outage for outage in self._paused(environment) if outage.trying == group_id]
        for outage in tried:
            outage.take_back()
        return bool(tried)

    def pause_left_s(self, environment: str, *, now_s: float) -> float:
        """Seconds until the environment may be tried again."""
        return max([0.0, *(one.ends_s - now_s for (name, _), one in self._outages.items() if name == environment)])

    @property
    def paused(self) -> list[str]:
        """Environments that pause, or of which one group tries whether they work again."""
        return list(dict.fromkeys(name for (name, _), outage in self._outages.items() if outage.pause_s))

    def outages_s(self, *, now_s: float) -> dict[str, float]:
        """For how many seconds each of those has failed.

        >>> backoff = Backoff()
        >>> _ = [backoff.failed("shop", "rollouts", now_s=float(second)) for second in range(8)]
        >>> backoff.outages_s(now_s=60.0)
        {'shop': 60.0}
        """
        lasted_s: dict[str, float] = {}
        for (name, _), outage in self._outages.items():
            if outage.pause_s:
                lasted_s[name] = max(now_s - outage.since_s, lasted_s.get(name, 0.0))
        return lasted_s

    def _paused(self, environment: str) -> Iterator[_Outage]:
        return (outage for (name, _), outage in self._outages.items() if name == environment and outage.pause_s)

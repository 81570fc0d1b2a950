"""Environments that fail pause: an outage of what one calls costs some rollouts, not the run.

    8 failures in a row ─► pause 1 s ─► one group probes ─┬─ something came back ─► on as before
                             ▲                            └─ failed again ─► twice the pause, at most 30 s ─┐
                             └────────────────────────────────────────────────────────────────────────────┘

Only failures that may pass count (`RolloutError.may_pass`): those of rollouts and those of groups' scores apart, since
rollouts come back while a judge is away. Decides over plain numbers; the caller knows the time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tailrace.records import GroupId

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


class Backoff:
    """Which environments pause, and for how long.

    >>> backoff = Backoff()
    >>> [backoff.failed("shop", "rollouts", now_s=0.0) for _ in range(9)][-2:]
    [1.0, 0.0]
    >>> backoff.failed("shop", "rollouts", now_s=1.0), backoff.pause_left_s("shop", now_s=1.5)
    (2.0, 1.5)
    >>> backoff.came_back("shop", "rollouts", now_s=3.0); backoff.paused
    []
    """

    def __init__(self) -> None:
        self._outages: dict[tuple[str, Part], _Outage] = {}
        self._trying: dict[str, GroupId] = {}
        """Of environments that have paused: the group that tries whether they work again."""

    def failed(self, environment: str, part: Part, *, now_s: float) -> float:
        """One more failed. Returns the seconds of the pause that begins with it; 0 where none does."""
        outage = self._outages.setdefault((environment, part), _Outage(now_s))
        outage.failures += 1
        if outage.failures < FAILURES_IN_A_ROW or now_s < outage.ends_s:
            return 0.0
        if not outage.pause_s:
            _logger.warning(
                "the last %d %s of environment %r all failed: it pauses for %g s; then one group tries again, after "
                "ever longer pauses of at most %g s",
                *(outage.failures, part, environment, FIRST_PAUSE_S, LONGEST_PAUSE_S),
            )
        outage.pause_s = min(2 * outage.pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        outage.ends_s = now_s + outage.pause_s
        return outage.pause_s

    def came_back(self, environment: str, part: Part, *, now_s: float) -> None:
        """One succeeded: the environment goes on as before."""
        outage = self._outages.pop((environment, part), None)
        if outage is not None and outage.pause_s:
            _logger.warning("environment %r works again, after %.0f s", environment, now_s - outage.since_s)
        if environment not in self.paused:
            self._trying.pop(environment, None)

    def may_try(self, environment: str, group_id: GroupId, *, now_s: float) -> bool:
        """Whether a group may try again what failed of it: after a pause one does, and goes on while it is open.

        >>> backoff = Backoff()
        >>> _ = [backoff.failed("shop", "rollouts", now_s=0.0) for _ in range(8)]
        >>> [backoff.may_try("shop", GroupId(one), now_s=1.0) for one in ("a", "b")]
        [True, False]
        >>> backoff.group_ended("shop", GroupId("a")); backoff.may_try("shop", GroupId("b"), now_s=1.0)
        True
        """
        if self.pause_left_s(environment, now_s=now_s):
            return False
        return environment not in self.paused or self._trying.setdefault(environment, group_id) == group_id

    def group_ended(self, environment: str, group_id: GroupId) -> None:
        """Another one may try."""
        if self._trying.get(environment) == group_id:
            del self._trying[environment]

    def pause_left_s(self, environment: str, *, now_s: float) -> float:
        """Seconds until the environment may be tried again."""
        return max([0.0, *(one.ends_s - now_s for (name, _), one in self._outages.items() if name == environment)])

    @property
    def paused(self) -> list[str]:
        """Environments that pause, or of which one group tries whether they work again."""
        return list(dict.fromkeys(name for (name, _), outage in self._outages.items() if outage.pause_s))

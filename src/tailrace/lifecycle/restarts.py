"""Whether a role that ended early is started again, and when. Decided purely; who owns the role acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.config.restarts import RestartSettings

_LONGEST_PAUSE_S = 30.0
_AT_THE_START = 1
"""Restarts of a role that never worked: it may have been killed by somebody who meant another, but not twice."""


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """How one life of a role ended."""

    now_s: float
    has_worked: bool
    """In this life or an earlier one."""
    by_itself: bool = False
    """With an error of its own; else it was killed, or left without a word."""


def restart_pause_s(settings: RestartSettings, earlier_s: Sequence[float], end: EarlyEnd) -> float | None:
    """Seconds to wait before the role is started again; None where it is not. `earlier_s` are times of restarts.

    What failed by itself before it ever worked has wrong settings, or a wrong model, and would fail again.

    >>> settings = RestartSettings(per_role=2, window_s=60, backoff_s=1)
    >>> restart_pause_s(settings, [], EarlyEnd(10.0, has_worked=True))
    0.0
    >>> restart_pause_s(settings, [10.0], EarlyEnd(20.0, has_worked=True))
    1.0
    >>> restart_pause_s(settings, [10.0, 20.0], EarlyEnd(30.0, has_worked=True)) is None
    True
    """
    if end.by_itself and not end.has_worked:
        return None
    recent = [time_s for time_s in earlier_s if end.now_s - time_s < settings.window_s]
    allowed = settings.per_role if end.has_worked else min(settings.per_role, _AT_THE_START)
    if len(recent) >= allowed:
        return None
    return min(settings.backoff_s * 2.0 ** (len(recent) - 1), _LONGEST_PAUSE_S) if recent else 0.0


@dataclass(slots=True)
class RestartHistory:
    """The restarts of one role."""

    settings: RestartSettings
    times_s: list[float] = field(default_factory=list)

    def next_pause_s(self, end: EarlyEnd) -> float | None:
        """As `restart_pause_s`; a restart that is granted is counted."""
        pause_s = restart_pause_s(self.settings, self.times_s, end)
        if pause_s is not None:
            self.times_s.append(end.now_s)
        return pause_s

"""How long something holds: who waits for whom."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """Adds up the time for which a condition holds.

    >>> now = 1.0
    >>> watch = Stopwatch(lambda: now)
    >>> watch.set(True); now = 3.0; watch.set(False); now = 9.0
    >>> watch.total_s
    2.0
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._total_s = 0.0

    def set(self, holds: bool) -> None:
        """From now on it holds, or not."""
        if holds != (self._since_s is not None):
            self._total_s, self._since_s = self.total_s, self._clock() if holds else None

    @property
    def total_s(self) -> float:
        """Until now, in seconds."""
        return self._total_s + (0.0 if self._since_s is None else self._clock() - self._since_s)

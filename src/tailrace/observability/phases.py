"""Where a step's time goes: named phases, in seconds."""

from __future__ import annotations

from collections import defaultdict


class PhaseTimer:
    """Adds up the time of named phases. Phases overlap: each counts in full.

    >>> timer = PhaseTimer()
    >>> timer.add("score", 0.25)
    >>> timer.add("score", 0.5)
    >>> timer.flush(), timer.flush()
    ({'phase/score_s': 0.75}, {})
    """

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, duration_s: float) -> None:
        """Count a duration under `name`; a phase that took no time did not take place."""
        if duration_s > 0:
            self._totals[name] += duration_s

    def flush(self) -> dict[str, float]:
        """Metrics `phase/{name}_s` since the last flush; starts over."""
        totals, self._totals = self._totals, defaultdict(float)
        return {f"phase/{name}_s": total for name, total in totals.items()}

"""The course of a metric over a whole run, in as many points as can be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

_MOST_POINTS = 1024
"""More than a terminal is wide; even, so that they can be joined in pairs."""


@dataclass(slots=True)
class Curve:
    """All values so far, each point the mean of as many neighbours: drawing a long run costs what a short one does.

    First, newest, lowest and highest value are those that were added.

    >>> curve = Curve.of([0.25, 0.5, 0.75])
    >>> curve.points, curve.first, curve.newest, curve.lowest, curve.highest
    ([0.25, 0.5, 0.75], 0.25, 0.75, 0.25, 0.75)
    """

    first: float | None = None
    newest: float | None = None
    lowest: float = math.inf
    highest: float = -math.inf
    points: list[float] = field(default_factory=list)
    """The newest may still be of fewer values than the others. Values that are not finite are in none."""
    _values_per_point: int = 1
    _values_in_newest: int = 1

    @classmethod
    def of(cls, values: Iterable[float]) -> Curve:
        """The curve of these, in order."""
        curve = cls()
        for value in values:
            curve.add(value)
        return curve

    def add(self, value: float) -> None:
        """The next value."""
        self.first = value if self.first is None else self.first
        self.newest = value
        if not math.isfinite(value):
            return
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        if self._values_in_newest < self._values_per_point:
            self._values_in_newest += 1
            self.points[-1] += (value - self.points[-1]) / self._values_in_newest
            return
        if len(self.points) == _MOST_POINTS:
            # another list, since a thread may be drawing this one
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._values_per_point *= 2
        self.points.append(value)
        self._values_in_newest = 1

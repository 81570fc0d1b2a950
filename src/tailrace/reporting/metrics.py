"""Metrics: one documented table of names, and the accumulator that reduces by it.

A metric is recorded under its name in `METRICS`, which alone says how it is reduced over a step.
Names with `{placeholders}` are families: `reward/{environment}/mean` covers `reward/alphabet-sort/mean`.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.reporting.metric_table import METRICS, MetricSpec, Reduction

__all__ = ["METRICS", "MetricSpec", "MetricsAccumulator", "Reduction", "metric_spec"]


@functools.lru_cache(maxsize=4096)
def metric_spec(name: str) -> MetricSpec:
    """The row of `METRICS` that this name belongs to. Raises `ValueError` with the nearest name for an unknown one.

    >>> metric_spec("reward/alphabet-sort/mean").name
    'reward/{environment}/mean'
    """
    if (spec := METRICS.get(name)) is not None:
        return spec
    for pattern, family in _families():
        if pattern.fullmatch(name):
            return family
    nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"unknown metric {name!r}; the nearest name in METRICS is {nearest!r} (add a row there for a new one)"
    )


@functools.cache
def _families() -> tuple[tuple[re.Pattern[str], MetricSpec], ...]:
    return tuple((_pattern(name), spec) for name, spec in METRICS.items() if "{" in name)


def _pattern(template: str) -> re.Pattern[str]:
    """A placeholder stands for any text: users name environments, reward components and reasons."""
    parts = re.split(r"\{\w+\}", template)
    return re.compile(".*".join(map(re.escape, parts)), re.DOTALL)


@dataclass(slots=True)
class _Running:
    """Weighted mean and spread of a stream, with its extremes.

    Source: West, "Updating Mean and Variance Estimates: An Improved Method" (1979).
    """

    weight: float = 0.0
    total: float = 0.0
    """Plain sum, without weights."""
    mean: float = 0.0
    squares: float = 0.0
    """Weighted sum of squared differences from the mean."""
    minimum: float = math.inf
    maximum: float = -math.inf
    last: float = math.nan

    def add(self, value: float, weight: float) -> None:
        """Take in one value."""
        self.weight += weight
        difference = value - self.mean
        self.mean += difference * weight / self.weight
        self.squares += weight * difference * (value - self.mean)
        self.total += value
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)
        self.last = value

    def reduced(self, reduction: Reduction) -> float:
        """One number."""
        match reduction:
            case Reduction.MEAN:
                return self.mean
            case Reduction.STD:
                return math.sqrt(max(self.squares / self.weight, 0.0))
            case Reduction.SUM:
                return self.total
            case Reduction.MAX:
                return self.maximum
            case Reduction.MIN:
                return self.minimum
            case Reduction.LAST:
                return self.last


class MetricsAccumulator:
    """Collects values and reduces each as the table says. Not thread-safe.

    >>> metrics = MetricsAccumulator()
    >>> metrics.add_values("reward/mean", [0.0, 1.0])
    >>> metrics.add("batch/tokens", 512)
    >>> metrics.flush()
    {'batch/tokens': 512.0, 'reward/mean': 0.5}
    """

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record one value; `weight` counts in means and spreads (a value that stands for n tokens has weight n).

        Raises `ValueError` for a name that is not in `METRICS` and for a negative weight. Weight 0 records nothing.
        """
        if weight < 0:
            raise ValueError(f"metric {name!r} was added with weight {weight}; weights are 0 or above")
        metric_spec(name)
        if weight > 0:
            running = self._running.get(name)
            if running is None:
                running = self._running[name] = _Running()
            running.add(float(value), weight)

    def add_values(self, name: str, values: Iterable[float]) -> None:
        """Record many values of one metric, each of weight 1."""
        for value in values:
            self.add(name, value)

    def update(self, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Record one value of each of these metrics: what another process sent."""
        for name, value in metrics.items():
            self.add(name, value, weight)

    def flush(self) -> dict[str, float]:
        """The reduced values by name, sorted; starts over. Metrics without a value are absent, never 0."""
        running, self._running = self._running, {}
        return {name: running[name].reduced(metric_spec(name).reduction) for name in sorted(running)}

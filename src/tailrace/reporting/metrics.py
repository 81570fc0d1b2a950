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
from dataclasses import dataclass, field

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
    """Weighted mean and spread of a stream, with its extremes; two of them merge exactly.

    Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
    (1979), eq. 2.1.
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
        """Take in one value; a weight above 0."""
        total_weight = self.weight + weight
        difference = value - self.mean
        self.mean += difference * weight / total_weight
        self.squares += difference * difference * self.weight * weight / total_weight
        self.weight = total_weight
        self.total += value
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)
        self.last = value

    def merge(self, other: _Running) -> None:
        """Take in everything that `other` saw, as if it came after."""
        if other.weight == 0:
            return
        weight = self.weight + other.weight
        difference = other.mean - self.mean
        self.mean += difference * other.weight / weight
        self.squares += other.squares + difference * difference * self.weight * other.weight / weight
        self.weight = weight
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.last = other.last

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


@dataclass(slots=True)
class MetricsAccumulator:
    """Collects values and reduces each as the table says. Not thread-safe: one owner, `merge` for the others.

    >>> metrics = MetricsAccumulator()
    >>> metrics.add_values("reward/mean", [0.0, 1.0])
    >>> metrics.add("batch/tokens", 512)
    >>> metrics.flush()
    {'batch/tokens': 512.0, 'reward/mean': 0.5}
    """

    _running: dict[str, _Running] = field(default_factory=dict)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record one value; `weight` counts in means and spreads (a value that stands for n tokens has weight n).

        Raises `ValueError` for a name that is not in `METRICS` and for a negative weight. Weight 0 records nothing.
        """
        if weight < 0:
            raise ValueError(f"metric {name!r} was added with weight {weight}; weights are 0 or above")
        running = self._running.get(name) or self._begin(name)
        if weight > 0:
            running.add(float(value), weight)

    def add_values(self, name: str, values: Iterable[float]) -> None:
        """Record many values of one metric, each of weight 1."""
        for value in values:
            self.add(name, value)

    def update(self, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Record one value of each of these metrics: what another process sent."""
        for name, value in metrics.items():
            self.add(name, value, weight)

    def merge(self, other: MetricsAccumulator) -> None:
        """Take in everything that `other` holds, exactly as if it had been added here. `other` stays as it is."""
        for name, running in other._running.items():
            (self._running.get(name) or self._begin(name)).merge(running)

    def flush(self) -> dict[str, float]:
        """The reduced values by name, sorted; starts over. Metrics without a value are absent, never 0."""
        running, self._running = self._running, {}
        seen = sorted(name for name, one in running.items() if one.weight > 0)
        return {name: running[name].reduced(metric_spec(name).reduction) for name in seen}

    def _begin(self, name: str) -> _Running:
        metric_spec(name)
        running = self._running[name] = _Running()
        return running

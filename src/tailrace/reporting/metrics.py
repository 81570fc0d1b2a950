"""Metrics: one documented table of names, and the accumulator that reduces by it.

A metric is recorded under its name in `METRICS`, which alone says how it is reduced over a step.
Names with `{placeholders}` are families: `reward/{environment}/mean` covers `reward/alphabet-sort/mean`.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tailrace.reporting.metric_table import METRICS, MetricSpec, Reduction

__all__ = ["METRICS", "MetricSpec", "MetricsAccumulator", "Reduction", "StepMetrics", "metric_spec"]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a line of `metrics.jsonl` says of one step, or of one evaluation."""

    step: int
    """The optimizer step; of an evaluation, the one that it was due at."""
    wall_s: float
    """Seconds since the run began."""
    metrics: Mapping[str, float]
    """By the names of docs/metrics.md."""

    @classmethod
    def of(cls, line: Mapping[str, float]) -> StepMetrics:
        """What the line says."""
        metrics = {name: value for name, value in line.items() if name not in ("step", "wall_s")}
        return cls(int(line["step"]), line["wall_s"], metrics)


@functools.cache  # some names for each replica, all of them at every step
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


_VALUES_AT_ONCE = 512


class _Running:
    """What one metric's values come to. Those of weight 1 wait in a list, and many are taken in at once.

    Means and spreads of parts are joined by the pairwise update of Chan, Golub and LeVeque, "Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances" (1979), eq. 2.1.
    """

    __slots__ = ("_mean", "_reduction", "_result", "_squares", "_weight", "values")

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self.values: list[float] = []
        """Of weight 1, not taken in yet."""
        self._weight = self._mean = self._squares = 0.0
        self._result: float | None = None
        """Sum, minimum, maximum or last, where that is asked for."""

    def add(self, value: float, weight: float) -> None:
        """Take in one value that stands for many, after those that wait."""
        self.take_in()
        if self._reduction in (Reduction.MEAN, Reduction.STD):
            self._join(value, weight, 0.0)
        else:
            self.values.append(value)

    def take_in(self) -> None:
        """The values that wait."""
        values = self.values
        if not values:
            return
        if self._reduction in (Reduction.MEAN, Reduction.STD):
            mean = sum(values) / len(values)
            squares = 0.0
            if self._reduction is Reduction.STD:  # a product becomes infinite where a power would raise
                squares = sum([(value - mean) * (value - mean) for value in values])
            self._join(mean, len(values), squares)
        else:
            known = values if self._result is None else [self._result, *values]
            self._result = _CHOSEN[self._reduction](known)
        self.values = []

    def reduced(self) -> float:
        """One number."""
        self.take_in()
        if self._reduction is Reduction.MEAN:
            return self._mean
        if self._reduction is Reduction.STD:
            return math.sqrt(max(self._squares / self._weight, 0.0))
        assert self._result is not None  # a metric is there from its first value on
        return self._result

    def _join(self, mean: float, weight: float, squares: float) -> None:
        self._weight += weight
        difference = mean - self._mean
        moved = difference * weight / self._weight
        self._mean += moved
        self._squares += squares + difference * moved * (self._weight - weight)


def _last(values: Sequence[float]) -> float:
    return values[-1]


_CHOSEN: Mapping[Reduction, Callable[[Sequence[float]], float]] = {
    Reduction.SUM: sum,
    Reduction.MIN: min,
    Reduction.MAX: max,
    Reduction.LAST: _last,
    Reduction.TOTAL: _last,
}


class MetricsAccumulator:
    """Collects values and reduces each as the table says. Not thread-safe.

    >>> metrics = MetricsAccumulator()
    >>> metrics.add("reward/mean", 0.0)
    >>> metrics.add("reward/mean", 1.0)
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
        running = self._running.get(name)
        if running is None:
            reduction = metric_spec(name).reduction
            if weight == 0:
                return
            running = self._running[name] = _Running(reduction)
        if weight == 1:
            waiting = running.values
            waiting.append(float(value))
            if len(waiting) >= _VALUES_AT_ONCE:
                running.take_in()
        elif weight > 0:
            running.add(float(value), weight)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Record one value of each of these metrics: what another process sent."""
        for name, value in metrics.items():
            self.add(name, value)

    def flush(self) -> dict[str, float]:
        """The reduced values by name, sorted; starts over. Metrics without a value are absent, never 0."""
        running, self._running = self._running, {}
        return {name: running[name].reduced() for name in sorted(running)}

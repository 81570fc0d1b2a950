"""What the phases of a run cost, for people: a line per step, and the table of the report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrace.reporting.formats import NOTHING, compact, num_bytes, seconds

_METRIC = re.compile(r"phase/(?P<phase>.+)/(?P<key>\w+)")
_SHOWN = 8
"""Phases in a line."""


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """One phase over one step or several: seconds, bytes and times."""

    name: str
    values: Mapping[str, float]

    @property
    def cost_s(self) -> float:
        """What it takes from others: CPU time."""
        return self.values.get("cpu_s", 0.0)

    def words(self) -> str:
        """For the log."""
        text = f"{self.name} {seconds(self.cost_s)} CPU, {seconds(self.values.get('wall_s', 0.0))} wall"
        if "lag_max_s" in self.values:
            text += f", lag {seconds(self.values['lag_max_s'])}"
        return text

    def row(self) -> list[str]:
        """For the table of the report."""
        values = self.values
        return [
            self.name,
            seconds(self.cost_s),
            *(_seconds(values.get(key)) for key in ("wall_s", "held_s", "lag_p50_s", "lag_p99_s", "lag_max_s")),
            num_bytes(values["moved_bytes"]) if "moved_bytes" in values else NOTHING,
            compact(values.get("count", 0.0)),
        ]


ROW_HEADINGS = ("Phase", "CPU", "Wall", "Held the loop", "Lag p50", "Lag p99", "Lag max", "Bytes", "Times")


def phase_costs(metrics: Mapping[str, float]) -> list[PhaseCost]:
    """The phases in the metrics of a step, or of a run, dearest first."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if (match := _METRIC.fullmatch(name)) is not None:
            found.setdefault(match["phase"], {})[match["key"]] = value
    return sorted((PhaseCost(*phase) for phase in found.items()), key=lambda cost: -cost.cost_s)


def phase_line(metrics: Mapping[str, float]) -> str:
    """One line of a step.

    >>> phase_line({"phase/train/cpu_s": 1.2, "phase/train/wall_s": 1.3, "phase/score/cpu_s": 0.002})
    'train 1.2 s CPU, 1.3 s wall; score 2.0 ms CPU, 0 ms wall'
    """
    costs = phase_costs(metrics)
    rest = f"; and {len(costs) - _SHOWN} more" if len(costs) > _SHOWN else ""
    return "; ".join(cost.words() for cost in costs[:_SHOWN]) + rest


def total_costs(steps: Mapping[str, Sequence[float]]) -> list[PhaseCost]:
    """Over a run, by each metric's values in its steps, dearest first: sums; of a lag's quantiles the median step's, of
    its maximum the highest.
    """
    return phase_costs({name: _total(name, values) for name, values in steps.items() if _METRIC.fullmatch(name)})


def _total(name: str, values: Sequence[float]) -> float:
    key = name.rpartition("/")[2]
    if key == "lag_max_s":
        return max(values)
    return sorted(values)[len(values) // 2] if key.startswith("lag_") else sum(values)


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else seconds(value)

"""`metrics.jsonl` as columns: read once, then only what was appended; eight bytes a value."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from tailrace.dashboard.tailing import Tail
from tailrace.records import Json
from tailrace.reporting.metrics import METRICS
from tailrace.reporting.run_folder import is_number
from tailrace.reporting.sinks import decode_object

_MOST_OF_A_KIND = 4_000
"""A line of nonsense must not become a column a name, nor six of each generator keep others' names out."""
_KINDS = frozenset(name.partition("/")[0] for name in METRICS)


class MetricColumns:
    """Every metric of a run: `[num_lines]` each, NaN where a line has none."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.columns: dict[str, array[float]] = {}
        self._of_kind: Counter[str] = Counter()
        self.count = 0
        """Lines taken in."""

    @property
    def generation(self) -> int:
        """Changes where lines that were taken in are void."""
        return self._tail.generation

    @property
    def num_bytes(self) -> int:
        """What the columns take, at most: from any thread, while another one updates them."""
        return 8 * self.count * len(self.columns)

    def update(self) -> None:
        """Take in what was appended. Lines that are cut short, or are no metrics, are left out."""
        if self._tail.start_over_if_replaced():
            self.columns, self.count = {}, 0
            self._of_kind.clear()
        for line in self._tail.lines():
            metrics = decode_object(line)
            if metrics is not None and is_number(metrics.get("step")):
                self._add(metrics)

    def _add(self, metrics: dict[str, Json]) -> None:
        columns, count = self.columns, self.count
        for name, value in metrics.items():
            if type(value) is not float and type(value) is not int:
                continue
            column = columns.get(name)
            if column is None:
                kind = _kind_of(name)
                if self._of_kind[kind] >= _MOST_OF_A_KIND:
                    continue
                self._of_kind[kind] += 1
                column = columns[name] = array("d")
            if len(column) < count:
                column.extend([math.nan] * (count - len(column)))
            column.append(value)
        self.count = count + 1

    def values(self, name: str, after: int = 0) -> list[float]:
        """Those of one metric behind the first `after` lines."""
        column = self.columns.get(name)
        values = column[after:].tolist() if column is not None else []
        return values + [math.nan] * (self.count - after - len(values))

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Names that one of these is, or fits: `reward/*/mean`; of `phase/*/wall_s:7` the seven of the largest sums."""
        found = {name for pattern in patterns for name in self._fitting(pattern)}
        return [name for name in self.columns if name in found]

    def _fitting(self, pattern: str) -> list[str]:
        if "*" not in pattern:
            return [pattern]
        before, _, most = pattern.rpartition(":")
        if not before or not most.isdecimal():
            return [name for name in self.columns if fnmatchcase(name, pattern)]
        return sorted(self._fitting(before), key=self._sum, reverse=True)[: int(most)]

    def _sum(self, name: str) -> float:
        return float(np.nansum(np.frombuffer(self.columns[name])))

    def newest(self, count: int) -> list[dict[str, float]]:
        """The last lines, as they stand in the file, in order."""
        first = max(0, self.count - count)
        return [
            {
                name: column[row]
                for name, column in self.columns.items()
                if row < len(column) and not math.isnan(column[row])
            }
            for row in range(first, self.count)
        ]


def _kind_of(name: str) -> str:
    """What a name is counted with: alone where the table of metrics has it, else with its family's first word."""
    first = name.partition("/")[0]
    return name if name in METRICS else first if first in _KINDS else ""

"""What a tracker is told, and what it is. One of your own overrides what it cares about; see docs/trackers.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tailrace.records import Json
from tailrace.reporting.metrics import MetricSpec, metric_spec
from tailrace.reporting.rollout_records import RolloutRecord


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a tracker is for."""

    name: str
    run_id: str
    """Unique to the run; the same in each of its starts, so that a tracker goes on where it was."""
    project: str
    """What runs are gathered under."""
    run_folder: Path
    folder: Path
    """Of the tracker's own, in the run's folder; there already."""
    settings: dict[str, Json]
    """The resolved settings."""
    is_resumed: bool
    """The run was started before: steps after its newest checkpoint are told again."""


class Histogram(msgspec.Struct, frozen=True):
    """How values are spread."""

    edges: list[float]
    """[num_bins + 1], rising."""
    counts: list[int]
    """[num_bins]"""


class Tracker:
    """Made with a `TrackedRun`, in a process of its own, and called there one call at a time.

    Whatever a call raises is counted and written to the tracker's log; the next call is made all the same.
    """

    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        """A line of `metrics.jsonl`: of a step, or of an evaluation that was due at it, which may come later.

        `wall_s` is since the run began; `described` tells what each metric means. Some may not be finite.
        """

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """How the rollouts of a step are spread, by name."""

    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        """Some rollouts of a step, best reward first."""

    def log_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint is whole on the disk, in Hugging Face layout."""

    def end(self, summary: Mapping[str, Json] | None) -> None:
        """The run has ended: what `summary.json` says, or None where it was killed. Send what waits, and close."""


def described(metric: str) -> MetricSpec | None:
    """Unit, reduction and description of a metric; None for one that no table knows."""
    try:
        return metric_spec(metric)
    except ValueError:
        return None


def flattened(table: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Tables within tables, and what lists hold, under dotted names.

    >>> dict(flattened({"trainer": {"lr": 0.1}, "environments": [{"name": "sort"}], "tags": ["a"]}))
    {'trainer.lr': 0.1, 'environments.0.name': 'sort', 'tags.0': 'a'}
    """
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, list):
            value = {str(place): one for place, one in enumerate(value)}  # noqa: PLW2901
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.")
        else:
            yield name, value

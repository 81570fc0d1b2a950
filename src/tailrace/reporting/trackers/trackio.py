"""trackio: local by default (`trackio show`); `TRACKIO_DIR`, `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL` hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import trackio
from typing_extensions import override

from tailrace.records import Json
from tailrace.reporting.conversations import outcome_text
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.trackers.protocol import Histogram, TrackedRun, Tracker, flattened

_ID_CHARACTERS = 6


class TrackioTracker(Tracker):
    """One run of trackio. It knows runs by name, so the name has a piece of the run's id behind it."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id[:_ID_CHARACTERS]}",
            config=dict(flattened(run.settings)),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self._step = 0

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        self._step = max(self._step, step)
        self._run.log({**metrics, "wall_s": wall_s}, step=step)

    @override
    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        made = {
            name: trackio.Histogram(np_histogram=(np.asarray(one.counts), np.asarray(one.edges)))
            for name, one in histograms.items()
        }
        self._run.log(made, step=step)

    @override
    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        self._run.log({f"rollouts/{place}": _trace(one) for place, one in enumerate(rollouts)}, step=step)

    @override
    def log_checkpoint(self, step: int, path: str) -> None:
        self._run.log({"checkpoints": trackio.Table(data=[{"step": step, "path": path}])}, step=step)

    @override
    def end(self, summary: Mapping[str, Json] | None) -> None:
        if summary is not None:
            rows = [{"name": name, "value": str(value)} for name, value in flattened(summary)]
            self._run.log({"summary": trackio.Table(data=rows)}, step=self._step)
        self._run.finish()


def _trace(rollout: RolloutRecord) -> trackio.Trace:
    return trackio.Trace(
        [dict(message) for message in rollout.messages],
        metadata={
            "rollout_id": rollout.rollout_id,
            "task_id": rollout.task_id,
            "environment": rollout.environment,
            "status": outcome_text(rollout.outcome),
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "completion_tokens": rollout.completion_tokens,
            "duration_ms": 1000 * rollout.duration_s,
        },
    )

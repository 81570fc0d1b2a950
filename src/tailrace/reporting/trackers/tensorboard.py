"""TensorBoard: event files in the run's folder, for `tensorboard --logdir runs`. Needs no torch and no TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util
from typing_extensions import override

from tailrace.records import Json
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.trackers.protocol import Histogram, TrackedRun, Tracker, described, flattened
from tailrace.reporting.trackers.tables import ROLLOUT_COLUMNS, rollout_rows

_FLUSH_S = 10
_CELL_CHARACTERS = 4_000


class TensorboardTracker(Tracker):
    """A start of the run is an event file; readers take those of a folder together."""

    def __init__(self, run: TrackedRun) -> None:
        is_first = not any(run.folder.iterdir())  # also of a run that asked for no TensorBoard before it was resumed
        self._writer = EventFileWriter(str(run.folder), flush_secs=_FLUSH_S)
        self._declared: set[str] = set()
        self._is_resumed = run.is_resumed
        if is_first:
            settings = "\n".join(f"    {name} = {value!r}" for name, value in flattened(run.settings))
            self._add(text_pb("settings", settings), 0)
            self._add(hparams.hparams_pb({name: _plain(value) for name, value in flattened(run.settings)}), 0)

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        # not before an evaluation that was due at the step that was resumed from: that step is not told again
        if self._is_resumed and "policy/version" in metrics:
            self._is_resumed = False  # readers drop what an earlier start told of this step and later ones
            start = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
            self._writer.add_event(start)
        values = [
            Summary.Value(tag=name, simple_value=value, metadata=self._about(name)) for name, value in metrics.items()
        ]
        self._add(Summary(value=values), step)

    @override
    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        for name, histogram in histograms.items():
            edges, counts = np.asarray(histogram.edges), np.asarray(histogram.counts, np.float64)
            buckets = tensor_util.make_tensor_proto(np.stack([edges[:-1], edges[1:], counts], axis=1), np.float64)
            about = histogram_metadata.create_summary_metadata(display_name=None, description=None)
            self._add(Summary(value=[Summary.Value(tag=name, metadata=about, tensor=buckets)]), step)

    @override
    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        rows = [[_cell(value) for value in row] for row in rollout_rows(rollouts)]
        table = [ROLLOUT_COLUMNS, ["---"] * len(ROLLOUT_COLUMNS), *rows]
        self._add(text_pb("rollouts", "\n".join(f"| {' | '.join(row)} |" for row in table)), step)

    @override
    def log_checkpoint(self, step: int, path: str) -> None:
        self._add(text_pb("checkpoint", path), step)

    @override
    def end(self, summary: Mapping[str, Json] | None) -> None:
        if summary is not None:
            steps = summary.get("steps")
            text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
            self._add(text_pb("summary", "\n".join(f"    {line}" for line in text.splitlines())), int(str(steps or 0)))
        self._writer.close()

    def _about(self, name: str) -> SummaryMetadata | None:
        """Once for each metric; readers keep the first."""
        if name in self._declared:
            return None
        self._declared.add(name)
        spec = described(name)
        text = "" if spec is None else f"{spec.description} [{spec.unit}; {spec.reduction} over a step]"
        return scalar_metadata.create_summary_metadata(display_name=None, description=text)

    def _add(self, summary: Summary, step: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _plain(value: Json) -> str | float | bool:
    return value if isinstance(value, str | float | int | bool) else str(value)


def _cell(value: object) -> str:
    """A cell of a table in Markdown."""
    text = str(value)[:_CELL_CHARACTERS]
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", "<br>")

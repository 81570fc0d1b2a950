"""What is known of one run, kept while somebody looks at it; and of several, the newest few."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from tailrace.dashboard.metric_columns import MetricColumns
from tailrace.dashboard.rollout_files import KEPT_ROLLOUTS, RolloutFiles, RolloutRow
from tailrace.dashboard.run_events import EventList, RunEvent
from tailrace.dashboard.schedule import Schedule, Waiting, Waterfall, schedule_of, waiting_in, waterfall_of
from tailrace.dashboard.settings_view import read_settings
from tailrace.dashboard.trace_spans import TraceSpans
from tailrace.reporting.run_folder import METRICS_FILE, ROLLOUTS_FOLDER

_KEPT_BYTES = 256 << 20
_MOST_BYTES = 1 << 30
"""With runs that somebody looks at now: a page asks for each of those again every two seconds. Once it is closed they
stay until somebody asks for a run again, since nothing is let go of otherwise."""
_LOOKED_AT_S = 30.0
_ROW_BYTES = 2_000
"""Of a rollout's row, about."""
_KEPT_RUNS = 64
_KEPT_TRACES = 1
_NEWEST_FILES = 8
_MOST_RECORDED = KEPT_ROLLOUTS // 2
"""Of those, so that they stay in memory."""


class RunData:
    """One run's readers. From any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rollouts = RolloutFiles(folder / ROLLOUTS_FOLDER)
        self._metrics = MetricColumns(folder / METRICS_FILE)
        self._events = EventList(folder)
        self._lock = threading.Lock()
        self.asked_s = 0.0
        """When it was asked for last, by the cache's clock."""
        self.trace: TraceSpans | None = None
        self._waiting: tuple[object, list[Waiting]] = (None, [])

    @property
    def num_bytes(self) -> int:
        """What its curves and the rows of its rollouts take, about."""
        return self._metrics.num_bytes + _ROW_BYTES * self.rollouts.num_kept

    def metrics(self) -> tuple[MetricColumns, threading.Lock]:
        """Its curves up to now, and the lock to hold while they are read."""
        with self._lock:
            self._metrics.update()
        return self._metrics, self._lock

    def events(self) -> list[RunEvent]:
        """Its list of events up to now."""
        with self._lock:
            return list(self._events.update())

    def schedule(self, from_s: float | None, to_s: float | None) -> Schedule | None:
        """A stretch of its trace."""
        trace = self._traced()
        with trace.lock:
            trace.update()
            return schedule_of(trace, from_s, to_s, self._rows_of, self._waiting_in(trace))

    def waterfall(self, step: int | None) -> Waterfall | None:
        """A step of its trace."""
        trace = self._traced()
        with trace.lock:
            trace.update()
            return waterfall_of(trace, step)

    def _traced(self) -> TraceSpans:
        with self._lock:
            self.trace = self.trace or TraceSpans(self.folder)
            return self.trace

    def _waiting_in(self, trace: TraceSpans) -> list[Waiting]:
        """Looked for again where there is more of the trace or of the newest files."""
        recorded, steps = self._recorded()
        key = (len(trace), recorded, steps)
        if key != self._waiting[0]:
            settings = read_settings(self.folder / "config.toml")
            released_early = settings.text("scheduling.group_release") == "early"
            self._waiting = (key, waiting_in(trace, recorded, steps, released_early=released_early))
        return self._waiting[1]

    def _recorded(self) -> tuple[set[str], set[int]]:
        """Ids of the rollouts in the newest files, and the steps that have all of theirs among these."""
        files, ids, steps = self.rollouts.files(), set[str](), set[int]()
        for step in files.evaluations[-2:]:
            ids.update(row.rollout_id for row in self.rollouts.rows("evaluation", step))
        for step in reversed(files.steps[-_NEWEST_FILES:]):
            if len(ids) >= _MOST_RECORDED:
                break
            table = self.rollouts.table("step", step)
            ids.update(row.rollout_id for row in table.rollouts)
            if not table.left_out:
                steps.add(step)
        return ids, steps

    def _rows_of(self, steps: Sequence[int]) -> list[RolloutRow]:
        return [row for step in steps for row in self.rollouts.rows("step", step)]


class RunCache:
    """Runs that were looked at lately; older ones are read again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: OrderedDict[Path, RunData] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, folder: Path) -> RunData:
        """That of a folder."""
        with self._lock:
            run = self._runs.pop(folder, None) or RunData(folder)
            self._runs[folder] = run
            run.asked_s = self._clock()
            self._forget(run.asked_s)
            return run

    def _forget(self, now_s: float) -> None:
        while len(self._runs) > 1:
            num_bytes = sum(run.num_bytes for run in self._runs.values())
            oldest = next(iter(self._runs.values()))
            if now_s - oldest.asked_s < _LOOKED_AT_S:
                is_too_much = num_bytes > _MOST_BYTES
            else:
                is_too_much = num_bytes > _KEPT_BYTES or len(self._runs) > _KEPT_RUNS
            if not is_too_much:
                break
            self._runs.popitem(last=False)
        traced = [run for run in self._runs.values() if run.trace is not None]
        for run in traced[:-_KEPT_TRACES]:
            run.trace = None

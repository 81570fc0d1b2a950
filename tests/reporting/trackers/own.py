"""Trackers of one's own, good and bad ones, as `module:attribute`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

from typing_extensions import override

from tailrace.records import Json
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.trackers import Histogram, TrackedRun, Tracker


class Lines(Tracker):
    """Writes down all that it is told."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.folder / "told.jsonl").open("a")
        self._note("run", run.name, run.run_id, run.is_resumed, run.settings)

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        self._note("log", step, wall_s, dict(metrics))

    @override
    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._note("histograms", step, {name: sum(one.counts) for name, one in histograms.items()})

    @override
    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        self._note("rollouts", step, [[one.rollout_id, one.reward] for one in rollouts])

    @override
    def log_checkpoint(self, step: int, path: str) -> None:
        self._note("checkpoint", step, path)

    @override
    def end(self, summary: Mapping[str, Json] | None) -> None:
        self._note("end", summary)
        self._file.close()

    def _note(self, *what: object) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()


class NotMade(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError(f"nobody is there\nfor {run.name}")


class Failing(Tracker):
    """Raises in every call, and leaves in one of them."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        if step == 2:
            sys.exit(3)
        raise ValueError(f"no step {step}")


class Dying(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        os._exit(7)


class Hanging(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        (run.folder / "pid").write_text(str(os.getpid()))

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        time.sleep(10_000)


class Flooding(Lines):
    """Prints megabytes on both channels, and JSON that is no answer of ours."""

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        for _ in range(40):
            print("x" * 1_000_000)
            print('{"failed": 99}', file=sys.stderr)
        super().log(step, wall_s, metrics)


NOTHING = None

"""MLflow: the server of `MLFLOW_TRACKING_URI`, or files in the run's folder. `MLFLOW_EXPERIMENT_NAME` holds."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from mlflow.entities import LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from typing_extensions import override

from tailrace.records import Json
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.trackers.protocol import Histogram, TrackedRun, Tracker, flattened
from tailrace.reporting.trackers.tables import ROLLOUT_COLUMNS, rollout_rows

ItemT = TypeVar("ItemT")

_METRICS_AT_ONCE = 1000
_PARAMS_AT_ONCE = 100
_VALUE_CHARACTERS = 500
"""What servers take of a parameter's or tag's value, at least."""
_NOT_IN_NAMES = re.compile(r"[^\w.\- /]")
_STATUS = {"finished": "FINISHED", "cancelled": "KILLED"}


class MlflowTracker(Tracker):
    """One run of MLflow, whose id is kept in the run's folder, for as long as the store has it."""

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            uri = (run.folder / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._tables: list[dict[str, str]] = []
        kept = run.folder / "run_id"
        self._run_id = self._resumed(kept) or self._begun(run, kept)

    def _resumed(self, kept: Path) -> str | None:
        """The run of an earlier start, which goes on; None where this store has none, or it was deleted there."""
        if not kept.is_file():
            return None
        run_id = kept.read_text(encoding="utf-8")
        try:
            known = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if known.info.lifecycle_stage != LifecycleStage.ACTIVE:
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begun(self, run: TrackedRun, kept: Path) -> str:
        """A new run, with the settings."""
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project)
        tags = {"tailrace.run_id": run.run_id, "tailrace.folder": str(run.run_folder)}
        run_id = str(self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)
        kept.write_text(run_id, encoding="utf-8")
        params = [Param(_named(name), str(value)[:_VALUE_CHARACTERS]) for name, value in flattened(run.settings)]
        for some in _some(params, _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=some)
        return run_id

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = {**metrics, "wall_s": wall_s}
        points = [Metric(_named(name), value, now_ms, step) for name, value in values.items()]
        for some in _some(points, _METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=some)

    @override
    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        table = {name: msgspec.structs.asdict(one) for name, one in histograms.items()}
        self._client.log_dict(self._run_id, table, f"histograms/step_{step:06d}.json")

    @override
    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        """As `mlflow.log_table` does, which would ask for pandas."""
        path = f"rollouts/step_{step:06d}.json"
        self._client.log_dict(self._run_id, {"columns": ROLLOUT_COLUMNS, "data": rollout_rows(rollouts)}, path)
        self._tables.append({"path": path, "type": "table"})
        newest = msgspec.json.encode(self._tables[-10:]).decode()
        self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", newest)

    @override
    def log_checkpoint(self, step: int, path: str) -> None:
        tags = [RunTag("checkpoint", path), RunTag("checkpoint_step", str(step))]
        self._client.log_batch(self._run_id, tags=tags)
        self._client.log_text(self._run_id, f"{path}\n", f"checkpoints/step_{step:06d}.txt")

    @override
    def end(self, summary: Mapping[str, Json] | None) -> None:
        if summary is None:
            self._client.set_terminated(self._run_id, "FAILED")
            return
        self._client.log_dict(self._run_id, dict(summary), "summary.json")
        self._client.set_terminated(self._run_id, _STATUS.get(str(summary.get("status")), "FAILED"))

    def _experiment(self, name: str) -> str:
        """Its id; it is made where there is none, perhaps by another run at this very moment."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def _named(name: str) -> str:
    """MLflow refuses other characters.

    >>> _named("reward/my env:2/mean")
    'reward/my env_2/mean'
    """
    return _NOT_IN_NAMES.sub("_", name)


def _some(items: Sequence[ItemT], count: int) -> Iterator[list[ItemT]]:
    for start in range(0, len(items), count):
        yield list(items[start : start + count])

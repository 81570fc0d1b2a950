"""Weights & Biases. `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_DIR` and the rest of its variables hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import wandb
from typing_extensions import override

from tailrace.records import Json
from tailrace.reporting.rollout_records import RolloutRecord
from tailrace.reporting.trackers.protocol import Histogram, TrackedRun, Tracker, flattened
from tailrace.reporting.trackers.tables import ROLLOUT_COLUMNS, rollout_rows

_STEP = "step"


class WandbTracker(Tracker):
    """One run of wandb, with the run's own id in every start."""

    def __init__(self, run: TrackedRun) -> None:
        self._run_id = run.run_id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            config=run.settings,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
        )
        # Points lie at the step that they are of, and not at the call that told them: an evaluation comes late.
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    @override
    def log(self, step: int, wall_s: float, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "wall_s": wall_s, _STEP: step})

    @override
    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        made = {
            name: wandb.Histogram(np_histogram=(np.asarray(one.counts), np.asarray(one.edges)))
            for name, one in histograms.items()
        }
        self._run.log({**made, _STEP: step})

    @override
    def log_rollouts(self, step: int, rollouts: Sequence[RolloutRecord]) -> None:
        table = wandb.Table(columns=ROLLOUT_COLUMNS, data=rollout_rows(rollouts), allow_mixed_types=True)
        self._run.log({"rollouts": table, _STEP: step})

    @override
    def log_checkpoint(self, step: int, path: str) -> None:
        """By reference: no weight is read or sent. One that was deleted meanwhile is told of by its path alone."""
        self._run.summary["checkpoint"] = path
        if not Path(path).is_dir():
            return
        artifact = wandb.Artifact(f"checkpoint-{self._run_id}", type="model", metadata={"step": step, "path": path})
        artifact.add_reference(Path(path).absolute().as_uri(), name="checkpoint", checksum=False)
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    @override
    def end(self, summary: Mapping[str, Json] | None) -> None:
        if summary is None:
            self._run.finish(exit_code=1)
            return
        self._run.summary.update({f"run/{name}": value for name, value in flattened(summary)})
        self._run.finish(exit_code=int(str(summary.get("exit_code", 0))))

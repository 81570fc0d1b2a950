"""Settings of what a run shows and writes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class ObservabilitySettings(BaseModel):
    """What a run shows and writes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    live: Literal["auto", "on", "off"] = Field(
        "auto", description="Live view in the terminal; auto: when standard output is a terminal, else quiet log lines."
    )
    ui: bool = Field(
        False, description="Show the run in a browser while it goes on: the link is logged. Needs the extra `ui`."
    )
    tags: tuple[str, ...] = Field((), description="Words to find the run by, in the dashboard's table.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that logs/<role>.log keeps."
    )
    log_every_s: float = Field(
        2.0, ge=0, description="Without the live view, seconds at least between two progress lines."
    )
    rollouts_every_steps: int = Field(
        1, ge=0, description="Write rollouts/step_*.jsonl every this many steps; 0 writes none."
    )
    tokens_every_steps: int = Field(
        0,
        ge=0,
        description="Write rollouts token by token to tokens/step_*.parquet every this many steps, those of"
        " evaluations, and what the trainer made of each token of these steps: about 10 bytes a token, 20 more for a"
        " trained one. 0 writes none.",
    )
    tokens_mb: float = Field(
        1000.0,
        gt=0,
        description="Megabytes at most in tokens/. Over it files are deleted so that those left span the run evenly;"
        " those that trainer.export_tokens asks for, or did in an earlier start, are not counted, and stay.",
    )
    lag_interval_s: float = Field(0.1, gt=0, description="Seconds between two measurements of event-loop lag.")
    stall_s: float = Field(1.0, gt=0, description="Event-loop stalls longer than this many seconds log their stack.")
    no_progress_s: float = Field(
        60.0, gt=0, description="Seconds without any event after which a warning names what the run waits for."
    )
    watchdog_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds without any event, not one token sampled and no step begun or ended, after which the run"
        " ends as failed, with the stacks of every process in its log. Choose more than your longest step, and than the"
        " longest silence of your agents' tools.",
    )
    queue_records: int = Field(
        256, ge=1, description="Writes that may wait for the disk; more are dropped and counted, never waited for."
    )
    trace_mb: float = Field(
        16.0,
        ge=0,
        description="Megabytes that each process may add to trace.json, from its start on; 0 writes no trace.",
    )
    capture: int = Field(
        0,
        ge=0,
        description="Write what enters the pipeline in the first so many steps to capture/, for a replay. A run that is"
        " resumed does so only where it is asked again, in capture_2/.",
    )
    capture_mb: float = Field(1000.0, gt=0, description="Megabytes at most that a capture takes.")
    trim_mb: float = Field(
        512.0,
        ge=0,
        description="Megabytes that lay free in the orchestrator's allocator for ten steps and are then given back to"
        " the system, which holds its event loop for about 0.15 s per GB; 0 never does.",
    )
    trackers: tuple[str, ...] = Field(
        (),
        description="Experiment trackers that are told of the run: wandb, trackio, tensorboard, mlflow (extras of these"
        " names), installed ones, or module:attribute of your own (docs/trackers.md).",
    )
    tracker_project: str = Field("tailrace", min_length=1, description="What trackers gather runs under.")
    tracker_rollouts: int = Field(8, ge=0, description="Rollouts that trackers get of a step, best reward to worst.")
    tracker_rollouts_every_steps: int = Field(
        10, ge=0, description="Steps between two of which trackers get rollouts; 0: none."
    )
    tracker_close_s: float = Field(
        30.0, gt=0, description="Seconds that trackers have, at the end of the run, to send what waits."
    )
    report: bool = Field(True, description="Write report.html and reward.png at the end of the run.")

    @field_validator("trackers", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

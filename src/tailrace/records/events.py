"""What the processes of a run tell each other. Every event carries the run's epoch: a stale one cannot end a new run.

TrainerStarted → (ModelStateDictPublished → StepTrained | StepSkipped)* → TrainerEnded
StopRequested may come from any role at any time; only the trainer answers it, with TrainerEnded. ReplicaJoined and
ReplicaLeft, of the orchestrator, may come at any time too, and are for people.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec


class RunStatus(enum.StrEnum):
    """How training ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ModelStateDictRef(msgspec.Struct, frozen=True):
    """Where a published model state dict lies."""

    version: int
    uri: str
    num_bytes: int


class _Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    epoch: str
    """Unique to this start of the run."""


class TrainerStarted(_Event, frozen=True, kw_only=True):
    """The trainer holds a model of `version` and waits for the batch of step `step + 1`."""

    step: int
    version: int


class ModelStateDictPublished(_Event, frozen=True, kw_only=True):
    """New weights can be opened."""

    ref: ModelStateDictRef


class StepTrained(_Event, frozen=True, kw_only=True):
    """The batch of `step` became policy `version`."""

    step: int
    version: int
    metrics: dict[str, float]


NOTHING_TRAINABLE = "nothing_trainable"
"""Why a step was skipped of whose batch the loss kept nothing."""


class StepSkipped(_Event, frozen=True, kw_only=True):
    """The batch of `step` changed no weight (non-finite, nothing trainable): its rollouts are filtered."""

    step: int
    version: int
    reason: str


class CheckpointWritten(_Event, frozen=True, kw_only=True):
    """A checkpoint that contains `step` is durable."""

    step: int
    path: str


class ReplicaJoined(_Event, frozen=True, kw_only=True):
    """A generator takes requests from now on."""

    name: str
    serving: int
    """How many do."""


class ReplicaLeft(_Event, frozen=True, kw_only=True):
    """A generator that took requests is gone; those that it had go on elsewhere."""

    name: str
    serving: int
    reason: str
    in_order: bool
    """It was let go, with nothing to be sampled again; else it was lost."""


class StopRequested(_Event, frozen=True, kw_only=True):
    """Some role asks the trainer to end, and with which status."""

    role: str
    status: RunStatus
    reason: str


class TrainerEnded(_Event, frozen=True, kw_only=True):
    """The terminal record: training is over. Written once, by the trainer (or by the orchestrator in its place)."""

    status: RunStatus
    step: int
    reason: str
    error: str = ""
    """Class of `tailrace.errors` that failed the trainer: those of wrong settings end the command with status 2."""


Event: TypeAlias = (
    TrainerStarted
    | ModelStateDictPublished
    | StepTrained
    | StepSkipped
    | CheckpointWritten
    | ReplicaJoined
    | ReplicaLeft
    | StopRequested
    | TrainerEnded
)

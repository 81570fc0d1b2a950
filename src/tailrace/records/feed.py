"""What a trainer that is not ours is handed, one sample at a time, and what it tells in return.

    FeedSample ──► consumer (one rank of the trainer) ──► ConsumerJoined, SamplesTaken | SamplesWanted | SamplesDropped
                   its leader, once for the trainer    ──► TrainingBegan → (StepDone, WeightsWritten | WeightsOffered,
                                                           CheckpointSaved)* → TrainingOver

The order of reports is that in which they were told: a rank tells what it took before its leader can tell of the step.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tailrace.records.batch import TrainingSample
from tailrace.records.events import ModelStateDictRef, RunStatus
from tailrace.records.ids import SampleId, TaskId
from tailrace.records.sampling import SamplingParams


class FeedSample(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A training sample as it is handed over, with what a trainer or a person may want to know of its rollout."""

    sample_id: SampleId
    """The same however often the sample is handed over."""
    sample: TrainingSample
    """Its loss mask leaves out what is too old now, at the hand-over."""
    task_id: TaskId
    reward: float
    sampling: SamplingParams
    trainer_version: int
    """The version that the trainer had told of when the sample was handed over: staleness was judged against it."""
    group_rollouts: int
    """Rollouts of its group that were handed over together."""

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return self.sample.num_tokens


class _Report(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    consumer: str
    """Name of the rank that tells it, or that it is told of."""


class ConsumerJoined(_Report, frozen=True, kw_only=True):
    """A rank is there, and can be handed samples."""


class SamplesTaken(_Report, frozen=True, kw_only=True):
    """A rank has these now. One that is lost gives back what no step was told of."""

    sample_ids: tuple[SampleId, ...]


class SamplesWanted(_Report, frozen=True, kw_only=True):
    """A rank cannot go on before it is handed so many more; what it takes afterwards counts against them.

    Then samples are handed over beyond the window: however many a step takes, it gets them.
    """

    samples: int


class SamplesDropped(_Report, frozen=True, kw_only=True):
    """A rank will train on none of these: they end as `filtered(reason)`."""

    sample_ids: tuple[SampleId, ...]
    reason: str
    """Letters, digits and `_`: becomes part of a metric's name."""


class TrainingBegan(_Report, frozen=True, kw_only=True):
    """The trainer holds the weights of this step and version, and goes on there: first of all, and after it came back.

    A step before those that were told of means that it came back from a checkpoint of that step.
    """

    step: int
    version: int


class StepDone(_Report, frozen=True, kw_only=True):
    """The trainer took a step on these samples of all ranks, and then held weights of `version`.

    Steps are told in order; the version never falls, and stays where the step changed nothing.
    """

    step: int
    version: int
    sample_ids: tuple[SampleId, ...]
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class WeightsWritten(_Report, frozen=True, kw_only=True):
    """A folder holds the whole weights of `version` in Hugging Face layout; nobody changes it any more."""

    version: int
    folder: str


class WeightsOffered(_Report, frozen=True, kw_only=True):
    """The trainer's process holds whole weights, which the generators of its host take from there."""

    ref: ModelStateDictRef

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.ref.version


class CheckpointSaved(_Report, frozen=True, kw_only=True):
    """A durable checkpoint contains `step`: the trainer will never come back to an earlier one."""

    step: int
    path: str = ""


class TrainingOver(_Report, frozen=True, kw_only=True):
    """The trainer's terminal record: nothing else ends training."""

    status: RunStatus
    reason: str


class ConsumerLost(_Report, frozen=True, kw_only=True):
    """Told by what carries samples: the rank left, died or fell silent, and is heard no more under this name until it
    joins again."""

    reason: str
    sample_ids: tuple[SampleId, ...] = ()
    """That it had been given, where it may not have told so."""


ConsumerReport: TypeAlias = (
    SamplesWanted
    | SamplesDropped
    | TrainingBegan
    | StepDone
    | WeightsWritten
    | WeightsOffered
    | CheckpointSaved
    | TrainingOver
)
"""What a rank tells by itself; the other reports are told by what carries samples."""

FeedReport: TypeAlias = ConsumerReport | ConsumerJoined | SamplesTaken | ConsumerLost

"""What flows through a run: tasks, completions, branches, rollouts, groups, samples, batches, events.

Plain values and arrays. Per-token data is always a NumPy array, written once. Nothing here does I/O, knows torch,
or imports another room of the house (but for `errors`).
"""

from tailrace.records.arrays import BoolArray, Float32Array, Int32Array, as_token_ids
from tailrace.records.batch import Batch, BatchRow, BatchSummary, TrainingSample
from tailrace.records.branch import Branch
from tailrace.records.columns import (
    CROSS_ENTROPY_WEIGHTS,
    DISTILLATION_WEIGHTS,
    REFERENCE_KL_WEIGHTS,
    TEACHER_LOGPROBS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    WEIGHTS_OF_SAMPLED,
    ColumnKind,
)
from tailrace.records.completion import Completion, FinishReason
from tailrace.records.conversation import DEEPEST, Json, Message, Reply, ToolCall, ToolSpec, is_too_deep
from tailrace.records.events import (
    NOTHING_TRAINABLE,
    CheckpointWritten,
    Event,
    ModelStateDictPublished,
    ModelStateDictRef,
    ReplicaJoined,
    ReplicaLeft,
    RunStatus,
    StepSkipped,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.records.feed import (
    CheckpointSaved,
    ConsumerJoined,
    ConsumerLost,
    ConsumerReport,
    FeedReport,
    FeedSample,
    SamplesDropped,
    SamplesTaken,
    SamplesWanted,
    StepDone,
    TrainingBegan,
    TrainingOver,
    WeightsOffered,
    WeightsWritten,
)
from tailrace.records.generation import Generate, GenerationRequest, OnChunk
from tailrace.records.ids import GroupId, RequestId, RolloutId, SampleId, SessionId, TaskId, sample_of, session_of
from tailrace.records.origins import SampleOrigins
from tailrace.records.payload import ExpertArray, OpenPayload, PayloadChunk, PayloadRef, chunks_before, unrecorded
from tailrace.records.payload_table import PayloadTable
from tailrace.records.planned_batch import SUPPORT_COLUMNS, TOKEN_COLUMNS, PlannedBatch, Whitening
from tailrace.records.rollout import FirstReply, Group, Outcome, Reward, Rollout, TerminalState
from tailrace.records.sampling import SamplingParams
from tailrace.records.scores import NO_TOKEN, TokenScores
from tailrace.records.streamed import StreamedOrigin, StreamedSample
from tailrace.records.supports import Supports, ragged_places
from tailrace.records.task import Task

__all__ = [
    "CROSS_ENTROPY_WEIGHTS",
    "DEEPEST",
    "DISTILLATION_WEIGHTS",
    "NOTHING_TRAINABLE",
    "NO_TOKEN",
    "REFERENCE_KL_WEIGHTS",
    "SUPPORT_COLUMNS",
    "TEACHER_LOGPROBS",
    "TEACHER_TOP_IDS",
    "TEACHER_TOP_LOGPROBS",
    "TOKEN_COLUMNS",
    "WEIGHTS_OF_SAMPLED",
    "Batch",
    "BatchRow",
    "BatchSummary",
    "BoolArray",
    "Branch",
    "CheckpointSaved",
    "CheckpointWritten",
    "ColumnKind",
    "Completion",
    "ConsumerJoined",
    "ConsumerLost",
    "ConsumerReport",
    "Event",
    "ExpertArray",
    "FeedReport",
    "FeedSample",
    "FinishReason",
    "FirstReply",
    "Float32Array",
    "Generate",
    "GenerationRequest",
    "Group",
    "GroupId",
    "Int32Array",
    "Json",
    "Message",
    "ModelStateDictPublished",
    "ModelStateDictRef",
    "OnChunk",
    "OpenPayload",
    "Outcome",
    "PayloadChunk",
    "PayloadRef",
    "PayloadTable",
    "PlannedBatch",
    "ReplicaJoined",
    "ReplicaLeft",
    "Reply",
    "RequestId",
    "Reward",
    "Rollout",
    "RolloutId",
    "RunStatus",
    "SampleId",
    "SampleOrigins",
    "SamplesDropped",
    "SamplesTaken",
    "SamplesWanted",
    "SamplingParams",
    "SessionId",
    "StepDone",
    "StepSkipped",
    "StepTrained",
    "StopRequested",
    "StreamedOrigin",
    "StreamedSample",
    "Supports",
    "Task",
    "TaskId",
    "TerminalState",
    "TokenScores",
    "ToolCall",
    "ToolSpec",
    "TrainerEnded",
    "TrainerStarted",
    "TrainingBegan",
    "TrainingOver",
    "TrainingSample",
    "WeightsOffered",
    "WeightsWritten",
    "Whitening",
    "as_token_ids",
    "chunks_before",
    "is_too_deep",
    "ragged_places",
    "sample_of",
    "session_of",
    "unrecorded",
]

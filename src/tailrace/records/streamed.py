"""A training sample as a trainer outside gets it: plain arrays, and what they are of."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.records.arrays import BoolArray, Float32Array, Int32Array
from tailrace.records.ids import GroupId, RolloutId, SampleId, TaskId
from tailrace.records.sampling import SamplingParams
from tailrace.records.supports import Supports


class StreamedOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where one streamed sample comes from; JSON-friendly, without tokens."""

    run: str
    """The run's name."""
    epoch: str
    """Of the start of the run that made it."""
    sample_id: SampleId
    """Of the branch, and of no other one of the run, however often it is handed over."""
    rollout_id: RolloutId
    group_id: GroupId
    """The rollouts of one task that were scored together."""
    task_id: TaskId
    environment: str
    branch_index: int
    """Its place among the rollout's branches."""
    temperature: float
    """That its tokens were sampled at: a trainer divides its logits by it."""
    sampling: SamplingParams
    """The other settings of the rollout's sampling."""
    reward: float
    """The rollout's."""
    trainer_version: int
    """The version that the trainer had told of when the sample was handed over."""
    oldest_version: int
    """Tokens of versions below it were too old then, and bear no loss."""
    group_rollouts: int
    """Rollouts of its group that were handed over together."""


class StreamedSample(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One finished branch with its advantages. Arrays are read-only; context and completions lie in order."""

    origin: StreamedOrigin
    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens], of the distribution sampled from; 0 for context
    policy_versions: Int32Array  # [num_tokens], that sampled the token; -1 for context
    loss_mask: BoolArray  # [num_tokens], whether it bears loss; never where it was too old
    advantages: Float32Array  # [num_tokens]
    mixed_spans: Int32Array  # [num_spans, 2]: first token and end of what was sampled over older weights' keys, values
    supports: Supports | None = None
    """What top-p and top-k left of the vocabulary; None: all of it."""
    columns: Mapping[str, NDArray[np.generic]] = msgspec.field(default_factory=dict)
    """Columns with a name of their own: float32 or int32, [num_tokens] or [num_tokens, k]."""

    @property
    def sample_id(self) -> SampleId:
        """What it is reported by."""
        return self.origin.sample_id

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that bear loss."""
        return int(np.count_nonzero(self.loss_mask))

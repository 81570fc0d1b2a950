"""What one optimizer step trains on: samples concatenated in columns, and the plan that lays them in rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import PayloadLost
from tailrace.records.arrays import BoolArray, Float32Array, Int32Array
from tailrace.records.branch import Branch
from tailrace.records.ids import GroupId, RolloutId
from tailrace.records.payload import ExpertArray, OpenPayload
from tailrace.records.payload_table import PayloadTable


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """A finished branch with its advantages. Arrays are [num_tokens], views where they can be."""

    rollout_id: RolloutId
    group_id: GroupId
    environment: str
    temperature: float
    branch: Branch
    advantages: float | Float32Array
    """One for all of its tokens, or one each."""
    loss_mask: BoolArray
    """The branch's own, less the tokens masked for staleness."""

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return self.branch.num_tokens


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What people and the ledger want to know of a batch; JSON-friendly, without tokens."""

    step: int
    """The optimizer step that will train on it; steps count from 1."""
    judged_version: int
    """The policy version that the trainer will hold then; staleness was masked against it."""
    num_samples: int
    num_rollouts: int
    num_tokens: int
    loss_tokens: int
    """Planned denominator of the loss: tokens that bear loss, over the whole batch."""
    masked_tokens: int
    """Sampled tokens that lost their loss to staleness."""
    num_rows: int
    row_tokens: int
    staleness_mean: float
    staleness_max: int
    """Over tokens that bear loss."""
    padding: float
    """True padding share: 1 - tokens / (rows * row_tokens)."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One optimizer step's data. Samples lie in row order, so that a row is one slice of every column."""

    summary: BatchSummary
    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens]
    policy_versions: Int32Array  # [num_tokens]
    loss_mask: BoolArray  # [num_tokens]
    mixed_cache: BoolArray  # [num_tokens], True where older weights had a part in the keys and values sampled over
    advantages: Float32Array  # [num_tokens]
    temperatures: Float32Array  # [num_samples]
    sample_offsets: Int32Array  # [num_samples + 1], into the token columns
    row_offsets: Int32Array  # [num_rows + 1], into the samples
    environment_ids: Int32Array  # [num_samples], into `environments`
    environments: tuple[str, ...]
    payloads: PayloadTable = field(default_factory=PayloadTable.empty)
    """Where the routed experts of the tokens lie."""
    scheduler_state: bytes = b""
    """The scheduler's state once this batch is trained, for exact resume; opaque to the trainer (JSON)."""

    def row(self, index: int) -> BatchRow:
        """Row `index`: views, no copy."""
        first, last = int(self.row_offsets[index]), int(self.row_offsets[index + 1])
        start, end = int(self.sample_offsets[first]), int(self.sample_offsets[last])
        return BatchRow(
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            policy_versions=self.policy_versions[start:end],
            loss_mask=self.loss_mask[start:end],
            mixed_cache=self.mixed_cache[start:end],
            advantages=self.advantages[start:end],
            temperatures=self.temperatures[first:last],
            sample_lengths=np.diff(self.sample_offsets[first : last + 1]),
            payloads=self.payloads.between(start, end),
        )

    @property
    def num_rows(self) -> int:
        """Rows in the plan."""
        return len(self.row_offsets) - 1

    @property
    def num_bytes(self) -> int:
        """Of the columns of the tokens."""
        columns = (self.token_ids, self.logprobs, self.policy_versions, self.loss_mask, self.mixed_cache)
        return sum(column.nbytes for column in columns) + self.advantages.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class BatchRow:
    """One row: whole samples side by side, `[row_tokens]` at most."""

    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens]
    policy_versions: Int32Array  # [num_tokens]
    loss_mask: BoolArray  # [num_tokens]
    mixed_cache: BoolArray  # [num_tokens]
    advantages: Float32Array  # [num_tokens]
    temperatures: Float32Array  # [num_samples]
    sample_lengths: Int32Array  # [num_samples]
    payloads: PayloadTable = field(default_factory=PayloadTable.empty)

    def routed_experts(
        self,
        open_payload: OpenPayload,
        *,
        out: NDArray[np.generic] | None = None,
        on_lost: Callable[[PayloadLost], None] | None = None,
    ) -> ExpertArray | None:
        """[num_tokens, num_moe_layers, top_k]: what generation chose; see `PayloadTable.read`."""
        return self.payloads.read(open_payload, out=out, on_lost=on_lost)

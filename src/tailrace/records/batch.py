"""What one optimizer step trains on: samples concatenated in columns, and the plan that lays them in rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.records.arrays import BoolArray, Float32Array, Int32Array
from tailrace.records.branch import Branch
from tailrace.records.ids import GroupId, RolloutId
from tailrace.records.origins import SampleOrigins
from tailrace.records.payload_table import PayloadTable
from tailrace.records.supports import Supports


def _nothing() -> Int32Array:
    return np.empty(0, np.int32)


class TrainingSample(msgspec.Struct, frozen=True, eq=False):
    """A finished branch with its advantages. Arrays are [num_tokens], views where they can be."""

    rollout_id: RolloutId
    group_id: GroupId
    temperature: float
    branch: Branch
    advantages: float | Float32Array
    """One for all of its tokens, or one each."""
    oldest_version: int = 0
    """Tokens of versions below it bear no loss: they are too old."""
    branch_index: int = 0
    """Its place among the rollout's branches."""
    environment: str = ""

    @property
    def num_tokens(self) -> int:
        """All tokens, context included."""
        return self.branch.num_tokens

    @property
    def loss_mask(self) -> BoolArray:
        """The branch's own, less the tokens masked for staleness: a view where there are none."""
        oldest = self.branch.oldest_version
        if oldest is None or oldest >= self.oldest_version:
            return self.branch.loss_mask
        return self.branch.loss_mask & (self.branch.policy_versions >= self.oldest_version)

    def loss_versions(self) -> dict[int, int]:
        """How many tokens of each policy version bear loss. O(versions)."""
        counts = self.branch.version_counts
        return {version: count for version, count in counts.items() if version >= self.oldest_version}

    def weightless(self, name: str) -> int:
        """How many tokens that bear loss have the weight 0 in a column of weights that all sampled tokens have."""
        counts = self.branch.weightless(name)
        return sum(count for version, count in counts.items() if version >= self.oldest_version)


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What people and the ledger want to know of a batch; JSON-friendly, without tokens."""

    step: int
    """The optimizer step that will train on it; steps count from 1."""
    trainer_version: int
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
    """1 - tokens / tokens that the rows are padded to, where a trainer pads."""
    environments: tuple[str, ...] = ()
    """Of its samples, each once."""
    num_demonstrations: int = 0
    """Samples without a token that bears the loss of rewards."""
    cross_entropy_tokens: int = 0
    """Planned denominator of cross-entropy: tokens with a weight in the column of that name."""
    weightless_tokens: dict[str, int] = {}
    """By column of weights that all sampled tokens have: tokens that bear loss and have the weight 0 there."""

    def weighted_tokens(self, name: str) -> int:
        """Planned denominator of a component: tokens that bear loss, and have a weight in the column `name`."""
        return self.loss_tokens - self.weightless_tokens.get(name, 0)

    @property
    def num_sequences(self) -> int:
        """Samples with tokens that bear the loss of rewards."""
        return self.num_samples - self.num_demonstrations


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One optimizer step's data, as one data-parallel rank sees it: its own rows.

    Samples lie in row order, so that a row is one slice of every column. The summary, and with it the planned
    denominator of the loss, is of the whole batch, over all ranks.
    """

    summary: BatchSummary
    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens]
    policy_versions: Int32Array  # [num_tokens]
    loss_mask: BoolArray  # [num_tokens]
    mixed_spans: Int32Array  # [2 * num_spans]: first token and end of what was sampled over older weights' keys, values
    advantages: Float32Array  # [num_advantages], one for a sample or one for each of its tokens
    advantage_offsets: Int32Array  # [num_samples + 1], into the advantages
    temperatures: Float32Array  # [num_samples]
    sample_offsets: Int32Array  # [num_samples + 1], into the token columns
    row_offsets: Int32Array  # [num_rows + 1], into the samples
    payloads: PayloadTable = field(default_factory=PayloadTable)
    """Where the routed experts of the tokens lie."""
    origins: SampleOrigins = field(default_factory=SampleOrigins)
    support_counts: Int32Array = field(default_factory=_nothing)
    """[num_tokens], the `counts` of `Supports`; [0] where every token was sampled from the whole vocabulary."""
    support_ids: Int32Array = field(default_factory=_nothing)
    """Their token ids, sample after sample."""
    support_offsets: Int32Array = field(default_factory=_nothing)
    """[num_samples + 1], into the ids."""
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    """Columns of the tokens that have a name of their own: [num_tokens] or [num_tokens, k]."""
    rank: int = 0
    num_ranks: int = 1
    version_after: int | None = None
    """The policy version that an earlier life of the trainer had after this step; None: it has not been told of."""

    def row(self, index: int) -> BatchRow:
        """Row `index`; see `samples`."""
        return self.samples(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))

    def samples(self, first: int, last: int) -> BatchRow:
        """Samples `first` to `last` as a row: views of the columns; advantages and marks of older caches are spread
        over its tokens."""
        start, end = int(self.sample_offsets[first]), int(self.sample_offsets[last])
        lengths = np.diff(self.sample_offsets[first : last + 1])
        return BatchRow(
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            policy_versions=self.policy_versions[start:end],
            loss_mask=self.loss_mask[start:end],
            mixed_cache=self._mixed_cache(start, end),
            advantages=self._advantages(first, last, lengths),
            temperatures=self.temperatures[first:last],
            sample_lengths=lengths,
            payloads=self.payloads.between(start, end),
            supports=self._supports(first, last, slice(start, end)),
            origins=self.origins.between(first, last),
            columns={name: column[start:end] for name, column in self.columns.items()},
        )

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return len(self.row_offsets) - 1

    @property
    def num_bytes(self) -> int:
        """Of the columns of the tokens."""
        columns = (self.token_ids, self.logprobs, self.policy_versions, self.loss_mask, *self.columns.values())
        return sum(column.nbytes for column in (*columns, self.support_counts, self.support_ids))

    def _advantages(self, first: int, last: int, lengths: Int32Array) -> Float32Array:
        """[tokens of samples `first` to `last`]."""
        counts = np.diff(self.advantage_offsets[first : last + 1])
        given = self.advantages[self.advantage_offsets[first] : self.advantage_offsets[last]]
        return np.repeat(given, np.repeat(np.where(counts == 1, lengths, 1), counts))

    def _supports(self, first: int, last: int, tokens: slice) -> Supports | None:
        """Of samples `first` to `last`, which are these tokens."""
        if not len(self.support_counts):
            return None
        ids = self.support_ids[self.support_offsets[first] : self.support_offsets[last]]
        return Supports(ids, self.support_counts[tokens])

    def _mixed_cache(self, start: int, end: int) -> BoolArray:
        """[end - start], True where older weights had a part in the keys and values sampled over."""
        mixed = np.zeros(end - start, np.bool_)
        spans = self.mixed_spans.reshape(-1, 2)
        first, last = np.searchsorted(spans[:, 0], [start, end])
        for span_start, span_end in spans[first:last].tolist():
            mixed[span_start - start : span_end - start] = True
        return mixed


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
    payloads: PayloadTable = field(default_factory=PayloadTable)
    """Reads the routed experts of the row's tokens."""
    supports: Supports | None = None
    """What its tokens were sampled from; None: the whole vocabulary."""
    origins: SampleOrigins = field(default_factory=SampleOrigins)
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    """More for the loss, by name: [num_tokens] or [num_tokens, k]."""

    @property
    def support_sizes(self) -> Int32Array:
        """[num_tokens]: how many tokens each was sampled from; 0 for the whole vocabulary, and for context."""
        return np.zeros(len(self.token_ids), np.int32) if self.supports is None else self.supports.counts

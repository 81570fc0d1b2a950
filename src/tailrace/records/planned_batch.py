"""A batch before any byte of it has moved: its samples, still in their branches, and the plan that lays them in rows.

    branches ──(views)──► PlannedBatch ──(bytes move once)──► Batch, one for each data-parallel rank

The scheduler makes it, in O(samples); whoever carries it to the trainer moves the tokens, off the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import SettingsError
from tailrace.records.arrays import Float32Array, Int32Array
from tailrace.records.batch import Batch, BatchSummary, TrainingSample
from tailrace.records.columns import ColumnKind
from tailrace.records.origins import SampleOrigins
from tailrace.records.payload_table import PayloadTable, PayloadTableBuilder

TOKEN_COLUMNS: dict[str, np.dtype[np.generic]] = {
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
}
"""What a batch holds of every token, whatever its number: the columns that lie in the branches."""

SUPPORT_COLUMNS = ("support_counts", "support_ids")
"""What it holds of tokens that were sampled from a part of the vocabulary; int32, and empty where none was."""


@dataclass(frozen=True, slots=True)
class Whitening:
    """What a batch's advantages are shifted and divided by, on their way into its columns."""

    mean: float
    deviation: float

    def of(self, advantages: NDArray[np.floating]) -> Float32Array:
        """[num_advantages], whitened."""
        shifted = advantages.astype(np.float64) - self.mean
        return (shifted / self.deviation).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """Samples in row order, the rows of one rank after those of another, and where each row and each rank begins.

    Nobody may change the branches until every rank has given its part back.
    """

    summary: BatchSummary
    samples: Sequence[TrainingSample]
    lengths: Int32Array  # [num_samples], in tokens
    row_offsets: Int32Array  # [num_rows + 1], into the samples
    rank_offsets: Int32Array  # [num_ranks + 1], into the rows
    num_support_ids: int
    """Of the samples here: counted where they are gone through anyway, as tens of thousands hold an event loop."""
    first_rank: int = 0
    """The rank that `rank_offsets[0]` is of."""
    all_ranks: int = 0
    """Ranks of the whole batch, in the part of one rank; 0 in the whole batch."""
    whitening: Whitening | None = None
    """Of the advantages, over the whole batch."""
    columns: Mapping[str, ColumnKind] = field(default_factory=dict)
    """Columns with a name of their own, of any sample of the whole batch."""

    @property
    def num_ranks(self) -> int:
        """Ranks that this batch, or the batch that this is a part of, was planned for."""
        return self.all_ranks or len(self.rank_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples here."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        """Of the columns of the tokens."""
        named = sum(kind.num_bytes for kind in self.columns.values())
        each = named + sum(dtype.itemsize for dtype in TOKEN_COLUMNS.values())
        return self.num_tokens * each + 4 * sum(map(self.size, SUPPORT_COLUMNS))

    def part(self, rank: int) -> PlannedBatch:
        """The rows of one rank, with the summary of the whole batch: the planned denominator is over all ranks."""
        first_row, last_row = int(self.rank_offsets[rank]), int(self.rank_offsets[rank + 1])
        first, last = int(self.row_offsets[first_row]), int(self.row_offsets[last_row])
        samples = self.samples[first:last]
        return PlannedBatch(
            summary=self.summary,
            samples=samples,
            lengths=self.lengths[first:last],
            row_offsets=self.row_offsets[first_row : last_row + 1] - np.int32(first),
            rank_offsets=np.array([0, last_row - first_row], np.int32),
            num_support_ids=self.num_support_ids and sum(sample.branch.num_support_ids for sample in samples),
            first_rank=self.first_rank + rank,
            all_ranks=self.num_ranks,
            whitening=self.whitening,
            columns=self.columns,
        )

    def size(self, column: str) -> int:
        """Elements of one of `TOKEN_COLUMNS` or `SUPPORT_COLUMNS`."""
        if column == "support_ids":
            return self.num_support_ids
        return 0 if column == "support_counts" and not self.num_support_ids else self.num_tokens

    def pieces(self, column: str) -> Iterator[NDArray[np.generic]]:
        """One of `TOKEN_COLUMNS` or `SUPPORT_COLUMNS`, sample after sample: views of the branches."""
        if self.size(column) == 0:
            return
        for sample in self.samples:
            branch = sample.branch
            if column == "support_ids":
                yield from branch.support_ids
            elif column == "support_counts":
                counts = branch.support_counts
                yield np.zeros(branch.num_tokens, np.int32) if counts is None else counts
            else:
                yield sample.loss_mask if column == "loss_mask" else getattr(branch, column)

    def named_pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """One of `columns`, sample after sample: views of the branches (copies of the few of another dtype), and what
        is unset for what they lack."""
        kind = self.columns[name]
        for sample in self.samples:
            column = sample.branch.columns.get(name)
            count = 0 if column is None else len(column)
            if column is not None:
                yield column.astype(kind.dtype, copy=False)
            if count < sample.num_tokens:
                yield kind.unset(name, sample.num_tokens - count)

    def plan_columns(self) -> dict[str, NDArray[np.generic]]:
        """All columns that are short: of samples, rows and spans. O(samples)."""
        offsets = np.zeros(len(self.samples) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise SettingsError(
                f"one rank's part of a batch holds 2^31 tokens at most, not {int(offsets[-1]):,}: lower "
                "scheduling.batch_size, or raise trainer.ranks"
            )
        return {
            "temperatures": np.array([sample.temperature for sample in self.samples], np.float32),
            "sample_offsets": offsets.astype(np.int32),
            "row_offsets": np.asarray(self.row_offsets, np.int32),
            "mixed_spans": self._mixed_spans(offsets),
            "support_offsets": self._support_offsets(),
            **self._advantages(),
        }

    def payloads(self) -> PayloadTable:
        """Where the routed experts of the samples here lie. O(turns)."""
        builder = PayloadTableBuilder()
        for sample in self.samples:
            builder.add(sample.num_tokens, sample.branch.payload_chunks)
        return builder.table()

    def origins(self) -> SampleOrigins:
        """Where the samples here come from. O(samples)."""
        origins = [(one.rollout_id, one.branch_index, one.environment) for one in self.samples]
        return SampleOrigins.of(origins, self.summary.environments)

    def assembled(self, rank: int = 0) -> Batch:
        """The batch that this rank receives, its tokens copied once. O(tokens): not for an event loop."""
        part = self.part(rank)
        plan = part.plan_columns()
        for name, dtype in (TOKEN_COLUMNS | dict.fromkeys(SUPPORT_COLUMNS, np.dtype(np.int32))).items():
            plan[name] = np.concatenate([*part.pieces(name), np.empty(0, dtype)])
        return Batch(
            columns={
                name: np.concatenate([*part.named_pieces(name), kind.unset(name, 0)])
                for name, kind in part.columns.items()
            },
            summary=part.summary,
            payloads=part.payloads(),
            origins=part.origins(),
            rank=part.first_rank,
            num_ranks=part.num_ranks,
            **plan,  # type: ignore[arg-type]
        )

    def loss_versions(self) -> Counter[int]:
        """How many tokens of each policy version bear loss. O(samples)."""
        counts: Counter[int] = Counter()
        for sample in self.samples:
            counts.update(sample.loss_versions())
        return counts

    def _advantages(self) -> dict[str, NDArray[np.generic]]:
        """One number for a sample whose tokens share it, or one for each of its tokens."""
        offsets = np.arange(len(self.samples) + 1, dtype=np.int32)
        values = [sample.advantages for sample in self.samples]
        column: NDArray[np.floating]
        if any(isinstance(value, np.ndarray) for value in values):
            arrays = [np.atleast_1d(np.asarray(value, np.float32)) for value in values]
            np.cumsum([len(array) for array in arrays], out=offsets[1:])
            column = np.concatenate(arrays)
        else:
            column = np.array(values, np.float64)
        whitened = column.astype(np.float32, copy=False) if self.whitening is None else self.whitening.of(column)
        return {"advantages": whitened, "advantage_offsets": offsets}

    def _support_offsets(self) -> Int32Array:
        """[num_samples + 1], into the token ids of supports."""
        offsets = np.zeros(len(self.samples) + 1, np.int64)
        np.cumsum([sample.branch.num_support_ids for sample in self.samples], out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise SettingsError(
                f"one rank's part of a batch holds the supports of its tokens, of 2^31 token ids at most, not "
                f"{int(offsets[-1]):,}: lower rollouts.top_k or scheduling.batch_size, or raise trainer.ranks"
            )
        return offsets.astype(np.int32)

    def _mixed_spans(self, offsets: NDArray[np.int64]) -> Int32Array:
        spans = [
            offset + edge
            for sample, offset in zip(self.samples, offsets[:-1].tolist(), strict=True)
            for span in sample.branch.mixed_spans
            for edge in span
        ]
        return np.array(spans, np.int32)

"""Branches as agent workers send them: what was appended to them, to be appended once more.

A branch is made again by the calls that made it, so that nothing here knows how it keeps its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from tailrace.guards import guarded
from tailrace.records import Branch, Completion, FinishReason, Float32Array, Int32Array, PayloadChunk, Supports

_KINDS = {"int32": np.dtype(np.int32), "float32": np.dtype(np.float32)}


class ColumnData(msgspec.Struct, frozen=True, array_like=True):
    """A named column: [count, *width] numbers of one type."""

    name: str
    dtype: str
    width: tuple[int, ...]
    values: bytes


class BranchData(msgspec.Struct, frozen=True, array_like=True):
    """One branch."""

    temperature: float | None
    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens]
    policy_versions: Int32Array  # [num_tokens]
    completion_spans: tuple[tuple[int, int], ...]
    mixed_spans: tuple[tuple[int, int], ...]
    tool_spans: tuple[tuple[int, int], ...]
    payload_chunks: tuple[PayloadChunk, ...]
    supports: Supports | None
    columns: tuple[ColumnData, ...]

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        supports = 0 if self.supports is None else self.supports.token_ids.nbytes + self.supports.counts.nbytes
        return 12 * len(self.token_ids) + supports + sum(len(column.values) for column in self.columns)

    @classmethod
    def of(cls, branch: Branch) -> BranchData:
        """What makes the same branch."""
        counts = branch.support_counts
        return cls(
            temperature=branch.temperature,
            token_ids=branch.token_ids,
            logprobs=branch.logprobs,
            policy_versions=branch.policy_versions,
            completion_spans=branch.completion_spans,
            mixed_spans=branch.mixed_spans,
            tool_spans=branch.tool_spans,
            payload_chunks=branch.payload_chunks,
            supports=None if counts is None else Supports(_joined(branch.support_ids), counts),
            columns=columns_of(branch),
        )

    def branch(self) -> Branch:
        """The branch, in memory of its own. Raises `CorruptData` for data that no branch makes."""
        with guarded("an agent worker sent a branch that is none"):
            return self._branch()

    def _branch(self) -> Branch:
        branch, end, chunks = Branch(self.temperature), 0, self.payload_chunks
        for start, stop in self.completion_spans:
            if not end <= start <= stop <= len(self.token_ids):
                raise ValueError(f"a completion from token {start} to {stop}")
            self._extend_context(branch, end, start)
            branch.extend_completion(self._completion(start, stop, chunks))
            end, chunks = stop, ()
        self._extend_context(branch, end, len(self.token_ids))
        set_columns(branch, self.columns)
        return branch

    def _extend_context(self, branch: Branch, start: int, stop: int) -> None:
        for first, end in self.tool_spans:
            if start <= first < end <= stop:
                branch.extend_context(self.token_ids[start:first])
                branch.extend_context(self.token_ids[first:end], is_tool_output=True)
                start = end
        branch.extend_context(self.token_ids[start:stop])

    def _completion(self, start: int, stop: int, chunks: tuple[PayloadChunk, ...]) -> Completion:
        return Completion(
            self.token_ids[start:stop],
            self.logprobs[start:stop],
            self.policy_versions[start:stop],
            FinishReason.STOP,  # a branch does not keep why
            routed_experts=chunks,
            mixed_spans=tuple((a - start, b - start) for a, b in self.mixed_spans if start <= a < stop),
            supports=None if self.supports is None else self.supports.part(start, stop),
        )


def columns_of(branch: Branch) -> tuple[ColumnData, ...]:
    """Its named columns."""
    return tuple(
        ColumnData(name, str(column.dtype), column.shape[1:], column.tobytes())
        for name, column in branch.columns.items()
    )


def set_columns(branch: Branch, columns: Iterable[ColumnData]) -> None:
    """Set them. Raises `ValueError` or `KeyError` for columns that are none."""
    for column in columns:
        values = np.frombuffer(column.values, _KINDS[column.dtype])
        branch.set_column(column.name, values.reshape(-1, *column.width))


def _joined(parts: tuple[Int32Array, ...]) -> Int32Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)

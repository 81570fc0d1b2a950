"""A rollout as a line of `rollouts/step_000012.jsonl`: readable, without tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import Branch, Float32Array, Json, Outcome, Rollout
from tailrace.tracing.wall_clock import monotonic_to_unix_ns


class VersionRange(msgspec.Struct, frozen=True):
    """Policy versions that sampled a rollout's tokens."""

    min: int
    max: int
    mean: float


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a record cannot be without."""

    rollout_id: str
    group_id: str
    task_id: str
    environment: str
    step: int
    """The step whose file this is."""
    outcome: Outcome


class RolloutRecord(_Ended, frozen=True, kw_only=True):
    """One line of a rollout file: what went in, what came out, and its outcome."""

    error: str = ""
    """Why it failed, with the traceback of users' code; empty where it did not."""
    reward: float | None = None
    """None: it ended without one, or it was not a finite number."""
    reward_components: dict[str, float | None] = {}
    advantage: float | None = None
    """Mean over its tokens where it is per token; None where it was not computed."""
    messages: list[dict[str, Json]] = []
    task: dict[str, Json] = {}
    """The task's row, ground truth included."""
    task_seed: int = 0
    sampling: dict[str, Json] = {}
    columns: dict[str, Json] = {}
    """What the environment saves of its state."""
    metadata: dict[str, Json] = {}
    """What its author left at the rollout; where it has no reward, what would have come with one."""
    turns: int = 0
    branches: int = 0
    tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False
    attempt: int = 0
    versions: VersionRange | None = None
    """None where no token was sampled."""
    mean_logprob: float | None = None
    """Of the sampled tokens, in nats."""
    started_s: float = 0.0
    """Unix time at admission, as in the trace."""
    duration_s: float = 0.0
    metrics: dict[str, float | None] = {}
    """Timings and counts of the rollout: `generate_s`, `score_s`, `drifted_turns`, ..."""


@dataclass(frozen=True, slots=True)
class RolloutEntry:
    """A terminal rollout, handed to the writer. It must not change afterwards."""

    rollout: Rollout
    outcome: Outcome
    advantage: float | Float32Array | None = None
    """One for all of its tokens, or one each."""
    error: str = ""
    """Why it failed."""


def rollout_record(entry: RolloutEntry, step: int) -> RolloutRecord:
    """The line of one rollout: O(messages) in Python, O(tokens) in NumPy only."""
    rollout, reward = entry.rollout, entry.rollout.reward
    versions, mean_logprob = _token_statistics(rollout.branches)
    return RolloutRecord(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        task_id=rollout.task.task_id,
        environment=rollout.task.environment,
        step=step,
        outcome=entry.outcome,
        error=entry.error,
        reward=None if reward is None else reward.value,
        reward_components={} if reward is None else dict(reward.components),
        advantage=_mean_advantage(entry.advantage),
        messages=[dict(message) for message in rollout.messages],
        task=dict(rollout.task.row),
        task_seed=rollout.task.seed,
        sampling=msgspec.structs.asdict(rollout.sampling),
        columns={} if reward is None else dict(reward.columns),
        metadata=dict(rollout.metadata),
        turns=rollout.turns,
        branches=len(rollout.branches),
        tokens=rollout.num_tokens,
        completion_tokens=rollout.num_completion_tokens,
        truncated=rollout.truncated,
        attempt=rollout.attempt,
        versions=versions,
        mean_logprob=mean_logprob,
        started_s=rollout.started_s + monotonic_to_unix_ns() / 1e9,
        duration_s=max(0.0, rollout.ended_s - rollout.started_s),
        metrics=dict(rollout.metrics),
    )


def _mean_advantage(advantage: float | Float32Array | None) -> float | None:
    return None if advantage is None else float(np.mean(advantage))


def _token_statistics(branches: Sequence[Branch]) -> tuple[VersionRange | None, float | None]:
    """Of the sampled tokens: O(versions), and one sum over the log-probabilities, which are 0 at other tokens."""
    counts: Counter[int] = Counter()
    for branch in branches:
        counts.update(branch.version_counts)
    sampled = counts.total()
    if not sampled:
        return None, None
    mean_version = sum(version * count for version, count in counts.items()) / sampled
    total_logprob = sum(float(branch.logprobs.sum(dtype=np.float64)) for branch in branches)
    return VersionRange(min(counts), max(counts), round(mean_version, 3)), total_logprob / sampled


def encode_line(record: RolloutRecord) -> bytes:
    """One line of JSON with its newline, whatever users put into their columns.

    What JSON cannot hold is written as its `repr`; NaN and infinities become null; a record that cannot be written even
    so keeps its identity, outcome and reward, and says why the rest is missing.
    """
    try:
        return _encoder.encode(record) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reduced = RolloutRecord(
            rollout_id=record.rollout_id,
            group_id=record.group_id,
            task_id=record.task_id,
            environment=record.environment,
            step=record.step,
            outcome=record.outcome,
            reward=record.reward,
            columns={"not_written": f"{type(error).__name__}: {error}".encode("ascii", "replace").decode()},
        )
        return _encoder.encode(reduced) + b"\n"


def decode_line(line: bytes) -> RolloutRecord:
    """The record of one line. Raises `DataError` for a line that is not one (a write that was cut short)."""
    with guarded("a line is no rollout's record", DataError):
        return msgspec.json.decode(line, type=RolloutRecord)


class _Scored(_Ended, frozen=True, kw_only=True):
    """What is read to choose between records."""

    reward: float | None = None


def reward_of_line(line: bytes) -> float | None:
    """Of the record of one line, without making anything of the rest. Raises `DataError` for a line that is not one."""
    with guarded("a line is no rollout's record", DataError):
        return msgspec.json.decode(line, type=_Scored).reward


def plain_value(value: Any) -> Json:
    """What JSON does not know, in plain values: NumPy by value, the rest by `repr`."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return repr(value)


_encoder = msgspec.json.Encoder(enc_hook=plain_value)

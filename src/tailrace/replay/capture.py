"""`capture/`: what entered the pipeline in the first steps of a start of a run, for `tailrace replay`.

    finished group ──▶ group_000001.safetensors  columns of its branches, side by side
                   └─▶ group_000001.msgpack      everything else of it

The first steps' groups and so many megabytes, no more. Bytes of routed experts are not kept, only how many there were.
A run that was resumed and captures again does so in a folder of its own: `capture_2/`, and so on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import (
    DEEPEST,
    Branch,
    Completion,
    FinishReason,
    FirstReply,
    Float32Array,
    Group,
    GroupId,
    Json,
    PayloadChunk,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Supports,
    Task,
    TaskId,
    is_too_deep,
)
from tailrace.reporting.rollout_records import plain_value
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.phases import phase

SETTINGS_FILE = "settings.json"
_logger = logging.getLogger(__name__)


class _BranchRecord(msgspec.Struct, frozen=True):
    spans: list[tuple[int, int]]
    """Of its completions; what lies between is context."""
    mixed_spans: list[tuple[int, int]]
    payload_chunks: list[PayloadChunk]
    columns: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    """Those with names of their own: type, shape and content."""
    temperature: float | None = None
    """None: the rollout's."""


class _RolloutRecord(msgspec.Struct, frozen=True):
    rollout_id: str
    sampling: SamplingParams
    branches: list[_BranchRecord]
    messages: list[dict[str, Any]]
    turns: int
    truncated: bool
    attempt: int
    times_s: tuple[float, float]
    metrics: dict[str, float]
    reward: tuple[float, dict[str, float], dict[str, Json]] | None
    first_reply: FirstReply | None = None
    """None in captures of versions that did not keep it, too."""
    sampled_texts: dict[int, str] = {}
    """Empty in captures of versions that did not keep them, too."""


class _GroupRecord(msgspec.Struct, frozen=True):
    group_id: str
    task: tuple[str, str, int, dict[str, Json], int]
    """Its id, environment, index, row and seed."""
    rollouts: list[_RolloutRecord]
    advantages: list[float | bytes] | None
    """One for each rollout, or one for each of its tokens."""


class CaptureWriter:
    """Writes the groups that come until the first `steps` steps have ended, off the event loop; at most `max_bytes`."""

    def __init__(
        self, folder: Path, writer: BackgroundWriter, *, steps: int, max_bytes: int, settings_json: str
    ) -> None:
        self._folder, self._writer = folder, writer
        self._steps_left, self._left_bytes = steps, max_bytes
        self._groups = 0
        self._is_full = False
        if steps:
            writer.submit(lambda: self._begin(settings_json))

    def write(self, group: Group) -> None:
        """A scored group entered the pipeline. Never waits: a thread reads the group, which no longer changes."""
        if self._steps_left <= 0 or self._is_full:
            return
        self._groups += 1
        number, rollouts = self._groups, list(group.rollouts)
        self._writer.submit(lambda: self._write(number, group, rollouts))

    def step_ended(self) -> None:
        """A step less to capture."""
        self._steps_left -= 1

    # --- in the writer's thread ---

    def _begin(self, settings_json: str) -> None:
        if before := capture_folders(self._folder):
            self._folder = self._folder.with_name(f"{self._folder.name}_{_number(before[-1]) + 1}")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / SETTINGS_FILE).write_text(settings_json, encoding="utf-8")

    def _write(self, number: int, group: Group, rollouts: list[Rollout]) -> None:
        with phase("capture") as capturing:
            columns = save(_columns(rollouts))
            record = msgspec.msgpack.encode(_group_record(group, rollouts), enc_hook=plain_value)
            num_bytes = len(columns) + len(record)
            if num_bytes > self._left_bytes:
                if not self._is_full:
                    _logger.warning("the capture is full after %d groups (observability.capture_mb)", number - 1)
                self._is_full = True
                return
            self._left_bytes -= num_bytes
            capturing.add_bytes(num_bytes)
            path = self._folder / f"group_{number:06d}"
            path.with_suffix(".safetensors").write_bytes(columns)
            path.with_suffix(".msgpack").write_bytes(record)


def capture_folders(first: Path) -> list[Path]:
    """The captures of a run, in order; `first` is where its first one is."""
    others = first.parent.glob(f"{first.name}_*")
    return sorted((path for path in (first, *others) if path.is_dir() and _number(path)), key=_number)


def _number(folder: Path) -> int:
    """Which of a run's captures it is, from 1; 0 for another folder."""
    _, _, number = folder.name.partition("_")
    return int(number) if number.isdecimal() else not number


def read_capture(folder: Path) -> list[Group]:
    """The groups of a capture, in order, with the advantages of the run. Raises `DataError`."""
    paths = sorted(folder.glob("group_*.msgpack"))
    if not paths:
        raise DataError(
            f"there is no capture in {folder}: `tailrace train RECIPE --capture 2` writes what enters the pipeline in "
            "the first two steps to the run's folder"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> Group:
    columns = path.with_suffix(".safetensors")
    with guarded(f"{path} or {columns.name} beside it is no captured group", DataError):
        record = msgspec.msgpack.decode(path.read_bytes(), type=_GroupRecord)
        if any(map(is_too_deep, _free_form(record))):
            raise ValueError(f"it nests deeper than {DEEPEST} levels")
        return _group(record, load_file(columns))


def _free_form(record: _GroupRecord) -> Iterator[Json]:
    """Values whose shape their type leaves open."""
    yield record.task[3]
    for rollout in record.rollouts:
        yield rollout.messages
        if rollout.reward is not None:
            yield rollout.reward[2]


def _columns(rollouts: list[Rollout]) -> dict[str, NDArray[Any]]:
    # The empty branch makes the first offset 0, and the columns of a group without any branch.
    branches = [Branch(), *(branch for rollout in rollouts for branch in rollout.branches)]
    columns = {
        "token_ids": np.concatenate([branch.token_ids for branch in branches]),
        "logprobs": np.concatenate([branch.logprobs for branch in branches]),
        "policy_versions": np.concatenate([branch.policy_versions for branch in branches]),
        "branch_offsets": np.cumsum([branch.num_tokens for branch in branches], dtype=np.int64),
    }
    if any(branch.num_support_ids for branch in branches):
        counts = (branch.support_counts for branch in branches)
        sizes = (branch.num_tokens for branch in branches)
        columns["support_counts"] = np.concatenate(
            [np.zeros(size, np.int32) if own is None else own for own, size in zip(counts, sizes, strict=True)]
        )
        columns["support_ids"] = np.concatenate([ids for branch in branches for ids in branch.support_ids])
    return columns


def _group_record(group: Group, rollouts: list[Rollout]) -> _GroupRecord:
    task = group.task
    return _GroupRecord(
        group_id=group.group_id,
        task=(task.task_id, task.environment, task.index, dict(task.row), task.seed),
        rollouts=[_rollout_record(rollout) for rollout in rollouts],
        advantages=None if group.advantages is None else [*map(_plain, group.advantages)],
    )


def _rollout_record(rollout: Rollout) -> _RolloutRecord:
    reward = rollout.reward
    return _RolloutRecord(
        rollout_id=rollout.rollout_id,
        sampling=rollout.sampling,
        branches=[
            _BranchRecord(
                list(branch.completion_spans),
                list(branch.mixed_spans),
                [chunk for chunk in branch.payload_chunks if chunk.ref is not None],
                {name: (column.dtype.str, column.shape, column.tobytes()) for name, column in branch.columns.items()},
                branch.temperature,
            )
            for branch in rollout.branches
        ],
        messages=[{**message} for message in rollout.messages],
        turns=rollout.turns,
        truncated=rollout.truncated,
        attempt=rollout.attempt,
        times_s=(rollout.started_s, rollout.ended_s),
        metrics=rollout.metrics,
        reward=None if reward is None else (reward.value, reward.components, reward.columns),
        first_reply=rollout.first_reply,
        sampled_texts=rollout.sampled_texts,
    )


def _group(record: _GroupRecord, columns: Mapping[str, NDArray[Any]]) -> Group:
    task_id, environment, index, row, seed = record.task
    task = Task(TaskId(task_id), environment, index, row, seed)
    branches = _branches([branch for rollout in record.rollouts for branch in rollout.branches], columns)
    rollouts = [_rollout(rollout, task, GroupId(record.group_id), branches) for rollout in record.rollouts]
    group = Group(GroupId(record.group_id), task, rollouts)
    if record.advantages is not None:
        group.advantages = [
            np.frombuffer(advantage, "<f4").astype(np.float32) if isinstance(advantage, bytes) else advantage
            for advantage in record.advantages
        ]
    return group


def _plain(advantage: float | Float32Array) -> float | bytes:
    """One per token as the bytes of float32, little-endian."""
    return advantage.astype("<f4").tobytes() if isinstance(advantage, np.ndarray) else float(advantage)


def _rollout(record: _RolloutRecord, task: Task, group_id: GroupId, branches: Iterator[Branch]) -> Rollout:
    return Rollout(
        rollout_id=RolloutId(record.rollout_id),
        group_id=group_id,
        task=task,
        sampling=record.sampling,
        branches=[next(branches) for _ in record.branches],
        messages=record.messages,  # type: ignore[arg-type]  # as they were written
        first_reply=record.first_reply,
        sampled_texts=record.sampled_texts,
        reward=None if record.reward is None else Reward(*record.reward),
        turns=record.turns,
        truncated=record.truncated,
        started_s=record.times_s[0],
        ended_s=record.times_s[1],
        metrics=record.metrics,
        attempt=record.attempt,
    )


def _branches(records: list[_BranchRecord], columns: Mapping[str, NDArray[Any]]) -> Iterator[Branch]:
    """Made context by context and completion by completion, as the run made them."""
    offsets = columns["branch_offsets"].tolist()
    if len(offsets) != len(records) + 1 or offsets[-1] != len(columns["token_ids"]):
        raise ValueError(f"{len(records)} branches do not fit {len(offsets)} offsets")
    counts = columns.get("support_counts")
    supports = None if counts is None else Supports(columns["support_ids"], counts)
    for record, start, end in zip(records, offsets[:-1], offsets[1:], strict=True):
        own = {name: columns[name][start:end] for name in ("token_ids", "logprobs", "policy_versions")}
        branch = Branch(temperature=record.temperature)
        position, chunks = 0, tuple(record.payload_chunks)
        for first, last in record.spans:
            branch.extend_context(own["token_ids"][position:first])
            mixed = tuple((a - first, b - first) for a, b in record.mixed_spans if first <= a and b <= last)
            completion = Completion(
                token_ids=own["token_ids"][first:last],
                logprobs=own["logprobs"][first:last],
                policy_versions=own["policy_versions"][first:last],
                finish_reason=FinishReason.STOP,
                routed_experts=chunks,
                mixed_spans=mixed,
                supports=supports and supports.part(start + first, start + last),
            )
            branch.extend_completion(completion)
            position, chunks = last, ()
        branch.extend_context(own["token_ids"][position:])
        for name, (dtype, shape, content) in record.columns.items():
            branch.set_column(name, np.frombuffer(content, dtype).reshape(shape))
        yield branch

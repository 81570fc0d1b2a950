"""Rollouts that ended, token by token: `tokens/step_000012.parquet`, one row a branch, written off the event loop.

    entries ─► bounded in rollouts ─► a writer thread of its own ─► row groups of 64 Ki tokens ─► whole file, renamed

A file is there when it is whole. What the folder holds is bounded in bytes: see `files.surplus`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailrace.extras import require_extra
from tailrace.records import Branch, Float32Array, RolloutId
from tailrace.records.columns import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS
from tailrace.reporting.rollout_records import RolloutEntry
from tailrace.reporting.sinks import WaitingRollouts
from tailrace.reporting.tokens.files import FoundFile, Moment, files_in, is_beside_rollouts, surplus
from tailrace.tracing.background import BackgroundWriter
from tailrace.tracing.phases import phase

if TYPE_CHECKING:
    import pyarrow

TextOf = Callable[[Sequence[int]], str]

_GROUP_TOKENS = 1 << 16
_REMEMBERED_TEXTS = 1 << 18
_FLOATS = ("advantages", "alternative_logprobs", "logprobs")
_logger = logging.getLogger(__name__)


class TokenOrigin(enum.IntEnum):
    """Where a token comes from."""

    CONTEXT = 0
    """A prompt, a user's turn, what a template puts around messages; in a forked branch also what it shares."""
    SAMPLED = 1
    TOOL = 2
    """Context that brought what tools answered."""


def require_parquet(every_steps: int) -> None:
    """Raise `SettingsError` where tokens are asked for and pyarrow is not installed; imports nothing heavy."""
    if every_steps:
        key = ("observability", "tokens_every_steps")
        require_extra("pyarrow", extra="parquet", what=".".join(key), key=key)


class TokenWriter:
    """The files of a run. Nothing here waits for a disk, and nothing raises into the run."""

    def __init__(
        self,
        folder: Path,
        writer: BackgroundWriter,
        text_of: TextOf,
        *,
        every_steps: int,
        max_bytes: int,
        waiting_rollouts: int = 1024,
    ) -> None:
        """`text_of` tells the text of token ids."""
        self._folder, self._every_steps, self._max_bytes = folder, every_steps, max_bytes
        self._exports: dict[Path, bool] = {}
        """Whole ones: whether they go with the files of rollouts."""
        self._waiting = WaitingRollouts(writer, at_most=waiting_rollouts)
        self._text_of = lru_cache(_REMEMBERED_TEXTS)(lambda token_id: text_of([token_id]))

    def wants(self, step: int) -> bool:
        """Whether the step's rollouts are written."""
        return bool(self._every_steps) and step % self._every_steps == 0

    def write(self, step: int, entries: Sequence[RolloutEntry], oldest_versions: Mapping[RolloutId, int]) -> None:
        """Write what ended with a step; of trained rollouts, tokens older than `oldest_versions` bore no loss.

        Never waits and never raises: they are dropped, and counted, where there is no room. The rollouts must be final.
        """
        if self.wants(step):
            self._submit(Moment(step), entries, oldest_versions)

    def write_evaluation(self, step: int, entries: Sequence[RolloutEntry]) -> None:
        """The same of an evaluation that was due at the step."""
        if self._every_steps:
            self._submit(Moment(step, is_evaluation=True), entries, {})

    def _submit(self, moment: Moment, entries: Sequence[RolloutEntry], oldest: Mapping[RolloutId, int]) -> None:
        if any(entry.rollout.branches for entry in entries):
            self._waiting.submit(entries, lambda taken: self._write(moment, taken, oldest))

    def _write(self, moment: Moment, entries: Iterator[RolloutEntry], oldest: Mapping[RolloutId, int]) -> None:
        path = self._folder / moment.file_name
        part = path.with_name(f"{path.name}.part")
        with phase("write_tokens") as writing:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                _write_file(part, _rows(entries, moment.step, oldest), self._text_of, self._max_bytes)
                writing.add_bytes(part.stat().st_size)
                part.replace(path)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise
            self._bound()

    def _bound(self) -> None:
        """Delete what is too much, and what an earlier start of the run left half written."""
        found = [one for one in files_in(self._folder) if not self._stays(one)]
        sizes: dict[Moment, int] = {}
        for one in found:
            sizes[one.moment] = sizes.get(one.moment, 0) + one.num_bytes
        gone = set(surplus(sizes, self._max_bytes))
        for one in found:
            if one.moment in gone or one.is_part:
                one.path.unlink(missing_ok=True)

    def _stays(self, one: FoundFile) -> bool:
        """Whether it is an export that was asked for, in this start of the run or in one before, or may be one."""
        if not one.is_export:
            return False
        if one.is_part:
            return True
        if one.path not in self._exports:
            self._exports[one.path] = is_beside_rollouts(one.path)
        return not self._exports[one.path]


class _Row:
    """One branch, as a row."""

    def __init__(self, entry: RolloutEntry, index: int, step: int, oldest: int | None) -> None:
        rollout, branch = entry.rollout, entry.rollout.branches[index]
        self.branch = branch
        self.advantages = _advantages(entry, branch)
        temperature = branch.temperature
        self.scalars: dict[str, object] = {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "task_id": rollout.task.task_id,
            "environment": rollout.task.environment,
            "step": step,
            "branch": index,
            "outcome": str(entry.outcome.state),
            "reason": entry.outcome.reason,
            "reward": None if rollout.reward is None else rollout.reward.value,
            "temperature": rollout.sampling.temperature if temperature is None else temperature,
            "oldest_version": oldest,
            "num_tokens": branch.num_tokens,
            "num_completion_tokens": branch.num_completion_tokens,
        }


def _rows(entries: Iterable[RolloutEntry], step: int, oldest: Mapping[RolloutId, int]) -> Iterator[_Row]:
    for entry in entries:
        for index in range(len(entry.rollout.branches)):
            yield _Row(entry, index, step, oldest.get(entry.rollout.rollout_id))


def _advantages(entry: RolloutEntry, branch: Branch) -> Float32Array:
    """[0] where unknown, [1] where one is of all tokens, or [num_tokens]."""
    given = np.atleast_1d(np.asarray([] if entry.advantage is None else entry.advantage, np.float32))
    return given if len(given) <= 1 or len(given) == branch.num_tokens else given[:0]


def _write_file(path: Path, rows: Iterator[_Row], text_of: Callable[[int], str], max_bytes: int) -> None:
    """Row group after row group; a file that alone is larger than `max_bytes` is cut there."""
    from pyarrow import parquet

    schema = _schema()
    columns = [f"{name}.list.element" for name in _FLOATS]
    encoded = [name for name in _leaves(schema) if name not in columns]
    with (
        path.open("wb") as file,
        parquet.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=encoded, use_byte_stream_split=columns
        ) as writer,
    ):
        for group in _grouped(rows):
            if file.tell() > max_bytes:
                _logger.warning("%s: cut at observability.tokens_mb", path.name.removesuffix(".part"))
                break
            writer.write_table(_table(group, schema, text_of))


def _grouped(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """Rows of 64 Ki tokens together, or a little more."""
    group: list[_Row] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += row.branch.num_tokens
        if tokens >= _GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _schema() -> pyarrow.Schema:
    import pyarrow

    text, int32, float32 = pyarrow.string(), pyarrow.int32(), pyarrow.float32()
    scalars = {
        **dict.fromkeys(("rollout_id", "group_id", "task_id", "environment"), text),
        **dict.fromkeys(("step", "branch"), int32),
        **dict.fromkeys(("outcome", "reason"), text),
        "reward": pyarrow.float64(),
        "temperature": float32,
        **dict.fromkeys(("oldest_version", "num_tokens", "num_completion_tokens", "alternatives"), int32),
    }
    lists = {
        "token_ids": int32,
        "texts": text,
        "origins": pyarrow.uint8(),
        "policy_versions": int32,
        "logprobs": float32,
        "advantages": float32,
        "support_sizes": int32,
        "alternative_ids": int32,
        "alternative_logprobs": float32,
        "alternative_texts": text,
    }
    of_tokens = {name: pyarrow.list_(pyarrow.field("element", kind)) for name, kind in lists.items()}
    return pyarrow.schema(list((scalars | of_tokens).items()))


def _leaves(schema: pyarrow.Schema) -> list[str]:
    import pyarrow

    return [f"{field.name}.list.element" if pyarrow.types.is_list(field.type) else field.name for field in schema]


def _table(rows: Sequence[_Row], schema: pyarrow.Schema, text_of: Callable[[int], str]) -> pyarrow.Table:
    import pyarrow

    branches = [row.branch for row in rows]
    alternatives = [_alternatives(branch) for branch in branches]
    lists: dict[str, list[NDArray[Any]]] = {
        "token_ids": [branch.token_ids for branch in branches],
        "origins": [_origins(branch) for branch in branches],
        "policy_versions": [branch.policy_versions for branch in branches],
        "logprobs": [branch.logprobs for branch in branches],
        "advantages": [row.advantages for row in rows],
        "support_sizes": [_support_sizes(branch) for branch in branches],
        "alternative_ids": [ids.reshape(-1) for ids, _ in alternatives],
        "alternative_logprobs": [logprobs.reshape(-1) for _, logprobs in alternatives],
    }
    columns = {name: _list_array(parts, schema.field(name).type.value_type) for name, parts in lists.items()}
    for name, ids in (("texts", "token_ids"), ("alternative_texts", "alternative_ids")):
        offsets, values = columns[ids].offsets, _texts(np.concatenate(lists[ids]), text_of)
        columns[name] = pyarrow.ListArray.from_arrays(offsets, values)
    for name in rows[0].scalars:
        columns[name] = pyarrow.array([_plain(row.scalars[name]) for row in rows], schema.field(name).type)
    columns["alternatives"] = pyarrow.array([ids.shape[1] for ids, _ in alternatives], pyarrow.int32())
    return pyarrow.table([columns[field.name].cast(field.type) for field in schema], schema=schema)


def _plain(value: object) -> object:
    """Users name tasks and environments as they like; half of a surrogate pair is nothing that Parquet holds."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _list_array(parts: Sequence[NDArray[Any]], kind: pyarrow.DataType) -> pyarrow.ListArray:
    import pyarrow

    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(np.concatenate(parts), kind))


def _texts(token_ids: NDArray[np.int32], text_of: Callable[[int], str]) -> pyarrow.Array:
    """[num_tokens]: each token's text; each id is decoded once. Negative ids are none, and have none."""
    import pyarrow

    ids, places = np.unique(token_ids, return_inverse=True)
    texts = ["" if token_id < 0 else text_of(token_id) for token_id in ids.tolist()]
    return pyarrow.array(texts, pyarrow.string()).take(pyarrow.array(places))


def _origins(branch: Branch) -> NDArray[np.uint8]:
    origins = branch.loss_mask.astype(np.uint8)
    for start, end in branch.tool_spans:
        origins[start:end] = TokenOrigin.TOOL
    return origins


def _support_sizes(branch: Branch) -> NDArray[np.int32]:
    counts = branch.support_counts
    return np.empty(0, np.int32) if counts is None else counts


def _alternatives(branch: Branch) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[num_tokens, k] each: a teacher's likeliest tokens in each place, where it told them; k = 0 otherwise."""
    ids, logprobs = branch.columns.get(TEACHER_TOP_IDS), branch.columns.get(TEACHER_TOP_LOGPROBS)
    if ids is None or logprobs is None or ids.shape != logprobs.shape or ids.shape[:1] != (branch.num_tokens,):
        return np.empty((branch.num_tokens, 0), np.int32), np.empty((branch.num_tokens, 0), np.float32)
    return ids.astype(np.int32), logprobs.astype(np.float32)

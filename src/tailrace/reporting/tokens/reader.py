"""Reads rollouts token by token, for pages and reports: one rollout's row groups, never a whole file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import BoolArray, Float32Array, Int32Array
from tailrace.reporting.tokens.arrow_columns import list_of
from tailrace.reporting.tokens.files import TOKENS_FOLDER, Moment, TokenFile, exported_files
from tailrace.reporting.tokens.trained import ALONE, ExportedTokens, TrainerTokens, read_exported
from tailrace.reporting.tokens.writer import TokenOrigin

if TYPE_CHECKING:
    from pyarrow import parquet

_KEY = (
    *("rollout_id", "group_id", "task_id", "environment", "step", "branch"),
    *("num_tokens", "num_completion_tokens", "reward", "outcome", "reason"),
)


_TEXTS = ("texts", "alternative_texts")
"""Lists of texts that come again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchKey:
    """Which branch it is, and how its rollout ended."""

    rollout_id: str
    group_id: str
    task_id: str
    environment: str
    step: int
    """The step whose file it is in."""
    branch: int
    """Its place among its rollout's branches."""
    num_tokens: int
    num_completion_tokens: int
    reward: float | None
    outcome: str
    """A `TerminalState`, and why where there is a reason."""
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """Tokens that were likely in each place, as far as any were recorded: today those of a teacher."""

    token_ids: Int32Array  # [num_tokens, k]; -1 where there are fewer
    logprobs: Float32Array  # [num_tokens, k]
    texts: list[list[str]]  # [num_tokens, k]


@dataclass(frozen=True, slots=True, eq=False)
class BranchTokens:
    """One branch, token by token. Arrays are [num_tokens]."""

    key: BranchKey
    temperature: float
    token_ids: Int32Array
    """-1 where nobody wrote the token: context, in an export that stands alone."""
    texts: list[str]
    """Each token decoded alone."""
    origins: NDArray[np.uint8]
    """A `TokenOrigin` each."""
    policy_versions: Int32Array
    """-1 where no policy sampled the token."""
    generator_logprobs: Float32Array
    """Of the distribution that the token was sampled from; NaN where none was."""
    loss_mask: BoolArray
    """Sampled, in a rollout that was trained, and not too old when its batch was formed; where the trainer exported the
    step, what it says."""
    advantages: Float32Array
    """NaN where unknown, and where the token was not sampled; the trainer's own (perhaps whitened) where exported."""
    support_sizes: Int32Array | None
    """How many tokens it was sampled from, 0 for the whole vocabulary; None: all from the whole vocabulary."""
    alternatives: Alternatives | None
    trainer: TrainerTokens | None
    """None where the trainer exported nothing of this branch."""

    @property
    def num_tokens(self) -> int:
        """Of the branch."""
        return len(self.token_ids)


def list_branches(file: TokenFile) -> list[BranchKey]:
    """The branches of a file, in its order, without reading a token. Raises `DataError` for a file that is broken."""
    with guarded(f"{file.path} holds no tokens of rollouts", DataError):
        from pyarrow import parquet

        with parquet.ParquetFile(file.path) as source:
            return [BranchKey(**row) for row in source.read(columns=list(_KEY)).to_pylist()]


def read_rollout(
    run_folder: Path, rollout_id: str, *, step: int, is_evaluation: bool = False, max_tokens: int = 1_000_000
) -> list[BranchTokens]:
    """The branches of a rollout in order, joined with what the trainer exported of them; none where none are there.

    Of a step whose rollouts' tokens were not written the trainer's export may stand alone: then those that were trained
    on are there, in their places. `step` is that of the rollout's file, as its record says. The first branch is read
    however long it is; those that would make it more than `max_tokens` are left out. Raises `DataError` for a file that
    is broken.
    """
    moment = Moment(step, is_evaluation)
    path = run_folder / TOKENS_FOLDER / moment.file_name
    if not path.is_file():
        return [] if is_evaluation else _read_export_alone(run_folder, rollout_id, step, max_tokens)
    with guarded(f"{path} holds no tokens of rollouts", DataError):
        rows = sorted(_rows_of(path, rollout_id, max_tokens), key=lambda row: row["branch"])
    exported = [] if is_evaluation else exported_files(run_folder, step)
    trained = read_exported(exported, rollout_id) if rows and exported else {}
    with guarded(f"{path} holds no tokens of rollouts", DataError):
        return [_branch(row, trained.get(row["branch"])) for row in rows]


def _read_export_alone(run_folder: Path, rollout_id: str, step: int, max_tokens: int) -> list[BranchTokens]:
    branches: list[BranchTokens] = []
    for branch, exported in sorted(read_exported(exported_files(run_folder, step), rollout_id, ALONE).items()):
        with guarded(f"the tokens that the trainer exported of step {step}", DataError):
            made = _branch_of_export(rollout_id, step, branch, exported)
        max_tokens -= made.num_tokens
        if not branches or max_tokens >= 0:
            branches.append(made)
    return branches


def _branch_of_export(rollout_id: str, step: int, branch: int, exported: ExportedTokens) -> BranchTokens:
    """Up to the last token that was exported; what was not has neither id (-1) nor text."""
    columns = exported.columns
    positions, count = columns["position"], int(columns["position"].max()) + 1
    mask, texts = exported.loss_mask(count), [""] * count
    for place, text in zip(positions.tolist(), columns["text"].tolist(), strict=True):
        texts[place] = text

    def spread(name: str, elsewhere: float) -> NDArray[Any]:
        whole = np.full(count, elsewhere, columns[name].dtype)
        whole[positions] = columns[name]
        return whole

    supports = spread("support_size", 0)
    return BranchTokens(
        key=BranchKey(
            rollout_id=rollout_id,
            group_id="",
            task_id="",
            environment="",
            step=step,
            branch=branch,
            num_tokens=count,
            num_completion_tokens=int(mask.sum()),
            reward=None,
            outcome="trained",
            reason="",
        ),
        temperature=math.nan,
        token_ids=spread("token_id", -1),
        texts=texts,
        origins=np.where(mask, TokenOrigin.SAMPLED, TokenOrigin.CONTEXT).astype(np.uint8),
        policy_versions=spread("policy_version", -1),
        generator_logprobs=spread("generator_logprob", math.nan),
        loss_mask=mask,
        advantages=exported.advantages(np.full(count, np.nan, np.float32)),
        support_sizes=supports if supports.any() else None,
        alternatives=None,
        trainer=exported.spread(count),
    )


def _rows_of(path: Path, rollout_id: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet
    from pyarrow.types import is_list

    with parquet.ParquetFile(path, read_dictionary=[f"{name}.list.element" for name in _TEXTS]) as source:
        for group, places in _places_of(source, rollout_id, max_tokens):
            table = source.read_row_group(group, use_threads=False)
            for place in places:
                row = table.slice(place, 1)
                # lists become arrays without a Python object for each number
                yield {
                    name: list_of(column) if is_list(column.type) else column[0].as_py()
                    for name, column in zip(row.column_names, row.columns, strict=True)
                }


def _places_of(source: parquet.ParquetFile, rollout_id: str, max_tokens: int) -> Iterable[tuple[int, list[int]]]:
    """Row groups that hold the rollout, with its rows in them."""
    left, is_first = max_tokens, True
    for group in range(source.num_row_groups):
        table = source.read_row_group(group, ["rollout_id", "num_tokens"], use_threads=False)
        ids, lengths = table.column("rollout_id").to_pylist(), table.column("num_tokens").to_pylist()
        places = []
        for place, (found, length) in enumerate(zip(ids, lengths, strict=True)):
            if found == rollout_id and (is_first or length <= left):
                places.append(place)
                left, is_first = left - length, False
        if places:
            yield group, places


def _branch(row: dict[str, Any], exported: ExportedTokens | None) -> BranchTokens:
    count: int = row["num_tokens"]
    origins: NDArray[np.uint8] = row["origins"]
    is_sampled = origins == TokenOrigin.SAMPLED
    _require_length(row, count)
    mask: BoolArray = is_sampled & (row["outcome"] == "trained")
    if row["oldest_version"] is not None:
        mask &= row["policy_versions"] >= row["oldest_version"]
    advantages = row["advantages"] if len(row["advantages"]) else np.array([np.nan], np.float32)
    advantages = np.where(is_sampled, advantages, np.float32(np.nan))
    trainer = None
    if exported is not None:
        trainer = exported.spread(count)
        mask, advantages = exported.loss_mask(count), exported.advantages(advantages)
    return BranchTokens(
        key=BranchKey(**{name: row[name] for name in _KEY}),
        temperature=row["temperature"],
        token_ids=row["token_ids"],
        texts=row["texts"],
        origins=origins,
        policy_versions=row["policy_versions"],
        generator_logprobs=np.where(is_sampled, row["logprobs"], np.float32(np.nan)),
        loss_mask=mask,
        advantages=advantages,
        support_sizes=row["support_sizes"] if len(row["support_sizes"]) else None,
        alternatives=_alternatives(row, count),
        trainer=trainer,
    )


def _require_length(row: dict[str, Any], count: int) -> None:
    for name in ("token_ids", "texts", "origins", "policy_versions", "logprobs"):
        if len(row[name]) != count:
            raise ValueError(
                f"branch {row['branch']} of {row['rollout_id']} has {count} tokens, {len(row[name])} {name}"
            )


def _alternatives(row: dict[str, Any], count: int) -> Alternatives | None:
    width: int = row["alternatives"]
    if not width:
        return None
    texts: Sequence[str] = row["alternative_texts"]
    return Alternatives(
        row["alternative_ids"].reshape(count, width),
        row["alternative_logprobs"].reshape(count, width),
        [list(texts[start : start + width]) for start in range(0, count * width, width)],
    )

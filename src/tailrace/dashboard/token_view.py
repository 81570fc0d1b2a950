"""A rollout's tokens for the page: columns of a stretch of a branch, with everything that is known of each token."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.dashboard.rollout_files import StepFiles
from tailrace.records import common_prefix
from tailrace.reporting.tokens import BranchTokens, exported_steps, read_rollout, token_files
from tailrace.reporting.tokens.files import Moment, files_of

PAGE_TOKENS = 20_000
"""At most."""
_MOST_TOKENS = 400_000
"""Of a rollout: branches behind that are left out, and said to be."""


class BranchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A branch without its tokens."""

    branch: int
    num_tokens: int
    num_completion_tokens: int
    forks_at: int
    """How many tokens it has in common with the branch of the page; for that branch itself, all."""


class TokenPage(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of tokens, `[n]` each; null where there is no value."""

    rollout_id: str
    step: int
    branches: list[BranchInfo]
    branch: int
    """Place in `branches`."""
    first: int
    reward: float | None
    outcome: str
    reason: str
    is_exported: bool
    """The trainer's columns are there."""
    has_context: bool
    """Tokens that were not trained on are there too: false of an export alone."""
    token_ids: list[int]
    texts: list[str]
    origins: list[int]
    """0: context, 1: sampled, 2: tool output."""
    versions: list[int]
    """-1 where none sampled it."""
    logprobs: list[float]
    loss_mask: list[bool]
    advantages: list[float]
    support_sizes: list[int] | None
    trainer_logprobs: list[float] | None
    ratios: list[float] | None
    entropies: list[float] | None
    losses: list[float] | None
    kept: list[bool] | None
    is_trained: list[bool] | None
    alternatives: list[list[tuple[str, float]]] | None
    """The likeliest of each place, where they were recorded."""


class TokenReader:
    """Keeps the rollout that was asked for last, for as long as its files stay: a page is a part of it.

    From any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object = None
        self._branches: list[BranchTokens] = []

    def page(
        self,
        folder: Path,
        rollout_id: str,
        *,
        step: int,
        is_evaluation: bool,
        branch: int,
        first: int,
        count: int = PAGE_TOKENS,
    ) -> TokenPage | None:
        """None where no tokens of it were written. Raises `DataError` for a file that is broken."""
        with self._lock:
            key = (folder, rollout_id, files_of(folder, Moment(step, is_evaluation)))
            if key != self._key:
                self._branches = read_rollout(
                    folder, rollout_id, step=step, is_evaluation=is_evaluation, max_tokens=_MOST_TOKENS
                )
                self._key = key if self._branches else None
            if not 0 <= branch < len(self._branches):
                return None
            return _page(self._branches, branch, first, min(count, PAGE_TOKENS))


def token_steps(folder: Path) -> StepFiles:
    """Those of a run, also where only the trainer exported them."""
    files = token_files(folder)
    steps = {file.step for file in files if not file.is_evaluation}
    return StepFiles(sorted(steps.union(exported_steps(folder))), [file.step for file in files if file.is_evaluation])


def _page(branches: list[BranchTokens], place: int, first: int, count: int) -> TokenPage:
    branch = branches[place]
    where = slice(max(0, first), max(0, first) + count)
    trainer = branch.trainer

    def of_trainer(column: NDArray[Any] | None) -> list[Any] | None:
        return None if column is None else _plain(column[where])

    return TokenPage(
        rollout_id=branch.key.rollout_id,
        step=branch.key.step,
        branches=[_info(each, branch) for each in branches],
        branch=place,
        first=where.start,
        reward=branch.key.reward,
        outcome=branch.key.outcome,
        reason=branch.key.reason,
        is_exported=trainer is not None,
        has_context=bool((branch.token_ids >= 0).all()),
        token_ids=_plain(branch.token_ids[where]),
        texts=list(branch.texts[where]),
        origins=_plain(branch.origins[where]),
        versions=_plain(branch.policy_versions[where]),
        logprobs=_plain(branch.generator_logprobs[where]),
        loss_mask=_plain(branch.loss_mask[where]),
        advantages=_plain(branch.advantages[where]),
        support_sizes=None if branch.support_sizes is None else _plain(branch.support_sizes[where]),
        trainer_logprobs=of_trainer(None if trainer is None else trainer.logprobs),
        ratios=of_trainer(None if trainer is None else trainer.ratios),
        entropies=of_trainer(None if trainer is None else trainer.entropies),
        losses=of_trainer(None if trainer is None else trainer.losses),
        kept=of_trainer(None if trainer is None else trainer.kept),
        is_trained=of_trainer(None if trainer is None else trainer.is_trained),
        alternatives=_alternatives(branch, where),
    )


def _info(branch: BranchTokens, shown: BranchTokens) -> BranchInfo:
    key = branch.key
    return BranchInfo(
        branch=key.branch,
        num_tokens=key.num_tokens,
        num_completion_tokens=key.num_completion_tokens,
        forks_at=common_prefix(shown.token_ids, branch.token_ids),
    )


def _plain(column: NDArray[Any]) -> list[Any]:
    """In as few digits as the column has: seven of a 32-bit number."""
    values: list[Any] = (_seven_digits(column) if column.dtype == np.float32 else column).tolist()
    return values


def _seven_digits(column: NDArray[np.float32]) -> NDArray[np.float64]:
    """As numbers of 64 bits, which else have the other nine digits of what 32 bits cannot hold."""
    values = column.astype(np.float64)
    values[~np.isfinite(values)] = np.nan
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = 10.0 ** (6 - np.floor(np.log10(np.abs(values))))
        rounded = np.round(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)


def _alternatives(branch: BranchTokens, where: slice) -> list[list[tuple[str, float]]] | None:
    found = branch.alternatives
    if found is None:
        return None
    return [
        [
            (text, logprob)
            for text, token_id, logprob in zip(texts, token_ids, logprobs, strict=True)
            if token_id >= 0 and math.isfinite(logprob)
        ]
        for texts, token_ids, logprobs in zip(
            found.texts[where], found.token_ids[where].tolist(), found.logprobs[where].tolist(), strict=True
        )
    ]

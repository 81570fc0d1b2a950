"""The rows that made a step's loss or gradient not finite, in a file of the run's folder: for who looks for a cause.

    each step       what the policy made of a row stays where it was computed; nobody reads it
    not finite ─►   losses and log-probabilities are read; if all are finite, rows go through once more, for gradients
               ─►   nonfinite/step_000012_rank_0.npz:  dict(numpy.load(path)), columns of tokens, all of one length

Every rank writes its own rows, and all name each other's files. Of a row all tokens are kept, context included; of what
top-p and top-k left of the vocabulary only how much, and of columns with names of their own nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tailrace.records import Batch, BatchRow
from tailrace.training.model.head import LossOutput
from tailrace.training.model.sharding import own_share
from tailrace.training.ranks import Ranks
from tailrace.training.reports.token_export import on_host, spread, token_places
from tailrace.training.step.gradients import GradientPasses, RowOutput

MAX_ROWS: Final = 8
"""In one file, the first ones."""
MAX_TOKENS: Final = 1 << 18
"""In one file, but for its first row, which is whole whatever its length."""
KEPT_FILES: Final = 16
"""Of one rank, the newest."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Culprit:
    """A row that is not finite by itself."""

    index: int
    """Among the rows of its rank that bear loss."""
    row: BatchRow
    output: RowOutput
    what: str
    """`loss`, `components` or `gradient`."""


class NonFiniteRows:
    """Finds and keeps those of one rank. `folder` is where; without one they are counted alone."""

    def __init__(self, folder: Path | None, passes: GradientPasses, ranks: Ranks) -> None:
        self._folder, self._passes, self._ranks = folder, passes, ranks

    def report(self, batch: Batch, outputs: Sequence[RowOutput], version: int) -> str:
        """Keep the rows of a step that was not finite, all ranks together; a sentence that names them and their files.

        `outputs` are those of the batch's rows (`GradientPasses.add`), which was the last one there. Gradients are
        overwritten. Raises `RankLost`.
        """
        rows = self._passes.rows(batch)
        found = [
            _Culprit(index, row, output, what)
            for index, (row, output) in enumerate(zip(rows, outputs, strict=True))
            if (what := _not_finite(output.output))
        ]
        if not any(self._ranks.gather(len(found))):
            wanted = self._with_infinite_gradients(rows, version)
            found = [_Culprit(index, rows[index], outputs[index], "gradient") for index in wanted]
        path = self._save(batch.summary.step, found)
        return _sentence(self._ranks.gather([len(found), "" if path is None else str(path)]))

    def _with_infinite_gradients(self, rows: Sequence[BatchRow], version: int) -> list[int]:
        """Which of this rank's rows have such gradients. Rows of all ranks go through side by side, then one by one
        where their sum is not finite."""
        found, ranks = list[int](), self._ranks
        for index in range(max(ranks.gather(len(rows)))):
            row = rows[index] if index < len(rows) else None
            if self._has_finite_gradients(row, version):
                continue
            for rank in range(ranks.data_size):
                own = row if rank == ranks.data_rank else None
                is_finite = ranks.data_size > 1 and self._has_finite_gradients(own, version)
                if not is_finite and own is not None:
                    found.append(index)
        return found

    def _has_finite_gradients(self, row: BatchRow | None, version: int) -> bool:
        """After a pass in which this rank has `row`, or none, and each other rank its own. The same on all ranks."""
        weights = self._passes.weights
        for weight in weights:
            weight.grad = None
        with self._ranks.exchanging():
            self._passes.pass_over(row, version)
        own = all(bool(torch.isfinite(own_share(weight.grad)).all()) for weight in weights if weight.grad is not None)
        return all(self._ranks.gather(own))

    def _save(self, step: int, found: Sequence[_Culprit]) -> Path | None:
        """The file; None where there is nothing to save, or no room: that is logged and ends nothing."""
        if not found or self._folder is None:
            return None
        path = self._folder / f"step_{step:06d}_rank_{self._ranks.rank}.npz"
        part = path.with_suffix(".part")
        lengths = accumulate(len(one.row.token_ids) for one in found[:MAX_ROWS])
        kept = max(1, sum(length <= MAX_TOKENS for length in lengths))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **_columns(found[:kept]))
            part.replace(path)
            files = self._folder.glob(f"step_*_rank_{self._ranks.rank}.npz")
            # By time: a run that was resumed writes steps anew.
            for old in sorted(files, key=lambda file: file.stat().st_mtime_ns)[:-KEPT_FILES]:
                old.unlink()
        except OSError as error:
            _log.warning("the rows of step %d that are not finite could not be kept in %s: %s", step, path, error)
            with suppress(OSError):
                part.unlink()
            return None
        return path


def _not_finite(output: LossOutput) -> str:
    """What of a row is not: the loss of rewards, or what components add to it; "" where both are.

    Waits for the device. A log-probability of -inf is a probability of 0, of which a loss may come out finite.
    """
    if not bool(torch.isfinite(output.losses).all()) or bool(torch.isnan(output.logprobs).any()):
        return "loss"
    added = bool(torch.isfinite(output.losses.sum())) and not bool(torch.isfinite(output.total))
    return "components" if added else ""


def _columns(found: Sequence[_Culprit]) -> dict[str, NDArray[Any]]:
    """Of all tokens of the rows, by name."""
    parts = [_columns_of(one) for one in found]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _columns_of(one: _Culprit) -> dict[str, NDArray[Any]]:
    """[num_tokens of the row] each; what the trainer says only of tokens that bear loss is NaN, or False, elsewhere."""
    row, (positions, output) = one.row, one.output
    count = len(row.token_ids)
    return {
        "row": np.full(count, one.index, np.int32),
        "not_finite": np.full(count, one.what),
        **{name: np.asarray(column) for name, column in token_places(row, np.arange(count)).items()},
        "token_id": row.token_ids,
        "loss_mask": row.loss_mask,
        "mixed_cache": row.mixed_cache,
        "advantage": row.advantages,
        "temperature": np.repeat(row.temperatures, row.sample_lengths),
        "generator_logprob": row.logprobs,
        "trainer_logprob": spread(on_host(output.logprobs), positions, count, math.nan),
        "loss": spread(on_host(output.losses), positions, count, math.nan),
        "kept": spread(on_host(output.kept), positions, count, False),
        "policy_version": row.policy_versions,
        "support_size": row.support_sizes,
    }


def _sentence(counts: Sequence[Sequence[Any]]) -> str:
    """Of how many rows each rank found, and the file that it wrote.

    >>> _sentence([[2, "a.npz"], [0, ""], [1, ""]])
    'not finite are 2 rows of rank 0 (kept in a.npz), 1 row of rank 2'
    >>> _sentence([[0, ""]])
    'every row is finite by itself, only their sum is not'
    """
    ranks = [
        f"{count} row{'s' * (count > 1)} of rank {rank}" + (f" (kept in {path})" if path else "")
        for rank, (count, path) in enumerate(counts)
        if count
    ]
    return f"not finite are {', '.join(ranks)}" if ranks else "every row is finite by itself, only their sum is not"

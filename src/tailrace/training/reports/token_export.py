"""Every token that a step trained on, in a file of the run's folder: for viewers, and for whoever checks the figures.

Those too that bear components of the loss alone: demonstrated ones, which no policy sampled and which so have no ratio,
and sampled ones that are too old for the loss of rewards.

    trainer's thread: a row's columns are copied ─► one thread writes  tokens/step_000012_rank_0.parquet  (or .jsonl)

A token is joined to its rollout by `rollout_id`, `branch` and `position`, its place in that branch. Training waits for
the writer only where that is a whole step behind.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tailrace.records import BatchRow
from tailrace.training.model.head import LossOutput
from tailrace.training.settings.trainer import BESIDE_ROLLOUTS, ExportFormat, require_export

Columns: TypeAlias = Mapping[str, NDArray[np.generic] | Sequence[str]]

_REMEMBERED_TEXTS = 1 << 18
_GROUP_TOKENS = 1 << 16
"""Readers skip groups in which a rollout is not."""
_log = logging.getLogger(__name__)


class TokenExport:
    """The files of one rank."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        form: ExportFormat,
        *,
        rank: int = 0,
        every_steps: int = 1,
        beside_rollouts: bool = False,
    ) -> None:
        """`tokenizer` tells the texts. With `beside_rollouts` Parquet files say that they go with those of rollouts.

        Raises `SettingsError` where Parquet cannot be written here.
        """
        require_export(form)
        self._folder, self._form, self._rank, self._every_steps = folder, form, rank, every_steps
        self._metadata = {BESIDE_ROLLOUTS: b"true"} if beside_rollouts else None
        self._text = lru_cache(_REMEMBERED_TEXTS)(lambda token_id: tokenizer.decode([token_id], False))
        self._rows: list[Columns] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-export")
        self._writing: Future[None] | None = None

    def wants(self, step: int) -> bool:
        """Whether the step's tokens are exported."""
        return step % self._every_steps == 0

    def add(self, row: BatchRow, output: LossOutput, positions: NDArray[np.int64], rewarded: LossOutput) -> None:
        """Copy what the step made of a row: `output` is of its tokens at `positions`, all that are trained.

        `rewarded` is what the loss of rewards says of those that bear it.
        """
        loss_mask, logprobs = row.loss_mask[positions], on_host(output.logprobs)
        places = np.flatnonzero(loss_mask)
        versions = row.policy_versions[positions]
        generated = np.where(versions >= 0, row.logprobs[positions], np.float32(math.nan))
        with np.errstate(over="ignore"):
            ratios = np.exp(logprobs - generated)
        self._rows.append(
            {
                **token_places(row, positions),
                "token_id": row.token_ids[positions],
                "loss_mask": loss_mask,
                "kept": spread(on_host(rewarded.kept), places, len(positions), False),
                "advantage": row.advantages[positions],
                "loss": spread(on_host(rewarded.losses), places, len(positions), 0.0),
                "trainer_logprob": logprobs,
                "generator_logprob": generated,
                "ratio": ratios,
                "entropy": on_host(output.entropy),
                "policy_version": versions,
                "support_size": row.support_sizes[positions],
            }
        )

    def end_step(self, step: int) -> None:
        """Hand what was added since the last step to the thread that writes it."""
        rows, self._rows = self._rows, []
        if self._writing is not None:
            self._writing.result()
        self._writing = self._thread.submit(self._write, step, rows)

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()

    def _write(self, step: int, rows: list[Columns]) -> None:
        if not rows:
            return
        path = self._folder / f"step_{step:06d}_rank_{self._rank}.{self._form}"
        columns: dict[str, NDArray[np.generic] | list[str]] = {}
        for name, first in rows[0].items():
            parts = [row[name] for row in rows]
            columns[name] = np.concatenate(parts) if isinstance(first, np.ndarray) else [*chain.from_iterable(parts)]
        columns["text"] = [self._text(token_id) for token_id in np.asarray(columns["token_id"]).tolist()]
        part = path.with_name(f"{path.name}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._form == "parquet":
                _write_parquet(part, columns, self._metadata)
            else:
                _write_lines(part, columns)
            part.replace(path)
        except OSError as error:
            _log.warning("the tokens of step %d could not be exported to %s: %s", step, path, error.strerror)
            with suppress(OSError):
                part.unlink()


def _write_parquet(path: Path, columns: Columns, metadata: Mapping[bytes, bytes] | None) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()}, metadata=metadata)
    parquet.write_table(table, path, compression="zstd", row_group_size=_GROUP_TOKENS)


def _write_lines(path: Path, columns: Columns) -> None:
    """A JSON object a line; what is not finite is null, as JSON knows no infinity."""
    with path.open("wb") as file:
        file.writelines(_lines(columns))


def _lines(columns: Columns) -> Iterator[bytes]:
    names = list(columns)
    values = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns.values()]
    for row in zip(*values, strict=True):
        yield msgspec.json.encode(dict(zip(names, row, strict=True))) + b"\n"


def token_places(row: BatchRow, positions: NDArray[np.int64]) -> Columns:
    """Where the tokens at these positions of a row come from: what joins them to their rollouts; "" where unknown."""
    edges = np.concatenate([[0], np.cumsum(row.sample_lengths)])
    samples, origins = np.searchsorted(edges, positions, side="right") - 1, row.origins
    known = bool(origins.rollout_ids)
    return {
        "rollout_id": [origins.rollout_ids[sample] if known else "" for sample in samples.tolist()],
        "branch": np.array(origins.branches if known else [0] * len(row.sample_lengths), np.int32)[samples],
        "position": (positions - edges[samples]).astype(np.int32),
        "environment": [
            origins.environments[origins.environment_ids[sample]] if known else "" for sample in samples.tolist()
        ],
    }


def spread(values: NDArray[Any], places: NDArray[np.int64], count: int, elsewhere: float | bool) -> NDArray[Any]:
    """[count]: the values at their places, and another one elsewhere."""
    column = np.full(count, elsewhere, values.dtype)
    column[places] = values
    return column


def on_host(column: Tensor) -> NDArray[Any]:
    """[num_loss_tokens]: the tensor's own memory where that is the host's, since nobody writes to it again."""
    array: NDArray[Any] = (column if column.dtype is torch.bool else column.float()).cpu().numpy()
    return array

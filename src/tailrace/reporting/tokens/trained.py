"""What the trainer exported of a rollout's tokens (`training/reports/token_export.py`), one row a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import DataError
from tailrace.guards import guarded
from tailrace.records import BoolArray, Float32Array
from tailrace.reporting.tokens.arrow_columns import numbers_of, places_of, texts_of

_COLUMNS: Mapping[str, type[np.generic]] = {
    "branch": np.int32,
    "position": np.int32,
    "loss_mask": np.bool_,
    "kept": np.bool_,
    **dict.fromkeys(("advantage", "loss", "trainer_logprob", "ratio", "entropy"), np.float32),
}


ALONE: Mapping[str, type[np.generic]] = {
    **_COLUMNS,
    **dict.fromkeys(("token_id", "policy_version", "support_size"), np.int32),
    "generator_logprob": np.float32,
    "text": np.object_,
}
"""What is read of an export that stands for its rollouts' own file."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainerTokens:
    """A branch as the trainer saw it: [num_tokens] each, NaN where a token was not trained."""

    logprobs: Float32Array
    """Of the trained policy before the step."""
    ratios: Float32Array
    """Trainer's probability over the generator's."""
    entropies: Float32Array
    """In nats."""
    losses: Float32Array
    kept: BoolArray
    """Whether the loss kept the token: masks may have rejected it."""
    is_trained: BoolArray
    """Whether it was exported at all: it bears a loss, that of rewards or another."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportedTokens:
    """The exported tokens of one branch, in any order."""

    columns: Mapping[str, NDArray[Any]]
    """[num_exported] each, by the names of `_COLUMNS`, or of `ALONE`."""

    def spread(self, count: int) -> TrainerTokens:
        """Over the branch's tokens. Raises `IndexError` for one that the branch has not."""
        return TrainerTokens(
            logprobs=self._column("trainer_logprob", count),
            ratios=self._column("ratio", count),
            entropies=self._column("entropy", count),
            losses=self._column("loss", count),
            kept=self._placed(np.zeros(count, np.bool_), self.columns["kept"]),
            is_trained=self._placed(np.zeros(count, np.bool_), True),
        )

    def loss_mask(self, count: int) -> BoolArray:
        """[num_tokens]: which tokens bore the loss of rewards."""
        return self._placed(np.zeros(count, np.bool_), self.columns["loss_mask"])

    def advantages(self, known: Float32Array) -> Float32Array:
        """[num_tokens]: those trained with, where they bore that loss, and `known` elsewhere."""
        bears = self.columns["loss_mask"]
        whole = known.copy()
        whole[self.columns["position"][bears]] = self.columns["advantage"][bears]
        return whole

    def _column(self, name: str, count: int) -> Float32Array:
        return self._placed(np.full(count, np.nan, np.float32), self.columns[name])

    def _placed(self, whole: NDArray[Any], values: NDArray[Any] | bool) -> NDArray[Any]:
        whole[self.columns["position"]] = values
        return whole


class _Line(msgspec.Struct):
    """A line of the export's other form; what was not finite is null there."""

    rollout_id: str
    branch: int
    position: int
    loss_mask: bool
    kept: bool
    advantage: float | None
    loss: float | None
    trainer_logprob: float | None
    ratio: float | None
    entropy: float | None
    token_id: int = -1
    policy_version: int = -1
    support_size: int = 0
    generator_logprob: float | None = None
    text: str = ""


def read_exported(
    paths: Iterable[Path], rollout_id: str, columns: Mapping[str, type[np.generic]] = _COLUMNS
) -> dict[int, ExportedTokens]:
    """What all ranks exported of a rollout, by branch. Raises `DataError` for a file that is broken."""
    parts: list[Mapping[str, NDArray[Any]]] = []
    for path in paths:
        with guarded(f"{path} holds no exported tokens", DataError):
            parts.append((_read_parquet if path.suffix == ".parquet" else _read_lines)(path, rollout_id, columns))
    if not parts:
        return {}
    whole = {name: np.concatenate([part[name] for part in parts]) for name in columns}
    branches = whole["branch"]
    return {
        int(branch): ExportedTokens({name: column[branches == branch] for name, column in whole.items()})
        for branch in np.unique(branches)
    }


def _read_parquet(path: Path, rollout_id: str, columns: Mapping[str, type[np.generic]]) -> Mapping[str, NDArray[Any]]:
    """Of row groups without the rollout only their ids."""
    from pyarrow import parquet

    parts: list[Mapping[str, NDArray[Any]]] = []
    texts = ["rollout_id", *(name for name, kind in columns.items() if kind is np.object_)]
    with parquet.ParquetFile(path, read_dictionary=texts) as source:
        for group in range(source.num_row_groups):
            places = places_of(source.read_row_group(group, ["rollout_id"], use_threads=False).column(0), rollout_id)
            if len(places):
                table = source.read_row_group(group, list(columns), use_threads=False)
                parts.append({name: _values(table.column(name))[places].astype(kind) for name, kind in columns.items()})
    return {
        name: np.concatenate([np.empty(0, kind), *(part[name] for part in parts)]) for name, kind in columns.items()
    }


def _values(column: Any) -> NDArray[Any]:
    from pyarrow.types import is_dictionary

    return np.array(texts_of(column), np.object_) if is_dictionary(column.type) else numbers_of(column)


def _read_lines(path: Path, rollout_id: str, columns: Mapping[str, type[np.generic]]) -> Mapping[str, NDArray[Any]]:
    decode = msgspec.json.Decoder(_Line).decode
    with path.open("rb") as file:
        lines = [found for line in file if line.strip() and (found := decode(line)).rollout_id == rollout_id]
    return {
        name: np.array([np.nan if (value := getattr(line, name)) is None else value for line in lines], kind)
        for name, kind in columns.items()
    }

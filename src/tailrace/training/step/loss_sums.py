"""Sums over the tokens of a batch that become metrics; they stay on the device until the step reads them, once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailrace.errors import TrainingError
from tailrace.records import BatchSummary
from tailrace.training.losses import Component, Divisor, Loss, MeasuredLoss, WeightedLoss
from tailrace.training.model.head import LossOutput
from tailrace.training.ranks import Ranks
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.step.component_sums import ComponentSums

REJECTED_SHARE = "training/rejected_share"
MAX_LOG_RATIO = 20.0
"""In metrics alone: ratios above e^20 are one and the same catastrophe, and sums of their squares stay finite."""
MAX_RATIO = math.exp(MAX_LOG_RATIO)


OF_ENVIRONMENTS = frozenset(
    {
        "kl",
        "entropy",
        "clip_share",
        "rejected_share",
        "effective_sample_share",
        "ratio_mean",
        "logprob_difference",
    }
)
"""What is told of each environment by itself, too."""


class LossSums:
    """Grows with each micro-batch of a batch."""

    def __init__(
        self,
        loss: Loss,
        divisor: Divisor,
        environments: Sequence[str] = (),
        components: Sequence[Component] = (),
        version: int = 0,
    ) -> None:
        """`environments` are the batch's, on all ranks alike; where none is told, figures are of the whole alone.

        `version` is the one that trains on it.
        """
        self._added = ComponentSums(components, environments)
        self._measured = loss if isinstance(loss, MeasuredLoss) else None
        self._weighted = loss if isinstance(loss, WeightedLoss) else None
        self._divisor = divisor
        self._environments, self._version = tuple(environments), version
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None  # [num_environments, num_names], float64: float32 cannot count that far
        self._maxima: Tensor | None = None  # [num_environments, 2], float64: of ratios and ages

    def add(self, output: LossOutput, micro_batch: MicroBatch) -> None:
        """Add one micro-batch, of tokens that bear the loss of rewards; `output` is without components.

        The divergence from the generator is the k3 estimate of KL(μ ‖ π_θ): E_μ[r - 1 - log r]
        (Schulman 2020, "Approximating KL divergence").
        """
        tokens = micro_batch.tokens
        if tokens.is_nothing:  # a row of demonstrations
            return
        log_ratio = (output.logprobs - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
        ratio, difference = log_ratio.exp(), log_ratio.abs()
        columns = {
            "tokens": torch.ones_like(ratio),
            "sequences": tokens.spread(tokens.sample_lengths.double().reciprocal()),  # 1 over all tokens of one
            "loss": output.losses,
            "rejected": ~output.kept,
            "training/kl": ratio - 1 - log_ratio,
            "training/entropy": output.entropy,
            "training/ratio_mean": ratio,
            "training/logprob_difference": difference,
            "fresh_tokens": micro_batch.fresh,
            "fresh_difference": difference * micro_batch.fresh,
            "mixed_tokens": micro_batch.mixed,
            "mixed_difference": difference * micro_batch.mixed,
            "age": self._version - tokens.policy_versions,
        }
        if self._measured is not None:
            columns |= self._measured.token_metrics(output.logprobs, tokens)
        columns |= self._weight_columns(output, micro_batch)
        if self._sums is None or self._maxima is None:
            self._names = tuple(columns)
            zeros = torch.zeros(max(1, len(self._environments)), 1, dtype=torch.float64, device=ratio.device)
            self._sums, self._maxima = zeros.repeat(1, len(columns)), zeros.repeat(1, 2)
        _require_same_names(self._names, tuple(columns))
        values = torch.stack([column.double() for column in columns.values()], dim=1)
        self._sums.index_add_(0, micro_batch.environments, values)
        largest = torch.stack([ratio.double(), columns["age"].double()], dim=1)
        self._maxima.scatter_reduce_(0, micro_batch.environments[:, None].expand(-1, 2), largest, "amax")

    def add_components(self, output: LossOutput, micro_batch: MicroBatch) -> None:
        """Add what components say of all tokens of one micro-batch."""
        self._added.add(output, micro_batch)

    def reduce(self, ranks: Ranks) -> None:
        """Make these the sums over all ranks, the same on each. Waits for the device, and for the other ranks."""
        if ranks.size == 1:
            return
        own: list[Any] | None = None
        if self._sums is not None and self._maxima is not None:
            own = [self._names, self._sums.tolist(), self._maxima.tolist()]
        gathered: list[list[Any]] = ranks.gather([own, self._added.as_lists()])
        self._added.join([added for _, added in gathered])
        if parts := [part for part, _ in gathered if part is not None]:
            names, sums, maxima = zip(*parts, strict=True)
            self._names = tuple(names[0])
            for others in names:
                _require_same_names(self._names, tuple(others))
            self._sums = torch.tensor(sums, dtype=torch.float64).sum(0)
            self._maxima = torch.tensor(maxima, dtype=torch.float64).amax(0)

    def _weight_columns(self, output: LossOutput, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Weights and their squares, of which an effective sample size is made; a rejected token weighs nothing."""
        if self._weighted is None:
            return {}
        weights = self._weighted.importance_weights(output.logprobs, micro_batch.tokens)
        if weights is None:
            return {}
        weights = weights.clamp(max=MAX_RATIO).where(output.kept, 0.0)
        return {"weights": weights, "squared_weights": weights.square()}

    def read(self, batch: BatchSummary) -> tuple[dict[str, float], int]:
        """Metrics of the whole `batch` by their names in the table, and how many of its tokens the loss kept.

        Waits for the device. Nothing fresh, mixed or rejected: no metric of it.
        """
        added, added_loss = self._added.read(batch)
        metrics, kept = self._read_rewards(batch)
        if added:
            metrics["training/reward_loss"] = metrics["training/loss"]
            metrics["training/loss"] += added_loss
        return metrics | added, kept

    def _read_rewards(self, batch: BatchSummary) -> tuple[dict[str, float], int]:
        if self._sums is None or self._maxima is None:
            return {"training/loss": 0.0}, batch.loss_tokens
        rows: list[list[float]] = torch.cat([self._sums, self._maxima], dim=1).tolist()
        each = [dict(zip(self._names, row[:-2], strict=True)) for row in rows]
        maxima = [row[-2:] for row in rows]
        whole = {name: sum(sums[name] for sums in each) for name in self._names}
        if not whole["tokens"]:
            return {"training/loss": 0.0}, batch.loss_tokens
        kept = batch.loss_tokens - int(whole["rejected"])
        divisor = max(self._divisor.final(batch, kept), 1)
        ratio_max = float(np.max([ratio for ratio, _ in maxima]))  # NaN where one is
        metrics = _figures(whole) | {"training/loss": whole["loss"] / divisor, "training/ratio_max": ratio_max}
        for environment, sums, largest in zip(self._environments, each, maxima, strict=False):
            metrics |= self._of_environment(environment, sums, *largest)
        return metrics, kept

    def _of_environment(
        self, environment: str, sums: Mapping[str, float], ratio_max: float, age_max: float
    ) -> dict[str, float]:
        """Figures of the tokens of one environment, under its name."""
        if not sums["tokens"]:
            return {}
        planned, rejected, sequences = (round(sums[name]) for name in ("tokens", "rejected", "sequences"))
        metrics = {f"training/{environment}/loss_tokens": sums["tokens"]}
        divisor = self._divisor.of(planned, planned - rejected, sequences)
        metrics[f"training/{environment}/loss"] = sums["loss"] / max(divisor, 1)
        metrics[f"training/{environment}/staleness"] = sums["age"] / sums["tokens"]
        metrics[f"training/{environment}/staleness_max"] = age_max
        metrics[f"training/{environment}/ratio_max"] = ratio_max
        for name, value in _figures(sums).items():
            key = name.removeprefix("training/")
            if key in OF_ENVIRONMENTS or key.startswith("rejected_share/"):
                metrics[f"training/{environment}/{key}"] = value
        return metrics


def _require_same_names(names: tuple[str, ...], others: tuple[str, ...]) -> None:
    """What is told of one row alone is no mean over a batch."""
    if names != others:
        odd = ", ".join(sorted({*names} ^ {*others}))
        raise TrainingError(
            f"trainer.loss.name: what the loss tells of some tokens it does not tell of others ({odd}): token_metrics "
            "must have the same names at each call, and importance_weights be None at each, or at none"
        )


def _figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over tokens, of their sums: of those that are metrics, whose names have a slash."""
    left, tokens = dict(sums), max(sums["tokens"], 1.0)
    figures = dict[str, float]()
    for kind in ("fresh", "mixed"):
        count, difference = left.pop(f"{kind}_tokens"), left.pop(f"{kind}_difference")
        if count:
            figures[f"training/logprob_difference_{kind}"] = difference / count
    left.pop("sequences")
    squares, weights = left.pop("squared_weights", 0.0), left.pop("weights", 0.0)
    if squares:
        figures["training/effective_sample_share"] = min(1.0, weights**2 / (tokens * squares))  # but for rounding
    if left["rejected"] or any(name.startswith(REJECTED_SHARE) for name in left):
        figures[REJECTED_SHARE] = left["rejected"] / tokens
    return figures | {name: value / tokens for name, value in left.items() if "/" in name}

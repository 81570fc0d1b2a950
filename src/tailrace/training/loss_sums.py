"""Sums over the tokens of a batch that become metrics; they stay on the device until the step reads them, once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tailrace.records import BatchSummary
from tailrace.training.head import LossOutput
from tailrace.training.losses import Divisor, Loss, MeasuredLoss, WeightedLoss
from tailrace.training.micro_batch import MicroBatch

REJECTED_SHARE = "training/rejected_share"
MAX_LOG_RATIO = 20.0
"""In metrics alone: ratios above e^20 are one and the same catastrophe, and sums of their squares stay finite."""
MAX_RATIO = math.exp(MAX_LOG_RATIO)


class LossSums:
    """Grows with each micro-batch of a batch."""

    def __init__(self, loss: Loss, divisor: Divisor) -> None:
        self._measured = loss if isinstance(loss, MeasuredLoss) else None
        self._weighted = loss if isinstance(loss, WeightedLoss) else None
        self._divisor = divisor
        self._tokens = 0
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None  # [num_names], float64: a batch may have more tokens than float32 can count
        self._ratio_max: Tensor | None = None

    def add(self, output: LossOutput, micro_batch: MicroBatch) -> None:
        """Add one micro-batch.

        The divergence from the generator is the k3 estimate of KL(μ ‖ π_θ): E_μ[r - 1 - log r]
        (Schulman 2020, "Approximating KL divergence").
        """
        tokens = micro_batch.tokens
        log_ratio = (output.logprobs - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
        ratio, difference = log_ratio.exp(), log_ratio.abs()
        columns = {
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
        }
        if self._measured is not None:
            columns |= self._measured.token_metrics(output.logprobs, tokens)
        columns |= self._weight_columns(output, micro_batch)
        sums, ratio_max = torch.stack([column.float() for column in columns.values()]).sum(1).double(), ratio.max()
        self._names, self._tokens = tuple(columns), self._tokens + len(ratio)
        self._sums = sums if self._sums is None else self._sums + sums
        self._ratio_max = ratio_max if self._ratio_max is None else torch.maximum(self._ratio_max, ratio_max)

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
        if self._sums is None or self._ratio_max is None:
            return {"training/loss": 0.0}, batch.loss_tokens
        *totals, ratio_max = torch.cat([self._sums, self._ratio_max[None].double()]).tolist()
        sums = dict(zip(self._names, totals, strict=True))
        rejected = sums.pop("rejected")
        kept = batch.loss_tokens - int(rejected)
        divisor = max(self._divisor.final(batch, kept), 1)
        metrics = {"training/loss": sums.pop("loss") / divisor, "training/ratio_max": ratio_max}
        for kind in ("fresh", "mixed"):
            count, difference = sums.pop(f"{kind}_tokens"), sums.pop(f"{kind}_difference")
            if count:
                metrics[f"training/logprob_difference_{kind}"] = difference / count
        if squares := sums.pop("squared_weights", 0.0):
            metrics["training/effective_sample_share"] = sums.pop("weights") ** 2 / (self._tokens * squares)
        sums.pop("weights", None)
        if rejected or any(name.startswith(REJECTED_SHARE) for name in sums):
            metrics[REJECTED_SHARE] = rejected / self._tokens
        return metrics | {name: value / self._tokens for name, value in sums.items()}, kept

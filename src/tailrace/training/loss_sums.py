"""Sums over the tokens of a batch, that become metrics. They stay on the device until the step reads them, once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.training.head import LossOutput
from tailrace.training.losses import Loss, MeasuredLoss
from tailrace.training.losses.clipped_ratio import MAX_LOG_RATIO
from tailrace.training.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class LossTotals:
    """Of one batch, on the host."""

    tokens: int
    """That bear loss."""
    sums: dict[str, float]

    @property
    def loss(self) -> float:
        """Of the kept tokens, not divided by anything."""
        return self.sums.get("loss", 0.0)

    @property
    def rejected(self) -> int:
        """Tokens that the loss did not keep."""
        return int(self.sums.get("rejected", 0.0))

    def metrics(self, denominator: float) -> dict[str, float]:
        """Metrics of the batch, by their names in the table. Nothing fresh, mixed or rejected: no figure for it."""
        sums, tokens = dict(self.sums), max(self.tokens, 1)
        metrics = {"training/loss": sums.pop("loss", 0.0) / denominator}
        metrics["training/ratio_max"] = sums.pop("ratio_max", 0.0)
        for kind in ("fresh", "mixed"):
            count, difference = (sums.pop(name, 0.0) for name in (f"{kind}_tokens", f"{kind}_difference"))
            if count:
                metrics[f"training/logprob_difference_{kind}"] = difference / count
        if rejected := sums.pop("rejected", 0.0):
            metrics["training/rejected_share"] = rejected / tokens
        return metrics | {name: value / tokens for name, value in sums.items()}


class LossSums:
    """Grows with each micro-batch of a batch."""

    def __init__(self, loss: Loss) -> None:
        self._measured = loss if isinstance(loss, MeasuredLoss) else None
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
        sums, ratio_max = torch.stack([column.float() for column in columns.values()]).sum(1).double(), ratio.max()
        self._names, self._tokens = tuple(columns), self._tokens + len(ratio)
        self._sums = sums if self._sums is None else self._sums + sums
        self._ratio_max = ratio_max if self._ratio_max is None else torch.maximum(self._ratio_max, ratio_max)

    def read(self) -> LossTotals:
        """What was added; waits for the device."""
        if self._sums is None or self._ratio_max is None:
            return LossTotals(0, {})
        totals = torch.cat([self._sums, self._ratio_max[None].double()]).tolist()
        return LossTotals(self._tokens, dict(zip((*self._names, "ratio_max"), totals, strict=True)))

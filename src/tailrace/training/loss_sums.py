"""Sums over the tokens of a batch that become metrics; they stay on the device until the step reads them, once."""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.training.head import LossOutput
from tailrace.training.losses import Loss, MeasuredLoss
from tailrace.training.losses.clipped_ratio import MAX_LOG_RATIO
from tailrace.training.micro_batch import MicroBatch


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

    def read(self, loss_tokens: int) -> tuple[dict[str, float], int]:
        """Metrics of a batch of `loss_tokens` by their names in the table, and how many the loss kept.

        Waits for the device. Nothing fresh, mixed or rejected: no metric of it.
        """
        if self._sums is None or self._ratio_max is None:
            return {"training/loss": 0.0}, loss_tokens
        *totals, ratio_max = torch.cat([self._sums, self._ratio_max[None].double()]).tolist()
        sums = dict(zip(self._names, totals, strict=True))
        rejected = sums.pop("rejected")
        kept = loss_tokens - int(rejected)
        metrics = {"training/loss": sums.pop("loss") / max(kept, 1), "training/ratio_max": ratio_max}
        for kind in ("fresh", "mixed"):
            count, difference = sums.pop(f"{kind}_tokens"), sums.pop(f"{kind}_difference")
            if count:
                metrics[f"training/logprob_difference_{kind}"] = difference / count
        if rejected:
            metrics["training/rejected_share"] = rejected / self._tokens
        return metrics | {name: value / self._tokens for name, value in sums.items()}, kept

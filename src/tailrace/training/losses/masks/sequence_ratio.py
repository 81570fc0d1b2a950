r"""Whole sequences do not count whose probability has changed too much.

    kept where low ≤ Π_t r_t ≤ high,   r_t = π_θ(y_t) / μ(y_t), over the tokens of the sequence that bear loss

TRL's `sequence_mask`, its default with vLLM, with high = 3 (trl/trainer/grpo_trainer.py, 1.16.0); after Liu, Li et al.
2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
(richardli.xyz/rl-collapse). The product is the importance weight of the sequence, without bias and with a spread that
grows with its length: long sequences are rejected first. `geometric_ratio` does not know lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.masks.protocol import Mask
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import log_ratios, within
from tailrace.training.settings.masks import SequenceRatioSettings


@dataclass(frozen=True, slots=True)
class SequenceRatio(Mask):
    """Sequences by the product of their ratios."""

    settings: SequenceRatioSettings

    @override
    def keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        total = tokens.sum_by_sample(log_ratios(logprobs, tokens))
        return tokens.spread(within(total, self.settings.low, self.settings.high))

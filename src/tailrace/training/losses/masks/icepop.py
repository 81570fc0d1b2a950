r"""IcePop: tokens about which trainer and generator disagree too much do not count.

    kept where α ≤ r_t ≤ β,   r_t = π_θ(y_t) / μ(y_t)

Ling team 2025, "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!" (ringtech.notion.site/icepop),
with its α = 0.5 and β = 5. There the ratio is that of the trainer's policy before its steps on a batch, which with one
step per batch is π_θ; the weight of what is kept is the ratio itself, as in `aipo`, `cispo` or `ipo`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.masks.protocol import PointwiseMask
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import ratios
from tailrace.training.settings.masks import IcePopSettings


@dataclass(frozen=True, slots=True)
class IcePop(PointwiseMask):
    """Tokens by their ratios."""

    settings: IcePopSettings

    @override
    def keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        ratio = ratios(logprobs, tokens)
        return (ratio >= self.settings.low) & (ratio <= self.settings.high)

r"""IPO: a token counts while trainer and generator agree about its probability.

    J = 1/N Σ_t [ |π_θ(y_t) - μ(y_t)| ≤ ε ] r_t A_t,   r_t = π_θ(y_t) / μ(y_t)

over the N planned tokens, rejected ones included. "INTELLECT Policy Optimization", the default of prime-rl
(docs.primeintellect.ai/prime-rl/ipo, 2026), with its ε = 0.3. A difference of probabilities leaves rare tokens alone,
whose ratios are large by noise, and finds the likely ones that moved, whose ratios look harmless. Unlike in `dppo` the
sign of the advantage does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from tailrace.training.losses.protocol import LossTokens, PointwiseLoss
from tailrace.training.losses.ratios import ratios
from tailrace.training.settings.losses import IpoSettings


@dataclass(frozen=True, slots=True)
class Ipo(PointwiseLoss):
    """-r A of each token that it keeps."""

    settings: IpoSettings

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative of -r A by log π is itself."""
        loss = -ratios(logprobs, tokens) * tokens.advantages
        return loss, loss, self._keeps(logprobs, tokens)

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> Mapping[str, Tensor]:
        """Which tokens were rejected."""
        return {"training/rejected_share/ipo": ~self._keeps(logprobs, tokens)}

    def importance_weights(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """r."""
        return ratios(logprobs, tokens)

    def _keeps(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        return (logprobs.exp() - tokens.logprobs.exp()).abs() <= self.settings.threshold

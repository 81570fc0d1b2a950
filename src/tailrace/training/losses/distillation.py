r"""On-policy distillation: the reverse divergence from a teacher, at every token that the policy sampled.

    L = 1/N Σ_t w_t sg[min(r_t, C) (log π(y_t) - log π_T(y_t))] log π(y_t),   r_t = π(y_t) / μ(y_t)

over the N planned tokens with a weight w_t (1, unless the column `distillation_weights` says), π_T the teacher, sg the
stop-gradient: where w is 1 a policy gradient with the advantage log π_T(y_t) - log π(y_t), whose gradient is that of
KL(π ‖ π_T) at the states that the policy came to, for any μ as far as C does not truncate it. Agarwal et al. 2024,
"On-Policy Distillation of Language Models" (arXiv:2306.13649): GKD with the reverse divergence, on the student's own
samples alone (λ = 1); Gu et al. 2024, "MiniLLM" (arXiv:2306.08543); as a dense reward, in this form, Lu et al. 2025,
"On-Policy Distillation" (Thinking Machines).

Unlike a reference model (`reference_kl`), a teacher is another and better model, that the policy is to become.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from tailrace.records import TEACHER_LOGPROBS
from tailrace.training.losses.components import TokenComponent
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import ratios, weighted
from tailrace.training.settings.components import DistillationSettings


@dataclass(frozen=True, slots=True)
class Distillation(TokenComponent):
    """min(r, C) (log π - log π_T) of each token, and that as its derivative."""

    name: ClassVar = "distillation"
    settings: DistillationSettings

    @override
    def of_token(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        weights = ratios(logprobs, tokens).clamp(max=self.settings.truncation)
        slope = weighted(weights, self.measure(logprobs, tokens))
        return slope, slope

    @override
    def measure(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """log π - log π_T."""
        return logprobs - tokens.columns[TEACHER_LOGPROBS].to(logprobs.dtype)

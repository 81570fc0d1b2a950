r"""On-policy distillation from what a teacher finds likely: a divergence at every place where the policy sampled.

    L = 1/N Σ_t w_t d(π, q)

over the N planned tokens with a weight w_t (1, unless the column `distillation_weights` says). With S the teacher's k
likeliest tokens there, q and π the probabilities that teacher and policy give to them, and one bucket, 0, for all other
tokens, q_0 = 1 - Σ_{i ∈ S} q_i and π_0 = 1 - Σ_{i ∈ S} π_i, each with ε added, d is

    divergence   added per token                          its derivative by log π_i, i ∈ S
    reverse      Σ_{i ∈ S ∪ {0}} π_i log(π_i / q_i)       π_i (log(π_i / q_i) - log(π_0 / q_0))
    forward      Σ_{i ∈ S ∪ {0}} q_i log(q_i / π_i)       -q_i + q_0 π_i / π_0

Both are 0 where π and q agree on S, and never below. They are divergences of the distributions over S and the bucket,
so that none exceeds that over the whole vocabulary, and they come near it as q_0 vanishes. Without the bucket nothing
would hold the policy on S: the sum over S alone falls as π leaves it. ε = 1e-5 is added to both buckets because
they are differences of numbers that are near 1 in float32: a bucket much below it counts as ε.

The sampled token has no part in it but to have led there: no importance weight, and none of the noise of
one sample (`distillation` judges by that token alone, with the same gradient on average where S is the vocabulary).
Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649): GKD with either divergence, on the
student's own samples alone (λ = 1). Of others, TRL has such a bucket (`loss_add_tail`), and from a server's top k the
forward divergence alone; verl has the forward one without a bucket; NeMo-RL has both, over the top k renormalised, or
with a penalty for what the student has outside of it (`zero_outside_topk`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from tailrace.records import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS
from tailrace.training.losses.components import CandidateComponent
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.losses.ratios import weighted
from tailrace.training.settings.components import DistillationSettings

_BUCKET_FLOOR = 1e-5
"""ε."""


@dataclass(frozen=True, slots=True)
class TopDistillation(CandidateComponent):
    """The divergence over the teacher's likeliest tokens, at all tokens that were sampled."""

    name: ClassVar = "distillation"
    settings: DistillationSettings

    @override
    def candidates(self, tokens: LossTokens) -> Tensor:
        return tokens.columns[TEACHER_TOP_IDS].long()

    @override
    def with_derivatives(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        bears = (tokens.columns[TEACHER_TOP_IDS] >= 0) & tokens.reward_mask[:, None]
        teacher_logprobs = tokens.columns[TEACHER_TOP_LOGPROBS].to(logprobs.dtype)
        policy, teacher = (one.exp().where(bears, 0.0) for one in (logprobs, teacher_logprobs))
        policy_bucket, teacher_bucket = _bucket(policy), _bucket(teacher)
        difference = (logprobs - teacher_logprobs).where(bears, 0.0)  # log(π / q)
        bucket_difference = (policy_bucket / teacher_bucket).log()
        if self.settings.divergence == "forward":
            losses = -(teacher * difference).sum(1) - teacher_bucket * bucket_difference
            derivatives = (teacher_bucket / policy_bucket)[:, None] * policy - teacher
        else:
            losses = weighted(policy, difference).sum(1) + policy_bucket * bucket_difference
            derivatives = weighted(policy, difference - bucket_difference[:, None])
        return losses.where(tokens.reward_mask, 0.0), derivatives


def _bucket(probabilities: Tensor) -> Tensor:
    """[num_loss_tokens]: what is left beside them, and ε."""
    return (1 - probabilities.sum(1)).clamp(min=0.0) + _BUCKET_FLOOR

r"""DAPO: PPO's clipped ratio with a higher upper bound, and one mean over all tokens of a batch.

    J = 1/N Σ_t min( r_t A_t,  clip(r_t, 1 - ε_low, 1 + ε_high) A_t ),   r_t = π_θ(y_t) / μ(y_t)

over the N tokens that are kept, here all of them. Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning
System at Scale" (arXiv:2503.14476): "clip-higher" with ε = 0.2 and 0.28, and the mean over tokens, which lets long
sequences weigh as much as they are long. Its other two parts are elsewhere: dynamic sampling is
`scheduling.filter_zero_spread`, overlong reward shaping a matter of the reward.

A token with A_t < 0 and r_t ≫ 1 has no bound: `clipped_ratio` is this loss with one.
"""

from __future__ import annotations

from tailrace.training.losses.clipped_surrogate import ClippedSurrogate


class Dapo(ClippedSurrogate):
    """-min(r A, clip(r) A) of each token."""

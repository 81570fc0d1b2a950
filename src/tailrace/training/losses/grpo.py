r"""GRPO: PPO's clipped ratio, averaged over the tokens of a sequence and then over sequences.

    J = 1/G Σ_i 1/|o_i| Σ_t min( r_it A_it,  clip(r_it, 1 - ε_low, 1 + ε_high) A_it ),   r_it = π_θ(y_it) / μ(y_it)

over the G sequences of a batch, |o_i| the tokens of sequence i that bear loss. Shao et al. 2024, "DeepSeekMath"
(arXiv:2402.03300), eq. 3, without its penalty for leaving a reference model. A token of a short sequence weighs more
than one of a long sequence: where long wrong answers shall cost as much as short ones, take `dapo` or `dr_grpo`.
"""

from __future__ import annotations

from tailrace.training.losses.clipped_surrogate import ClippedSurrogate


class Grpo(ClippedSurrogate):
    """-min(r A, clip(r) A) of each token."""

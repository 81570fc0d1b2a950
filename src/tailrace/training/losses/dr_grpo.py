r"""Dr. GRPO: PPO's clipped ratio, summed over tokens and divided by a length that no sequence changes.

    J = 1/(G L) Σ_i Σ_t min( r_it A_it,  clip(r_it, 1 - ε_low, 1 + ε_high) A_it ),   r_it = π_θ(y_it) / μ(y_it)

over the G sequences of a batch, with a constant L such as the longest completion allowed. Liu et al. 2025,
"Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv:2503.20783), §3: dividing by |o_i| favours short
right answers and long wrong ones. The gradient is that of the sum of rewards; its other half, advantages that are not
divided by their deviation, is `scheduling.advantage = "mean"`.
"""

from __future__ import annotations

from tailrace.training.losses.clipped_surrogate import ClippedSurrogate


class DrGrpo(ClippedSurrogate):
    """-min(r A, clip(r) A) of each token."""

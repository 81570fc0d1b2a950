r"""AIPO, and truncated importance sampling of tokens (TIS): here they are one loss.

    J = 1/N Σ_t sg[min(r_t, C)] A_t log π_θ(y_t),   r_t = π_θ(y_t) / μ(y_t)

over the N tokens that are kept, here all of them; sg is the stop-gradient. Wu et al. 2025, "LlamaRL"
(arXiv:2505.24034), where it is called AIPO. TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training") multiplies a loss by min(π_old / μ, C), π_old being the trainer's policy before its steps on a
batch: with one step per batch that is π_θ, and what is left of a clipped ratio of π_θ to π_old is this.

`clipped_ratio` also stops at the clip, and `cispo` is this loss with another C and, where asked for, a lower bound.
"""

from __future__ import annotations

from tailrace.training.losses.cispo import Cispo


class Aipo(Cispo):
    """-sg[min(r, C)] A log π of each token; it keeps all."""

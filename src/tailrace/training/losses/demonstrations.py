r"""Cross-entropy of demonstrated tokens: supervised fine-tuning, beside a loss of rewards or alone.

    ℓ_t = -w_t log π(y_t)

of each token whose weight w_t, in the column `cross_entropy_weights`, is not 0; divided by their number in the whole
batch, so that a weight of 0.5 halves what its token teaches. Maximum likelihood of demonstrations beside the policy
gradient is what Ouyang et al. 2022, "Training language models to follow instructions with human feedback"
(arXiv:2203.02155, eq. 2, γ) add, and Rajeswaran et al. 2018 (arXiv:1709.10087, section IV-C2: DAPG).

Demonstrated tokens were sampled by no policy: they bear no loss of rewards, and no ratio means anything there. Tokens
that were sampled may have a weight, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tailrace.records import CROSS_ENTROPY_WEIGHTS, BatchRow, BatchSummary, BoolArray
from tailrace.training.losses.components import TokenComponent
from tailrace.training.losses.protocol import LossTokens
from tailrace.training.settings.components import CrossEntropySettings


@dataclass(frozen=True, slots=True)
class CrossEntropy(TokenComponent):
    """-w log π of each token; it keeps those with a weight, unless they have become impossible."""

    name: ClassVar = "cross_entropy"
    settings: CrossEntropySettings

    @override
    def planned(self, batch: BatchSummary) -> int:
        """The tokens with a weight."""
        return batch.cross_entropy_tokens

    @override
    def bears(self, row: BatchRow) -> BoolArray | None:
        weights = row.columns.get(CROSS_ENTROPY_WEIGHTS)
        return None if weights is None else np.asarray(weights != 0)

    @override
    def weights(self, tokens: LossTokens) -> Tensor:
        given = tokens.columns.get(CROSS_ENTROPY_WEIGHTS)
        return torch.zeros_like(tokens.logprobs) if given is None else given

    @override
    def weighs(self, tokens: LossTokens) -> Tensor:
        return self.weights(tokens) != 0

    @override
    def of_token(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        return -logprobs, -torch.ones_like(logprobs)

    @override
    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        loss, derivative, kept = TokenComponent.with_derivative(self, logprobs, tokens)  # slots have no `super()`
        return loss, derivative, kept & (logprobs != -math.inf)

    @override
    def measure(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """-log π, whatever the weights."""
        return -logprobs

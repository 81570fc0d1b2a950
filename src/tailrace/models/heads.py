"""The output head of a causal language model: the matrix from hidden states to logits, and what follows it.

Models scale logits (Granite, Cohere) or cap them (Gemma) after the head's module. Both are read from the configuration;
callers compare with the model's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """logits = cap · tanh(scale · (hidden @ weightᵀ + bias) / cap); without a cap just the scaled product."""

    linear: nn.Linear
    """Its weight is [vocabulary, hidden_size]; where embeddings are tied it is the embedding's own parameter."""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary] of `hidden` [..., hidden_size]."""
        logits = self.linear(hidden) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def find_head(model: Any) -> OutputHead | None:
    """The head of a transformers model; None where it is more than one linear layer, or part of the base model."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or model.base_model is model:
        return None
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return OutputHead(linear, float(scale), getattr(config, "final_logit_softcapping", None))

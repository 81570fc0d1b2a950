"""Settings of what is added to the loss of rewards, one class each. Without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CrossEntropySettings(BaseModel):
    """Cross-entropy of demonstrations, added to any loss."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coefficient: float = Field(default=1.0, gt=0, description="What it is multiplied by, beside the loss of rewards.")


class DistillationSettings(BaseModel):
    """On-policy distillation from a teacher behind an endpoint, added to any loss."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coefficient: float = Field(default=1.0, gt=0, description="What it is multiplied by, beside the loss of rewards.")
    truncation: float = Field(default=2.0, ge=1, description="Highest importance weight that any token gets.")
    url: str = Field(
        pattern=r"^https?://", description="The teacher's endpoint with its `/v1`, as vLLM serves one: docs/losses.md."
    )
    model: str = Field(description="What the endpoint calls the teacher.")
    api_key_variable: str | None = Field(
        default=None, description="Environment variable with its key. Unset: no key is sent."
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Seconds one call may take.")
    retries: int = Field(default=2, ge=0, description="Calls after one that failed or timed out.")
    retry_pause_s: float = Field(default=0.5, ge=0, description="Seconds before the first retry, doubled every time.")


class ReferenceKlSettings(BaseModel):
    """A divergence from a frozen model, added to any loss; it costs one more forward pass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coefficient: float = Field(
        default=0.001, ge=0, description="What the divergence is multiplied by, per token; 0: it is measured alone."
    )
    estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        default="unbiased",
        description="How it is estimated from the sampled tokens: see docs/losses.md; k1's gradient is 0 on average.",
    )
    model: str | None = Field(
        default=None,
        description="The frozen model, named as model.name is, with the same vocabulary; unset: the initial model.",
    )

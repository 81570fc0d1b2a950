"""Settings of what is added to the loss of rewards, one class each. Without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CrossEntropySettings(BaseModel):
    """Cross-entropy of demonstrations, added to any loss."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coefficient: float = Field(default=1.0, gt=0, description="What it is multiplied by, beside the loss of rewards.")


class DistillationSettings(BaseModel):
    """On-policy distillation from a teacher, behind an endpoint or on an engine of the run, added to any loss."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coefficient: float = Field(default=1.0, gt=0, description="What it is multiplied by, beside the loss of rewards.")
    truncation: float = Field(
        default=2.0, ge=1, description="Highest importance weight that any token gets; with top_k there are none."
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Compare with the teacher over so many tokens that it finds likeliest, wherever one was sampled; "
        "unset: at the sampled token alone.",
    )
    divergence: Literal["reverse", "forward"] = Field(
        default="reverse",
        description="From policy to teacher, which leaves what the teacher finds unlikely (reverse), or from teacher "
        "to policy, which covers all that it finds likely (forward: with top_k alone).",
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="The teacher's endpoint with its `/v1`, as vLLM serves one: docs/losses.md. Unset: the run starts "
        "an engine for it.",
    )
    model: str = Field(
        description="The teacher, named as model.name is, of the same tokenizer; with url, what the endpoint calls it."
    )
    api_key_variable: str | None = Field(
        default=None, description="Environment variable with its key. Unset: no key is sent."
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Seconds one call may take.")
    retries: int = Field(default=2, ge=0, description="Calls after one that failed or timed out.")
    retry_pause_s: float = Field(default=0.5, ge=0, description="Seconds before the first retry, doubled every time.")

    @model_validator(mode="after")
    def _says_what_it_uses(self) -> Self:
        if self.top_k is None and self.divergence == "forward":
            raise ValueError(
                "divergence is 'forward', which the sampled token alone cannot tell: set top_k, or leave divergence out"
            )
        if self.url is None and self.api_key_variable is not None:
            raise ValueError("api_key_variable is for url, and there is none: leave it out, or set url")
        if self.top_k is not None and self.truncation != type(self).model_fields["truncation"].default:
            raise ValueError(
                "truncation bounds importance weights, and there are none with top_k: leave one of them out"
            )
        return self


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

"""Settings of the masks that any loss can be combined with, one class each, chosen by name. Without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator


def name_or_default(given: object, otherwise: str) -> str:
    """The name in a table or in settings."""
    return str(given.get("name", otherwise) if isinstance(given, dict) else getattr(given, "name", otherwise))


class NamedSettings(BaseModel):
    """One of several kinds, which its name tells."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _is_told_by_its_name(self) -> Self:
        """So it counts as set: who writes down only what was would leave it out, and another kind be read."""
        self.model_fields_set.add("name")
        return self


class _MaskSettings(NamedSettings):
    name: str = Field(description="Which mask.")


class _BoundsSettings(_MaskSettings):
    low: float
    high: float

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> Self:
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"low = {self.low} and high = {self.high}: a ratio of 1, where trainer and generator agree, must lie "
                "between them"
            )
        return self


class IcePopSettings(_BoundsSettings):
    """Rejects a token whose probability ratio of trainer to generator leaves the bounds."""

    name: Literal["icepop"] = Field(default="icepop", description="Which mask.")
    low: float = Field(default=0.5, ge=0, description="Lowest ratio of a token that counts.")
    high: float = Field(default=5.0, description="Highest ratio of a token that counts.")


class SequenceRatioSettings(_BoundsSettings):
    """Rejects a whole sequence when the product of its tokens' ratios leaves the bounds."""

    name: Literal["sequence_ratio"] = Field(default="sequence_ratio", description="Which mask.")
    low: float = Field(default=0.0, ge=0, description="Lowest product of a sequence that counts; 0: no bound.")
    high: float = Field(default=3.0, description="Highest product of a sequence that counts.")


class GeometricRatioSettings(_BoundsSettings):
    """Rejects a whole sequence when the geometric mean of its tokens' ratios leaves the bounds."""

    name: Literal["geometric_ratio"] = Field(default="geometric_ratio", description="Which mask.")
    low: float = Field(default=0.99, ge=0, description="Lowest mean of a sequence that counts.")
    high: float = Field(default=1.01, description="Highest mean of a sequence that counts.")


class OffPolicySequenceSettings(_MaskSettings):
    """Rejects tokens with a negative advantage in a sequence that the policy has moved away from (OPSM)."""

    name: Literal["off_policy_sequence"] = Field(default="off_policy_sequence", description="Which mask.")
    threshold: float = Field(
        gt=0,
        description="Highest mean over a sequence's tokens of log generator / trainer, in nats. Others take 1e-4"
        " (slime) to 0.5 (TRL).",
    )


MaskSettings: TypeAlias = Annotated[
    Annotated[IcePopSettings, Tag("icepop")]
    | Annotated[SequenceRatioSettings, Tag("sequence_ratio")]
    | Annotated[GeometricRatioSettings, Tag("geometric_ratio")]
    | Annotated[OffPolicySequenceSettings, Tag("off_policy_sequence")],
    Discriminator(lambda given: name_or_default(given, "")),
]
"""One of them, by `name`."""

"""Settings of the losses, one class each, chosen by name.

Without torch, since they are read where nothing computes. Each loss says what the sum over a batch is divided by.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from tailrace.training.settings.components import (
    CrossEntropySettings,
    DistillationSettings,
    ReferenceKlSettings,
)
from tailrace.training.settings.masks import MaskSettings, NamedSettings, name_or_default

DEFAULT_LOSS = "clipped_ratio"

OWN = "module:function"
"""Stands for the name of every loss of one's own."""

REFUSED = {
    "icepop": "it is a mask here: write trainer.loss.masks = [{ name = 'icepop' }] beside a loss such as cispo",
    "ppo": "it is called clipped_ratio here; dapo and grpo are its variants",
    "tis": "it is called aipo here",
}
"""Names that are no loss here, and why."""


class Denominator(enum.StrEnum):
    """What the losses of a batch are divided by: a figure of the whole batch, never of a row or a rank."""

    PLANNED_TOKENS = "planned_tokens"
    """The tokens that bear loss: one that is rejected still counts."""
    KEPT_TOKENS = "kept_tokens"
    """Those of them that are not rejected."""
    SEQUENCES = "sequences"
    """The mean over a sequence's tokens, then the mean over sequences; a sequence is a training sample."""
    SEQUENCES_TIMES_LENGTH = "sequences_times_length"
    """Sequences times a length that settings give: every token weighs the same, in every batch."""


class CommonLossSettings(NamedSettings):
    """What every loss knows."""

    name: str = Field(description="Which loss.")
    masks: tuple[MaskSettings, ...] = Field(
        default=(),
        description="What rejects tokens before the loss does: a rejected one adds neither loss nor gradient, and is"
        " counted under the mask's name.",
    )
    entropy: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of a bonus for the policy's entropy, per token; above 0 logits are computed twice.",
    )
    reference_kl: ReferenceKlSettings | None = Field(
        default=None, description="A divergence from a frozen model that is added; unset: none, and no such model."
    )
    cross_entropy: CrossEntropySettings | None = Field(
        default=None,
        description="Cross-entropy of what agents demonstrate, which is added; unset: they may demonstrate nothing.",
    )
    distillation: DistillationSettings | None = Field(
        default=None, description="A divergence from a teacher, which is added; unset: no teacher is asked."
    )

    @model_validator(mode="after")
    def _masks_differ(self) -> Self:
        names = [mask.name for mask in self.masks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"masks has {twice!r} twice: write its bounds into one")
        return self


def _clip_low(default: float, of: str = "token") -> Any:
    text = f"A {of} with a negative advantage stops counting below the ratio 1 - clip_low."
    return Field(default=default, gt=0, lt=1, description=text)


def _clip_high(default: float, of: str = "token") -> Any:
    text = f"A {of} with a positive advantage stops counting above the ratio 1 + clip_high."
    return Field(default=default, gt=0, description=text)


def _truncation(default: float) -> Any:
    return Field(default=default, gt=1, description="Highest importance weight that any token gets.")


class ClippedRatioSettings(CommonLossSettings):
    """The default: a ratio clipped against the generator's log-probabilities, its weight truncated."""

    denominator: ClassVar = Denominator.KEPT_TOKENS

    name: Literal["clipped_ratio"] = Field(default="clipped_ratio", description="Need not be said.")
    correction: Literal["truncated_is", "none"] = Field(
        default="truncated_is",
        description="Weigh each token by its truncated probability ratio of trainer to generator (truncated_is), or not"
        " at all (none: biased as soon as generation is stale; warns).",
    )
    clip_low: float = _clip_low(0.2)
    clip_high: float = _clip_high(0.28)
    truncation: float = _truncation(2.0)

    @model_validator(mode="after")
    def _bounds_are_of_ratios(self) -> Self:
        fields, bounds = type(self).model_fields, ("truncation", "clip_low", "clip_high")
        given = [name for name in bounds if getattr(self, name) != fields[name].default]
        if self.correction == "none" and given:
            raise ValueError(
                f"{given[0]} is a bound of importance weights, and with correction = 'none' there are none: leave one "
                f"of them out, or write {given[0]} = {fields[given[0]].default}"
            )
        return self

    @model_validator(mode="after")
    def _truncation_reaches_the_clip(self) -> Self:
        if self.truncation < 1 + self.clip_high:
            raise ValueError(
                f"truncation is {self.truncation}, which clip_high = {self.clip_high} would never reach; "
                f"it must be 1 + clip_high = {1 + self.clip_high} or above"
            )
        return self


class DapoSettings(CommonLossSettings):
    """A clipped ratio, its mean over all tokens."""

    denominator: ClassVar = Denominator.KEPT_TOKENS

    name: Literal["dapo"] = Field(default="dapo", description="Which loss.")
    clip_low: float = _clip_low(0.2)
    clip_high: float = _clip_high(0.28)


class GrpoSettings(CommonLossSettings):
    """A clipped ratio, its mean over each sequence, then over sequences."""

    denominator: ClassVar = Denominator.SEQUENCES

    name: Literal["grpo"] = Field(default="grpo", description="Which loss.")
    clip_low: float = _clip_low(0.2)
    clip_high: float = _clip_high(0.2)


class DrGrpoSettings(CommonLossSettings):
    """A clipped ratio, its sum over tokens divided by sequences times a fixed length."""

    denominator: ClassVar = Denominator.SEQUENCES_TIMES_LENGTH

    name: Literal["dr_grpo"] = Field(default="dr_grpo", description="Which loss.")
    clip_low: float = _clip_low(0.2)
    clip_high: float = _clip_high(0.2)
    length: int = Field(ge=1, description="What each sequence is divided by: as many tokens as one may have.")


class CispoSettings(CommonLossSettings):
    """Every token keeps its gradient; its importance weight is clipped."""

    denominator: ClassVar = Denominator.KEPT_TOKENS

    name: Literal["cispo"] = Field(default="cispo", description="Which loss.")
    lowest_weight: float = Field(default=0.0, ge=0, lt=1, description="Lowest importance weight that any token gets.")
    truncation: float = _truncation(5.0)


class AipoSettings(CommonLossSettings):
    """Truncated importance sampling of tokens, which is AIPO here; every token keeps its gradient."""

    denominator: ClassVar = Denominator.KEPT_TOKENS
    lowest_weight: ClassVar[float] = 0.0

    name: Literal["aipo"] = Field(default="aipo", description="Which loss.")
    truncation: float = _truncation(2.0)


class IpoSettings(CommonLossSettings):
    """A token counts while trainer and generator agree about its probability."""

    denominator: ClassVar = Denominator.PLANNED_TOKENS

    name: Literal["ipo"] = Field(default="ipo", description="Which loss.")
    threshold: float = Field(
        default=0.3, gt=0, le=1, description="Highest difference of the two probabilities of a token that counts."
    )


class DppoSettings(CommonLossSettings):
    """A token counts unless it would lead further out of a trust region over distributions."""

    denominator: ClassVar = Denominator.PLANNED_TOKENS

    name: Literal["dppo"] = Field(default="dppo", description="Which loss.")
    divergence: Literal["total_variation", "kl"] = Field(
        default="total_variation", description="How far policy and generator are apart, over this token and any other."
    )
    threshold: float | None = Field(
        default=None, gt=0, description="Radius of the region; unset: 0.15 for total_variation, 0.05 for kl."
    )

    @property
    def radius(self) -> float:
        """`threshold`, or what follows from the divergence."""
        return self.threshold or (0.15 if self.divergence == "total_variation" else 0.05)


class DecoupledPpoSettings(CommonLossSettings):
    """For several optimizer steps on each batch: a ratio clipped against the policy before them."""

    denominator: ClassVar = Denominator.PLANNED_TOKENS

    name: Literal["decoupled_ppo"] = Field(default="decoupled_ppo", description="Which loss.")
    clip_low: float = _clip_low(0.2)
    clip_high: float = _clip_high(0.2)
    highest_weight: float = Field(
        default=5.0,
        gt=1,
        description="A token is rejected where the policy before a batch's first step finds it so many times as likely"
        " as the generator did.",
    )


class GspoSettings(CommonLossSettings):
    """One clipped ratio for each sequence, its tokens' geometric mean."""

    denominator: ClassVar = Denominator.SEQUENCES

    name: Literal["gspo"] = Field(default="gspo", description="Which loss.")
    clip_low: float = _clip_low(3e-4, of="sequence")
    clip_high: float = _clip_high(4e-4, of="sequence")


class SapoSettings(CommonLossSettings):
    """A soft gate in place of a clip."""

    denominator: ClassVar = Denominator.SEQUENCES

    name: Literal["sapo"] = Field(default="sapo", description="Which loss.")
    temperature_positive: float = Field(
        default=1.0, gt=0, description="How steep the gate is for tokens with a positive advantage."
    )
    temperature_negative: float = Field(
        default=1.05, gt=0, description="How steep it is for the others; above the former, it closes sooner."
    )


class SelectedCrossEntropySettings(CommonLossSettings):
    """Cross-entropy of what was better than its group: rejection-sampling fine-tuning."""

    denominator: ClassVar = Denominator.KEPT_TOKENS

    name: Literal["selected_cross_entropy"] = Field(default="selected_cross_entropy", description="Which loss.")


class OwnLossSettings(CommonLossSettings):
    """A function, class or object of your own, in a module that the trainer's process can import."""

    name: str = Field(description="As module:function.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments: of a class when it is made, of a function at each call.",
    )
    denominator: Literal["kept_tokens", "planned_tokens", "sequences"] = Field(
        default="kept_tokens",
        description="What losses are divided by: tokens that the loss keeps, all planned ones, or the mean of each"
        " sequence first, and then of sequences.",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_a_loss(cls, given: Any) -> Any:
        name = given.get("name") if isinstance(given, dict) else None
        if name in REFUSED:
            raise ValueError(f"name is {name!r}: {REFUSED[name]}")
        if isinstance(name, str) and not all(name.partition(":")):
            raise ValueError(f"name is {name!r}; a loss of your own is written as {OWN}")
        return given


def _loss(given: object) -> str:
    """The tag of the loss that is meant."""
    name = name_or_default(given, DEFAULT_LOSS)
    return OWN if ":" in name or name in REFUSED else name


LossSettings: TypeAlias = Annotated[
    Annotated[ClippedRatioSettings, Tag("clipped_ratio")]
    | Annotated[DapoSettings, Tag("dapo")]
    | Annotated[GrpoSettings, Tag("grpo")]
    | Annotated[DrGrpoSettings, Tag("dr_grpo")]
    | Annotated[CispoSettings, Tag("cispo")]
    | Annotated[AipoSettings, Tag("aipo")]
    | Annotated[IpoSettings, Tag("ipo")]
    | Annotated[DppoSettings, Tag("dppo")]
    | Annotated[DecoupledPpoSettings, Tag("decoupled_ppo")]
    | Annotated[GspoSettings, Tag("gspo")]
    | Annotated[SapoSettings, Tag("sapo")]
    | Annotated[SelectedCrossEntropySettings, Tag("selected_cross_entropy")]
    | Annotated[OwnLossSettings, Tag(OWN)],
    Discriminator(_loss),
]
"""One of them, by `name`."""

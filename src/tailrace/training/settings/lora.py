"""Settings of an adapter that is trained in place of all weights."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.extras import require_extra


class LoraSettings(BaseModel):
    """Train low-rank adapters beside frozen weights (LoRA); an extra: `pip install 'tailrace[lora]'`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int | None = Field(
        default=None, ge=1, le=2**14, description="Rank of each adapter; unset: no adapters, all weights are trained."
    )
    alpha: float | None = Field(
        default=None, gt=0, description="Each adapter's product is multiplied by alpha / rank; unset: 32."
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the linear layers that get an adapter, as q_proj or self_attn.q_proj; unset: all of the"
        " decoder's layers but routers, and what peft takes for experts. On the command line q_proj,v_proj",
    )

    publish: Literal["merged", "adapters"] | None = Field(
        default=None,
        description="What generators get after a step: whole weights with the adapters added up (merged), or the"
        " adapters alone, which is about a hundredth of the bytes and needs generator.engine = vllm; unset: merged.",
    )

    @property
    def publishes_adapters(self) -> bool:
        """Whether generators get the adapters alone."""
        return self.publish == "adapters"

    @property
    def chosen_alpha(self) -> float:
        """Independent of the rank, so that the best learning rate nearly is (Schulman et al., 2025)."""
        return 32.0 if self.alpha is None else self.alpha

    @field_validator("targets", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _belongs_to_a_rank(self) -> LoraSettings:
        given = [name for name in ("alpha", "targets", "publish") if getattr(self, name) is not None]
        if self.rank is None and given:
            raise ValueError(
                f"lora.{given[0]} is of adapters, and without lora.rank there are none: set lora.rank = 16, for "
                f"example, or leave lora.{given[0]} out"
            )
        if self.targets is not None and not all(self.targets):
            raise ValueError("lora.targets names layers, and is empty: leave it out for all of them")
        return self


def require_peft(settings: LoraSettings) -> None:
    """Raise `SettingsError` where adapters are asked for and peft is not installed; imports nothing heavy."""
    if settings.rank is not None:
        require_extra("peft", extra="lora", what="trainer.lora", key=("trainer", "lora", "rank"))

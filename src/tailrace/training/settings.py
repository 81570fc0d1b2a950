"""Settings of the trainer."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.models.devices import DeviceIds

ExportFormat: TypeAlias = Literal["parquet", "jsonl"]

BUILT_IN_LOSSES = ("clipped_ratio",)
"""Not in the registry, which imports torch: names are checked where settings are read."""


class LossSettings(BaseModel):
    """What the trainer minimises; but for the name, settings of clipped_ratio."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        default="clipped_ratio",
        description="clipped_ratio: the clipped ratio against the generator's log-probabilities, its weight truncated."
        " Or module:function, a loss of your own (docs/losses.md).",
    )
    correction: Literal["truncated_is", "none"] = Field(
        default="truncated_is",
        description="Weigh each token by its truncated probability ratio of trainer to generator (truncated_is), or not"
        " at all (none: biased as soon as generation is stale; warns).",
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="A token with a negative advantage stops counting below the ratio 1 - clip_low.",
    )
    clip_high: float = Field(
        default=0.28,
        gt=0,
        description="A token with a positive advantage stops counting above the ratio 1 + clip_high.",
    )
    truncation: float = Field(default=2.0, gt=1, description="Highest importance weight that any token gets.")

    @field_validator("name")
    @classmethod
    def _names_a_loss(cls, name: str) -> str:
        if name not in BUILT_IN_LOSSES and not all(name.partition(":")):
            raise ValueError(
                f"name is {name!r}; it must be {' or '.join(BUILT_IN_LOSSES)}, or module:function, a loss of your own"
            )
        return name

    @model_validator(mode="after")
    def _truncation_reaches_the_clip(self) -> Self:
        if self.truncation < 1 + self.clip_high:
            raise ValueError(
                f"truncation is {self.truncation}, which clip_high = {self.clip_high} would never reach; "
                f"it must be 1 + clip_high = {1 + self.clip_high} or above"
            )
        return self


class TrainerSettings(BaseModel):
    """From a batch to a new policy version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="Learning rate of AdamW after warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the learning rate rises linearly from 0.")
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls after warm-up."
    )
    decay_end: float = Field(
        default=0.0, ge=0, le=1, description="Fraction of learning_rate that is left at the end (linear and cosine)."
    )
    decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Step at which it has fallen; unset: max_steps, or those that max_epochs come to if no group is"
        " filtered.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean of gradients.")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW's decay of the mean of squared gradients.")
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's term against division by zero.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay, on matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm, at most.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Forward and backward compute; bfloat16 is autocast, over float32 weights."
    )
    head_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Compute of logits under dtype = bfloat16; float32 keeps log-probabilities close to the"
        " generator's.",
    )
    device: str = Field(default="cpu", description="Where the trainer computes: cpu, cuda, cuda:1, ...")
    devices: DeviceIds = Field(
        default=None,
        description="The trainer's GPU: a number or UUID, as CUDA_VISIBLE_DEVICES has it; unset: the first one.",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the trainer's compute.")
    native_kernels: bool = Field(
        default=True,
        description="On a CPU with one thread and a C++ compiler: compile passes over activations for this processor,"
        " once, and use them in layers of the common kind (Llama, Qwen, ...); torch's own operations otherwise.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Compute activations twice instead of keeping them: less memory, about a third more time.",
    )
    router_replay: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Train mixture-of-experts models with the experts that generation chose, which needs"
        " generator.return_routed_experts; auto: wherever they are returned.",
    )
    loss: LossSettings = Field(default=LossSettings(), description="The loss.")
    max_nonfinite_steps: int = Field(
        default=3,
        ge=1,
        description="Consecutive steps with a non-finite loss or gradient that end the run as diverged.",
    )
    export_tokens: ExportFormat | None = Field(
        default=None,
        description="Write every trained token of every step to tokens/ in the run's folder: its rollout and place,"
        " text, advantage, both log-probabilities, ratio, entropy, version. 20 (parquet) to 300 (jsonl) bytes each.",
    )
    checkpoint_every_steps: int | None = Field(
        default=None,
        ge=0,
        description="Steps between checkpoints; 0 saves only at the end; unset: whenever 5 minutes have passed since"
        " the last one, and 20 times as long as it took.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept; older ones are deleted.")

"""Settings of the trainer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.errors import SettingsError
from tailrace.extras import extra_needed
from tailrace.models.devices import CPU_OR_CUDA, DeviceIds, require_device_name
from tailrace.training.settings.lora import LoraSettings
from tailrace.training.settings.losses import ClippedRatioSettings, DecoupledPpoSettings, LossSettings

ComputeDtype: TypeAlias = Literal["float32", "bfloat16"]
OptimizerName: TypeAlias = Literal["adamw", "muon"]
ExportFormat: TypeAlias = Literal["parquet", "jsonl"]
BESIDE_ROLLOUTS = b"tailrace.beside_rollouts"
"""In a Parquet file of exported tokens: nobody asked for it but by `observability.tokens_every_steps`."""


_NOT_TO_BE_HAD = ("tensor_parallel", "expert_parallel", "pipeline_parallel", "context_parallel")


class TrainerSettings(BaseModel):
    """From a batch to a new policy version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    feed: Literal["batch", "stream"] = Field(
        default="batch",
        description="batch: Tailrace's own trainer, which is sent whole batches. stream: a program of yours pulls"
        " finished training samples one at a time, forms steps of its own, and tells of them and of its end"
        " (docs/streams.md); the rest of this section is of our trainer then, and refused.",
    )
    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="Learning rate after warm-up.")
    optimizer: OptimizerName = Field(
        default="adamw",
        description="muon: matrices inside of layers take the steps of Muon, as large as AdamW's; embeddings, head and"
        " vectors stay AdamW's.",
    )
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
        description="Step at which it has fallen (linear and cosine, refused otherwise in a new run); unset: max_steps,"
        " or what max_epochs come to if no group is filtered, whichever is first.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean of gradients.")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW's decay of the mean of squared gradients.")
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's term against division by zero.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay, on matrices only.")
    steps_per_batch: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Optimizer steps on each batch, every one over all of it; weights are published after the last.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm, at most.")
    dtype: ComputeDtype | None = Field(
        default=None,
        description="Forward and backward compute; bfloat16 is autocast, over float32 weights. Unset: bfloat16 on a"
        " GPU, float32 on a CPU.",
    )
    head_dtype: ComputeDtype | None = Field(
        default=None,
        description="Products of the head under dtype = bfloat16; float32 keeps log-probabilities close to those of a"
        " generator that computes logits so. Unset: bfloat16 on a GPU, which adds up to float32 logits, float32 on a"
        " CPU.",
    )
    device: str = Field(default="cpu", description="Where the trainer computes: cpu, cuda, cuda:1, ...")
    devices: DeviceIds = Field(
        default=None,
        description="The trainer's GPUs, one for each rank: numbers or UUIDs, as CUDA_VISIBLE_DEVICES has them; unset:"
        " the first ones.",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Processes that share the model's weights, gradients and optimizer (FSDP), and the rows of each"
        " batch (docs/trainer.md).",
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Neighbouring ranks that compute each row together, a slice of its tokens each, and exchange tokens"
        " for attention heads: for rows whose activations one rank cannot hold. A divisor of ranks and of the model's"
        " heads (docs/trainer.md).",
    )
    collective_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds within which every rank must take part in an exchange; past it all ranks end, the silent"
        " one is named, and the trainer is started again (restarts.per_role).",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of each rank's compute.")
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="Operations per second that one rank's device can do in dtype, for training/mfu; unset: as known of"
        " the GPU, under bfloat16, and no such metric where nothing is.",
    )
    native_kernels: bool = Field(
        default=True,
        description="On a CPU with one thread and a C++ compiler: compile passes over activations for this processor,"
        " once, and use them in layers of the common kind (Llama, Qwen, ...); torch's own operations otherwise.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Compute activations twice instead of keeping them: less memory, about a third more time.",
    )
    offload_activations: bool = Field(
        default=False,
        description="On a GPU, with gradient_checkpointing: keep the inputs of layers, all that is left then, in the"
        " host's pinned memory until the backward pass.",
    )
    offload_optimizer: bool = Field(
        default=False,
        description="On a GPU, with AdamW: keep its two moments in the host's pinned memory; in each step they cross to"
        " the GPU and back, block by block (docs/trainer.md).",
    )
    compile: bool = Field(
        default=False,
        description="Compile layers by torch.compile, in the first step; on a CPU only without native_kernels.",
    )
    router_replay: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Train mixture-of-experts models with the experts that generation chose, which needs"
        " generator.return_routed_experts; auto: wherever they are returned.",
    )
    loss: LossSettings = Field(default=ClippedRatioSettings(), description="The loss, by its `name`.")
    lora: LoraSettings = Field(default_factory=LoraSettings)
    max_nonfinite_steps: int = Field(
        default=3,
        ge=1,
        description="Consecutive steps with a non-finite loss or gradient that end the run as diverged.",
    )
    export_tokens: ExportFormat | None = Field(
        default=None,
        description="Write every trained token of every step to tokens/ in the run's folder: its rollout and place,"
        " id, text, mask, advantage, both log-probabilities, ratio, entropy, version, support size. 20 (parquet) to 300"
        " (jsonl) bytes each.",
    )
    checkpoint_every_steps: int | None = Field(
        default=None,
        ge=0,
        description="Steps between checkpoints; 0 saves only at the end; unset: whenever 5 minutes have passed since"
        " the last one, and 20 times as long as it took.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints kept; older ones are deleted.")

    @property
    def chosen_dtype(self) -> ComputeDtype:
        """`dtype`, or what follows from the device."""
        return self.dtype or self._fastest_dtype

    @property
    def chosen_head_dtype(self) -> ComputeDtype:
        """`head_dtype`, or what follows from the device."""
        return self.head_dtype or self._fastest_dtype

    @property
    def _fastest_dtype(self) -> ComputeDtype:
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    @property
    def rank_names(self) -> list[str]:
        """Of the roles, rank 0 first."""
        return ["trainer", *(f"trainer-{rank}" for rank in range(1, self.ranks))]

    @property
    def row_groups(self) -> int:
        """To how many groups of ranks, or single ones, the rows of a batch are dealt."""
        return self.ranks // self.sequence_parallel

    @field_validator("device")
    @classmethod
    def _names_a_device(cls, device: str) -> str:
        return require_device_name(device, "trainer.device", CPU_OR_CUDA)  # from others weights reach no generator

    @model_validator(mode="after")
    def _head_is_computed_under_autocast(self) -> Self:
        if self.head_dtype == "bfloat16" and self.chosen_dtype == "float32":
            raise ValueError(
                "head_dtype = 'bfloat16' is of a head under dtype = 'bfloat16', and dtype is 'float32' (unset: on a "
                'CPU), where nothing is rounded: leave it out, or write head_dtype = "float32" or dtype = "bfloat16"'
            )
        return self

    @model_validator(mode="after")
    def _decoupled_ppo_needs_steps(self) -> Self:
        if isinstance(self.loss, DecoupledPpoSettings) and self.steps_per_batch == 1:
            raise ValueError(
                "loss.name is 'decoupled_ppo', which clips against the policy before a batch's first optimizer step, "
                "and with steps_per_batch = 1 there is no second: nothing would ever be clipped; write steps_per_batch "
                "= 2 or more, or choose clipped_ratio"
            )
        return self

    @model_validator(mode="after")
    def _has_activations_to_offload(self) -> Self:
        if self.offload_activations and self.device == "cpu":
            raise ValueError(
                "offload_activations moves activations from a GPU to the host, and device = 'cpu' has them there: leave"
                " it out"
            )
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "offload_activations keeps the inputs of layers that are computed twice on the host: write "
                "gradient_checkpointing = true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_moments_to_offload(self) -> Self:
        if self.offload_optimizer and self.device == "cpu":
            raise ValueError(
                "offload_optimizer moves the optimizer's moments from a GPU to the host, and device = 'cpu' has them "
                "there: leave it out"
            )
        if self.offload_optimizer and self.optimizer == "muon":
            raise ValueError(
                "offload_optimizer brings moments to the GPU a few numbers at a time, and optimizer = 'muon' needs "
                "those of a whole matrix at once: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _groups_fill_ranks(self) -> Self:
        ranks, group = self.ranks, self.sequence_parallel
        if ranks % group:
            raise ValueError(
                f"ranks = {ranks} cannot be parted into groups of sequence_parallel = {group}: write ranks = "
                f"{-(-ranks // group) * group}, for example"
            )
        if group > 1 and self.steps_per_batch > 1:
            raise ValueError(
                f"steps_per_batch = {self.steps_per_batch} keeps what each rank's rows were like before the first step,"
                f" and sequence_parallel = {group} has slices of rows: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_no_muon(self) -> Self:
        if self.lora.rank is not None and self.optimizer == "muon":
            raise ValueError(
                "optimizer = 'muon' makes steps of whole matrices orthogonal, and with lora.rank a matrix is the "
                "product of two that are trained: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _layers_are_computed_one_way(self) -> TrainerSettings:
        if self.compile and self.device == "cpu" and self.native_kernels:
            raise ValueError(
                "compile = true gives layers to torch.compile, and on a CPU native_kernels = true computes them by "
                "kernels of its own, which are faster: leave compile out, or write native_kernels = false"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parallelism(cls, given: Any) -> Any:
        """By name, where only ranks that share the model, or rows too, are to be had."""
        for name in _NOT_TO_BE_HAD if isinstance(given, Mapping) else ():
            if name in given:
                instead = f"ranks = {given[name]}"
                if name == "context_parallel":
                    instead += f" and sequence_parallel = {given[name]}"
                raise ValueError(
                    f"{name} is not to be had in the trainer, which shares a model out by ranks alone (FSDP): write "
                    f"{instead}"
                )
        return given


def require_export(form: ExportFormat | None) -> None:
    """Raise `SettingsError` where Parquet is asked for and pyarrow is not installed; imports nothing heavy."""
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        needed = extra_needed('trainer.export_tokens = "parquet"', "pyarrow", "parquet")
        raise SettingsError(f'{needed}, or choose "jsonl"', key=("trainer", "export_tokens"))

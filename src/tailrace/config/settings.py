"""Every setting of a run. Each part owns its section; here they are composed and checked against each other."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailrace.config.contradictions import Contradictions, find_contradictions
from tailrace.config.gateway import GatewaySettings
from tailrace.config.ray import RaySettings
from tailrace.config.restarts import RestartSettings
from tailrace.config.shutdown import ShutdownSettings
from tailrace.environments import EnvironmentSettings
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.reporting.settings import ObservabilitySettings
from tailrace.rollouts.settings import RolloutSettings
from tailrace.scheduling.settings import EvaluationSettings, Schedule, SchedulingSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.transport.settings import TransportSettings

_LONGEST_NAME = 255
"""Bytes that file systems have for the name of a folder."""


class RunSettings(BaseModel):
    """A run, from its model to its end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "run",
        pattern=r"^\w[\w.-]*$",
        description="Its folder's name under runs/: letters, digits, `_`, `-` and `.`; unset: the recipe's or file's.",
    )
    seed: int = Field(0, ge=0, description="Of the task order, the sampling and the training.")
    placement: str = Field(
        "local",
        pattern=r"^\w+$|^[\w.]+:\w+$",
        description="Who starts the roles. local: trainer and generators are processes of their own; redis: the same,"
        " but the trainer, which `tailrace join` has on another machine; ray: on the nodes of a Ray cluster; inline:"
        " all in one process, for tests and debuggers; module:Class: a launcher of your own.",
    )
    schedule: Schedule = Field(
        "stream",
        description="Sets the default of scheduling.max_staleness: sync 0, one-step-off 1, stream 4.",
    )
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps after which training is finished.")
    max_epochs: int | None = Field(None, ge=1, description="Walks through the data sets after which it is finished.")
    resume: bool = Field(
        False,
        description="Go on from the run folder's newest checkpoint, with the run's own settings (its config.toml). What"
        " is given anew and differs from them is refused, unless allow_changed_settings is true.",
    )
    allow_changed_settings: bool = Field(
        False, description="With resume: go on with settings that differ from the run's own; those are kept."
    )

    deadline_scale: float = Field(
        1.0,
        ge=0.001,
        le=1000,
        description="What every deadline of the run's own parts is multiplied by: more for a slow machine, less for a"
        " test. Which: docs/lifecycle.md.",
    )

    model: ModelSettings
    environments: tuple[EnvironmentSettings, ...] = Field(min_length=1)
    rollouts: RolloutSettings = Field(default_factory=RolloutSettings)
    scheduling: SchedulingSettings = Field(default_factory=SchedulingSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    transport: TransportSettings = Field(default_factory=TransportSettings)
    ray: RaySettings = Field(default_factory=RaySettings)
    restarts: RestartSettings = Field(default_factory=RestartSettings)
    shutdown: ShutdownSettings = Field(default_factory=ShutdownSettings)
    observability: ObservabilitySettings = Field(default_factory=ObservabilitySettings)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if (size := len(name.encode())) > _LONGEST_NAME:
            raise ValueError(f"name has {size} bytes, and a folder's may have {_LONGEST_NAME}: choose a shorter one")
        return name

    @property
    def max_staleness(self) -> int:
        """Oldest tokens that bear loss, in policy versions."""
        return self.scheduling.staleness_bound(self.schedule)

    @property
    def max_running(self) -> int:
        """Rollouts whose agents run at once, at most."""
        replicas = max(len(self.generator.replica_names), self.generator.replicas.max)
        return self.scheduling.max_in_flight or self.generator.concurrency * replicas

    @property
    def max_model_tokens(self) -> int:
        """Prompt and completion together, at most: what a slot of the generator holds, or less."""
        chosen = self.model.max_model_tokens
        return min(chosen or self.generator.max_cache_tokens, self.generator.max_cache_tokens)

    @property
    def generator_seed(self) -> int:
        """Of the random streams of requests that bring no seed."""
        own = self.generator.seed
        return self.seed if own is None else own

    def temperatures_outside(self, least: float, highest: float, *, of_judges: bool = False) -> list[tuple[str, float]]:
        """By their settings, those asked for that an engine of this range, and of 0 (greedy), does not take.

        `of_judges`: also those of judges that ask the run's engine. Which do is known once these are the settings
        `with_own_judges`: what one of the settings leaves unset, an endpoint too, is of the environment's own.
        """
        judges = [(index, one.judge) for index, one in enumerate(self.environments) if one.judge and of_judges]
        asked = [
            ("rollouts.temperature", self.rollouts.temperature),
            ("rollouts.evaluation.temperature", self.rollouts.evaluation.temperature),
            *(("environments", one.temperature) for one in self.environments),
            *((f"environments.{at}.judge.temperature", one.temperature) for at, one in judges if one.url is None),
        ]
        return [(key, one) for key, one in asked if one and not least <= one <= highest]

    @property
    def uses_redis(self) -> bool:
        """Whether batches and the event log go through Redis."""
        return self.transport.batches == "redis" or self.placement == "redis"

    @property
    def feeds_through_redis(self) -> bool:
        """Whether samples go to a trainer outside through Redis."""
        return self.trainer.feed == "stream" and self.placement == "local"

    def group_size(self, environment: EnvironmentSettings) -> int:
        """Rollouts per task of one of the run's environments."""
        return environment.group_size or self.rollouts.group_size

    @model_validator(mode="after")
    def _require_consistent(self) -> RunSettings:
        if found := find_contradictions(self):
            raise Contradictions(found)
        return self

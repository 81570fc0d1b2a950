"""Every setting of a run. Each part owns its section; here they are composed and checked against each other."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.environments import EnvironmentSettings
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.observability.settings import ObservabilitySettings
from tailrace.rollouts.settings import RolloutSettings
from tailrace.scheduling.settings import MAX_STALENESS, Schedule, SchedulingSettings
from tailrace.training.settings import TrainerSettings

Placement: TypeAlias = Literal["local", "inline"]


class RunSettings(BaseModel):
    """A run, from its model to its end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("run", pattern=r"^[\w.-]+$", description="Its folder's name under runs/.")
    seed: int = Field(0, ge=0, description="Of the task order, the sampling and the training.")
    placement: Placement = Field(
        "local",
        description="local: orchestrator, trainer and generator are processes of their own; inline: all in one process,"
        " for tests and debuggers.",
    )
    schedule: Schedule = Field(
        "stream",
        description="Sets the default of scheduling.max_staleness: sync 0, one-step-off 1, stream 4.",
    )
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps after which training is finished.")
    max_epochs: int | None = Field(None, ge=1, description="Walks through the data sets after which it is finished.")
    resume: bool = Field(False, description="Go on from the run folder's newest checkpoint.")

    model: ModelSettings
    environments: tuple[EnvironmentSettings, ...] = Field(min_length=1)
    rollouts: RolloutSettings = Field(default_factory=RolloutSettings)
    scheduling: SchedulingSettings = Field(default_factory=SchedulingSettings)
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    observability: ObservabilitySettings = Field(default_factory=ObservabilitySettings)

    @property
    def max_staleness(self) -> int:
        """Oldest tokens that bear loss, in policy versions."""
        chosen = self.scheduling.max_staleness
        return MAX_STALENESS[self.schedule] if chosen is None else chosen

    @property
    def max_running(self) -> int:
        """Rollouts whose agents run at once, at most."""
        return self.scheduling.max_in_flight or self.generator.slots

    @property
    def max_model_tokens(self) -> int:
        """Prompt and completion together, at most: what a slot of the generator holds, or less."""
        chosen = self.model.max_model_tokens
        return min(chosen or self.generator.max_cache_tokens, self.generator.max_cache_tokens)

    def group_size(self, environment: EnvironmentSettings) -> int:
        """Rollouts per task of one of the run's environments."""
        return environment.group_size or self.rollouts.group_size

    @model_validator(mode="after")
    def _require_consistent(self) -> RunSettings:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self


def _contradictions(settings: RunSettings) -> list[str]:
    """What no single section can see: each a sentence that names the keys and what to write instead."""
    return [*_of_the_end(settings), *_of_the_schedule(settings), *_of_groups(settings), *_of_lengths(settings)]


def _of_the_end(settings: RunSettings) -> list[str]:
    if settings.max_steps is None and settings.max_epochs is None:
        return ["this run would never end: set max_steps or max_epochs"]
    return []


def _of_the_schedule(settings: RunSettings) -> list[str]:
    implied, chosen = MAX_STALENESS[settings.schedule], settings.scheduling.max_staleness
    if settings.schedule != "stream" and chosen not in {None, implied}:
        return [
            f"schedule = {settings.schedule!r} means scheduling.max_staleness = {implied}, but it is {chosen}: "
            'leave it out, or write schedule = "stream"'
        ]
    return []


def _of_groups(settings: RunSettings) -> list[str]:
    problems = []
    for environment in settings.environments:
        size = settings.group_size(environment)
        if settings.scheduling.batch_size % size:
            fitting = max(size, settings.scheduling.batch_size // size * size)
            problems.append(
                f"scheduling.batch_size is {settings.scheduling.batch_size}, no multiple of the group size {size} of "
                f"environment {environment.name!r}: write {fitting}, for example"
            )
        if size == 1:
            problems.append(
                f"the group size of environment {environment.name!r} is 1: advantages compare the rollouts of a group, "
                "so write rollouts.group_size = 2 or more"
            )
    ids = [environment.id or environment.name for environment in settings.environments]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        problems.append(f"two environments are called {twice[0]!r}: give each its own environments.id")
    return problems


def _of_lengths(settings: RunSettings) -> list[str]:
    longest = min(settings.rollouts.max_rollout_tokens or settings.max_model_tokens, settings.max_model_tokens)
    if longest > settings.scheduling.row_tokens:
        return [
            f"a rollout's branch may have {longest} tokens (the least of rollouts.max_rollout_tokens, "
            "model.max_model_tokens and generator.max_cache_tokens) and would not fit a row of "
            f"scheduling.row_tokens = {settings.scheduling.row_tokens}: write scheduling.row_tokens = {longest}"
        ]
    return []

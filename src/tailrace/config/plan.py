"""What settings come to: every derived budget of a run, in plain words, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.config.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Plan:
    """Budgets derived from the settings. Counts are rollouts unless named otherwise."""

    batch_size: int
    tasks_per_batch: dict[str, int]
    """By environment: how many tasks a batch of that environment alone would hold."""
    staleness_budget: int
    max_running: int
    max_staleness: int
    tokens_per_step: int
    """Completion tokens of one step at most."""
    steps_per_epoch: float
    """Expected, when no group is filtered."""
    expected_steps: float
    """Until the run finishes by itself."""

    def describe(self) -> list[str]:
        """One sentence per budget."""
        tasks = ", ".join(f"{count} of {name}" for name, count in self.tasks_per_batch.items())
        return [
            f"A batch is {self.batch_size} rollouts: {tasks} tasks.",
            f"At most {self.max_running} rollouts run at once.",
            f"At most {self.staleness_budget} rollouts are admitted and not yet trained"
            f" (({self.max_staleness} + 1) x {self.batch_size}).",
            f"Tokens that bear loss are at most {self.max_staleness} policy versions old; older ones are masked.",
            f"A step trains on at most {self.tokens_per_step:,} completion tokens.",
            f"An epoch is about {self.steps_per_epoch:,.1f} steps, if no group is filtered.",
            f"The run finishes after about {self.expected_steps:,.0f} steps.",
        ]


def plan_run(settings: RunSettings, num_tasks: Mapping[str, int]) -> Plan:
    """Derive the budgets. `num_tasks` counts each environment's training tasks, by its id."""
    batch_size = settings.scheduling.batch_size
    sizes = {
        environment.id or environment.name: settings.group_size(environment) for environment in settings.environments
    }
    by_environment = dict(zip(num_tasks, sizes.values(), strict=True))
    steps_per_epoch = sum(count * by_environment[name] for name, count in num_tasks.items()) / batch_size
    ends = [float(settings.max_steps)] if settings.max_steps else []
    ends += [steps_per_epoch * settings.max_epochs] if settings.max_epochs else []
    turn_tokens = max(environment.max_tokens or settings.rollouts.max_tokens for environment in settings.environments)
    turns = max(environment.max_turns or settings.rollouts.max_turns for environment in settings.environments)
    rollout_tokens = min(turn_tokens * turns, settings.rollouts.max_rollout_tokens or turn_tokens * turns)
    return Plan(
        batch_size=batch_size,
        tasks_per_batch={name: batch_size // size for name, size in by_environment.items()},
        staleness_budget=(settings.max_staleness + 1) * batch_size,
        max_running=min(settings.max_running, (settings.max_staleness + 1) * batch_size),
        max_staleness=settings.max_staleness,
        tokens_per_step=rollout_tokens * batch_size,
        steps_per_epoch=steps_per_epoch,
        expected_steps=min(ends),
    )

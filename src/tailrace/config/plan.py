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
    started_per_step: int | None
    """Under over-sampling: what each step starts at once."""
    schedule: str
    """What the engines and the trainer wait for, in one sentence."""
    on_stale: str
    """What happens to tokens that are too old, in one sentence."""
    group_release: str
    """When a group's rollouts are trained on, in one sentence."""
    on_straggler: str | None
    """Under over-sampling: what happens to groups that run at the edge of a step, in one sentence."""
    tokens_per_step: int
    """Completion tokens of one step at most."""
    steps_per_epoch: float
    """Expected, when no group is filtered."""
    expected_steps: float
    """Until the run finishes by itself."""
    evaluation: str | None
    """Where held-out tasks are measured beside training: how often and where, in one sentence."""

    def describe(self) -> list[str]:
        """One sentence per budget."""
        tasks = ", ".join(f"{count} of {name}" for name, count in self.tasks_per_batch.items())
        over = 1 if self.started_per_step is None else self.started_per_step / self.batch_size
        edge = [
            f"Each step starts {self.started_per_step} rollouts; the first {self.batch_size} of finished groups are its"
            " batch, groups beyond it are kept for the next.",
            f"At the edge of a step, {self.on_straggler}",
        ]
        return [
            self.schedule,
            f"A batch is {self.batch_size} rollouts: {tasks} tasks.",
            f"At most {self.max_running} rollouts run at once.",
            f"At most {self.staleness_budget} rollouts are admitted and not yet trained"
            f" (({self.max_staleness} + {over:g}) x {self.batch_size}).",
            *([] if self.started_per_step is None else edge),
            self.group_release,
            f"Tokens that bear loss are at most {self.max_staleness} policy versions old; {self.on_stale}",
            f"A step trains on at most {self.tokens_per_step:,} completion tokens.",
            f"An epoch is about {self.steps_per_epoch:,.1f} steps, if no group is filtered.",
            f"The run finishes after about {self.expected_steps:,.0f} steps.",
            *([] if self.evaluation is None else [self.evaluation]),
        ]


_SCHEDULES = {
    0: "Synchronous: generation and training take turns; every token is of the weights that train on it.",
    1: "One step off: the next batch is generated while the trainer works on this one.",
}
_STEPS = "In steps: what runs when a batch is full stops until the trainer has trained on it, and then goes on."
_STREAM = "Streaming: generation never stops for the trainer while the budgets below have room."

_GROUP_RELEASE = {
    "together": "A group is trained on once all of its rollouts have come back.",
    "early": "A rollout is trained on once enough of its siblings are known, before its group's stragglers; with fewer,"
    " before it becomes too old.",
}
_ON_STALE = {
    "mask": "older ones are masked.",
    "wait": "a batch is held for a group that its step would make older.",
    "restart": "a group that becomes older is started again, at most {max_restarts} times, then masked.",
    "drop": "a group that becomes older is dropped.",
}
_ON_STRAGGLER = {
    "continue": "groups that still run go on.",
    "requeue": "groups that still run are stopped and their tasks started from scratch.",
    "resume_next_step": "groups that still run stop, and go on once the step is trained and its weights serve.",
    "drop": "groups that still run are dropped: batches favour short rollouts.",
}


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
    scheduling, max_staleness = settings.scheduling, settings.max_staleness
    over = scheduling.over_sampling
    stops = over > 1 and scheduling.on_straggler == "resume_next_step"
    budget = scheduling.staleness_budget(max_staleness)
    return Plan(
        batch_size=batch_size,
        tasks_per_batch={name: batch_size // size for name, size in by_environment.items()},
        staleness_budget=budget,
        max_running=min(settings.max_running, budget if over == 1 else int(over * batch_size)),
        max_staleness=max_staleness,
        started_per_step=int(over * batch_size) if over > 1 else None,
        schedule=_STEPS if stops else _SCHEDULES.get(max_staleness, _STREAM),
        on_stale=_ON_STALE[scheduling.on_stale].format(max_restarts=scheduling.max_restarts),
        group_release=_GROUP_RELEASE[scheduling.group_release],
        on_straggler=_ON_STRAGGLER[scheduling.on_straggler] if over > 1 else None,
        tokens_per_step=rollout_tokens * batch_size,
        steps_per_epoch=steps_per_epoch,
        expected_steps=min(ends),
        evaluation=_evaluation(settings),
    )


def _evaluation(settings: RunSettings) -> str | None:
    chosen = settings.evaluation
    if chosen.every_steps is None:
        return None
    return (
        f"Every {chosen.every_steps} steps, up to {chosen.tasks} held-out tasks of each environment are measured, "
        f"{chosen.slots(settings.max_running)} rollouts at once, which training leaves to them meanwhile."
    )

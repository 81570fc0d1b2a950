"""What settings come to: every derived budget of a run, in plain words, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.config.settings import RunSettings
from tailrace.errors import SettingsError
from tailrace.scheduling.settings import WINDOW_BATCHES
from tailrace.urls import without_user

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


@dataclass(frozen=True, slots=True)
class Plan:
    """Budgets derived from the settings."""

    max_running: int
    """Rollouts that run at once, at most."""
    expected_steps: float
    """Until the run finishes by itself."""
    sentences: list[str]
    """One per budget, for people."""


def plan_run(settings: RunSettings, num_tasks: Mapping[str, int]) -> Plan:
    """Derive the budgets. `num_tasks` counts each environment's training tasks, by its id.

    Raises `SettingsError` where the learning rate would have fallen before it has risen, and the run goes on then, and
    where it is told when to have fallen, and does not fall, unless that is a resume, whose settings are there already.
    """
    batch_size, max_staleness = settings.scheduling.batch_size, settings.max_staleness
    sizes = dict(zip(num_tasks, map(settings.group_size, settings.environments), strict=True))
    steps_per_epoch = sum(count * sizes[name] for name, count in num_tasks.items()) / batch_size
    expected_steps = min(settings.max_steps or float("inf"), steps_per_epoch * (settings.max_epochs or float("inf")))
    _require_decay_steps_in_place(settings, expected_steps)
    budget = settings.scheduling.staleness_budget(max_staleness)
    over = settings.scheduling.over_sampling
    max_running = min(settings.max_running, budget if over == 1 else int(over * batch_size))
    tasks = ", ".join(f"{batch_size // size} of {name}" for name, size in sizes.items())
    bound = f"({max_staleness} + {int(over * batch_size) / batch_size:g}) x {batch_size}"
    sentences = [
        _schedule(settings),
        f"A batch is {batch_size} rollouts: {tasks} tasks.",
        f"At most {max_running} rollouts run at once.",
        f"At most {budget} rollouts are admitted and not yet trained ({bound}).",
        *_edge(settings),
        _GROUP_RELEASE[settings.scheduling.group_release],
        f"Tokens that bear loss are at most {max_staleness} policy versions old; "
        + _ON_STALE[settings.scheduling.on_stale].format(max_restarts=settings.scheduling.max_restarts),
        *_end(settings, steps_per_epoch, expected_steps),
        *_evaluation(settings),
    ]
    return Plan(max_running, expected_steps, sentences)


def with_decay_end(settings: RunSettings, plan: Plan) -> RunSettings:
    """The settings, with the step at which the learning rate has fallen where epochs may end the run."""
    trainer = settings.trainer
    if trainer.decay == "constant" or trainer.decay_steps is not None or not settings.max_epochs:
        return settings
    end = trainer.model_copy(update={"decay_steps": math.ceil(plan.expected_steps)})
    return settings.model_copy(update={"trainer": end})


def _require_decay_steps_in_place(settings: RunSettings, expected_steps: float) -> None:
    trainer = settings.trainer
    if trainer.decay_steps is None:
        return
    if trainer.decay == "constant":
        if settings.resume:  # of a run that was begun when this was not refused
            return
        raise SettingsError(
            f"trainer.decay_steps = {trainer.decay_steps} is the step at which the learning rate has fallen, and with "
            "trainer.decay = 'constant' it does not fall: leave it out, or write trainer.decay = \"linear\" or "
            '"cosine"',
            key=("trainer", "decay_steps"),
        )
    if trainer.decay_steps <= trainer.warmup_steps < expected_steps:
        raise SettingsError(
            f"trainer.decay_steps = {trainer.decay_steps} is the step at which the learning rate has fallen, and with "
            f"trainer.warmup_steps = {trainer.warmup_steps} it rises until then: write more decay_steps, or fewer "
            "warmup_steps",
            key=("trainer", "decay_steps"),
        )


def _end(settings: RunSettings, steps_per_epoch: float, expected_steps: float) -> list[str]:
    """What a step is, and how many there are."""
    epoch = f"An epoch is about {steps_per_epoch:,.1f} steps, if no group is filtered."
    if settings.trainer.feed == "stream":
        window = WINDOW_BATCHES * settings.scheduling.batch_size
        return [
            f"The trainer is a program of yours: up to {window} samples are handed over before it tells of a step, and "
            "more where it cannot go on without; its step, its version and its end are what it tells.",
            epoch.replace("about", "about, at that size,"),
        ]
    return [
        f"A step trains on at most {_rollout_tokens(settings) * settings.scheduling.batch_size:,} completion tokens.",
        *_decay(settings),
        *_ranks(settings),
        *_components(settings),
        epoch,
        f"The run finishes after about {expected_steps:,.0f} steps.",
    ]


def _schedule(settings: RunSettings) -> str:
    stops = settings.scheduling.over_sampling > 1 and settings.scheduling.on_straggler == "resume_next_step"
    return _STEPS if stops else _SCHEDULES.get(settings.max_staleness, _STREAM)


def _edge(settings: RunSettings) -> list[str]:
    scheduling = settings.scheduling
    if scheduling.over_sampling == 1:
        return []
    started = int(scheduling.over_sampling * scheduling.batch_size)
    return [
        f"Each step starts {started} rollouts; the first {scheduling.batch_size} of finished groups are its batch, "
        "groups beyond it are kept for the next.",
        f"At the edge of a step, {_ON_STRAGGLER[scheduling.on_straggler]}",
    ]


def _rollout_tokens(settings: RunSettings) -> int:
    """Completion tokens of a rollout, at most."""
    rollouts, environments = settings.rollouts, settings.environments
    turn_tokens = max(environment.max_tokens or rollouts.max_tokens for environment in environments)
    turn_tokens = min(turn_tokens, settings.max_model_tokens - 1)
    turns = max(environment.max_turns or rollouts.max_turns for environment in environments)
    return min(turn_tokens * turns, rollouts.max_rollout_tokens or turn_tokens * turns)


def _decay(settings: RunSettings) -> list[str]:
    trainer = settings.trainer
    unused = [] if trainer.decay_steps is None else [f"trainer.decay_steps = {trainer.decay_steps}"]
    unused += [f"trainer.decay_end = {trainer.decay_end:g}"] if trainer.decay_end else []
    if trainer.decay != "constant" or not unused:
        return []
    are = "are" if len(unused) > 1 else "is"
    return [
        f"The learning rate does not fall: {' and '.join(unused)} {are} for trainer.decay = 'linear' and 'cosine', "
        "and it is 'constant'."
    ]


def _ranks(settings: RunSettings) -> list[str]:
    trainer = settings.trainer
    if trainer.ranks == 1:
        return []
    rows, together = "its own rows of a batch", trainer.sequence_parallel
    if together > 1:
        rows = f"a slice of each row that {together} of them compute together"
    return [
        f"The trainer is {trainer.ranks} processes: each holds 1/{trainer.ranks} of weights, gradients and optimizer, "
        f"and takes {rows}; one that is silent for {trainer.collective_timeout_s:g} s ends all of them."
    ]


def _components(settings: RunSettings) -> list[str]:
    reference, teacher = settings.trainer.loss.reference_kl, settings.trainer.loss.distillation
    sentences = []
    if reference is not None:
        model = f"A frozen copy of {reference.model or settings.model.name} lies beside the trained model, and"
        if reference.model is None and settings.trainer.lora.rank is not None:
            model = "The model without its adapter"
        sentences.append(f"{model} computes every row once more, forward alone.")
    if teacher is not None:
        where = f"at {without_user(teacher.url)}" if teacher.url else "in a process of its own, the role teacher,"
        scored = f"Each group is scored by the teacher {teacher.model} {where}"
        sentences.append(f"{scored} before it is trained on.")
    return sentences


def _evaluation(settings: RunSettings) -> list[str]:
    chosen = settings.evaluation
    if chosen.every_steps is None:
        return []
    return [
        f"Every {chosen.every_steps} steps, up to {chosen.tasks} held-out tasks of each environment are measured, "
        f"{chosen.slots(settings.max_running)} rollouts at once, which training leaves to them meanwhile."
    ]

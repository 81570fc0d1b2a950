"""Between what is scheduled, scored and batched, and when a run ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.batching import INCREMENTAL
from tailrace.config.contradictions.contradiction import Contradiction, first_twice
from tailrace.scheduling.settings import SchedulingSettings, staleness_contradiction

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings


def _end(settings: RunSettings) -> Iterator[Contradiction]:
    if settings.trainer.feed == "batch" and settings.max_steps is None and settings.max_epochs is None:
        yield Contradiction("this run would never end: set max_steps or max_epochs", "max_steps", "max_epochs")


def _schedule(settings: RunSettings) -> Iterator[Contradiction]:
    if why := staleness_contradiction(settings.schedule, settings.scheduling.max_staleness):
        yield Contradiction(why, "scheduling.max_staleness", "schedule")


def _edges(settings: RunSettings) -> Iterator[Contradiction]:
    scheduling, chosen = settings.scheduling, settings.scheduling.on_straggler
    if chosen != "continue" and scheduling.over_sampling == 1:
        yield Contradiction(
            f"scheduling.on_straggler = {chosen!r} speaks of the edge of a step, and without over-sampling there "
            "is none: leave it out, or write scheduling.over_sampling = 1.5, for example",
            *("scheduling.on_straggler", "scheduling.over_sampling"),
        )
    if chosen != "continue" and scheduling.on_stale == "wait":
        yield Contradiction(
            f"scheduling.on_stale = 'wait' holds a batch for groups that run, scheduling.on_straggler = {chosen!r} "
            "stops them when the batch is formed: leave one of them out",
            *("scheduling.on_stale", "scheduling.on_straggler"),
        )


def _restarts(settings: RunSettings) -> Iterator[Contradiction]:
    scheduling, unset = settings.scheduling, SchedulingSettings().max_restarts
    if scheduling.on_stale != "restart" and scheduling.max_restarts != unset:
        message = (
            f"scheduling.max_restarts is for scheduling.on_stale = 'restart' alone: leave it out, or write {unset}"
        )
        yield Contradiction(message, "scheduling.max_restarts", "scheduling.on_stale")


def _early_release(settings: RunSettings) -> Iterator[Contradiction]:
    scheduling, known = settings.scheduling, settings.scheduling.min_known_siblings or 0
    if scheduling.group_release == "together":
        if scheduling.min_known_siblings is not None:
            message = "scheduling.min_known_siblings is for scheduling.group_release = 'early' alone: leave it out"
            yield Contradiction(message, "scheduling.min_known_siblings", "scheduling.group_release")
        return
    early = "scheduling.group_release = 'early' trains on rollouts before their group is complete, and"
    otherwise = "or leave scheduling.group_release out"
    refused: list[tuple[str, str, str, str, str]] = [
        ("on_stale", scheduling.on_stale, "restart", "starts the whole group again", "mask"),
        ("on_straggler", scheduling.on_straggler, "requeue", "starts the whole group again", "continue"),
        (
            "partial_groups",
            scheduling.partial_groups,
            "drop",
            "filters a whole group for one that fails later",
            "keep",
        ),
    ]
    if scheduling.advantage not in INCREMENTAL:
        differs, incremental = "is no reward less the mean of the siblings that are known", min(INCREMENTAL)
        refused.insert(0, ("advantage", scheduling.advantage, scheduling.advantage, differs, incremental))
    for name, chosen, value, why, instead in refused:
        if chosen == value:
            key = f"scheduling.{name}"
            yield Contradiction(f"{early} {key} = {value!r} {why}: write {key} = {instead!r}, {otherwise}", key)
    smallest = min(map(settings.group_size, settings.environments))
    if known >= smallest > 1:
        key = "scheduling.min_known_siblings"
        why = f"a group of {smallest} never has {key} = {known} siblings"
        yield Contradiction(f"{early} {why}: write {smallest // 2}, for example, {otherwise}", key)


def _groups(settings: RunSettings) -> Iterator[Contradiction]:
    batch_size, names = settings.scheduling.batch_size, []
    common = math.lcm(*map(settings.group_size, settings.environments))
    for environment in settings.environments:
        name, size = environment.id or environment.name, settings.group_size(environment)
        names.append(name)
        if batch_size % size:
            yield Contradiction(
                f"scheduling.batch_size is {batch_size}, no multiple of the group size {size} of environment {name!r}: "
                f"write {max(common, batch_size // common * common)}, for example",
                *("scheduling.batch_size", "rollouts.group_size"),
            )
        if size == 1:
            yield Contradiction(
                f"the group size of environment {name!r} is 1: advantages compare the rollouts of a "
                "group, so write rollouts.group_size = 2 or more",
                "rollouts.group_size",
            )
    if twice := first_twice(names):
        yield Contradiction(f"two environments are called {twice!r}: give each its own environments.id", "environments")


def _lengths(settings: RunSettings) -> Iterator[Contradiction]:
    if settings.trainer.feed == "stream":  # whose rows are none of ours
        return
    longest = min(settings.rollouts.max_rollout_tokens or settings.max_model_tokens, settings.max_model_tokens)
    if longest > settings.scheduling.row_tokens:
        yield Contradiction(
            f"a rollout's branch may have {longest} tokens (the least of rollouts.max_rollout_tokens, "
            "model.max_model_tokens and generator.max_cache_tokens) and would not fit a row of "
            f"scheduling.row_tokens = {settings.scheduling.row_tokens}: write scheduling.row_tokens = {longest}",
            *("scheduling.row_tokens", "generator.max_cache_tokens", "model.max_model_tokens"),
        )


CHECKS = (
    _end,
    _schedule,
    _edges,
    _restarts,
    _early_release,
    _groups,
    _lengths,
)

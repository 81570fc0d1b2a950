"""Settings that are each fine and cannot hold together: what no single section can see."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tailrace.batching import INCREMENTAL
from tailrace.config.sources import Key
from tailrace.errors import SettingsError
from tailrace.generation.rpc.keys import require_safe_address
from tailrace.scheduling.settings import MAX_STALENESS

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings


class Contradiction(ValueError):
    """A sentence that names the keys and what to write instead; `keys` are those keys."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys: tuple[Key, ...] = tuple(tuple(key.split(".")) for key in keys)


class Contradictions(ValueError):
    """All that were found."""

    def __init__(self, found: list[Contradiction]) -> None:
        super().__init__("\n".join(map(str, found)))
        self.found = found


def find_contradictions(settings: RunSettings) -> list[Contradiction]:
    """Between the sections of a run's settings."""
    return [
        *_of_the_end(settings),
        *_of_the_schedule(settings),
        *_of_the_edges(settings),
        *_of_early_release(settings),
        *_of_groups(settings),
        *_of_lengths(settings),
        *_of_the_replicas(settings),
        *_of_router_replay(settings),
        *_of_the_transport(settings),
    ]


def _of_the_end(settings: RunSettings) -> list[Contradiction]:
    if settings.max_steps is None and settings.max_epochs is None:
        return [Contradiction("this run would never end: set max_steps or max_epochs", "max_steps", "max_epochs")]
    return []


def _of_the_schedule(settings: RunSettings) -> list[Contradiction]:
    implied, chosen = MAX_STALENESS[settings.schedule], settings.scheduling.max_staleness
    if settings.schedule == "stream" or chosen in {None, implied}:
        return []
    return [
        Contradiction(
            f"schedule = {settings.schedule!r} means scheduling.max_staleness = {implied}, but it is {chosen}: "
            'leave it out, or write schedule = "stream"',
            *("scheduling.max_staleness", "schedule"),
        )
    ]


def _of_the_edges(settings: RunSettings) -> list[Contradiction]:
    scheduling, problems = settings.scheduling, []
    chosen = scheduling.on_straggler
    if chosen != "continue" and scheduling.over_sampling == 1:
        problems.append(
            Contradiction(
                f"scheduling.on_straggler = {chosen!r} speaks of the edge of a step, and without over-sampling there "
                "is none: leave it out, or write scheduling.over_sampling = 1.5, for example",
                *("scheduling.on_straggler", "scheduling.over_sampling"),
            )
        )
    if chosen != "continue" and scheduling.on_stale == "wait":
        problems.append(
            Contradiction(
                f"scheduling.on_stale = 'wait' holds a batch for groups that run, scheduling.on_straggler = {chosen!r} "
                "stops them when the batch is formed: leave one of them out",
                *("scheduling.on_stale", "scheduling.on_straggler"),
            )
        )
    return problems


def _of_early_release(settings: RunSettings) -> list[Contradiction]:
    scheduling = settings.scheduling
    if scheduling.group_release == "together":
        if scheduling.min_known_siblings is None:
            return []
        message = "scheduling.min_known_siblings is for scheduling.group_release = 'early' alone: leave it out"
        return [Contradiction(message, "scheduling.min_known_siblings", "scheduling.group_release")]
    early, problems = "scheduling.group_release = 'early' trains on rollouts before their group is complete", []
    if scheduling.advantage not in INCREMENTAL:
        why = f"scheduling.advantage = {scheduling.advantage!r} needs all of a group's rewards"
        problems.append((why, f"write scheduling.advantage = {min(INCREMENTAL)!r}", "scheduling.advantage"))
    if scheduling.on_stale == "restart":
        why = "scheduling.on_stale = 'restart' starts the whole group again"
        problems.append((why, "write scheduling.on_stale = 'mask'", "scheduling.on_stale"))
    if scheduling.on_straggler == "requeue":
        why = "scheduling.on_straggler = 'requeue' starts the whole group again"
        problems.append((why, "write scheduling.on_straggler = 'continue'", "scheduling.on_straggler"))
    if scheduling.partial_groups == "drop":
        why = "scheduling.partial_groups = 'drop' filters the whole group for one that fails later"
        problems.append((why, "write scheduling.partial_groups = 'keep'", "scheduling.partial_groups"))
    smallest = min(settings.group_size(environment) for environment in settings.environments)
    if (scheduling.min_known_siblings or 0) >= smallest > 1:
        why = (
            f"a group of {smallest} never has scheduling.min_known_siblings = {scheduling.min_known_siblings} siblings"
        )
        problems.append((why, f"write {smallest // 2}, for example", "scheduling.min_known_siblings"))
    return [
        Contradiction(f"{early}, and {why}: {instead}, or leave scheduling.group_release out", key)
        for why, instead, key in problems
    ]


def _of_groups(settings: RunSettings) -> list[Contradiction]:
    problems = []
    common = math.lcm(*map(settings.group_size, settings.environments))
    fitting = max(common, settings.scheduling.batch_size // common * common)
    for environment in settings.environments:
        name, size = environment.id or environment.name, settings.group_size(environment)
        if settings.scheduling.batch_size % size:
            problems.append(
                Contradiction(
                    f"scheduling.batch_size is {settings.scheduling.batch_size}, no multiple of the group size {size} "
                    f"of environment {name!r}: write {fitting}, for example",
                    *("scheduling.batch_size", "rollouts.group_size"),
                )
            )
        if size == 1:
            problems.append(
                Contradiction(
                    f"the group size of environment {name!r} is 1: advantages compare the rollouts of a "
                    "group, so write rollouts.group_size = 2 or more",
                    "rollouts.group_size",
                )
            )
    ids = [environment.id or environment.name for environment in settings.environments]
    if twice := sorted({one for one in ids if ids.count(one) > 1}):
        message = f"two environments are called {twice[0]!r}: give each its own environments.id"
        problems.append(Contradiction(message, "environments"))
    return problems


def _of_lengths(settings: RunSettings) -> list[Contradiction]:
    longest = min(settings.rollouts.max_rollout_tokens or settings.max_model_tokens, settings.max_model_tokens)
    if longest <= settings.scheduling.row_tokens:
        return []
    return [
        Contradiction(
            f"a rollout's branch may have {longest} tokens (the least of rollouts.max_rollout_tokens, "
            "model.max_model_tokens and generator.max_cache_tokens) and would not fit a row of "
            f"scheduling.row_tokens = {settings.scheduling.row_tokens}: write scheduling.row_tokens = {longest}",
            *("scheduling.row_tokens", "generator.max_cache_tokens", "model.max_model_tokens"),
        )
    ]


def _of_the_replicas(settings: RunSettings) -> list[Contradiction]:
    generator, problems = settings.generator, []
    if settings.placement == "inline" and (generator.replicas > 1 or generator.connect):
        key = "generator.connect" if generator.connect else "generator.replicas"
        message = f'{key} needs generators in processes of their own: leave it out, or write placement = "local"'
        problems.append(Contradiction(message, key, "placement"))
    if generator.connect and generator.replicas > 1:
        message = (
            "generator.connect names generators that run already, generator.replicas starts new ones: leave one out"
        )
        problems.append(Contradiction(message, "generator.replicas", "generator.connect"))
    if generator.connect_key and not generator.connect:
        message = "generator.connect_key is for generator.connect, which is empty: leave it out, or name the generators"
        problems.append(Contradiction(message, "generator.connect_key"))
    for address in generator.connect:
        try:
            require_safe_address(
                address,
                has_keys=generator.connect_key is not None,
                setting="generator.connect",
                key_setting="generator.connect_key",
            )
        except SettingsError as error:
            problems.append(Contradiction(str(error), "generator.connect"))
    if twice := sorted({one for one in generator.connect if generator.connect.count(one) > 1}):
        problems.append(Contradiction(f"generator.connect names {twice[0]} twice", "generator.connect"))
    return problems


def _of_router_replay(settings: RunSettings) -> list[Contradiction]:
    keys = ("trainer.router_replay", "generator.return_routed_experts")
    replay, returned = settings.trainer.router_replay, settings.generator.return_routed_experts
    if replay == "on" and not returned:
        message = (
            "trainer.router_replay = 'on' replays the experts that generation chose, and "
            "generator.return_routed_experts = false leaves them unknown: write generator.return_routed_experts = true"
        )
        return [Contradiction(message, *keys)]
    if returned and settings.generator.connect and settings.transport.payloads == "reference":
        message = (
            "generators of generator.connect do not see this run's shared memory, and transport.payloads = 'reference' "
            'leaves routed experts there: write transport.payloads = "value"'
        )
        return [Contradiction(message, "transport.payloads", "generator.connect")]
    if replay == "off" and returned:
        message = (
            "generator.return_routed_experts = true sends experts for every token and layer to a trainer that "
            "trainer.router_replay = 'off' keeps from using them: leave one of them out"
        )
        return [Contradiction(message, *keys)]
    return []


def _of_the_transport(settings: RunSettings) -> list[Contradiction]:
    placement, batches = settings.placement, settings.transport.batches
    if batches is None or (batches == "memory") == (placement == "inline"):
        return []
    return [
        Contradiction(
            f"transport.batches = {batches!r} does not go with placement = {placement!r}: batches stay in memory where"
            " all is one process, and only there; leave it out, or choose the other placement",
            *("transport.batches", "placement"),
        )
    ]

"""Settings that are each valid and contradict each other, across sections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from tailrace.batching import INCREMENTAL
from tailrace.config.sources import Key
from tailrace.errors import SettingsError
from tailrace.scheduling.settings import MAX_STALENESS
from tailrace.transport.keys import require_safe_address

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings
    from tailrace.generation.settings import GeneratorSettings

_SUPPORT_IDS = 2**31
_LAST_PORT = 65_535


class Contradiction:
    """A sentence that names the keys and what to write instead; `keys` are those keys."""

    def __init__(self, message: str, *keys: str) -> None:
        self.message = message
        self.keys: tuple[Key, ...] = tuple(tuple(key.split(".")) for key in keys)


class Contradictions(ValueError):
    """All that were found."""

    def __init__(self, found: list[Contradiction]) -> None:
        super().__init__("\n".join(one.message for one in found))
        self.found = found


def find_contradictions(settings: RunSettings) -> list[Contradiction]:
    """Between the sections of a run's settings."""
    checks = (
        _end,
        _schedule,
        _edges,
        _early_release,
        _groups,
        _lengths,
        _replicas,
        _ranks,
        _router_replay,
        _adapters,
        _supports,
        _support_room,
        _batches,
        _redis,
        _ray,
        _weights,
        _teacher,
        _agent_workers,
        _gateway,
        _stream,
    )
    return [*chain.from_iterable(check(settings) for check in checks)]


def _end(settings: RunSettings) -> Iterator[Contradiction]:
    if settings.trainer.feed == "batch" and settings.max_steps is None and settings.max_epochs is None:
        yield Contradiction("this run would never end: set max_steps or max_epochs", "max_steps", "max_epochs")


def _schedule(settings: RunSettings) -> Iterator[Contradiction]:
    implied, chosen = MAX_STALENESS[settings.schedule], settings.scheduling.max_staleness
    if settings.schedule != "stream" and chosen not in {None, implied}:
        yield Contradiction(
            f"schedule = {settings.schedule!r} means scheduling.max_staleness = {implied}, but it is {chosen}: "
            'leave it out, or write schedule = "stream"',
            *("scheduling.max_staleness", "schedule"),
        )


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
    if twice := _first_twice(names):
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


def _replicas(settings: RunSettings) -> Iterator[Contradiction]:
    generator = settings.generator
    if settings.placement == "inline" and (generator.replicas.max > 1 or generator.connect):
        key = "generator.connect" if generator.connect else "generator.replicas"
        message = f'{key} needs generators in processes of their own: leave it out, or write placement = "local"'
        yield Contradiction(message, key, "placement")
    if generator.connect and generator.replicas.max > 1:
        yield Contradiction(
            "generator.connect names generators that run already, generator.replicas starts new ones: leave one out",
            *("generator.replicas", "generator.connect"),
        )
    if generator.connect_key and not generator.connect:
        message = "generator.connect_key is for generator.connect, which is empty: leave it out, or name the generators"
        yield Contradiction(message, "generator.connect_key")
    for address in generator.connect:
        try:
            require_safe_address(
                address,
                has_keys=generator.connect_key is not None,
                setting="generator.connect",
                key_setting="generator.connect_key",
            )
        except SettingsError as error:
            yield Contradiction(str(error), "generator.connect")
    if twice := _first_twice(generator.connect):
        yield Contradiction(f"generator.connect names {twice} twice", "generator.connect")
    yield from _joining(generator)
    yield from _growing(settings)


def _growing(settings: RunSettings) -> Iterator[Contradiction]:
    """A launcher of one's own may start more generators as a cluster's does."""
    chosen, unset = settings.generator.replicas, type(settings.generator.replicas)()
    names = [name for name in ("grow_after_s", "shrink_after_s") if getattr(chosen, name) != getattr(unset, name)]
    if names and not chosen.may_join:
        why = f"generator.replicas has min = max = {chosen.max}: leave it out, or write a larger max"
    elif names and settings.placement != "ray" and ":" not in settings.placement:
        why = "only with placement = 'ray' a run starts more of them by itself: leave it out, or choose that"
    else:
        return
    yield Contradiction(
        f"generator.replicas.{names[0]} is about how many generators a run has, and {why}",
        *(f"generator.replicas.{names[0]}", "placement"),
    )


def _joining(generator: GeneratorSettings) -> Iterator[Contradiction]:
    address, keys = generator.join_address, ("generator.join_address", "generator.replicas")
    if address is not None and not generator.replicas.may_join:
        yield Contradiction(
            f"generator.join_address is for generators that join, and generator.replicas = {generator.replicas.max} "
            "takes none in: leave it out, or write generator.replicas = {min = ..., max = ...}",
            *keys,
        )
    if generator.join_key is not None and address is None:
        message = "generator.join_key is for generator.join_address, which is unset: leave it out, or say where"
        yield Contradiction(message, "generator.join_key")
    if address is not None:
        try:
            require_safe_address(
                address,
                has_keys=generator.join_key is not None,
                setting="generator.join_address",
                key_setting="generator.join_key",
            )
        except SettingsError as error:
            yield Contradiction(str(error), "generator.join_address")


def _ranks(settings: RunSettings) -> Iterator[Contradiction]:
    trainer = settings.trainer
    if trainer.ranks > 1 and settings.placement == "inline":
        yield Contradiction(
            f"trainer.ranks = {trainer.ranks} needs a process for each rank, and placement = 'inline' has one for all: "
            'leave it out, or write placement = "local"',
            *("trainer.ranks", "placement"),
        )
    if trainer.devices is not None and trainer.device.startswith("cuda") and len(trainer.devices) != trainer.ranks:
        yield Contradiction(
            f"trainer.devices names {len(trainer.devices)} GPUs, and trainer.ranks = {trainer.ranks} needs one for "
            "each rank: give both the same number",
            *("trainer.devices", "trainer.ranks"),
        )
    if twice := _first_twice(trainer.devices or ()):
        yield Contradiction(
            f"trainer.devices names the GPU {twice} twice, and ranks cannot share one", "trainer.devices"
        )
    if trainer.ranks > 1 and ":" in trainer.device:
        yield Contradiction(
            f"trainer.device = {trainer.device!r} is one GPU, and trainer.ranks = {trainer.ranks}: write "
            'trainer.device = "cuda", and name their GPUs in trainer.devices',
            *("trainer.device", "trainer.ranks"),
        )


def _router_replay(settings: RunSettings) -> Iterator[Contradiction]:
    keys = ("trainer.router_replay", "generator.return_routed_experts")
    replay, returned = settings.trainer.router_replay, settings.generator.return_routed_experts
    if replay == "on" and not returned:
        yield Contradiction(
            "trainer.router_replay = 'on' replays the experts that generation chose, and "
            "generator.return_routed_experts = false leaves them unknown: write generator.return_routed_experts = true",
            *keys,
        )
    elif returned and (elsewhere := _elsewhere(settings)) and settings.transport.payloads == "reference":
        yield Contradiction(
            f"generators of {elsewhere} do not see this run's shared memory, and transport.payloads = 'reference' "
            'leaves routed experts there: write transport.payloads = "value"',
            *("transport.payloads", elsewhere),
        )
    elif replay == "off" and returned:
        yield Contradiction(
            "generator.return_routed_experts = true sends experts for every token and layer to a trainer that "
            "trainer.router_replay = 'off' keeps from using them: leave one of them out",
            *keys,
        )
    elif returned and settings.trainer.loss.reference_kl is not None:
        yield Contradiction(
            "generator.return_routed_experts = true trains the policy with the experts that generation chose, and the "
            "model of trainer.loss.reference_kl chooses its own, so that equal weights would diverge: leave one out",
            *("trainer.loss.reference_kl", "generator.return_routed_experts"),
        )


def _elsewhere(settings: RunSettings) -> str:
    """The setting by which generators on other hosts serve the run; empty where none may."""
    if settings.generator.connect:
        return "generator.connect"
    return "generator.join_address" if settings.generator.join_address is not None else ""


def _adapters(settings: RunSettings) -> Iterator[Contradiction]:
    generator, publish = settings.generator, "trainer.lora.publish"
    if not settings.trainer.lora.publishes_adapters:
        if generator.vllm.get("enable_lora"):
            yield Contradiction(
                "generator.vllm.enable_lora is for weights that come as adapters: leave it out, or write "
                'trainer.lora.publish = "adapters", which sets it',
                *("generator.vllm", publish),
            )
    elif generator.engine != "vllm":
        yield Contradiction(
            f"trainer.lora.publish = 'adapters' needs an engine that adds them up, and generator.engine is "
            f'{generator.engine!r}: leave it out, or write generator.engine = "vllm"',
            *(publish, "generator.engine"),
        )
    elif elsewhere := _elsewhere(settings):
        yield Contradiction(
            "trainer.lora.publish = 'adapters' needs generators that were started for it, and those of "
            f"{elsewhere} take whole weights: leave it out",
            *(publish, elsewhere),
        )


def _supports(settings: RunSettings) -> Iterator[Contradiction]:
    rollouts, generator = settings.rollouts, settings.generator
    knows = generator.engine != "vllm" or generator.connect or generator.vllm.get("return_sampling_mask")
    if rollouts.restricts and not knows:
        key = "rollouts.top_p" if rollouts.top_p < 1 else "rollouts.top_k"
        yield Contradiction(
            f"{key} restricts what is sampled, and the trainer has to know what was left: add "
            "generator.vllm.return_sampling_mask = true (vLLM on GPUs), or choose generator.engine = 'torch'",
            *(key, "generator.engine"),
        )


def _support_room(settings: RunSettings) -> Iterator[Contradiction]:
    """A batch names the ids of supports by 31 bits; each sampled token brings `top_k` of them."""
    rollouts, trainer, batch_size = settings.rollouts, settings.trainer, settings.scheduling.batch_size
    longest = min(rollouts.max_rollout_tokens or settings.max_model_tokens, settings.max_model_tokens)
    rank_rollouts = -(-batch_size // trainer.row_groups)
    ids = rank_rollouts * longest * rollouts.top_k
    if ids >= _SUPPORT_IDS:
        yield Contradiction(
            f"rollouts.top_k = {rollouts.top_k:,} sends so many token ids with each token: {rank_rollouts:,} rollouts "
            f"of {longest:,} tokens, one rank's part of a batch, are {ids:,} ids, and a batch holds {_SUPPORT_IDS:,}: "
            "lower rollouts.top_k, scheduling.batch_size or model.max_model_tokens, or raise trainer.ranks",
            *("rollouts.top_k", "scheduling.batch_size"),
        )


def _batches(settings: RunSettings) -> Iterator[Contradiction]:
    placement, batches = settings.placement, settings.transport.batches
    if placement == "redis" and batches not in {None, "redis"}:
        yield Contradiction(
            f"transport.batches = {batches!r} does not reach a trainer elsewhere (placement = 'redis'): leave it out",
            *("transport.batches", "placement"),
        )
    elif batches is not None and (batches == "memory") != (placement == "inline"):
        yield Contradiction(
            f"transport.batches = {batches!r} does not go with placement = {placement!r}: batches stay in memory where"
            " all is one process, and only there; leave it out, or choose the other placement",
            *("transport.batches", "placement"),
        )


def _redis(settings: RunSettings) -> Iterator[Contradiction]:
    chosen, feeds = settings.transport.redis, settings.feeds_through_redis
    is_used = settings.uses_redis or feeds
    if not is_used and (chosen.url is not None or chosen.start):
        yield Contradiction(
            'transport.redis is used by nothing: write transport.batches = "redis", or leave it out',
            *("transport.redis", "transport.batches"),
        )
    elif is_used and (chosen.url is None) != chosen.start:
        what = "trainer.feed = 'stream'" if feeds else "transport.batches = 'redis'"
        yield Contradiction(
            f"{what} needs either the address of one (transport.redis.url) or "
            f"transport.redis.start = true, and {'both are' if chosen.start else 'neither is'} there",
            *("transport.redis.url", "transport.redis.start"),
        )
    if settings.placement != "redis":
        return
    refused = {
        "transport.redis.start": (
            chosen.start,
            "starts a Redis that only this machine reaches: give transport.redis.url",
        ),
        "trainer.ranks": (settings.trainer.ranks > 1, "above 1 needs ranks that meet on one machine: leave it out"),
        "generator.return_routed_experts": (
            settings.generator.return_routed_experts,
            "leaves routed experts in the memory of the generators' machine: leave it out",
        ),
        "transport.weights": (settings.transport.weights == "nccl", "= 'nccl' needs one machine: leave it out"),
    }
    for key, (is_chosen, why) in refused.items():
        if is_chosen:
            message = f"placement = 'redis' has a trainer on another machine, and {key} {why}"
            yield Contradiction(message, key, "placement")


def _ray(settings: RunSettings) -> Iterator[Contradiction]:
    trainer, generator, transport = settings.trainer, settings.generator, settings.transport
    if settings.placement != "ray":
        if settings.ray != type(settings.ray)() and ":" not in settings.placement:  # a launcher of one's own may ask
            yield Contradiction("ray is about placement = 'ray': leave it out, or choose that", "ray", "placement")
        return
    memory = transport.batches in ("memory", "shared_memory")
    refused = {
        "transport.batches": (memory, f"= {transport.batches!r} stays on one node"),
        "transport.redis.start": (transport.redis.start, "starts a Redis that only this machine reaches"),
        "trainer.feed": (trainer.feed == "stream", "= 'stream' has no trainer of the run's own"),
        "trainer.devices": (trainer.devices is not None, "names GPUs of one machine"),
        "generator.devices": (generator.devices is not None, "names GPUs of one machine"),
        "trainer.device": (":" in trainer.device, "names a GPU of one machine, and not 'cuda'"),
        "generator.device": (":" in generator.device, "names a GPU of one machine, and not 'cuda'"),
    }
    for key, (is_chosen, why) in refused.items():
        if is_chosen:
            message = f"placement = 'ray' has roles on the nodes of a cluster, and {key} {why}: leave it out"
            yield Contradiction(message, key, "placement")


def _teacher(settings: RunSettings) -> Iterator[Contradiction]:
    if settings.trainer.loss.distillation is None:
        return
    if settings.scheduling.group_release == "early":
        yield Contradiction(
            "trainer.loss.distillation asks a teacher when a group is scored, and scheduling.group_release = 'early' "
            "trains on rollouts before: leave one of them out",
            *("trainer.loss.distillation", "scheduling.group_release"),
        )
    if settings.rollouts.restricts:
        yield Contradiction(
            "trainer.loss.distillation compares with a teacher's log-probabilities over the whole vocabulary, and "
            "rollouts.top_p or rollouts.top_k leaves less of it to the policy: leave one of them out",
            *("trainer.loss.distillation", "rollouts.top_p"),
        )
    asked = [settings.rollouts.temperature, *(one.temperature for one in settings.environments)]
    if odd := next((one for one in asked if one not in (None, 1.0)), None):
        yield Contradiction(
            f"trainer.loss.distillation compares with a teacher's log-probabilities, which are told at temperature 1, "
            f"and rollouts are sampled at {odd}: write rollouts.temperature = 1.0",
            *("trainer.loss.distillation", "rollouts.temperature"),
        )


def _weights(settings: RunSettings) -> Iterator[Contradiction]:
    chosen = settings.transport.weights
    if chosen == "nccl":
        yield from _weight_transfer(settings)
    elif chosen is not None and not _elsewhere(settings):
        yield Contradiction(
            f"transport.weights = {chosen!r} is about weights that are sent to generators of other hosts, and there are"
            " none: generators of this run read them in shared memory; leave it out, or set generator.connect",
            *("transport.weights", "generator.connect"),
        )


def _weight_transfer(settings: RunSettings) -> Iterator[Contradiction]:
    trainer, generator = settings.trainer, settings.generator
    reasons = {
        "generator.connect": generator.connect and "generators of other hosts are sent weights by their sockets",
        "generator.replicas": generator.replicas.may_join and "generators that join take no part in its group of GPUs",
        "placement": settings.placement == "inline" and "roles of one process share its GPUs",
        "generator.engine": generator.engine != "vllm" and f"the {generator.engine} engine has no weight transfer",
        "generator.lockstep": generator.lockstep and "ranks in lockstep are given weights by their first one",
        "trainer.device": trainer.feed == "batch"
        and not trainer.device.startswith("cuda")
        and f"the trainer is on {trainer.device!r}",
        "trainer.lora.publish": trainer.lora.publishes_adapters and "adapters are installed from files",
    }
    for key, reason in reasons.items():
        if reason:
            yield Contradiction(
                "transport.weights = 'nccl' sends weights from the trainer's GPU to those of the run's own vLLM, and "
                f"{reason}: leave it out",
                *("transport.weights", key),
            )


def _agent_workers(settings: RunSettings) -> Iterator[Contradiction]:
    workers = settings.rollouts.agent_workers
    if settings.placement == "inline" and workers not in (0, "auto"):
        yield Contradiction(
            f"placement = 'inline' keeps all in one process, but rollouts.agent_workers is {workers}: leave it out, or "
            "write placement = 'local'",
            *("rollouts.agent_workers", "placement"),
        )


def _gateway(settings: RunSettings) -> Iterator[Contradiction]:
    port, workers = settings.gateway.port, settings.rollouts.num_agent_workers
    if port and settings.placement != "inline" and port + workers > _LAST_PORT:
        yield Contradiction(
            f"gateway.port is {port}, and the {workers} agent workers of rollouts.agent_workers listen at the ports "
            f"after it, which end at {_LAST_PORT}: lower gateway.port",
            *("gateway.port", "rollouts.agent_workers"),
        )


def _stream(settings: RunSettings) -> Iterator[Contradiction]:
    """What a trainer that is not ours would ignore, or cannot be given."""
    if settings.trainer.feed == "batch":
        return
    stream, scheduling, own = "trainer.feed = 'stream'", settings.scheduling, type(settings.trainer)()
    odd = [f"trainer.{name}" for name, value in own if name != "feed" and getattr(settings.trainer, name) != value]
    if odd:
        are = "is" if len(odd) == 1 else "are"
        yield Contradiction(
            f"{stream} leaves training to a program of yours, and {', '.join(odd)} {are} of Tailrace's own trainer: "
            f"leave {'it' if len(odd) == 1 else 'them'} out",
            *(*odd, "trainer.feed"),
        )
    reasons = {
        "max_steps": settings.max_steps is not None and "that program says when training is over",
        "scheduling.on_stale": scheduling.on_stale == "wait" and "there is no batch that could be held",
        "scheduling.over_sampling": scheduling.over_sampling > 1 and "there is no edge of a step",
        "scheduling.whiten_advantages": scheduling.whiten_advantages
        and "there is no batch to whiten over (tailrace.feed has a helper for the program)",
        "scheduling.row_tokens": scheduling.row_tokens != type(scheduling).model_fields["row_tokens"].default
        and "rows are laid by that program",
        "generator.return_routed_experts": settings.generator.return_routed_experts
        and "routed experts stay in this run's shared memory",
        "transport.batches": settings.transport.batches is not None and "no batch is sent",
        "placement": settings.placement == "redis" and "the trainer of placement = 'redis' is Tailrace's own",
    }
    for key, reason in reasons.items():
        if reason:
            message = f"{stream} hands samples to a program of yours, and {reason}: leave {key} out"
            yield Contradiction(message, key, "trainer.feed")


def _first_twice(names: Iterable[str]) -> str | None:
    return min((name for name, count in Counter(names).items() if count > 1), default=None)

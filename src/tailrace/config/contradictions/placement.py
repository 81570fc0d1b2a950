"""Between where roles are and how they reach each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.config.contradictions.contradiction import Contradiction, key_of_other_hosts

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings

_LAST_PORT = 65_535


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


def _devices(settings: RunSettings) -> Iterator[Contradiction]:
    """GPUs that no role would be given. vLLM takes GPUs whatever `device` says."""
    if settings.placement == "ray":  # where none are named
        return
    trainer, generator = settings.trainer, settings.generator
    of_roles = [("trainer", trainer.device, trainer.devices)] if trainer.feed == "batch" else []
    of_roles += [("generator", generator.device, generator.devices)] if generator.engine != "vllm" else []
    for section, device, devices in of_roles:
        if devices and not device.startswith("cuda"):
            yield Contradiction(
                f"{section}.devices names GPUs, and {section}.device = {device!r} uses none: write {section}.device = "
                '"cuda", or leave it out',
                *(f"{section}.devices", f"{section}.device"),
            )
    for section, devices in (("trainer", trainer.devices), ("generator", generator.devices)):
        if devices and settings.placement == "inline":
            yield Contradiction(
                f"{section}.devices gives GPUs to a process of its own, and placement = 'inline' has one for all roles:"
                f' leave it out, and write {section}.device = "cuda:1", or set CUDA_VISIBLE_DEVICES for vLLM',
                *(f"{section}.devices", "placement"),
            )
    if generator.devices and generator.connect:
        yield Contradiction(
            "generator.devices gives GPUs to generators that the run starts, and generator.connect has it start none: "
            "leave one of them out",
            *("generator.devices", "generator.connect"),
        )


def _weights(settings: RunSettings) -> Iterator[Contradiction]:
    chosen = settings.transport.weights
    if chosen == "nccl":
        yield from _weight_transfer(settings)
    elif chosen == "object_store":
        yield from _object_store(settings)
    elif chosen is not None and not key_of_other_hosts(settings):
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


def _object_store(settings: RunSettings) -> Iterator[Contradiction]:
    what = "transport.weights = 'object_store' goes through the object store of a Ray cluster"
    if settings.placement != "ray" and ":" not in settings.placement:
        yield Contradiction(
            f"{what}, and placement is {settings.placement!r}: leave it out, or write placement = 'ray'",
            *("transport.weights", "placement"),
        )
    elif settings.generator.connect:
        yield Contradiction(
            f"{what} to the run's own generators, and those of generator.connect are not: leave one of them out",
            *("transport.weights", "generator.connect"),
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


CHECKS = (
    _batches,
    _redis,
    _ray,
    _devices,
    _weights,
    _agent_workers,
    _gateway,
    _stream,
)

"""What the roles of a run need of a cluster's nodes, from its settings."""

from __future__ import annotations

import asyncio
import uuid

from tailrace.config import RunSettings
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.cluster import Bundle, RoleGroup, describe_placing, place
from tailrace.run.devices import is_vllm_for_cpus
from tailrace.run.teacher import TEACHER, teacher_settings


def role_groups(settings: RunSettings, *, has_gpus: bool | None = None) -> tuple[RoleGroup, ...]:
    """Each replica on a node of its own choice, whole; the trainer's ranks on as few nodes as have room for them.

    A number of agent workers is spread over the nodes. What is left of agents, and `auto`, is beside the scheduler: on
    the machine that the run is started on. `has_gpus` is whether nodes have GPUs for vLLM; None: as its build here
    says.
    """
    trainer, generator = settings.trainer, settings.generator
    of_rank = 1 if trainer.device.startswith("cuda") else 0
    ranks = tuple(Bundle(name, trainer.threads, of_rank) for name in trainer.rank_names)
    groups = [RoleGroup("trainer", ranks, "STRICT_PACK" if len(ranks) == 1 else "PACK")]
    if not generator.connect:
        groups += [_replica(name, generator, has_gpus) for name in generator.replica_names]
    if (teacher := teacher_settings(settings)) is not None:
        groups.append(_replica(TEACHER, teacher.generator, has_gpus))
    if agents := tuple(map(Bundle, settings.rollouts.hosted_worker_names)):
        groups.append(RoleGroup("agents", agents, "SPREAD"))
    return tuple(groups)


def spare_groups(settings: RunSettings, *, has_gpus: bool | None = None) -> tuple[RoleGroup, ...]:
    """Replicas that the run asks for later, while rollouts have use for more."""
    generator = settings.generator
    return () if generator.connect else tuple(_replica(name, generator, has_gpus) for name in generator.spare_names)


def _replica(name: str, generator: GeneratorSettings, has_gpus: bool | None) -> RoleGroup:
    """A replica's tensor parallelism is on one node."""
    ranks = generator.tensor_parallel
    for_vllm = not is_vllm_for_cpus() if has_gpus is None else has_gpus
    on_gpus = generator.device.startswith("cuda") or (generator.engine == "vllm" and for_vllm)
    bundle = Bundle(name, generator.threads * ranks, ranks if on_gpus else 0, _why_whole(generator, on_gpus=on_gpus))
    return RoleGroup(name, (bundle,))


def _why_whole(generator: GeneratorSettings, *, on_gpus: bool) -> str:
    """No engine here has ranks on several nodes; empty for one that has a single rank."""
    if generator.tensor_parallel == 1:
        return ""
    if generator.lockstep:
        who = "generator.lockstep drives its ranks"
    else:
        who = "vLLM is started with its ranks" if on_gpus else "vLLM's build for CPUs has its ranks"
    return f"{who} on one node: lower generator.tensor_parallel = {generator.tensor_parallel}, or take larger nodes"


def describe_cluster(settings: RunSettings) -> list[str]:
    """For people, of placement = "ray": which role would be on which node, and what fits nowhere. Asks the cluster.

    Raises `SettingsError` where it cannot be reached.
    """
    if settings.placement != "ray":
        return []
    from tailrace.lifecycle.ray_cluster import RayCluster

    cluster = asyncio.run(RayCluster.reach(settings.ray, settings.name, uuid.uuid4().hex))
    try:
        nodes = cluster.nodes()
    finally:
        cluster.close()
    placing, spare = place(role_groups(settings), nodes), spare_groups(settings)
    more = len(place(spare, placing.left).nodes)
    growing = f"Room for {more} more of the {len(spare)} generators that may be started later."
    return [*describe_placing(placing, nodes), *([growing] if spare else [])]

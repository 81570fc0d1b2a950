"""What the roles of a run need of a cluster's nodes, from its settings."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

from tailrace.config import RunSettings
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.cluster import Bundle, RoleGroup, describe_placing, fitted, place
from tailrace.run.devices import is_vllm_for_cpus
from tailrace.run.teacher import TEACHER, teacher_settings


def role_groups(settings: RunSettings, *, has_gpus: bool | None = None) -> tuple[RoleGroup, ...]:
    """Each replica on a node of its own choice, or divided where no node has it; the trainer's ranks on few nodes.

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
    """A replica's tensor parallelism is on one node, or over several alike where none has room for it."""
    ranks = generator.tensor_parallel
    for_vllm = not is_vllm_for_cpus() if has_gpus is None else has_gpus
    on_gpus = generator.device.startswith("cuda") or (generator.engine == "vllm" and for_vllm)
    whole = Bundle(name, generator.threads * ranks, ranks if on_gpus else 0, _why_whole(generator))
    if generator.engine != "vllm" or generator.lockstep:
        return RoleGroup(name, (whole,))
    # Of several ranks on one node vLLM finds the queues by the number of its GPUs, which a CPU has one of.
    counts = [count for count in range(2, ranks + 1) if ranks % count == 0 and (on_gpus or count == ranks)]
    return RoleGroup(name, (whole,), divisions=tuple(_shares(whole, count) for count in counts))


def _shares(whole: Bundle, count: int) -> tuple[Bundle, ...]:
    """Of so many nodes; vLLM wants the same number of ranks on each."""
    first = replace(whole, cpus=whole.cpus // count, gpus=whole.gpus // count)
    others = (replace(first, role=f"{whole.role}-node-{number}", share_of=whole.role) for number in range(1, count))
    return (first, *others)


def _why_whole(generator: GeneratorSettings) -> str:
    """Of ranks that are on one node only; else empty."""
    if not generator.lockstep:
        return ""
    return (
        "generator.lockstep drives its ranks on one node: lower "
        f"generator.tensor_parallel = {generator.tensor_parallel}, or take larger nodes"
    )


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
    placing, spare = place(fitted(role_groups(settings), nodes), nodes), fitted(spare_groups(settings), nodes)
    more = len({group.name for group in spare} & {*place(spare, placing.left).nodes})
    growing = f"Room for {more} more of the {len(spare)} generators that may be started later."
    return [*describe_placing(placing, nodes), *([growing] if spare else [])]

"""Which node has which role of a run, by GPUs and CPUs. Pure.

    all roles fit one node   →  one node, where `tailrace train` starts every role, as on any machine
    else                     →  head: orchestrator, ranks, teacher;  the generators wherever there is room for one
    placement = "redis"      →  the trainer is a role by itself, wherever there is room

Orchestrator and ranks meet in one machine's memory, so no node but one has ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailrace.config import RunSettings
from tailrace.config.shutdown import HURRIED_WRITES_S
from tailrace.errors import SettingsError
from tailrace.generation.settings import GeneratorSettings

HEAD, TRAINER, GENERATOR = "head", "trainer", "generator"

PLACEMENTS = ("local", "redis")


@dataclass(frozen=True, slots=True)
class NodeSize:
    """What every node of the cluster has."""

    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Need:
    """What one role takes of the node that it is on."""

    role: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The roles of a run, and the number of each one's node; node 0 has the head, which comes first."""

    needs: tuple[Need, ...]
    nodes: tuple[int, ...]
    is_single: bool
    """`tailrace train` starts every role itself, on the only node."""

    @property
    def num_nodes(self) -> int:
        """Nodes with any role."""
        return max(self.nodes) + 1

    @property
    def generators(self) -> tuple[int, ...]:
        """The node of each generator; empty where the run starts its own."""
        return tuple(node for need, node in zip(self.needs, self.nodes, strict=True) if need.role == GENERATOR)

    @property
    def has_gpus(self) -> bool:
        """Whether any role takes one."""
        return any(need.gpus for need in self.needs)

    @property
    def busiest_node_cpus(self) -> int:
        """CPUs that the roles of one node take, at most."""
        sums = [0] * self.num_nodes
        for need, node in zip(self.needs, self.nodes, strict=True):
            sums[node] += need.cpus
        return max(sums)

    def need(self, role: str) -> Need:
        """Of one role of that kind: all of a kind are alike."""
        return next(need for need in self.needs if need.role == role)

    def node_of(self, role: str) -> int:
        """Of the first role of that kind."""
        return next(node for need, node in zip(self.needs, self.nodes, strict=True) if need.role == role)


def lay_out(settings: RunSettings, node: NodeSize) -> Layout:
    """Place the roles, each on the first node with room. Raises `SettingsError` for what cannot run on such nodes.

    >>> from tailrace.config import load_settings
    >>> layout = lay_out(load_settings("quickstart", ["--generator.replicas", "2"]), NodeSize(gpus=0, cpus=4))
    >>> [need.role for need in layout.needs], layout.nodes
    (['head', 'generator', 'generator'], (0, 1, 1))
    """
    _require_spread(settings)
    needs = _needs(settings, node)
    for need in needs:
        _require_room(need, node, settings)
    everything = Need(HEAD, sum(need.gpus for need in needs), sum(need.cpus for need in needs))
    if settings.placement == "local" and everything.gpus <= node.gpus and everything.cpus <= node.cpus:
        return Layout((everything,), (0,), is_single=True)
    _require_spreading_weights(settings)
    return Layout(needs, _first_fit(needs, node), is_single=False)


def stop_s(settings: RunSettings) -> int:
    """Seconds that a run may take from the notice that its machine is taken away until its last process has ended.

    >>> from tailrace.config import load_settings
    >>> stop_s(load_settings("quickstart")), stop_s(load_settings("quickstart", ["--observability.trackers=wandb"]))
    (90, 120)
    """
    shutdown, observability = settings.shutdown, settings.observability
    parts = (
        shutdown.grace_s,
        2 * shutdown.cancel_rollouts_s,
        shutdown.close_transports_s,
        shutdown.stop_generators_s,
        shutdown.close_event_log_s,
        shutdown.terminate_s,
        HURRIED_WRITES_S,
        observability.tracker_close_s if observability.trackers else 0,
    )
    return math.ceil(sum(parts))


def _needs(settings: RunSettings, node: NodeSize) -> tuple[Need, ...]:
    """The head's first."""
    trainer, rollouts = settings.trainer, settings.rollouts
    has_trainer = trainer.feed == "batch"
    rank_gpus = trainer.ranks if has_trainer and trainer.device.startswith("cuda") else 0
    ranks = Need(TRAINER, rank_gpus, trainer.ranks * trainer.threads if has_trainer else 0)
    generator = Need(GENERATOR, *_generator(settings.generator, node))
    distillation = trainer.loss.distillation if has_trainer else None
    teacher = generator if distillation is not None and distillation.url is None else Need(HEAD, 0, 0)
    is_apart = settings.placement == "redis"
    head = Need(
        HEAD,
        teacher.gpus + (0 if is_apart else ranks.gpus),
        1 + rollouts.workers + rollouts.num_agent_workers + teacher.cpus + (0 if is_apart else ranks.cpus),
    )
    return (head, *([ranks] if is_apart else []), *[generator] * settings.generator.replicas.min)


def _generator(generator: GeneratorSettings, node: NodeSize) -> tuple[int, int]:
    """GPUs and CPUs of one: beside its engine's threads, one for calls and for weights on their way in."""
    on_gpus = node.gpus > 0 if generator.engine == "vllm" else generator.device.startswith("cuda")
    processes = generator.tensor_parallel
    return (processes if on_gpus else 0), processes * generator.threads + 1


def _first_fit(needs: tuple[Need, ...], node: NodeSize) -> tuple[int, ...]:
    free: list[tuple[int, int]] = []
    chosen = []
    for need in needs:
        fitting = (index for index, (gpus, cpus) in enumerate(free) if gpus >= need.gpus and cpus >= need.cpus)
        index = next(fitting, len(free))
        if index == len(free):
            free.append((node.gpus, node.cpus))
        free[index] = (free[index][0] - need.gpus, free[index][1] - need.cpus)
        chosen.append(index)
    return tuple(chosen)


def _require_spread(settings: RunSettings) -> None:
    """Raise `SettingsError` for what no such cluster starts."""
    if settings.placement not in PLACEMENTS:
        raise SettingsError(
            f"placement = {settings.placement!r} is not started by role: write placement = 'local', or 'redis' for a "
            "trainer on a node of its own",
            key=("placement",),
        )
    if settings.generator.connect:
        raise SettingsError(
            "generator.connect names generators that run already, and what is rendered starts its own: leave it out, "
            "and say how many by generator.replicas",
            key=("generator", "connect"),
        )


def _require_spreading_weights(settings: RunSettings) -> None:
    """Raise `SettingsError` for what needs generators that the run itself starts."""
    if settings.generator.lockstep:
        raise SettingsError(
            "generator.lockstep starts every process of a generator by torchrun, and generators on other nodes are "
            "started by `tailrace serve`: leave it out",
            key=("generator", "lockstep"),
        )
    if settings.generator.replicas.may_join:
        raise SettingsError(
            "generator.replicas = {min, max} lets generators come and go, and this run is told which there are when it "
            "starts: write a number, or let Ray start them (placement = 'ray', `tailrace cluster render kuberay`)",
            key=("generator", "replicas"),
        )
    for key, values in (("trainer", settings.trainer.devices), ("generator", settings.generator.devices)):
        if values is not None:
            raise SettingsError(
                f"{key}.devices names GPUs of one machine, and the roles of this run are on several: leave it out",
                key=(key, "devices"),
            )


def _require_room(need: Need, node: NodeSize, settings: RunSettings) -> None:
    """Raise `SettingsError` for a role that no node can hold."""
    what = {
        HEAD: f"orchestrator and ranks (trainer.ranks = {settings.trainer.ranks}) meet in one machine's memory and",
        TRAINER: "the trainer",
        GENERATOR: f"a generator (generator.tensor_parallel = {settings.generator.tensor_parallel})",
    }[need.role]
    setting = "generator.tensor_parallel" if need.role == GENERATOR else "trainer.ranks"
    for name, wanted, there in (("GPUs", need.gpus, node.gpus), ("CPUs", need.cpus, node.cpus)):
        if wanted > there:
            raise SettingsError(
                f"{what} need{'' if need.role == HEAD else 's'} {wanted} {name}, and a node has {there}: lower "
                f"{setting}, or say what a node has (--{name.lower()}-per-node)",
                key=tuple(setting.split(".")),
            )

"""Which roles need what of a cluster's nodes, and whether its nodes have that: decided purely, without Ray.

Roles that meet often stand in one group, which is given its resources as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from tailrace.config.ray import RaySettings

Strategy: TypeAlias = Literal["STRICT_PACK", "PACK", "SPREAD"]
"""Ray's names. On one node; on few; on many, as far as they have room."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one role needs, on one node."""

    role: str
    cpus: int = 1
    gpus: int = 0
    is_whole_since: str = ""
    """Why it is not spread over several nodes, for people, where it might be thought of."""
    share_of: str = ""
    """The role that this is a further node's share of; it starts and ends with that one."""

    def __str__(self) -> str:
        """For people.

        >>> str(Bundle("trainer", 2)), str(Bundle("generator", 1, 4))
        ('the trainer (2 CPUs)', 'the generator (1 CPU, 4 GPUs)')
        """
        return f"the {self.role} ({_amount(self.cpus, self.gpus)})"


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """Roles that are placed together."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: Strategy = "STRICT_PACK"
    divisions: tuple[tuple[Bundle, ...], ...] = ()
    """The same over several nodes, for where no node has it whole; the fewest first."""

    def bundles_of(self, role: str) -> list[Bundle]:
        """Its own, and those of its shares, in order."""
        return [bundle for bundle in self.bundles if role in (bundle.role, bundle.share_of)]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What one run needs of a cluster."""

    run: str
    """Its name."""
    settings: RaySettings
    groups: tuple[RoleGroup, ...]
    folder: Path
    """The run's, which all nodes have to see."""
    spare: tuple[RoleGroup, ...] = ()
    """What it may ask for later."""

    def group_of(self, role: str) -> RoleGroup:
        """The one that this role is in."""
        groups = (*self.groups, *self.spare)
        return next(group for group in groups if role in {bundle.role for bundle in group.bundles})

    def on(self, nodes: Sequence[ClusterNode]) -> ClusterPlan:
        """With its groups as such nodes can have them."""
        return replace(self, groups=fitted(self.groups, nodes), spare=fitted(self.spare, nodes))


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One machine, or what is left of it."""

    id: str
    address: str
    cpus: float
    gpus: float = 0.0

    def has(self, bundle: Bundle) -> bool:
        """Whether the bundle fits."""
        return self.cpus >= bundle.cpus and self.gpus >= bundle.gpus

    def without(self, bundle: Bundle) -> ClusterNode:
        """What is left beside the bundle."""
        return replace(self, cpus=self.cpus - bundle.cpus, gpus=self.gpus - bundle.gpus)


@dataclass(frozen=True, slots=True)
class Placing:
    """Where roles would be, if nobody else used the nodes."""

    nodes: dict[str, ClusterNode] = field(default_factory=dict)
    """By role."""
    unplaced: list[Bundle] = field(default_factory=list)
    """What fits nowhere beside the others."""
    left: list[ClusterNode] = field(default_factory=list)
    """What each node has beside them."""


def fitted(groups: Iterable[RoleGroup], nodes: Sequence[ClusterNode]) -> tuple[RoleGroup, ...]:
    """The groups, those divided that no node has whole, where nodes have them divided.

    >>> halves = (Bundle("generator", 2), Bundle("generator-node-1", 2, share_of="generator"))
    >>> whole = RoleGroup("generator", (Bundle("generator", 4),), divisions=(halves,))
    >>> for cpus in (4, 3, 1):
    ...     [group] = fitted([whole], [ClusterNode("a", "10.0.0.1", 2), ClusterNode("b", "10.0.0.2", cpus)])
    ...     print(group.strategy, *group.bundles)
    STRICT_PACK the generator (4 CPUs)
    PACK the generator (2 CPUs) the generator-node-1 (2 CPUs)
    STRICT_PACK the generator (4 CPUs)
    """
    return tuple(_fitted(group, nodes) for group in groups)


def _fitted(group: RoleGroup, nodes: Sequence[ClusterNode]) -> RoleGroup:
    choices = (replace(group, bundles=bundles, strategy="PACK") for bundles in group.divisions)
    return next((one for one in (group, *choices) if not place([one], nodes).unplaced), group)


def largest_first(groups: Iterable[RoleGroup]) -> list[RoleGroup]:
    """By what is to be on one node: what needs GPUs, and then what needs much, is the hardest to place."""

    def size(group: RoleGroup) -> tuple[int, int]:
        whole = max(group.bundles, key=_size) if group.strategy == "SPREAD" else _sum(group.bundles)
        return _size(whole)

    return sorted(groups, key=size, reverse=True)


def place(groups: Iterable[RoleGroup], nodes: Sequence[ClusterNode]) -> Placing:
    """Each group on as few nodes as its strategy lets it, or as many, the fullest first; the largest group first.

    >>> trainer = RoleGroup("trainer", (Bundle("trainer", 2),))
    >>> generators = [RoleGroup(name, (Bundle(name),)) for name in ("generator-0", "generator-1")]
    >>> placing = place([trainer, *generators], [ClusterNode("a", "10.0.0.1", 2), ClusterNode("b", "10.0.0.2", 1)])
    >>> {role: node.address for role, node in placing.nodes.items()}
    {'trainer': '10.0.0.1', 'generator-0': '10.0.0.2'}
    >>> [str(bundle) for bundle in placing.unplaced]
    ['the generator-1 (1 CPU)']
    """
    left, placing = {node.id: node for node in nodes}, Placing()
    for group in largest_first(groups):
        spread = group.strategy == "SPREAD"
        together = None if spread else _fullest(left.values(), _sum(group.bundles))
        used: list[str] = []
        for bundle in group.bundles:
            if together is not None:
                found: str | None = together.id
            else:
                fits = [one.id for one in left.values() if one.has(bundle) and group.strategy != "STRICT_PACK"]
                found = (min if spread else max)(fits, key=used.count, default=None)
            if found is None:
                placing.unplaced.append(bundle)
                continue
            used.append(found)
            left[found] = left[found].without(bundle)
            placing.nodes[bundle.role] = next(one for one in nodes if one.id == found)
    placing.left.extend(left.values())
    return placing


def bundles_by_node(nodes: Mapping[int, str]) -> list[int]:
    """A group's bundles, those of one node beside each other: neighbours among ranks share a node.

    >>> bundles_by_node({0: "node-b", 1: "node-a", 2: "node-b", 3: "node-a"})
    [1, 3, 0, 2]
    """
    return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))


def describe_placing(placing: Placing, nodes: Sequence[ClusterNode]) -> list[str]:
    """For people: what each node would have, and what fits nowhere."""
    roles: dict[str, list[str]] = {node.id: [] for node in nodes}
    for role, node in placing.nodes.items():
        roles[node.id].append(role)
    sentences = []
    for node in nodes:
        has = _amount(node.cpus, node.gpus)
        sentences.append(f"Node {node.address} ({node.id[:8]}, {has}): {', '.join(roles[node.id]) or 'no role'}.")
    if placing.unplaced:
        sentences.append(f"Fits nowhere: {', '.join(map(str, placing.unplaced))}.")
    too_large = [one for one in placing.unplaced if one.is_whole_since and not any(node.has(one) for node in nodes)]
    return sentences + [f"No node has {_amount(one.cpus, one.gpus)}: {one.is_whole_since}." for one in too_large[:1]]


def _size(bundle: Bundle) -> tuple[int, int]:
    return bundle.gpus, bundle.cpus


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    return Bundle("", sum(one.cpus for one in bundles), sum(one.gpus for one in bundles))


def _fullest(nodes: Iterable[ClusterNode], bundle: Bundle) -> ClusterNode | None:
    """Of those where it fits; what needs no GPU leaves those alone."""
    return min((one for one in nodes if one.has(bundle)), key=lambda one: (one.gpus, one.cpus), default=None)


def _amount(cpus: float, gpus: float) -> str:
    amounts = [(amount, kind) for amount, kind in ((cpus, "CPU"), (gpus, "GPU")) if amount]
    return ", ".join(f"{amount:g} {kind}{'' if amount == 1 else 's'}" for amount, kind in amounts) or "nothing"

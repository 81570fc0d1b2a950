"""What a run needs of a cluster's nodes, and what it says where no node has that."""

from __future__ import annotations

from tailrace.config import load_settings
from tailrace.lifecycle.cluster import ClusterNode, describe_placing, fitted, place
from tailrace.run.cluster import role_groups, spare_groups

NODES = [ClusterNode(f"node-{number}", f"10.0.0.{number}", 2, 2) for number in range(3)]


def groups(*overrides: str, has_gpus: bool = False, spare: bool = False) -> list[str]:
    """As people are told."""
    settings = load_settings("quickstart", ["--placement", "ray", *overrides])
    found = (spare_groups if spare else role_groups)(settings, has_gpus=has_gpus)
    return [f"{group.strategy}: {', '.join(map(str, group.bundles))}" for group in found]


def test_ranks_share_a_group_and_each_replica_has_its_own() -> None:
    assert groups("--trainer.ranks", "2", "--generator.replicas", "{min = 1, max = 3}") == [
        "PACK: the trainer (1 CPU), the trainer-1 (1 CPU)",
        "STRICT_PACK: the generator-0 (1 CPU)",
    ]
    assert groups("--generator.replicas", "{min = 1, max = 3}", spare=True) == [
        "STRICT_PACK: the generator-1 (1 CPU)",
        "STRICT_PACK: the generator-2 (1 CPU)",
    ]


def wide(*overrides: str, has_gpus: bool, nodes: list[ClusterNode] = NODES) -> tuple[list[str], list[str]]:
    """What a replica of four ranks asks such nodes for, and what is told of its place."""
    four = ("--generator.engine", "vllm", "--generator.tensor_parallel", "4", "--generator.threads", "2")
    settings = load_settings("quickstart", ["--placement", "ray", *four, *overrides])
    found = fitted(role_groups(settings, has_gpus=has_gpus), nodes)
    return [str(bundle) for bundle in found[1].bundles], describe_placing(place(found, nodes), nodes)


def test_a_replica_that_no_node_has_room_for_has_as_many_ranks_on_each_of_as_few_as_do() -> None:
    nodes = [ClusterNode(f"node-{number}", f"10.0.0.{number}", 10, gpus) for number, gpus in enumerate((3, 2, 3))]
    bundles, told = wide(has_gpus=True, nodes=nodes)
    assert bundles == ["the generator (4 CPUs, 2 GPUs)", "the generator-node-1 (4 CPUs, 2 GPUs)"]
    assert told == [
        "Node 10.0.0.0 (node-0, 10 CPUs, 3 GPUs): generator.",
        "Node 10.0.0.1 (node-1, 10 CPUs, 2 GPUs): generator-node-1, trainer.",
        "Node 10.0.0.2 (node-2, 10 CPUs, 3 GPUs): no role.",
    ]
    assert wide(has_gpus=True, nodes=[*nodes, ClusterNode("large", "10.0.0.9", 8, 4)])[0] == [
        "the generator (8 CPUs, 4 GPUs)"
    ]


def test_on_cpus_each_rank_of_such_a_replica_is_a_process_of_its_own() -> None:
    bundles, told = wide(has_gpus=False, nodes=[ClusterNode("a", "10.0.0.1", 7), ClusterNode("b", "10.0.0.2", 3)])
    assert bundles == ["the generator (2 CPUs)", *(f"the generator-node-{number} (2 CPUs)" for number in (1, 2, 3))]
    assert not [sentence for sentence in told if "nowhere" in sentence]


def test_a_replica_that_nodes_have_no_room_for_at_all_or_whose_ranks_one_process_drives_fits_nowhere() -> None:
    assert wide(has_gpus=True, nodes=NODES[:1])[1][-1] == "Fits nowhere: the generator (8 CPUs, 4 GPUs)."
    lockstep = wide("--generator.lockstep", "true", has_gpus=True)[1][-1]
    assert "generator.lockstep drives its ranks on one node: lower generator.tensor_parallel = 4" in lockstep

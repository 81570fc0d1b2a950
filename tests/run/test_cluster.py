"""What a run needs of a cluster's nodes, and what it says where no node has that."""

from __future__ import annotations

import pytest

from tailrace.config import load_settings
from tailrace.lifecycle.cluster import ClusterNode, describe_placing, place
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


@pytest.mark.parametrize(
    ("overrides", "has_gpus", "who"),
    [
        ((), False, "vLLM's build for CPUs has its ranks on one node"),
        ((), True, "vLLM is started with its ranks on one node"),
        (("--generator.lockstep", "true"), False, "generator.lockstep drives its ranks on one node"),
    ],
)
def test_a_replica_that_no_node_has_room_for_is_told_by_its_engine(
    overrides: tuple[str, ...], has_gpus: bool, who: str
) -> None:
    wide = ("--generator.engine", "vllm", "--generator.tensor_parallel", "4", *overrides)
    settings = load_settings("quickstart", ["--placement", "ray", *wide])
    told = describe_placing(place(role_groups(settings, has_gpus=has_gpus), NODES), NODES)[-1]
    assert f"{who}: lower generator.tensor_parallel = 4, or take larger nodes." in told

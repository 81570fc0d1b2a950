"""Where roles would be on a cluster's nodes."""

from __future__ import annotations

from tailrace.lifecycle.cluster import Bundle, ClusterNode, RoleGroup, describe_placing, place


def nodes(*sizes: tuple[int, int]) -> list[ClusterNode]:
    return [ClusterNode(f"node-{number}", f"10.0.0.{number}", *size) for number, size in enumerate(sizes)]


def ranks(count: int, gpus: int = 0) -> RoleGroup:
    return RoleGroup("trainer", tuple(Bundle(f"trainer-{rank}", 1, gpus) for rank in range(count)), "PACK")


def on(groups: list[RoleGroup], machines: list[ClusterNode]) -> dict[str, str]:
    return {role: node.id for role, node in place(groups, machines).nodes.items()}


def test_ranks_share_a_node_that_has_room_for_all_and_the_smallest_of_those() -> None:
    assert on([ranks(2)], nodes((8, 0), (2, 0), (1, 0))) == {"trainer-0": "node-1", "trainer-1": "node-1"}


def test_ranks_that_fit_no_node_are_on_few() -> None:
    assert on([ranks(3)], nodes((2, 0), (2, 0))) == {
        "trainer-0": "node-0",
        "trainer-1": "node-0",
        "trainer-2": "node-1",
    }


def test_a_replica_is_on_one_node_or_none() -> None:
    replica = RoleGroup("generator", (Bundle("generator", 1, 4),))
    assert on([replica], nodes((8, 2), (8, 4))) == {"generator": "node-1"}
    assert place([replica], nodes((8, 2), (8, 2))).unplaced == [*replica.bundles]


def test_what_needs_no_gpu_leaves_those_to_what_does() -> None:
    replica = RoleGroup("generator", (Bundle("generator", 1, 1),))
    assert on([ranks(1), replica], nodes((1, 1), (1, 0))) == {"generator": "node-0", "trainer-0": "node-1"}


def test_the_largest_is_placed_first_so_that_the_others_leave_it_room() -> None:
    groups = [RoleGroup(f"role-{cpus}", (Bundle(f"role-{cpus}", cpus),)) for cpus in (1, 3, 2)]
    assert on(groups, nodes((3, 0), (3, 0))) == {"role-3": "node-0", "role-2": "node-1", "role-1": "node-1"}


def test_people_are_told_what_is_where_and_what_fits_nowhere() -> None:
    machines = nodes((1, 0), (1, 2))
    assert describe_placing(place([ranks(3)], machines), machines) == [
        "Node 10.0.0.0 (node-0, 1 CPU): trainer-0.",
        "Node 10.0.0.1 (node-1, 1 CPU, 2 GPUs): trainer-1.",
        "Fits nowhere: the trainer-2 (1 CPU).",
    ]


def test_what_is_too_large_for_any_node_is_told_with_why_it_is_not_spread() -> None:
    replica = RoleGroup("generator", (Bundle("generator", 1, 4, "the engine has its ranks on one node"),))
    small, full = nodes((8, 2), (8, 2)), [*nodes((8, 4))]
    assert describe_placing(place([replica], small), small)[-1] == (
        "No node has 1 CPU, 4 GPUs: the engine has its ranks on one node."
    )
    both = [replica, RoleGroup("generator-1", (Bundle("generator-1", 1, 4, "the engine has its ranks on one node"),))]
    assert describe_placing(place(both, full), full)[-1] == "Fits nowhere: the generator-1 (1 CPU, 4 GPUs)."

"""What a run asks a Ray cluster for, and gives way to another with; nodes are raylets on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.ray_clusters import RayNodes, ray_cluster

from tailrace.config.ray import RaySettings
from tailrace.lifecycle.cluster import Bundle, RoleGroup, place
from tailrace.lifecycle.ray_cluster import RayCluster

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]

GROUPS = [RoleGroup(f"role-{number}", (Bundle(f"role-{number}", cpus),)) for number, cpus in enumerate((2, 3, 2))]
"""All that the two nodes have."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_cluster(0, 4, 3) as cluster:
        yield cluster


@pytest.fixture
async def cluster(nodes: RayNodes) -> AsyncIterator[RayCluster]:
    reached = await RayCluster.reach(RaySettings(address=nodes.address), "first", "epoch")
    try:
        yield reached
    finally:
        reached.close()


async def test_groups_are_on_the_nodes_that_a_dry_run_names_though_ray_itself_takes_the_emptiest(
    nodes: RayNodes, cluster: RayCluster
) -> None:
    told = place(GROUPS, cluster.nodes())
    assert not told.unplaced
    await cluster.reserve(GROUPS)
    assert nodes.nodes_of_groups() == {role: {node.id} for role, node in told.nodes.items()}


async def test_of_two_runs_that_have_a_part_each_of_what_both_need_one_gives_way(cluster: RayCluster) -> None:
    second = RayCluster(cluster.settings, "tailrace:second:epoch", cluster.head, cluster.own_address)
    for run, number in ((cluster, 1), (second, 0), (second, 2)):
        await run.ask_for(GROUPS[number])

    async def reserve_and_let_go(run: RayCluster) -> None:
        await run.reserve(GROUPS)
        for group in GROUPS:
            await run.let_go(group.name)

    await asyncio.gather(*map(reserve_and_let_go, (cluster, second)))

"""A Ray cluster of several nodes on this machine: raylets of their own, one head, no dashboard, no network."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.run.runs import IMPORTS

_ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_NODE = {
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "include_log_monitor": False,
}
_QUICK = {  # a node that is killed is missed within seconds
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@dataclass
class RayNodes:
    """The cluster's nodes, the head first."""

    cluster: Any
    nodes: list[Any]

    @property
    def address(self) -> str:
        address = self.cluster.address
        assert isinstance(address, str)
        return address

    def node_of(self, process: psutil.Process) -> Any:
        """Which node's raylet started what started this process."""
        ancestors = {one.pid for one in process.parents()}
        return next(node for node in self.nodes if raylet_of(node).pid in ancestors)

    def add(self, cpus: int, first_import: Path | None = None) -> None:
        address = f"127.0.0.{len(self.cluster.list_all_nodes()) + 1}"
        node = {"num_cpus": cpus, "node_ip_address": address, "env_vars": imports_from(first_import), **_NODE}
        self.nodes.append(self.cluster.add_node(**node))

    def lose(self, node: Any, *, whole: bool = True) -> None:
        """As a machine that loses its power: nothing of it says a word. Or the raylet alone is killed."""
        raylet = psutil.Process(raylet_of(node).pid)
        for process in [raylet, *(raylet.children(recursive=True) if whole else [])]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def made_by_runs(self) -> set[str]:
        """Names of actors and groups of resources that are there now."""
        state = self.cluster.global_state
        actors = {one["Name"] for one in state.actor_table(None, None, None).values() if one["State"] != "DEAD"}
        groups = {one["name"] for one in state.placement_group_table().values() if one["state"] != "REMOVED"}
        return actors | groups

    def wait_until_empty(self, within_s: float) -> None:
        """Until nothing is left of what runs made. Raises `AssertionError`."""
        deadline_s = time.monotonic() + within_s
        while left := self.made_by_runs():
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)

    def nodes_of_groups(self) -> dict[str, set[str]]:
        """Where each group of resources is that is there now, by the end of its name."""
        groups = self.cluster.global_state.placement_group_table().values()
        there = [one for one in groups if one["state"] == "CREATED"]
        return {one["name"].rpartition(":")[2]: {*one["bundles_to_node_id"].values()} for one in there}

    @contextmanager
    def says_versions(self, ray: str, python: str) -> Iterator[None]:
        """Whoever comes is told that it was started with these."""
        from ray._raylet import GcsClient

        client, place = GcsClient(address=self.address), {"namespace": b"cluster"}
        told = client.internal_kv_get(b"CLUSTER_METADATA", **place)
        other = json.dumps({**json.loads(told), "ray_version": ray, "python_version": python}).encode()
        client.internal_kv_put(b"CLUSTER_METADATA", other, True, **place)
        try:
            yield
        finally:
            client.internal_kv_put(b"CLUSTER_METADATA", told, True, **place)

    def lose_head(self) -> None:
        """The machine that has the cluster's own processes, and none of its roles."""
        for started in self.nodes[0].all_processes.values():
            for one in started:
                one.process.kill()


def raylet_of(node: Any) -> Any:
    """Its process."""
    return node.all_processes["raylet"][0].process


@contextmanager
def ray_cluster(*cpus: int, first_import: Path | None = None) -> Iterator[RayNodes]:
    """One node for each of these numbers of CPUs. What they start imports from `first_import` first."""
    with ray_head(cpus[0], imports_from(first_import), no_monitor=True) as cluster:
        found = RayNodes(cluster, [cluster.head_node])
        for count in cpus[1:]:
            found.add(count, first_import)
        yield found


@contextmanager
def ray_head(cpus: int, variables: Mapping[str, str], **arguments: object) -> Iterator[Any]:
    """A cluster that has a head so far; these variables are of the test meanwhile, and of all that it starts."""
    before = dict(os.environ)
    os.environ.update({**_ENVIRONMENT, **variables})
    from ray.cluster_utils import Cluster

    try:
        head = {"num_cpus": cpus, "node_ip_address": "127.0.0.1", "_system_config": _QUICK, **_NODE, **arguments}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cluster
        finally:
            session = cluster.head_node.get_session_dir_path()
            cluster.shutdown()
            shutil.rmtree(session, ignore_errors=True)
    finally:
        os.environ.clear()
        os.environ.update(before)


def imports_from(first: Path | None) -> dict[str, str]:
    """Variables of what imports this very tree, and from `first` before that."""
    return {"PYTHONPATH": os.pathsep.join([*([str(first)] if first else []), IMPORTS["PYTHONPATH"]])}

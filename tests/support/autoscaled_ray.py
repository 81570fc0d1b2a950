"""A Ray cluster on this machine that grows and shrinks by Ray's own autoscaler, of either version.

Its provider is the one that Ray tests itself with: a node is a raylet beside the others. `ray.cluster_utils` has such a
cluster as well; that one ends all of a machine's Ray, and needs a file that Ray's wheel has not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from tailrace.free_ports import free_port
from tests.run.runs import PATIENCE_S
from tests.support.ray_clusters import imports_from, ray_head

Version: TypeAlias = Literal["v1", "v2"]

IDLE_S = 4.0
"""After which a node without work is taken away."""
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider"
_HEAD_ID = "f" * 51 + "00000"
"""By which the provider knows the head."""
_HEAD, _WORKER, _MOST = "ray.head.default", "worker", 2


@dataclass(frozen=True)
class AutoscaledNodes:
    """A head, and what the autoscaler adds to it."""

    cluster: Any

    @property
    def address(self) -> str:
        address = self.cluster.address
        assert isinstance(address, str)
        return address

    def added(self) -> set[str]:
        """Nodes that are there now, beside the head. No name comes twice."""
        alive = {node["NodeID"] for node in self.cluster.global_state.node_table() if node["Alive"]}
        return alive - {_HEAD_ID}

    def wait_until_alone(self) -> None:
        """Until the autoscaler has taken all of them away, as nobody uses them."""
        deadline_s = time.monotonic() + PATIENCE_S
        while left := self.added():
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)

    def node_of(self, process: psutil.Process) -> str:
        """Which node's raylet started what started this process."""
        words = [word for one in process.parents() for word in one.cmdline()]
        return next(word.partition("=")[2] for word in words if word.startswith("--node_id="))


@contextmanager
def autoscaled_cluster(folder: Path, version: Version, *, head_cpus: int) -> Iterator[AutoscaledNodes]:
    """A head, and up to two nodes with one CPU each, of which there is none at first."""
    port = free_port()
    (written := folder / "autoscaling.json").write_text(json.dumps(_autoscaling(port, head_cpus)))
    variables = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": str(int(version == "v2")),
    }
    own = {
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_NODE_TYPE_NAME": _HEAD,
    }
    asked = {"gcs_server_port": port, "autoscaling_config": str(written), "env_vars": own}
    with ray_head(head_cpus, imports_from(None) | variables, **asked) as cluster:
        try:
            yield AutoscaledNodes(cluster)
        finally:
            _end_autoscaler(cluster)


def _autoscaling(port: int, head_cpus: int) -> Mapping[str, object]:
    """As Ray's schema for clusters has it."""
    provider = {
        "type": "external",
        "module": f"{_PROVIDER}.FakeMultiNodeProvider",
        "gcs_address": f"127.0.0.1:{port}",
        "head_node_id": _HEAD_ID,
        "use_node_id_as_ip": True,  # all have this machine's
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
    }
    types = {
        _HEAD: {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
        _WORKER: {
            "resources": {"CPU": 1, "object_store_memory": 80 << 20},
            "node_config": {},
            "min_workers": 0,
            "max_workers": _MOST,
        },
    }
    unused: dict[str, object] = {"auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False}
    parts = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    unused |= {f"{part}_commands": [] for part in parts}
    unused |= {name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")}
    return {
        "cluster_name": "tests",
        "provider": provider,
        "available_node_types": types,
        "head_node_type": _HEAD,
        "max_workers": _MOST,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        **unused,
    }


def _end_autoscaler(cluster: Any) -> None:
    """And all nodes that it has added."""
    monitor = psutil.Process(cluster.head_node.all_processes["monitor"][0].process.pid)
    monitor.suspend()  # it adds none meanwhile
    for process in [*monitor.children(recursive=True), monitor]:
        with suppress(psutil.NoSuchProcess):
            process.kill()

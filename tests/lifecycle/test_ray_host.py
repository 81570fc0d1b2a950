"""What a role's actor tells the role of its node; the actor is here, in this process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from tests.lifecycle.test_launchers import PATIENCE_S, spec

from tailrace.config.restarts import RestartSettings
from tailrace.config.shutdown import ShutdownSettings
from tailrace.lifecycle.ray_host import HostOrder, RoleHost
from tailrace.lifecycle.roles import NodeShare, RoleSpec

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SHARE = NodeShare("generator-0", 1, 2, "127.0.0.1", 5757)


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by the loopback address."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def interfaces(role: RoleSpec, logs: Path) -> list[str | None]:
    """Those that the variables of the role's process name."""
    host = RoleHost()
    async with asyncio.timeout(PATIENCE_S):
        await host.start(HostOrder(role, 0, "epoch", logs, Path.cwd(), ShutdownSettings(), RestartSettings()))
        status, why = await host.left()
    assert status == 0, why
    environment = json.loads(Path(role.settings.decode(), "environment").read_text())
    return [environment.get(name) for name in VARIABLES]


@pytest.mark.parametrize(
    ("role", "of_node", "told"),
    [
        ({"share": SHARE}, {}, ["lo", "lo"]),
        ({"share": SHARE}, {"NCCL_SOCKET_IFNAME": "ib0"}, ["lo", "ib0"]),
        ({"environment": {"GLOO_SOCKET_IFNAME": "another"}}, {}, ["lo", "lo"]),
        ({"environment": {"GLOO_SOCKET_IFNAME": "another"}}, {"GLOO_SOCKET_IFNAME": "eth7"}, ["eth7", "lo"]),
        ({}, {}, [None, None]),
    ],
    ids=["share", "share on a node that names one", "rank", "rank on a node that names one", "alone"],
)
async def test_what_is_on_several_nodes_meets_over_the_interface_of_its_node_unless_that_names_one(
    role: Mapping[str, NodeShare | dict[str, str]],
    of_node: Mapping[str, str],
    told: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, interface in of_node.items():
        monkeypatch.setenv(name, interface)
    described = replace(spec("write_whole_environment", tmp_path), **role)  # type: ignore[arg-type]
    assert await interfaces(described, tmp_path / "logs") == told

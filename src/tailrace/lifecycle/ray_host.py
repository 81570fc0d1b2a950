"""The Ray actor that has one life of a role, on whatever node Ray chose.

    RayHandle (orchestrator) ── start, ready, left, stop, kill ──► RoleHost (actor) ── as `local` does ──► the role

The role is a process that the actor starts, not the actor's own: so signals, thread counts, process groups, logs and
signs of life are those of placement = "local", and a crash in native code ends no worker of Ray's. An actor that dies,
with its node, its cluster or the run's own process, is missed by the role at once, which ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from typing_extensions import override

from tailrace.config.restarts import RestartSettings
from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import LifecycleError
from tailrace.free_ports import free_port
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import RoleSpec

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class HostOrder:
    """What an actor is to start."""

    spec: RoleSpec
    life: int
    epoch: str
    logs: Path
    folder: Path
    """The run's process works in it, and so does the role, where the node has it."""
    shutdown: ShutdownSettings
    restarts: RestartSettings


class RoleHost:
    """Starts a role beside itself, and tells how it goes."""

    async def meeting_place(self) -> tuple[str, int]:
        """An address of this node, and a port that is free there, for a role that is on several nodes."""
        import ray

        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    async def start(self, order: HostOrder) -> None:
        """Raises `LifecycleError`."""
        import ray

        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        own = Path(ray.__file__).parent  # what Ray brings along for itself
        sys.path[:] = [path for path in sys.path if own not in (Path(path), *Path(path).parents)]
        address = ray.util.get_node_ip_address()
        spec = replace(order.spec, environment=_reached_at(address, order.spec))
        self._launcher = _NodeLauncher(address, order)
        self._handle = self._launcher.start(spec, is_replaceable=True, life=order.life)

    async def ready(self) -> str | None:
        """Where it listens, once it is ready; None where it left before."""
        try:
            return await self._handle.ready()
        except LifecycleError:
            return None

    async def left(self) -> tuple[int, str]:
        """Its exit status once it has left, and that for people. This actor is of no use any more."""
        status = await self._handle.left()
        why = str(self._handle.early_exit())
        self._launcher.kill()
        return status, why

    async def stop(self) -> None:
        """As `RoleHandle.stop`."""
        await self._handle.stop()

    async def kill(self) -> str:
        """As `RoleHandle.kill`; what that raises, for people, or nothing."""
        try:
            await self._handle.kill()
        except LifecycleError as error:
            return str(error)
        return ""

    async def write_stacks(self) -> None:
        """As `RoleHandle.write_stacks`."""
        self._handle.write_stacks()


class _NodeLauncher(LocalLauncher):
    """Of roles that listen at the address by which the cluster knows this node, and at no other."""

    def __init__(self, address: str, order: HostOrder) -> None:
        super().__init__(order.epoch, order.logs, order.shutdown)
        self.restarts, self._address = order.restarts, address

    @override
    def address(self, name: str) -> str:
        return f"tcp://{self._address}:0"


def _reached_at(address: str, spec: RoleSpec) -> dict[str, str]:
    """Variables of a role. Ranks, and a vLLM over several nodes, meet over the interface that has this address, not
    over one machine's loopback or what its name leads to, unless the node's own environment names another.
    """
    if spec.share is None and not any(name in spec.environment for name in _INTERFACE_VARIABLES):
        return dict(spec.environment)
    interfaces = psutil.net_if_addrs().items()
    own = next((name for name, known in interfaces if address in {one.address for one in known}), None)
    found = dict.fromkeys(_INTERFACE_VARIABLES, own) if own else {}
    chosen = {name: os.environ[name] for name in _INTERFACE_VARIABLES if name in os.environ}
    return {**spec.environment, **found, **chosen}

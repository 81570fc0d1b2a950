"""The Ray cluster that a run's roles are started in: reached, checked, reserved, and let go of.

Everything that a run makes in it carries the run's name and epoch, belongs to the process that made it, and ends with
that one at the latest. Ray's calls block; here they wait in threads, each for a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import platform
import re
import socket
import tempfile
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.config.ray import RaySettings
from tailrace.errors import SettingsError, TransportError
from tailrace.extras import import_extra
from tailrace.lifecycle.cluster import (
    ClusterNode,
    ClusterPlan,
    RoleGroup,
    bundles_by_node,
    describe_placing,
    largest_first,
    place,
)
from tailrace.lifecycle.node_weights import NodeWeights
from tailrace.lifecycle.ray_host import RoleHost
from tailrace.timeouts import timeout

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

_logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

NAMESPACE = "tailrace"
"""Of the actors' names."""
_REACH_S, _NODES_S = 18.0, 25.0
"""Within which the cluster answers, and all of its nodes: whoever waits is told within 30 s, imports included."""
_PROBE_S = 5.0
_BUSY_S = 20.0
"""How long to wait for what others use, where the settings do not say."""
_PROGRESS_S = 5.0
_HOLDS_ON_S, _GIVES_WAY_S = 6.0, 1.0
"""How long a run keeps, at least, a part of what it needs while others have the rest, and then asks for nothing."""
_CLOSE_S = 5.0
_ADDRESS = ("ray", "address")
_VERSIONS = re.compile(r"Version mismatch: .*?Ray: (\S+) Python: (\S+) .*?Ray: (\S+) Python: (\S+)")
"""How Ray tells of a cluster's versions and of this process's."""
_LOOPBACK = ("127.0.0.1:", "localhost:")


class RayCluster:
    """A connected cluster. Make it with `reach`; one at a time in a process."""

    def __init__(self, settings: RaySettings, name: str, head: tuple[str, int], own_address: str) -> None:
        self.settings, self.head = settings, head
        self.own_address = own_address
        """Of this machine, by which the cluster knows it."""
        self._name = name
        self._groups: dict[str, tuple[RoleGroup, PlacementGroup]] = {}
        self._sound: set[str] = set()
        """Nodes that have what a run needs, by id."""
        self._weights = 0
        """How many actors were started that hold weights."""

    # --- reached and checked -----------------------------------------------------------------------------------------

    @classmethod
    async def reach(cls, settings: RaySettings, run: str, epoch: str) -> RayCluster:
        """Connect this process. Raises `SettingsError` where that fails, within seconds."""
        name = f"tailrace:{run}:{epoch[:8]}"
        try:
            return await _apart(lambda: cls._connected(settings, name), _REACH_S)
        except TimeoutError:
            raise _silent(settings) from None

    @classmethod
    def _connected(cls, settings: RaySettings, name: str) -> RayCluster:
        ray = _imported(settings)
        if settings.address is not None:
            _require_listener(settings.address)
        logging.getLogger("ray").setLevel(logging.ERROR)  # else it tells whoever looks on that this is no main thread
        try:
            context = ray.init(
                address=settings.address or "auto",
                namespace=NAMESPACE,
                configure_logging=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            ray.shutdown()  # of what it has begun
            raise SettingsError(_refused(settings, error), key=_ADDRESS) from error
        host, _, port = context.address_info["gcs_address"].rpartition(":")
        return cls(settings, name, (host, int(port)), ray.util.get_node_ip_address())

    def nodes(self) -> list[ClusterNode]:
        """Those that are alive, with all that they have."""
        import ray

        return [
            ClusterNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    async def require_nodes(self, folder: Path) -> None:
        """Raise `SettingsError` where a node has another Tailrace than this process, or does not see this folder.

        Each node is asked once. One that leaves meanwhile, as an autoscaler may take it away, is none of the cluster's.
        """
        nodes = [node for node in await _apart(self.nodes) if node.id not in self._sound]
        with tempfile.NamedTemporaryFile(dir=folder, prefix="seen-by-nodes-") as marker:
            probes = {node: asyncio.ensure_future(_probe(node, marker.name)) for node in nodes}
            try:
                if probes:
                    await asyncio.wait(probes.values(), timeout=_NODES_S)
                for node, probe in probes.items():
                    if (found := _answer(probe)) is not None:
                        version, sees_folder = found
                        _require_node(node, version, sees_folder=sees_folder, folder=folder)
                        self._sound.add(node.id)
                    elif node in await _apart(self.nodes):
                        raise SettingsError(
                            f"the cluster's node {node.address} ran no task within {_NODES_S:g} s: see `ray status` "
                            "and its logs"
                        )
            finally:
                for probe in probes.values():
                    probe.cancel()

    # --- resources ---------------------------------------------------------------------------------------------------

    async def fitted(self, plan: ClusterPlan) -> ClusterPlan:
        """With its groups as the nodes that are there can have them."""
        return plan.on(await _apart(self.nodes))

    async def reserve(self, groups: Sequence[RoleGroup]) -> None:
        """What all groups need, at once. Raises `SettingsError` where the cluster does not have it, or not in time."""
        nodes = await _apart(self.nodes)
        placing = place(groups, nodes)
        if placing.unplaced and self.settings.wait_s is None:
            have = " ".join(describe_placing(placing, nodes))
            raise SettingsError(
                f"the cluster is too small for this run. {have} Add nodes, lower what the run asks for, or set "
                "ray.wait_s where an autoscaler adds them"
            )
        began_s = asyncio.get_running_loop().time()
        while True:
            for group in largest_first(groups):
                await self.ask_for(group, placing.nodes.get(group.bundles[0].role))
            with contextlib.suppress(TimeoutError):
                async with timeout(None if placing.unplaced else self._holds_on_s):
                    for group in groups:
                        await self.wait_for(group.name, since_s=began_s)
                    return
            if await self._has_a_part(groups):
                _logger.info("lets go of a part of what it needs: another run may need just that")
                for group in groups:
                    await self.let_go(group.name)
                await asyncio.sleep(_GIVES_WAY_S)

    @property
    def _holds_on_s(self) -> float:
        """Each start of a run has another, so that of two that wait for one another the first one gives way."""
        return _HOLDS_ON_S * (1 + zlib.crc32(self._name.encode()) % 1000 / 1000)

    async def _has_a_part(self, groups: Sequence[RoleGroup]) -> bool:
        """Whether some of these have their nodes, and others do not."""
        from ray.util import placement_group_table

        made = [self._groups[group.name][1] for group in groups]
        has = await _apart(lambda: [placement_group_table(one)["state"] == "CREATED" for one in made])
        return any(has) and not all(has)

    async def ask_for(self, group: RoleGroup, node: ClusterNode | None = None) -> None:
        """Resources for this group, which an autoscaler may add nodes for; nothing where it has them, or waits.

        On this node, where one has to have all of it: of its own accord Ray takes the emptiest, and then finds no room
        for a larger group.
        """
        from ray.util import placement_group

        if group.name not in self._groups:
            bundles = [_resources(one.cpus, one.gpus) for one in group.bundles]
            make = partial(
                placement_group,
                bundles,
                strategy=group.strategy,
                name=f"{self._name}:{group.name}",
                _soft_target_node_id=node.id if node is not None and group.strategy == "STRICT_PACK" else None,
            )
            self._groups[group.name] = group, await _apart(make)

    async def let_go(self, name: str) -> None:
        """The resources of a group in which no role is, or waits."""
        from ray.util import remove_placement_group

        if (asked := self._groups.pop(name, None)) is not None:
            await _apart(partial(remove_placement_group, asked[1]))

    async def wait_for(self, name: str, *, since_s: float | None = None) -> None:
        """Until this group has its nodes, as it has unless one was lost. Raises `SettingsError` where it takes long."""
        group, made = self._groups[name]
        loop, limit_s = asyncio.get_running_loop(), self.settings.wait_s or _BUSY_S
        deadline_s = (loop.time() if since_s is None else since_s) + limit_s
        while True:
            left_s = deadline_s - loop.time()
            if await _apart(partial(made.wait, max(1, math.ceil(min(left_s, _PROGRESS_S))))):
                return
            if left_s <= 0:
                break
            wants = ", ".join(map(str, group.bundles))
            _logger.info("waits for the cluster to have room for %s; %s", wants, await _apart(_free))
        raise SettingsError(
            f"the cluster had no room for {', '.join(map(str, group.bundles))} within {limit_s:g} s (ray.wait_s); "
            f"{await _apart(_free)}. Other runs, or nodes that were lost, have the rest, or no node has enough of it: "
            "wait longer, or lower what the run asks for"
        )

    async def start_host(self, group: str, role: str, life: int) -> ActorHandle:
        """An actor for this life of a role, in its group's bundle. The caller ends it."""
        return await _apart(lambda: self._start_host(group, role, life))

    def _start_host(self, group: str, role: str, life: int) -> ActorHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        roles, made = self._groups[group]
        number = [bundle.role for bundle in roles.bundles].index(role)
        bundle = roles.bundles[number]
        place = number if roles.strategy == "SPREAD" else _by_node(made)[number]
        strategy = PlacementGroupSchedulingStrategy(made, placement_group_bundle_index=place)
        options: dict[str, Any] = {
            "name": f"{self._name}:{role}.{life}",
            "num_cpus": bundle.cpus,
            "num_gpus": bundle.gpus,
            "max_restarts": 0,  # whether it is started again is decided here
            "scheduling_strategy": strategy,
        }
        return ray.remote(RoleHost).options(**options).remote()

    async def start_weights(self, epoch: str, address: str) -> ActorHandle:
        """What holds weights on the node of this address. The caller ends it. Raises `TransportError`."""
        return await _apart(lambda: self._start_weights(epoch, address))

    def _start_weights(self, epoch: str, address: str) -> ActorHandle:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = next((node for node in self.nodes() if node.address == address), None)
        if node is None:
            raise TransportError(f"the cluster has no node {address} (any more)")
        self._weights += 1
        options: dict[str, Any] = {
            "name": f"{self._name}:weights-{address}.{self._weights}",
            "num_cpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
        }
        return ray.remote(NodeWeights).options(**options).remote(epoch, address)

    def end_host(self, host: ActorHandle) -> None:
        """End an actor that has nothing to do any more, soon."""
        import ray

        threading.Thread(target=partial(ray.kill, host), name="end of an actor", daemon=True).start()

    # --- its end -----------------------------------------------------------------------------------------------------

    async def answers(self) -> bool:
        """Whether the head still takes connections. Waits for seconds where it does not."""
        try:
            async with timeout(_PROBE_S):
                _, writer = await asyncio.open_connection(*self.head)
        except OSError:
            return False
        writer.close()
        return True

    def close(self) -> None:
        """Let go of everything in it. Does not wait long where the cluster is gone. Closing twice does nothing."""
        groups, self._groups = [*self._groups.values()], {}
        closing = threading.Thread(target=self._let_go, args=(groups,), name="end of the cluster", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _let_go(self, groups: Sequence[tuple[RoleGroup, PlacementGroup]]) -> None:
        import ray
        from ray.util import remove_placement_group

        with contextlib.suppress(Exception):  # the cluster is gone, and all in it
            for _, made in groups:
                remove_placement_group(made)
        ray.shutdown()


def _imported(settings: RaySettings) -> Any:
    if (settings.address or "").startswith(_LOOPBACK):  # else Ray puts another address of this machine in its place
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray = import_extra("ray", extra="ray", what="placement = 'ray'", key=("placement",))
    if ray.is_initialized():
        raise SettingsError("this process uses a Ray cluster already: a run connects by itself", key=("placement",))
    return ray


def _require_listener(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"ray.address = {address!r}: nothing answers there ({error}): give the head's address as `ray start` says"
            " it",
            key=_ADDRESS,
        ) from error


def _refused(settings: RaySettings, error: Exception) -> str:
    text = " ".join(str(error).split())
    if (versions := _VERSIONS.search(text)) is not None:
        theirs, own = (f"Ray {versions[side]} and Python {versions[side + 1]}" for side in (1, 3))
        return f"the cluster has {theirs}, and this process {own}: install the same ones on all of its nodes"
    if settings.address is None:
        return f"no Ray cluster is found on this machine ({text}): start one (`ray start --head`), or join one"
    return f"ray.address = {settings.address!r} cannot be used: {text}"


def _silent(settings: RaySettings) -> SettingsError:
    where = f"ray.address = {settings.address!r}" if settings.address else "the cluster of this machine"
    return SettingsError(
        f"{where}: what listens there did not take this process in within {_REACH_S:g} s: is it the head of a Ray "
        f"cluster of Ray {_ray_version()} that this machine belongs to?",
        key=_ADDRESS,
    )


def _ray_version() -> str:
    import ray

    return f"{ray.__version__} and Python {platform.python_version()}"


def _probe(node: ClusterNode, marker: str) -> Awaitable[tuple[str, bool]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def probe() -> tuple[str, bool]:  # sent as it is: Tailrace may not be there
        import os
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("tailrace"), os.path.exists(marker)
        except PackageNotFoundError:
            return "", False

    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    task = ray.remote(probe).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    answer: Awaitable[tuple[str, bool]] = task.remote()
    return answer


def _answer(probe: asyncio.Future[tuple[str, bool]]) -> tuple[str, bool] | None:
    """What a node said; None where it said nothing, or Ray that there is nothing to be heard of it."""
    from ray.exceptions import RayError

    if not probe.done() or isinstance(probe.exception(), RayError):
        return None
    return probe.result()


def _require_node(node: ClusterNode, version: str, *, sees_folder: bool, folder: Path) -> None:
    own = package_version("tailrace")
    if version != own:
        has = f"has Tailrace {version}" if version else "has no Tailrace"
        raise SettingsError(
            f"the cluster's node {node.address} {has}, and this process {own}: install {own} on all nodes"
        )
    if not sees_folder:
        raise SettingsError(
            f"the cluster's node {node.address} does not see {folder}: keep runs in a folder that all nodes have, by "
            "the same path"
        )


def _resources(cpus: int, gpus: int) -> dict[str, float]:
    return {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})


def _by_node(made: PlacementGroup) -> list[int]:
    from ray.util import placement_group_table

    return bundles_by_node(placement_group_table(made)["bundles_to_node_id"])


def _free() -> str:
    import ray

    have, free = ray.cluster_resources(), ray.available_resources()
    kinds = [kind for kind in ("CPU", "GPU") if have.get(kind)]
    return "free are " + ", ".join(f"{free.get(kind, 0):g} of {have[kind]:g} {kind}s" for kind in kinds)


async def _apart(work: Callable[[], ResultT], limit_s: float | None = None) -> ResultT:
    """What `work` returns, from a thread that nobody waits for where it takes too long, as Ray may without its head.

    Raises `TimeoutError` then, and what `work` raised.
    """
    finished: Future[ResultT] = Future()
    finished.set_running_or_notify_cancel()  # from now on, who waits no more does not cancel it

    def run() -> None:
        try:
            finished.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            finished.set_exception(error)

    threading.Thread(target=run, name="Ray", daemon=True).start()
    async with timeout(limit_s):
        return await asyncio.wrap_future(finished)

"""Roles on the nodes of a Ray cluster, each beside an actor of its own.

    RayLauncher: RayHandle ── start, ready, left, stop, kill ──► RoleHost (actor) ──► the role's process

Ray finds the nodes, and others for what was on a node that is lost. Whether a role is started again is decided where it
always is: no actor is restarted by Ray. They share the run's folder, and meet at sockets that carry the run's keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import ClusterFull, LifecycleError, SettingsError
from tailrace.free_ports import free_port
from tailrace.lifecycle.event_loop import first_done
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.launchers.base import KILLED_WITHIN_S, Launcher, RoleHandle
from tailrace.lifecycle.node_weights import WeightsOfNodes
from tailrace.lifecycle.ray_cluster import RayCluster
from tailrace.lifecycle.ray_host import HostOrder
from tailrace.lifecycle.roles import NodeShare, Role
from tailrace.timeouts import timeout

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_logger = logging.getLogger(__name__)

_KILL_S = 3.0
"""How long an actor may take to answer where its role is to be killed, before it is taken for lost."""
_UNKNOWN_S = 15.0
"""How long Ray may take to find out what has become of an actor that does not answer."""
_LOOK_S, _HEAD_LOST_S = 2.0, 15.0
"""Between two looks for the head, and how long it may be away. Ray ends this process after 60 s without."""


class RayHandle(RoleHandle):
    """One role's actor, or those of a role that is on several nodes, which end together; life by life."""

    _launcher: RayLauncher

    @override
    def _begin(self, role: Role) -> None:
        self._why = self._held = ""
        self._hosts: Sequence[ActorHandle] = ()
        self._living = self._launcher.own(self._live(role), f"host of the {self.spec.name}")

    @override
    def _terminate(self) -> None:
        if not self._hosts:
            self._end(self.life, ExitCode.TERMINATED, "it was not placed yet")
        else:
            self._ask(self._hosts[0].stop)

    @override
    def _kill(self) -> None:
        if not self._hosts:
            self._end(self.life, -signal.SIGKILL, "it was not placed yet")
        else:
            self._launcher.own(self._kill_hosts(self.life, self._hosts), f"end of the {self.spec.name}")

    @override
    def write_stacks(self) -> None:
        for host in self._hosts if self.is_running else ():
            self._ask(host.write_stacks)

    @override
    def early_exit(self) -> LifecycleError:
        return LifecycleError(self._why) if self._why else super().early_exit()

    @property
    @override
    def _gone_within_s(self) -> float:
        return super()._gone_within_s + 2 * _KILL_S  # the actor waits for so long, and is asked before

    @override
    def _not_gone(self) -> LifecycleError:
        return LifecycleError(self._held or f"the {self.spec.name} was killed, and its actor does not say that it left")

    async def _live(self, role: Role) -> None:
        """From its start to its end, on all its nodes."""
        hosts: list[ActorHandle] = []
        try:
            status, why = await self._first_end(role, hosts)
            if len(hosts) > 1:
                self._held = await _held_after_kill(hosts)
            if self._held:
                _logger.warning("%s (one of its nodes has left)", self._held)
                await asyncio.gather(*(host.left.remote() for host in hosts), return_exceptions=True)
        finally:
            for host in hosts:
                self._launcher.end_actor(host)
        self._end(role.life, status, why)

    async def _first_end(self, role: Role, hosts: list[ActorHandle]) -> tuple[int, str]:
        """Waits for its nodes, whose actors become `hosts`, for it to be ready, and for a process of it to leave."""
        from ray.exceptions import ActorUnavailableError, RayError

        try:
            hosts += await self._launcher.start_hosts(role)
            self._hosts = hosts
            orders = await self._launcher.orders(role, hosts)
            return await first_done(*map(self._live_on, hosts, orders))
        except (SettingsError, LifecycleError) as error:
            return int(ExitCode.FAILED), f"the {self.spec.name} cannot be started: {error}"
        except RayError as error:
            if isinstance(error, ActorUnavailableError):
                await _known(hosts)
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            return -signal.SIGKILL, f"the {self.spec.name} is lost, with its actor or its node: {first_line}"
        except Exception as error:  # noqa: BLE001 - of any kind: unreported, nobody would miss the role
            return int(ExitCode.FAILED), f"the {self.spec.name} cannot be watched: {error!r}"

    async def _live_on(self, host: ActorHandle, order: HostOrder) -> tuple[int, str]:
        """One of its processes, until that has left."""
        await host.start.remote(order)
        if (address := await host.ready.remote()) is not None and order.spec.name == self.spec.name:
            self._was_ready(address)
        left: tuple[int, str] = await host.left.remote()
        return left

    async def _kill_hosts(self, life: int, hosts: Sequence[ActorHandle]) -> None:
        """End this life at once, or what is left of its actors, where one does not answer. What the system holds lives
        on, and leaves when it is let go.
        """
        self._held = await _held_after_kill(hosts)
        if self._held:
            return
        await asyncio.wait({self._left}, timeout=_KILL_S)
        for host in hosts:
            self._launcher.end_actor(host)
        self._end(life, -signal.SIGKILL, f"the {self.spec.name} was killed with its actor, which did not answer")

    def _ask(self, method: Any) -> None:
        """Its answer, or that there is none, means nothing: `left` says all."""
        self._launcher.own(_ignored(method), f"word to the {self.spec.name}")

    def _end(self, life: int, status: int, why: str) -> None:
        if self.is_running and self.life == life:
            self._why = why
            self._has_left(status)
            if not self._hosts:
                self._living.cancel()


class RayLauncher(Launcher):
    """A Ray actor for each role, on the nodes of a cluster."""

    handle_class = RayHandle
    has_roles_elsewhere = True
    may_grow = True
    hosts_agents = True
    finds_devices = True

    def __init__(self, epoch: str, logs: Path, settings: ShutdownSettings | None = None) -> None:
        super().__init__(epoch, logs, settings)
        self._reached: RayCluster | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @override
    async def reserve(self) -> None:
        plan = self.cluster
        assert plan is not None, "no plan of the cluster"
        self._reached = cluster = await RayCluster.reach(plan.settings, plan.run, self.epoch)
        self.weights = WeightsOfNodes(partial(cluster.start_weights, self.epoch), cluster.end_host)
        await cluster.require_nodes(plan.folder)
        self.cluster = await cluster.fitted(plan)
        await cluster.reserve(self.cluster.groups)
        await cluster.require_nodes(plan.folder)  # those that an autoscaler has added

    @override
    async def place(self, name: str) -> None:
        assert self.cluster is not None
        group = self.cluster.group_of(name)
        try:
            await self._found.ask_for(group)
            await self._found.wait_for(group.name)
        except SettingsError as error:
            await self.let_go(name)
            raise ClusterFull(str(error)) from error

    @override
    async def let_go(self, name: str) -> None:
        assert self.cluster is not None
        await self._found.let_go(self.cluster.group_of(name).name)

    @override
    def address(self, name: str) -> str:
        """A role's own is chosen on its node. Here the ports after it are free as well, one for each rank."""
        assert self.cluster is not None
        host = self._found.own_address
        ranks = max(len(group.bundles) for group in self.cluster.groups if group.strategy != "SPREAD")
        return f"tcp://{host}:{free_port(host, ranks)}"

    @override
    async def watch(self) -> NoReturn:
        await first_done(super().watch(), self._miss_head())

    @override
    async def close(self) -> None:
        await super().close()
        if self._tasks:  # all roles have left: nobody waits for an actor that cannot say so
            await asyncio.wait(self._tasks, timeout=_KILL_S)
        for task in self._tasks:
            task.cancel()
        if self.weights is not None:
            with contextlib.suppress(TimeoutError):
                async with timeout(_KILL_S):
                    await self.weights.close()

    @override
    def kill(self) -> None:
        super().kill()
        reached, self._reached = self._reached, None
        if reached is not None:
            reached.close()

    async def start_hosts(self, role: Role) -> list[ActorHandle]:
        """One on each of its nodes, once its group has those. Raises `SettingsError`."""
        assert self.cluster is not None
        group = self.cluster.group_of(role.spec.name)
        await self._found.wait_for(group.name)
        return [
            await self._found.start_host(group.name, bundle.role, role.life)
            for bundle in group.bundles_of(role.spec.name)
        ]

    async def orders(self, role: Role, hosts: Sequence[ActorHandle]) -> list[HostOrder]:
        """What each actor of this life is told."""
        assert self.cluster is not None
        specs = [role.spec]
        if len(hosts) > 1:
            place = await hosts[0].meeting_place.remote()
            names = [bundle.role for bundle in self.cluster.group_of(role.spec.name).bundles_of(role.spec.name)]
            shares = [NodeShare(role.spec.name, number, len(hosts), *place) for number in range(len(hosts))]
            specs = [replace(role.spec, name=name, share=share) for name, share in zip(names, shares, strict=True)]
        common = role.life, self.epoch, self.logs, Path.cwd(), self.settings, self.restarts
        return [HostOrder(spec, *common) for spec in specs]

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends before this launcher is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end_actor(self, host: ActorHandle) -> None:
        """It has nothing to do any more."""
        if self._reached is not None:
            self._reached.end_host(host)

    @property
    def _found(self) -> RayCluster:
        if self._reached is None:
            raise LifecycleError("the cluster is not reached, or let go of")
        return self._reached

    async def _miss_head(self) -> NoReturn:
        """Waits for the cluster's head to be away for long, and raises that."""
        cluster, loop = self._found, asyncio.get_running_loop()
        seen_s = loop.time()
        while True:
            if await cluster.answers():
                seen_s = loop.time()
            elif loop.time() - seen_s > _HEAD_LOST_S:
                host, port = cluster.head
                lost = f"the head of the Ray cluster ({host}:{port}) is lost: start a cluster, and resume the run"
                raise LifecycleError(lost)
            await asyncio.sleep(_LOOK_S)


async def _held_after_kill(hosts: Sequence[ActorHandle]) -> str:
    """What these started is killed: empty where nothing is left of it, as far as they can say so; else what is."""
    return next(filter(None, await asyncio.gather(*map(_held_on, hosts))), "")


async def _held_on(host: ActorHandle) -> str:
    """Of one, which has as long as the system may take, if it answers at all."""
    from ray.exceptions import RayError

    killed = host.kill.remote()
    with contextlib.suppress(TimeoutError, RayError):
        async with timeout(_KILL_S) as deadline:
            await host.__ray_ready__.remote()
            deadline.reschedule(asyncio.get_running_loop().time() + KILLED_WITHIN_S + _KILL_S)
            held: str = await killed
            return held
    return ""


async def _known(hosts: Sequence[ActorHandle]) -> None:
    """Ray has found out whether these live: until it has, it starts the next life on a node that is gone."""
    with contextlib.suppress(TimeoutError):
        async with timeout(_UNKNOWN_S):
            await asyncio.gather(*map(_known_one, hosts))


async def _known_one(host: ActorHandle) -> None:
    from ray.exceptions import ActorUnavailableError, RayError

    while True:
        try:
            await host.__ray_ready__.remote()
        except ActorUnavailableError:
            await asyncio.sleep(_UNKNOWN_S / 60)
        except RayError:
            return
        else:
            return


async def _ignored(method: Any) -> None:
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):
        await method.remote()


LAUNCHER = RayLauncher

"""What all launchers share: names, lives, deadlines, and noticing a role that left before it was asked to."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from tailrace.child_processes import describe_exit
from tailrace.config.restarts import RestartSettings
from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import LifecycleError
from tailrace.lifecycle.cluster import ClusterPlan
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.transport.channels import wait_until
from tailrace.transport.redis.channels import RedisPlace

if TYPE_CHECKING:
    from tailrace.lifecycle.node_weights import WeightsOfNodes

_logger = logging.getLogger(__name__)

_ORDERLY = (ExitCode.FINISHED, ExitCode.TERMINATED)
"""Statuses of a role that ended because it was asked to."""

KILLED_WITHIN_S = 30.0
"""How long a role may take to be gone once it was killed: the system first frees all of its memory, a GPU's too."""


class RoleHandle(ABC):
    """A role, over all its lives. Made by its launcher, on a running event loop."""

    def __init__(self, spec: RoleSpec, launcher: Launcher, *, is_replaceable: bool = False) -> None:
        """The early end of one that `is_replaceable` fails nothing by itself: its owner sees to it."""
        self.spec, self._launcher, self.is_replaceable = spec, launcher, is_replaceable
        self.life = -1
        """How often it was started before; -1 until it is."""
        self.status: int | None = None
        """Its exit status once it left; a signal's number, negative, when one killed it."""
        self.is_done = False
        """Its work is over: it may leave, with status 0."""
        self.is_stopping = False
        """It was asked to leave."""
        self._is_held = False
        """It was killed, and was not gone within the deadline."""

    # --- what a launcher implements ----------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, role: Role) -> None:
        """Start this life. Raises `LifecycleError` where that fails."""

    @abstractmethod
    def _terminate(self) -> None:
        """Ask it, and all that it started, to end."""

    @abstractmethod
    def _kill(self) -> None:
        """End it, and all that it started, at once; does nothing once it left."""

    @property
    def pid(self) -> int | None:
        """Its process on this machine, where there is one."""
        return None

    def write_stacks(self) -> None:  # noqa: B027 - one that is no process of its own has none
        """Write the stacks of all its threads into its log, soon."""

    def early_exit(self) -> LifecycleError:
        """The error to raise when it left before it was asked to."""
        return LifecycleError(f"the {self.spec.name} left early, {describe_exit(self.status or 0)}")

    @property
    def _gone_within_s(self) -> float:
        """How long it may take to be known to be gone once it was killed."""
        return KILLED_WITHIN_S

    def _not_gone(self) -> LifecycleError:
        """The error to raise when it is not."""
        return LifecycleError(f"the {self.spec.name} ({self.pid}) cannot be killed: the system holds it")

    # --- what its launcher calls -------------------------------------------------------------------------------------

    def _was_ready(self, address: str) -> None:
        if not self._readied.done():
            self._readied.set_result(address)

    def _has_left(self, status: int) -> None:
        self.status = status
        self._left.set_result(status)
        self._launcher.changed.set()

    # --- what its owner does -----------------------------------------------------------------------------------------

    @property
    def instance(self) -> str:
        """Names this life of the role among all."""
        return f"{self.spec.name}.{self.life}"

    @property
    def is_running(self) -> bool:
        """Whether it has not left yet."""
        return self.life >= 0 and self.status is None

    @property
    def has_failed(self) -> bool:
        """Whether it left before it was asked to, or with an error."""
        return self.status is not None and not self.is_stopping and not (self.is_done and self.status == 0)

    async def ready(self) -> str:
        """Wait until it says that it is ready; where it listens. Raises `LifecycleError` when it leaves before."""
        ends: set[asyncio.Future[Any]] = {self._readied, self._left}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._readied.done():
            raise self.early_exit()
        return self._readied.result()

    async def left(self) -> int:
        """Wait for this life to end, for as long as it takes; returns its exit status."""
        return await asyncio.shield(self._left)

    def expect_exit(self) -> None:
        """Its work is done: from now on it may leave, with status 0."""
        self.is_done = True
        self._launcher.changed.set()

    async def stop(self) -> None:
        """Ask it to end, and kill it after a deadline; returns once it left. Raises `LifecycleError` as `kill` does."""
        self.is_stopping = True
        if self.is_running:
            self._terminate()
            if not await self._leaves(self._launcher.settings.terminate_s):
                _logger.warning("the %s did not end in time, and is killed", self.spec.name)
                await self.kill()
            elif self.status not in _ORDERLY:
                _logger.warning("the %s left when it was asked to, %s", self.spec.name, describe_exit(self.status or 0))

    async def kill(self) -> None:
        """End it, and wait for that. Raises `LifecycleError` where it lives on past a deadline (a hung disk).

        One that did so before is not waited for again.
        """
        self.is_stopping = True
        if self.is_running:
            self._kill()
            self._is_held = not await self._leaves(0.0 if self._is_held else self._gone_within_s)
            if self._is_held:
                raise self._not_gone()

    async def restart(self) -> None:
        """Start it again, under an address of its own, after killing what is left of it. Raises `LifecycleError`."""
        await self.kill()
        self.start_life()

    def start_next_life(self, settings: bytes) -> None:
        """As `restart`, of a role that has left, with settings that are this life's. Raises `LifecycleError`."""
        self.spec = replace(self.spec, settings=settings)
        self.start_life()

    def start_life(self) -> None:
        """Start the next life, once the one before has ended. Raises `LifecycleError` where it cannot be started."""
        loop = asyncio.get_running_loop()
        self._readied: asyncio.Future[str] = loop.create_future()
        self._left: asyncio.Future[int] = loop.create_future()
        self.status, self.is_done, self.is_stopping, self._is_held = None, False, False, False
        self.life += 1  # a new address each time: the old life may still hold its own
        own_process = not self._launcher.runs_in_this_process
        address = self._launcher.address(self.instance)
        self._begin(Role(self.spec, self.life, address, self._was_ready, has_own_process=own_process))

    async def _leaves(self, within_s: float) -> bool:
        """Wait for it to leave, until the deadline; whether it did."""
        await asyncio.wait({self._left}, timeout=within_s)
        return self._left.done()


class Launcher(ABC):
    """Starts the roles of a run, notices at once when one leaves early, and stops them.

    Use it as an async context manager: no role outlives it. A launcher has a `handle_class` and an `address`; what it
    owns it releases in `kill`, too.
    """

    handle_class: ClassVar[type[RoleHandle]]
    runs_in_this_process: ClassVar[bool] = False
    """Whether its roles share this process's memory: what joins them are objects then, and no sockets."""
    has_roles_elsewhere: ClassVar[bool] = False
    """Whether roles are on other machines, and share no more with this one than the run's folder, and Redis."""
    others_have: ClassVar[frozenset[str]] = frozenset()
    """Roles that machines of which this one knows nothing have, and give their GPUs."""
    may_grow: ClassVar[bool] = False
    """Whether machines may have room for more roles than a run begins with."""
    hosts_agents: ClassVar[bool] = False
    """Whether agent workers, where a number of them is asked for, are roles, too, and no children of this process."""
    finds_devices: ClassVar[bool] = False
    """Whether it gives roles the GPUs that they need by itself, wherever it starts them."""

    def __init__(self, epoch: str, logs: Path, settings: ShutdownSettings | None = None) -> None:
        """`logs` is the folder for what roles print."""
        self.epoch, self.logs, self.settings = epoch, logs, settings or ShutdownSettings()
        self.restarts = RestartSettings()
        """How long a role may give no sign of life, or be stuck."""
        self.redis: RedisPlace | None = None
        """Where roles on other machines are asked for, of a launcher that has such."""
        self.cluster: ClusterPlan | None = None
        """What roles need of a cluster's nodes, of a launcher that has such."""
        self.weights: WeightsOfNodes | None = None
        """Brings weights to a cluster's nodes, of a launcher that has such."""
        self.changed = asyncio.Event()
        """Set when a role leaves, or may leave."""
        self.inherited: tuple[int, ...] = ()
        """Descriptors that processes of roles inherit on this machine: a lock on one lasts until the last has ended."""
        self._handles: dict[str, RoleHandle] = {}

    # --- what a launcher implements ----------------------------------------------------------------------------------

    @abstractmethod
    def address(self, name: str) -> str:
        """A ZMQ endpoint for a listener of that name, which every role of the run can reach. Raises `SettingsError`.

        A role that cannot listen there says where it does when it is ready (`Role.ready`).
        """

    async def reserve(self) -> None:  # noqa: B027 - most start roles on this machine alone
        """Reach the machines that roles are to be started on, before anything else is asked. Raises `SettingsError`."""

    async def place(self, name: str) -> None:  # noqa: B027 - as above
        """Wait until there is a machine for this role, which is started next. Raises `LifecycleError`."""

    async def let_go(self, name: str) -> None:  # noqa: B027 - as above
        """This role has left and is not started again soon: another may have its place."""

    # --- what its owner does -----------------------------------------------------------------------------------------

    def start(self, spec: RoleSpec, *, is_replaceable: bool = False, life: int = 0) -> RoleHandle:
        """Start a role; `watch` ignores the end of a replaceable one. Raises `LifecycleError`, as for a taken name.

        `life` is its number where earlier ones were started elsewhere.
        """
        before = self._handles.get(spec.name)
        if before is not None and before.is_running:
            raise LifecycleError(f"a role named {spec.name} runs already")
        handle = self._handles[spec.name] = self._handle_class_of(spec)(spec, self, is_replaceable=is_replaceable)
        handle.life = life - 1
        handle.start_life()
        return handle

    async def watch(self) -> NoReturn:
        """Wait for a role that leaves before it was asked to, and raise its `LifecycleError`."""
        await wait_until(self.changed, lambda: any(self._failed()))
        raise self._failed()[0].early_exit()

    def pids(self) -> dict[str, int]:
        """Process ids of the roles that run in processes of their own, by name."""
        return {name: role.pid for name, role in self._handles.items() if role.is_running and role.pid is not None}

    def write_stacks(self) -> None:
        """Every role that runs writes the stacks of its threads into its log, soon; not one that is stopped."""
        for handle in self._handles.values():
            handle.write_stacks()

    async def close(self) -> None:
        """Stop every role that still runs, all at once: any number of them may hang. Closing twice does nothing.

        What the system holds is left to it, and told of.
        """
        async with asyncio.TaskGroup() as stopping:
            for handle in self._handles.values():
                stopping.create_task(_stop(handle))

    def kill(self) -> None:
        """End every role at once, without waiting (for a second Ctrl-C), and release what the launcher owns."""
        for handle in self._handles.values():
            handle.is_stopping = True
            if handle.is_running:
                handle._kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            self.kill()

    def _handle_class_of(self, spec: RoleSpec) -> type[RoleHandle]:
        """Of this role."""
        return self.handle_class

    def _failed(self) -> list[RoleHandle]:
        return [role for role in self._handles.values() if role.has_failed and not role.is_replaceable]


async def _stop(handle: RoleHandle) -> None:
    try:
        await handle.stop()
    except LifecycleError as error:
        _logger.error("stopping: %s", error)

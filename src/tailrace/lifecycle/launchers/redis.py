"""Roles as processes of this machine, but the trainer, which `tailrace join` starts on another one.

    RedisLauncher: RemoteHandle ── StartRole, StopRole, KillRole, Beat ──► tailrace join ──► the role's process
                                ◄── Beat, RoleReady, RoleLeft ──

They share a Redis and the run's folder. What asks for a machine is a notice in Redis, one for each life of the role,
which is gone soon after the run. A machine that is silent while Redis is there is lost, and its role with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TypeAlias

import msgspec
from typing_extensions import override

from tailrace.errors import LifecycleError, TransportError
from tailrace.lifecycle.launchers.base import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.transport.channels import Conversation, decode, encode
from tailrace.transport.redis.channels import RedisPlace

_logger = logging.getLogger(__name__)

BEAT_EVERY_S = 1.0
_NOTICE_S = 10.0
"""How long a notice is there, unless it is given again."""


class Notice(msgspec.Struct, frozen=True):
    """That a life of a role wants a machine."""

    run: str
    epoch: str
    name: str
    life: int
    address: str
    """Of the conversation about it."""
    outage_s: float
    """How long the run waits for Redis."""


class StartRole(msgspec.Struct, frozen=True, tag=True):
    """Start this role."""

    spec: RoleSpec
    life: int


class StopRole(msgspec.Struct, frozen=True, tag=True):
    """Ask it to end."""


class KillRole(msgspec.Struct, frozen=True, tag=True):
    """End it at once."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life of this end."""


class RoleReady(msgspec.Struct, frozen=True, tag=True):
    """The role is ready, and listens there."""

    address: str


class RoleLeft(msgspec.Struct, frozen=True, tag=True):
    """It has ended."""

    status: int
    reason: str
    """As `RoleHandle.early_exit` says it."""


ToMachine: TypeAlias = StartRole | StopRole | KillRole | Beat
FromMachine: TypeAlias = RoleReady | RoleLeft | Beat


def notice_key(place: RedisPlace) -> str:
    """Where a run's notice is."""
    return f"{place.prefix}:{place.origin.run}:wanted"


class RemoteHandle(RoleHandle):
    """A role that another machine has, or will have."""

    @override
    def _begin(self, role: Role) -> None:
        place = self._launcher.redis
        assert place is not None, "no Redis"
        self._why = ""
        self._is_taken = False
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard_s = asyncio.get_running_loop().time()
        address = place.address(f"{self.spec.name}.{role.life}")
        origin = place.origin
        self._notice = Notice(origin.run, origin.epoch, self.spec.name, role.life, address, place.outage_s)
        self._channel: Conversation = place.open_channel(
            address,
            bind=True,
            on_message=self._on_message,
            changed=asyncio.Event(),
            peer=f"machine of the {self.spec.name}",
        )
        self._channel.send(encode(StartRole(self.spec, role.life)))
        _logger.info("a machine is wanted for the %s: tailrace join %s --redis URL", self.spec.name, place.origin.run)
        self._keeping = asyncio.create_task(self._keep(place), name=f"machine of the {self.spec.name}")

    @override
    def _terminate(self) -> None:
        self._tell(StopRole())

    @override
    def _kill(self) -> None:
        if not self.is_running:
            return
        if self._is_taken:
            self._tell(KillRole())
        else:
            self._end(-signal.SIGKILL, "no machine ever took it")

    @override
    def early_exit(self) -> LifecycleError:
        return LifecycleError(self._why) if self._why else super().early_exit()

    @override
    def _not_gone(self) -> LifecycleError:
        return LifecycleError(f"the {self.spec.name} was killed, and its machine does not say that it left")

    async def _keep(self, place: RedisPlace) -> None:
        """Gives the notice again and again until a machine took it, then signs of life; waits for the machine's."""
        with contextlib.closing(place.connect()) as connection:
            while self.is_running:
                if self._channel.failure:
                    self._end(-signal.SIGKILL, f"the machine of the {self.spec.name} is lost: {self._channel.failure}")
                elif self._is_taken:
                    self._tell(Beat())
                    self._require_life(place)
                else:
                    notice = ("SET", notice_key(place), encode(self._notice), "PX", int(_NOTICE_S * 1000))
                    with contextlib.suppress(TransportError):  # the channel fails of it, too
                        await asyncio.to_thread(connection.one, *notice)
                await asyncio.sleep(BEAT_EVERY_S)

    def _require_life(self, place: RedisPlace) -> None:
        now_s, silence_s = asyncio.get_running_loop().time(), self._launcher.restarts.silence_s
        if place.is_away:
            self._heard_s = now_s
        elif now_s - self._heard_s > silence_s:
            name = self.spec.name
            self._end(-signal.SIGKILL, f"the machine of the {name} gave no sign of life for {silence_s:g} s")

    def _on_message(self, message: bytes) -> None:
        decoded: FromMachine = decode(message, FromMachine)  # type: ignore[arg-type]
        self._is_taken, self._heard_s = True, asyncio.get_running_loop().time()
        match decoded:
            case RoleReady(address):
                self._was_ready(address)
            case RoleLeft(status, reason):
                self._end(status, reason)

    def _tell(self, message: ToMachine) -> None:
        with contextlib.suppress(TransportError):  # it is lost, which is noticed elsewhere
            self._channel.send(encode(message))

    def _end(self, status: int, why: str) -> None:
        if self.is_running:
            self._why = why
            self._has_left(status)
            self._closing = asyncio.ensure_future(self._channel.close())

    async def closed(self) -> None:
        """Wait until the other machine's last messages are read, or given up."""
        await self._closing


class RedisLauncher(LocalLauncher):
    """A process of this machine for each role, and another machine for the trainer."""

    has_roles_elsewhere = True
    others_have = frozenset({"trainer"})

    @override
    async def close(self) -> None:
        await super().close()
        remote = [handle for handle in self._handles.values() if isinstance(handle, RemoteHandle)]
        await asyncio.gather(*(handle.closed() for handle in remote if not handle.is_running))

    @override
    def _handle_class_of(self, spec: RoleSpec) -> type[RoleHandle]:
        return RemoteHandle if spec.name in self.others_have else super()._handle_class_of(spec)


LAUNCHER = RedisLauncher

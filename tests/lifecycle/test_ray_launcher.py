"""How a role on a node of a Ray cluster is killed; its actor is here, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.lifecycle.test_launchers import PATIENCE_S, LingeringHandle, LingeringLauncher, spec
from typing_extensions import override

from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import LifecycleError
from tailrace.lifecycle.launchers import base, ray
from tailrace.lifecycle.launchers.ray import RayLauncher
from tailrace.lifecycle.ray_host import HostOrder, RoleHost
from tailrace.lifecycle.roles import Role

ANSWERS_WITHIN_S = 1.0
LINGERS_S = 1.5
"""A role that was killed does: for longer than its actor may take to answer."""


class Host(RoleHost):
    """An actor whose role the system holds for a while, or for ever by the name of `held`."""

    @override
    async def start(self, order: HostOrder) -> None:
        self._launcher = LingeringLauncher(order.epoch, order.logs, order.shutdown)
        self._handle = self._launcher.start(order.spec, is_replaceable=True, life=order.life)

    async def __ray_ready__(self) -> bool:
        return True


class Remote:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._method = method

    def remote(self, *arguments: object) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._method(*arguments))


class Actor:
    """The handle of an actor in this process. One that is `silent` answers nothing from then on."""

    def __init__(self) -> None:
        self._host, self.silent, self.is_ended = Host(), False, False

    def __getattr__(self, name: str) -> Remote:
        return Remote(self._never if self.silent else getattr(self._host, name))

    async def _never(self, *_: object) -> None:
        await asyncio.Future()


class HereLauncher(RayLauncher):
    """Its nodes are this process."""

    def __init__(self, logs: Path) -> None:
        super().__init__("epoch", logs, ShutdownSettings(terminate_s=0.01))
        self.actors: list[Actor] = []

    @override
    def address(self, name: str) -> str:
        return f"tcp://anywhere/{name}"

    @override
    async def start_hosts(self, role: Role) -> list[Any]:
        self.actors.append(Actor())
        return self.actors[-1:]

    @override
    async def orders(self, role: Role, hosts: Sequence[Any]) -> list[HostOrder]:
        return [HostOrder(role.spec, role.life, self.epoch, self.logs, Path.cwd(), self.settings, self.restarts)]

    @override
    def end_actor(self, host: Any) -> None:
        host.is_ended = True


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_KILL_S", ANSWERS_WITHIN_S)
    monkeypatch.setattr(base, "KILLED_WITHIN_S", 3.0)
    monkeypatch.setattr(LingeringHandle, "lingers_s", LINGERS_S)


async def test_a_role_that_takes_long_to_be_gone_is_waited_for_while_its_actor_answers(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), HereLauncher(tmp_path / "logs") as launcher:
        role = launcher.start(spec("wait_for_stop", tmp_path))
        await role.ready()
        await role.kill()
        assert (tmp_path / "cleaned up").exists()
        assert "did not answer" not in str(role.early_exit())


async def test_a_role_that_the_system_holds_is_told_of_as_its_actor_says_and_lives_on(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), HereLauncher(tmp_path / "logs") as launcher:
        role = launcher.start(spec("wait_for_stop", tmp_path, "held"))
        await role.ready()
        with pytest.raises(LifecycleError, match=r"^the held \(None\) cannot be killed: the system holds it$"):
            await role.kill()
        assert role.is_running
        assert not launcher.actors[0].is_ended


async def test_an_actor_that_does_not_answer_is_ended_with_its_role(tmp_path: Path) -> None:
    async with asyncio.timeout(PATIENCE_S), HereLauncher(tmp_path / "logs") as launcher:
        role = launcher.start(spec("wait_for_stop", tmp_path, "held"))
        await role.ready()
        launcher.actors[0].silent = True
        await role.kill()
        assert "its actor, which did not answer" in str(role.early_exit())
        assert launcher.actors[0].is_ended

"""What every launcher promises, kept by `inline`, `local` and one that exists in this file alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from typing_extensions import override

from tailrace.config.shutdown import ShutdownSettings
from tailrace.errors import LifecycleError, SettingsError
from tailrace.lifecycle.exit_codes import ExitCode
from tailrace.lifecycle.launchers import Launcher, RoleHandle, base, launcher_class
from tailrace.lifecycle.roles import Role, RoleSpec, resolve_entry

PATIENCE_S = 60.0


class ThreadHandle(RoleHandle):
    """A role on an event loop of its own, in a thread."""

    @override
    def _begin(self, role: Role) -> None:
        self._loop, ours = asyncio.new_event_loop(), asyncio.get_running_loop()
        role = replace(role, say_ready=lambda at: self._tell(ours, self._was_ready, at))
        self._task = self._loop.create_task(resolve_entry(self.spec.entry)(role))
        threading.Thread(target=self._run, args=(ours,), daemon=True).start()

    def _run(self, ours: asyncio.AbstractEventLoop) -> None:
        try:
            self._loop.run_until_complete(self._task)
            status = ExitCode.FINISHED
        except asyncio.CancelledError:
            status = ExitCode.TERMINATED
        except Exception:  # noqa: BLE001
            status = ExitCode.FAILED
        self._tell(ours, self._has_left, status)

    @staticmethod
    def _tell(loop: asyncio.AbstractEventLoop, *call: object) -> None:
        loop.call_soon_threadsafe(*call)

    @override
    def _terminate(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)

    _kill = _terminate


class ThreadLauncher(Launcher):
    handle_class = ThreadHandle

    @override
    def address(self, name: str) -> str:
        return f"tcp://anywhere/{name}"


@pytest.fixture(params=["inline", "local", f"{__name__}:ThreadLauncher"])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Launcher]:
    kind = launcher_class(request.param)
    async with kind("epoch", tmp_path / "logs", ShutdownSettings(terminate_s=PATIENCE_S)) as launcher:
        yield launcher


def spec(function: str, folder: Path, name: str = "trainer") -> RoleSpec:
    settings, environment = str(folder).encode(), {"COLOUR": "blue"}
    return RoleSpec(name, f"role_functions:{function}", settings, devices=("1",), environment=environment)


async def test_a_role_is_given_its_spec_and_says_where_it_listens(launcher: Launcher, tmp_path: Path) -> None:
    role = launcher.start(spec("describe_itself", tmp_path))
    assert await role.ready() == "tcp://there:0"
    address = launcher.address(role.instance)
    assert (tmp_path / role.instance).read_text() == f"trainer ('1',) blue {address}"
    role.expect_exit()
    (tmp_path / "leave").touch()
    assert await role.left() == role.status == 0
    assert not role.has_failed


async def test_a_role_can_be_restarted_by_its_handle(launcher: Launcher, tmp_path: Path) -> None:
    role = launcher.start(spec("describe_itself", tmp_path), is_replaceable=True)
    assert (await role.ready(), role.life) == ("tcp://there:0", 0)
    first_life = asyncio.ensure_future(role.left())
    await role.restart()
    assert await first_life != 0
    assert (await role.ready(), role.life, role.is_running) == ("tcp://there:1", 1, True)
    assert launcher.address("trainer.0") != launcher.address("trainer.1")
    await role.kill()
    await role.restart()
    assert await role.ready() == "tcp://there:2"


async def test_a_stopped_role_cleans_up_and_has_not_failed(launcher: Launcher, tmp_path: Path) -> None:
    role = launcher.start(spec("wait_for_stop", tmp_path))
    assert await role.ready() == launcher.address(role.instance)
    await role.stop()
    assert (tmp_path / "cleaned up").exists()
    assert (role.status, role.has_failed) == (ExitCode.TERMINATED, False)
    await role.stop()


async def test_a_killed_role_is_gone(launcher: Launcher, tmp_path: Path) -> None:
    role = launcher.start(spec("wait_for_stop", tmp_path))
    await role.ready()
    await role.kill()
    assert not role.is_running
    assert role.status != 0


async def test_a_role_that_leaves_early_is_told_of_at_once(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start(spec("fail", tmp_path, "other"), is_replaceable=True)
    role = launcher.start(spec("fail", tmp_path))
    with pytest.raises(LifecycleError, match="the trainer "):
        await launcher.watch()
    assert (role.has_failed, role.status) == (True, ExitCode.FAILED)
    with pytest.raises(LifecycleError, match="the trainer "):
        await role.ready()


async def test_a_name_is_taken_while_its_role_runs(launcher: Launcher, tmp_path: Path) -> None:
    role = launcher.start(spec("wait_for_stop", tmp_path))
    await role.ready()
    with pytest.raises(LifecycleError, match="runs already"):
        launcher.start(spec("wait_for_stop", tmp_path))


async def test_no_role_outlives_its_launcher(launcher: Launcher, tmp_path: Path) -> None:
    async with launcher:
        roles = [launcher.start(spec("wait_for_stop", tmp_path, name)) for name in ("one", "two")]
        for role in roles:
            await role.ready()
    assert not any(role.is_running for role in roles)


class LingeringHandle(ThreadHandle):
    """One that hears of no wish, and whose memory the system frees for a while once it is killed."""

    lingers_s: ClassVar[float] = 0.3

    @override
    def _terminate(self) -> None:
        """It does not hear."""

    @override
    def _kill(self) -> None:
        asyncio.get_running_loop().call_later(self.lingers_s, super()._terminate)


class HeldHandle(LingeringHandle):
    """One that a hung disk holds."""

    _kill = LingeringHandle._terminate


class LingeringLauncher(ThreadLauncher):
    @override
    def _handle_class_of(self, spec: RoleSpec) -> type[RoleHandle]:
        return HeldHandle if spec.name == "held" else LingeringHandle


async def test_a_killed_role_may_take_longer_to_be_gone_than_one_that_is_asked(tmp_path: Path) -> None:
    async with LingeringLauncher("epoch", tmp_path / "logs", ShutdownSettings(terminate_s=0.01)) as launcher:
        role = launcher.start(spec("wait_for_stop", tmp_path))
        await role.ready()
        await role.stop()
        assert not role.is_running


async def test_a_role_that_the_system_holds_is_told_of_and_the_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "KILLED_WITHIN_S", 3.0)
    async with LingeringLauncher("epoch", tmp_path / "logs", ShutdownSettings(terminate_s=0.01)) as launcher:
        roles = [launcher.start(spec("wait_for_stop", tmp_path, name)) for name in ("other", "held")]
        for role in roles:
            await role.ready()
        with pytest.raises(LifecycleError, match=r"the held .* cannot be killed"):
            await roles[1].kill()
    assert [role.is_running for role in roles] == [False, True]
    assert caplog.text.count("the held (None) cannot be killed: the system holds it") == 1


class CountedHandle(LingeringHandle):
    """One that tells what it is sent."""

    sent: ClassVar[list[str]] = []

    @override
    def _terminate(self) -> None:
        self.sent.append("SIGTERM")

    @override
    def _kill(self) -> None:
        self.sent.append("SIGKILL")
        super()._kill()


class CountingLauncher(ThreadLauncher):
    handle_class = CountedHandle


async def test_of_roles_that_hang_all_are_asked_to_end_before_one_is_killed(tmp_path: Path) -> None:
    async with CountingLauncher("epoch", tmp_path / "logs", ShutdownSettings(terminate_s=0.05)) as launcher:
        roles = [launcher.start(spec("wait_for_stop", tmp_path, name)) for name in ("one", "two", "three", "four")]
        for role in roles:
            await role.ready()
    assert CountedHandle.sent == ["SIGTERM"] * 4 + ["SIGKILL"] * 4
    assert not any(role.is_running for role in roles)


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        ("lokal", "write inline or local"),
        ("nowhere:Launcher", "there is no module 'nowhere'"),
        (f"{__name__}:spec", "no laun"),
    ],
)
def test_a_placement_that_names_no_launcher_is_refused(placement: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        launcher_class(placement)

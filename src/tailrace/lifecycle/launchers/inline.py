"""Roles as tasks on the event loop of this very process: for tests, debuggers and small evaluations."""

from __future__ import annotations

import asyncio

from typing_extensions import override

from tailrace.errors import LifecycleError
from tailrace.lifecycle.exit_codes import ExitCode, exit_code_of
from tailrace.lifecycle.launchers.base import Launcher, RoleHandle
from tailrace.lifecycle.roles import Role, resolve_entry


class InlineHandle(RoleHandle):
    """One role's task. Nothing can end a task that ignores its cancellation."""

    @override
    def _begin(self, role: Role) -> None:
        self._task = asyncio.create_task(self._run(role), name=self.spec.name)
        self._task.add_done_callback(self._ended)

    @override
    def _terminate(self) -> None:
        if not self.is_done:  # else it ends by itself, and a thread in its clean-up would be left behind
            self._task.cancel()

    @override
    def _kill(self) -> None:
        self._task.cancel()

    @override
    def early_exit(self) -> LifecycleError:
        error = None if self._task.cancelled() else self._task.exception()
        if error is None:
            return super().early_exit()
        failure = LifecycleError(f"the {self.spec.name} failed: {error}")
        failure.__cause__ = error
        return failure

    async def _run(self, role: Role) -> None:
        await resolve_entry(self.spec.entry)(role)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._has_left(exit_code_of(error))
        else:
            self._has_left(ExitCode.TERMINATED if task.cancelled() else ExitCode.FINISHED)


class InlineLauncher(Launcher):
    """A task for each role. Their threads, devices and environment are this process's, whatever their specs say."""

    runs_in_this_process = True
    handle_class = InlineHandle

    @override
    def address(self, name: str) -> str:
        return f"memory:{self.epoch}/{name}"


LAUNCHER = InlineLauncher

"""Agent workers on the nodes of a cluster: a role for each, which starts its processes one after another."""

from __future__ import annotations

import asyncio

from typing_extensions import override

from tailrace.cancelling import cancelled
from tailrace.lifecycle.launchers import Launcher, RoleHandle
from tailrace.lifecycle.roles import RoleSpec
from tailrace.rollouts.agent_workers.hosting import HostClient, HostedProcess
from tailrace.rollouts.agent_workers.places import WorkerPlace
from tailrace.run.host_transports import HostTransports

_EXPLANATION_S = 1.0
"""How long to wait for a lost host's role to end, whose error says more than its socket's."""


class HostedPlace(WorkerPlace):
    """Starts the role when it is needed, and again where it, or its node, was lost."""

    def __init__(self, spec: RoleSpec, launcher: Launcher, transports: HostTransports) -> None:
        self._spec, self._launcher, self._transports = spec, launcher, transports
        self._handle: RoleHandle | None = None
        self._client: HostClient | None = None
        self._missing: asyncio.Task[None] | None = None

    @override
    async def start(self, protocol: asyncio.Protocol) -> HostedProcess:
        client = self._client
        if client is None or not client.is_alive:
            client = await self._reach()
        return client.begin(protocol)

    @override
    async def close(self) -> None:
        had_client = self._client is not None
        await self._let_go()
        if self._handle is not None:
            await (self._handle.stop() if had_client else self._handle.kill())  # one that starts hears nothing

    async def _reach(self) -> HostClient:
        """The next life of the role. Raises `LifecycleError` where the cluster has no room for it, or it ends."""
        await self._let_go()
        if self._handle is None:
            self._handle = self._launcher.start(self._spec, is_replaceable=True)
        else:
            await self._handle.restart()
        client = self._client = self._transports.agent_host(await self._handle.ready(), self._spec.name)
        self._missing = asyncio.create_task(self._miss(self._handle, client), name=f"exit of {self._spec.name}")
        return client

    async def _miss(self, handle: RoleHandle, client: HostClient) -> None:
        """Waits for the role, or the way to it, to be gone, and says which."""
        left = asyncio.ensure_future(handle.left())
        lost = asyncio.ensure_future(client.lost())
        try:
            await asyncio.wait({left, lost}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({left}, timeout=_EXPLANATION_S)
            client.lose(str(handle.early_exit()) if left.done() else lost.result())
        finally:
            left.cancel()
            lost.cancel()

    async def _let_go(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            assert self._missing is not None
            await cancelled(self._missing)
            await client.close()

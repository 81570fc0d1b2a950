"""Where the generators of a run come from: roles of its own, or generators that run already, anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typing_extensions import override

from tailrace.errors import SettingsError
from tailrace.generation.engines.protocol import NO_SUPPORTS
from tailrace.generation.rpc.client import GeneratorClient, LendWeights, ReportListener
from tailrace.generation.rpc.keys import read_keys
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.exit_codes import is_from_outside
from tailrace.lifecycle.launchers import Launcher, RoleHandle
from tailrace.lifecycle.roles import RoleSpec
from tailrace.models.identity import ModelIdentity, identify, is_other, other_architecture
from tailrace.run.generators import EndedReplica, ReplicaSource
from tailrace.run.transports import ReplicaConnection, Transports
from tailrace.transport.payloads.accounts import PayloadAccounts

_EXPLANATION_S = 1.0
"""How long to wait for the role of a failed call to end, whose error says more than the call's."""

_CONNECT_S = 10.0
"""Within which a generator that runs already must answer."""


class StartedGenerator(ReplicaSource):
    """A role of this run."""

    def __init__(
        self, spec: RoleSpec, launcher: Launcher, transports: Transports, payloads: PayloadAccounts | None = None
    ) -> None:
        self.name, self._spec, self._launcher = spec.name, spec, launcher
        self._transports, self._payloads = transports, payloads
        self._serves = False
        self._handle: RoleHandle | None = None
        self._leaving: asyncio.Task[None] | None = None

    @override
    async def open(self, on_report: ReportListener) -> ReplicaConnection:
        self._serves = False
        if self._handle is None:
            self._handle = self._launcher.start(self._spec, is_replaceable=True)
        else:
            await self._handle.restart()
        client = self._transports.connect(await self._handle.ready(), self.name, on_report, self._payloads)
        self._leaving = asyncio.create_task(self._fail_when_left(self._handle, client), name=f"exit of {self.name}")
        return client

    @override
    async def hello(self, client: ReplicaConnection) -> WelcomeReply:
        welcome = await client.hello()
        self._serves = True
        return welcome

    @override
    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        if self._handle is None:
            return EndedReplica(failure, by_itself=True)
        if client is not None:
            assert self._leaving is not None
            await asyncio.wait({self._leaving}, timeout=_EXPLANATION_S)
        status = self._handle.status
        ended = EndedReplica(
            failure if status is None else self._handle.early_exit(),
            by_itself=status is None or not is_from_outside(status),
        )
        await self._handle.kill()
        if client is not None:
            await client.leave()
        if self._payloads is not None:
            self._payloads.writer_ended(self._handle.instance)
        return ended

    @override
    async def close(self, client: ReplicaConnection) -> None:
        assert self._handle is not None
        assert self._leaving is not None
        self._leaving.cancel()
        if self._serves:
            self._handle.expect_exit()
            await client.close()
        else:  # it is loading its model, and would read a close call only after that
            await self._handle.kill()
            await client.leave()

    async def _fail_when_left(self, handle: RoleHandle, client: ReplicaConnection) -> None:
        """Waits for the role to leave: its error says more than a closed socket."""
        await handle.left()
        client.fail(handle.early_exit())


class ConnectedGenerator(ReplicaSource):
    """A generator of `tailrace serve`."""

    def __init__(
        self,
        name: str,
        address: str,
        settings: GeneratorSettings,
        *,
        epoch: str,
        model: str,
        lend: LendWeights | None,
        needs_supports: bool = False,
        payloads: PayloadAccounts | None = None,
    ) -> None:
        """It has to serve the architecture of `model`; its weights, too, where no `lend` sends it others.

        With `needs_supports` it has to return what top-p and top-k left of the vocabulary.
        """
        self.name, self._address, self._epoch = name, address, epoch
        self._keys = read_keys(Path(settings.connect_key), "generator.connect_key") if settings.connect_key else None
        self._progress_deadline_s = settings.router.progress_deadline_s
        self._lend, self._model, self._payloads = lend, model, payloads
        self._needs_supports = needs_supports

    @override
    async def open(self, on_report: ReportListener) -> GeneratorClient:
        client = GeneratorClient(
            self._address,
            name=f"{self.name} ({self._address})",
            keys=self._keys,
            progress_deadline_s=self._progress_deadline_s,
            on_report=on_report,
            lend=self._lend,
            payloads=self._payloads,
            by_value=True,
        )
        try:
            async with asyncio.timeout(_CONNECT_S):
                await client.connected()
        except BaseException as error:
            await client.leave()
            if not isinstance(error, TimeoutError):
                raise
            raise SettingsError(
                f"generator.connect: no generator answers at {self._address} within {_CONNECT_S:g} s; start it with "
                "`tailrace serve MODEL --address ...`"
            ) from None
        return client

    @override
    async def hello(self, client: ReplicaConnection) -> WelcomeReply:
        welcome = await client.hello(self._epoch)
        own = await asyncio.to_thread(identify, self._model, with_weights=self._lend is None)
        if differences := other_architecture(own.config, welcome.model.config):
            raise self._refusal(welcome.model, f"another model than model.name = {own.name} ({differences[0]})")
        if self._lend is None and is_other(own, welcome.model):
            raise self._refusal(welcome.model, f"not the weights of model.name = {own.name}")
        if self._needs_supports and not welcome.limits.returns_supports:
            raise SettingsError(
                f"rollouts.top_p and rollouts.top_k: the generator at {self._address} cannot be used for training with "
                f"them: {NO_SUPPORTS}; leave them out, or serve with the torch engine or, on GPUs, with "
                "generator.vllm.return_sampling_mask = true"
            )
        return welcome

    def _refusal(self, served: ModelIdentity, what: str) -> SettingsError:
        return SettingsError(
            f"generator.connect: the generator at {self._address} serves {served.name}, {what}: start it with "
            f"`tailrace serve {self._model}`"
        )

    @override
    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        """The generator itself is not ours to end."""
        if client is not None:
            await client.leave()
        return EndedReplica(failure, by_itself=True)

    @override
    async def close(self, client: ReplicaConnection) -> None:
        await client.leave()

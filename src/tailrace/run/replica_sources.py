"""Where the generators of a run come from: processes of its own, or generators that run already, anywhere."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from tailrace.errors import SettingsError
from tailrace.generation.router.settings import RouterSettings
from tailrace.generation.rpc.client import GeneratorClient, LendFile, ReportListener
from tailrace.generation.rpc.keys import CurveKeys
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.roles import RoleSpec
from tailrace.lifecycle.supervisor import RoleProcess, Supervisor
from tailrace.run.roles import GENERATOR, RoleSettings
from tailrace.transport.payloads.accounts import PayloadAccounts

_EXPLANATION_S = 1.0
"""How long the process of a call that failed has to be seen leaving, which tells more than the call."""

_CONNECT_S = 10.0
"""Within which a generator that runs already must answer."""


class StartedGenerator:
    """A process of this run. Implements `ReplicaSource`."""

    def __init__(
        self,
        name: str,
        index: int,
        role: RoleSettings,
        settings: GeneratorSettings,
        supervisor: Supervisor,
        *,
        payloads: PayloadAccounts | None = None,
        by_value: bool = False,
    ) -> None:
        self.name = name
        self._payloads, self._by_value = payloads, by_value
        self._index, self._role, self._settings, self._supervisor = index, role, settings, supervisor
        self._lives = 0
        self._socket = ""
        self._serves = False
        self._process: RoleProcess | None = None
        self._leaving: asyncio.Task[None] | None = None

    def open(self, on_report: ReportListener) -> GeneratorClient:
        """See `ReplicaSource.open`."""
        socket = self._socket = f"{self.name}.{self._lives}"  # a new one: the old process may still hold its own
        role = msgspec.structs.replace(
            self._role, name=self.name, socket=socket, seed=_seed(self._settings.seed, self._index, self._lives)
        )
        self._lives += 1
        self._serves = False
        spec = RoleSpec(self.name, GENERATOR, role.encoded(), threads=self._settings.threads)
        process = self._process = self._supervisor.start(spec, is_replaceable=True)
        client = GeneratorClient(
            role.address(socket),
            name=self.name,
            progress_deadline_s=self._settings.router.progress_deadline_s,
            on_report=on_report,
            payloads=self._payloads,
            by_value=self._by_value,
        )
        self._leaving = asyncio.create_task(self._fail_when_left(process, client), name=f"exit of {self.name}")
        return client

    async def hello(self, client: GeneratorClient) -> WelcomeReply:
        """See `ReplicaSource.hello`."""
        welcome = await client.hello()
        self._serves = True
        return welcome

    async def end(self, client: GeneratorClient, failure: Exception) -> Exception:
        """See `ReplicaSource.end`."""
        assert self._process is not None
        assert self._leaving is not None
        await asyncio.wait({self._leaving}, timeout=_EXPLANATION_S)
        reason = failure if self._process.is_running else self._process.early_exit()
        await self._supervisor.kill_role(self.name)
        await self._leaving
        await client.leave()
        if self._payloads is not None:
            self._payloads.writer_ended(self._socket)
        return reason

    async def close(self, client: GeneratorClient) -> None:
        """See `ReplicaSource.close`."""
        assert self._leaving is not None
        self._leaving.cancel()
        if self._serves:
            self._supervisor.expect_exit(self.name)
            await client.close()
        else:  # it is loading its model, and would hear of its end only after that
            await self._supervisor.kill_role(self.name)
            await client.leave()

    async def _fail_when_left(self, process: RoleProcess, client: GeneratorClient) -> None:
        """Waits for the process to leave: it may do so before its socket ever was there."""
        await self._supervisor.wait(self.name)
        client.fail(process.early_exit())


class ConnectedGenerator:
    """A generator of `tailrace serve`. Implements `ReplicaSource`."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        epoch: str,
        settings: RouterSettings,
        keys: CurveKeys | None,
        lend_file: LendFile,
        serving_model: str | None = None,
        payloads: PayloadAccounts | None = None,
    ) -> None:
        """`serving_model` is the model that it has to serve, where it is sent no other weights."""
        self.name = name
        self._address, self._epoch, self._settings = address, epoch, settings
        self._keys, self._lend_file, self._serving_model = keys, lend_file, serving_model
        self._payloads = payloads

    def open(self, on_report: ReportListener) -> GeneratorClient:
        """See `ReplicaSource.open`."""
        return GeneratorClient(
            self._address,
            name=f"{self.name} ({self._address})",
            keys=self._keys,
            progress_deadline_s=self._settings.progress_deadline_s,
            on_report=on_report,
            lend_file=self._lend_file,
            payloads=self._payloads,
            by_value=True,
        )

    async def hello(self, client: GeneratorClient) -> WelcomeReply:
        """See `ReplicaSource.hello`."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                await client.connected()
        except TimeoutError:
            raise SettingsError(
                f"generator.connect: no generator answers at {self._address} within {_CONNECT_S:g} s; start it with "
                "`tailrace serve MODEL --address ...`"
            ) from None
        welcome = await client.hello(self._epoch)
        if self._serving_model not in (None, welcome.model):
            raise SettingsError(
                f"generator.connect: the generator at {self._address} serves {welcome.model}, not model.name = "
                f"{self._serving_model}: start it with `tailrace serve {self._serving_model}`"
            )
        return welcome

    async def end(self, client: GeneratorClient, failure: Exception) -> Exception:
        """See `ReplicaSource.end`: the generator itself is not ours to end."""
        await client.leave()
        return failure

    async def close(self, client: GeneratorClient) -> None:
        """See `ReplicaSource.close`."""
        await client.leave()


def _seed(seed: int, index: int, lives: int) -> int:
    """Of one life of one replica: that of the settings for the very first."""
    if index == lives == 0:
        return seed
    return int(np.random.SeedSequence([seed, index, lives]).generate_state(1)[0]) % 2**31

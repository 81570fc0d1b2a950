"""Where the generators of a run come from: roles of its own, or generators that run already, anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from tailrace.config import RunSettings
from tailrace.errors import ClusterFull, NotAnswering, ReplicaReleased, SettingsError
from tailrace.generation.engines.protocol import NO_SUPPORTS, EngineLimits
from tailrace.generation.rpc.client import BringWeights, GeneratorClient, LeaveListener, LendWeights, ReportListener
from tailrace.generation.rpc.messages import WelcomeReply
from tailrace.generation.settings import GeneratorSettings
from tailrace.lifecycle.exit_codes import is_from_outside
from tailrace.lifecycle.launchers import Launcher, RoleHandle
from tailrace.lifecycle.roles import RoleSpec
from tailrace.models.identity import ModelIdentity, identify, is_other, other_architecture
from tailrace.run.generators import EndedReplica, ReplicaSource
from tailrace.run.transports import ReplicaConnection, Transports
from tailrace.timeouts import timeout
from tailrace.transport.keys import CurveKeys, read_keys
from tailrace.transport.payloads.accounts import PayloadAccounts

_EXPLANATION_S = 1.0
"""How long to wait for the role of a failed call to end, whose error says more than the call's."""

_CLOSE_S = 10.0
"""Within which one that was let go must have closed its engine."""


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
    async def placed(self) -> None:
        await self._launcher.place(self.name)

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
    async def let_go(self) -> None:
        await self._launcher.let_go(self.name)

    @override
    async def hello(self, client: ReplicaConnection, seed: int) -> WelcomeReply:
        welcome = await client.hello(seed=seed)
        self._serves = True
        return welcome

    @override
    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        if isinstance(failure, ClusterFull):
            return EndedReplica(failure, by_itself=False)
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
        try:
            await self._handle.kill()
        finally:
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


def contradiction(own: ModelIdentity, served: ModelIdentity, *, with_weights: bool) -> str:
    """Why a generator that serves this model cannot serve a run with `own`; empty where it can."""
    if differences := other_architecture(own.config, served.config):
        return f"another model than model.name = {own.name} ({differences[0]})"
    return f"not the weights of model.name = {own.name}" if with_weights and is_other(own, served) else ""


def connect_keys(chosen: GeneratorSettings) -> CurveKeys | None:
    """Of `generator.connect_key`. Raises `SettingsError` where that file has none."""
    return read_keys(Path(chosen.connect_key), "generator.connect_key") if chosen.connect_key else None


class ConnectedGenerator(ReplicaSource):
    """A generator of `tailrace serve`."""

    def __init__(
        self,
        name: str,
        address: str,
        settings: RunSettings,
        *,
        epoch: str,
        lend: LendWeights | None,
        for_training: bool = False,
        payloads: PayloadAccounts | None = None,
    ) -> None:
        """It has to serve the architecture of the run's model; its weights, too, where no `lend` sends it others.

        What it cannot hold or take is refused, and, `for_training`, what it does not return. `settings` are those
        `with_own_judges`, which it may be asked by.
        """
        chosen = settings.generator
        self.name, self._address, self._epoch, self._settings = name, address, epoch, settings
        self._keys = connect_keys(chosen)
        self._progress_deadline_s = chosen.router.progress_deadline_s
        self._wait_s = chosen.connect_wait_s
        self._lend, self._model, self._payloads = lend, settings.model.name, payloads
        self._bring: BringWeights | None = None
        self._for_training = for_training
        self._compares_weights = lend is None

    @override
    async def open(self, on_report: ReportListener) -> GeneratorClient:
        client = self._client(on_report, by_value=True)
        try:
            async with timeout(self._wait_s):
                await client.connected()
        except BaseException as error:
            await client.leave()
            if not isinstance(error, TimeoutError):
                raise
            raise NotAnswering(
                f"generator.connect: no generator answers at {self._address} within {self._wait_s:g} s; start it with "
                "`tailrace serve MODEL --address ...`, or wait longer (generator.connect_wait_s)"
            ) from None
        return client

    def _client(
        self, on_report: ReportListener, *, by_value: bool, on_leaving: LeaveListener = lambda reason: None
    ) -> GeneratorClient:
        return GeneratorClient(
            self._address,
            name=f"{self.name} ({self._address})",
            keys=self._keys,
            progress_deadline_s=self._progress_deadline_s,
            on_report=on_report,
            lend=self._lend,
            bring=self._bring,
            payloads=self._payloads,
            by_value=by_value,
            on_leaving=on_leaving,
        )

    @override
    async def hello(self, client: ReplicaConnection, seed: int) -> WelcomeReply:
        welcome = await client.hello(self._epoch, seed)
        own = await asyncio.to_thread(identify, self._model, with_weights=self._compares_weights)
        what = await asyncio.to_thread(contradiction, own, welcome.model, with_weights=self._compares_weights)
        if what:
            raise self._refusal(welcome.model, what)
        for lack in self._lacks(welcome.limits):
            raise SettingsError(lack)
        return welcome

    def _lacks(self, limits: EngineLimits) -> Iterator[str]:
        """What the run asks for, and the engine does not give."""
        chosen = self._settings
        if limits.max_model_tokens < chosen.max_model_tokens:
            yield (
                f"generator.max_cache_tokens: a slot of the generator at {self._address} holds "
                f"{limits.max_model_tokens} tokens, and requests of this run have up to {chosen.max_model_tokens}: "
                f"start it with `tailrace serve {self._model} --generator.max_cache_tokens {chosen.max_model_tokens}`, "
                "or lower model.max_model_tokens"
            )
        if self._for_training and chosen.rollouts.restricts and not limits.returns_supports:
            yield (
                f"rollouts.top_p and rollouts.top_k: the generator at {self._address} cannot be used for training with "
                f"them: {NO_SUPPORTS}; leave them out, or serve with the torch engine or, on GPUs, with "
                "generator.vllm.return_sampling_mask = true"
            )
        if self._for_training and chosen.generator.return_routed_experts and not limits.returns_experts:
            yield (
                f"generator.return_routed_experts: the generator at {self._address} does not return the experts that "
                f"it chose: start it with `tailrace serve {self._model} --generator.return_routed_experts true`"
            )
        highest = limits.highest_temperature
        for key, temperature in chosen.temperatures_outside(0.0, highest, of_judges=True):
            yield (
                f"{key} asks for a temperature of {temperature:g}, and the generator at {self._address} samples at "
                f"{highest:g} at most: write less, or serve with another engine"
            )

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


class JoinedGenerator(ConnectedGenerator):
    """One of `tailrace serve --join`: it came by itself, and ends when the run lets it go."""

    def __init__(
        self,
        name: str,
        address: str,
        settings: RunSettings,
        *,
        epoch: str,
        slots: int,
        instance: str,
        keys: CurveKeys | None,
        lend: LendWeights | None,
        bring: BringWeights | None,
        payloads: PayloadAccounts | None,
        on_leaving: LeaveListener,
    ) -> None:
        """`lend` sends it weights, where it does not see this host's memory; else `instance` names it as a writer.

        `bring` brings them to this host before, where they are not there.

        `on_leaving` is called when it asks to be let go. Its model was compared before it was let in.
        """
        super().__init__(
            name,
            address,
            settings,
            epoch=epoch,
            lend=lend,
            for_training=True,
            payloads=payloads,
        )
        self.slots, self._bring = slots, bring
        self._keys, self._instance, self._on_leaving = keys, instance, on_leaving
        self._by_value = lend is not None or settings.transport.payloads == "value"

    @override
    async def open(self, on_report: ReportListener) -> GeneratorClient:
        """It listens in a moment: it was told just now that it may."""
        return self._client(on_report, by_value=self._by_value, on_leaving=self._on_leaving)

    @override
    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        """It is told why it is not used any more."""
        if isinstance(client, GeneratorClient) and isinstance(failure, ReplicaReleased):
            with contextlib.suppress(TimeoutError):
                async with timeout(_CLOSE_S):
                    await client.close(str(failure))
        elif isinstance(client, GeneratorClient):
            await client.dismiss(str(failure), in_order=False)
        if self._payloads is not None and not self._by_value:
            self._payloads.writer_ended(self._instance)
        return EndedReplica(failure, by_itself=True)

    @override
    async def close(self, client: ReplicaConnection) -> None:
        if isinstance(client, GeneratorClient):
            await client.dismiss("the run is over", in_order=True)

"""The generators of a run as they are, over modelled replicas in virtual time: they join, leave in order, and die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from typing_extensions import override

from tailrace.config import RunSettings, load_settings
from tailrace.errors import ClusterFull, EngineFailed, LifecycleError
from tailrace.generation.engines.protocol import EngineLimits
from tailrace.generation.rpc.client import ReportListener
from tailrace.generation.rpc.messages import PROTOCOL, WelcomeReply
from tailrace.models.identity import ModelIdentity
from tailrace.records import Completion, GenerationRequest, ModelStateDictRef, OnChunk
from tailrace.run.generators import EndedReplica, Generators, ReplicaSource
from tailrace.run.replica_pool import Standing
from tailrace.run.transports import ReplicaConnection
from tailrace.simulation.fleet import ModelledFleet
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.replica import ModelledReplica
from tailrace.simulation.settings import SimulationPlan

WAIT_S = 20
"""For a machine."""


def elastic_settings(least: int, most: int, *overrides: str) -> RunSettings:
    """Of a run that replaces its own generators however often they die."""
    endless = ("--restarts.per_role", "1000", "--restarts.backoff_s", "0", "--generator.router.max_failovers", "1000")
    return load_settings(
        "quickstart",
        ["--generator.replicas", f"{{min = {least}, max = {most}}}", "--generator.slots", "8", *endless, *overrides],
    )


class Life(ModelledReplica, ReplicaConnection):
    """One life of a replica."""

    def __init__(self, fleet: ElasticFleet, on_report: ReportListener) -> None:
        trainer = fleet.plan.trainer
        super().__init__(
            fleet.plan.engines,
            fleet.lengths,
            on_report,
            load_s=trainer.sync_s,
            load_holds=trainer.sync_holds_engines,
        )
        self._fleet = fleet
        self._told = 0

    async def hello(self, epoch: str = "", seed: int | None = None) -> WelcomeReply:
        return WelcomeReply(
            call_id=0,
            protocol=PROTOCOL,
            model=ModelIdentity("modelled"),
            limits=EngineLimits(vocab_size=2, max_model_tokens=2**20),
            statistics=self.engine.statistics(asyncio.get_running_loop().time()),
        )

    @override
    async def load_model_state_dict(self, ref: ModelStateDictRef) -> int:
        self._fleet.loading += 1
        try:
            return await super().load_model_state_dict(ref)
        finally:
            self._fleet.loading -= 1

    @override
    async def generate(self, request: GenerationRequest, on_chunk: OnChunk | None = None) -> Completion:
        def tell(chunk: Completion) -> None:
            self._told += chunk.num_tokens
            if on_chunk is not None:
                on_chunk(chunk)

        return await super().generate(request, tell)

    @override
    def fail(self, failure: Exception) -> None:
        """What was sampled since the last whole chunk is lost."""
        if self.failure is None:
            requests, sampled = self.engine.running, self.engine.open_tokens(self._now())
            self._told = 0
            super().fail(failure)
            self._fleet.redone_tokens.append((requests, sampled - self._told))

    async def close(self) -> None:
        self.fail(LifecycleError("the run is over"))

    async def leave(self) -> None:
        self.fail(LifecycleError("the run is over"))


class ModelledSource(ReplicaSource):
    """A replica whose engine takes `start_s` to be built."""

    def __init__(self, name: str, fleet: ElasticFleet, start_s: float) -> None:
        self.name, self._fleet, self._start_s = name, fleet, start_s

    @override
    async def placed(self) -> None:
        await self._fleet.take_machine(self.name)

    @override
    async def let_go(self) -> None:
        self._fleet.on_machines.discard(self.name)
        self._fleet.given_back.append(self.name)

    @override
    async def open(self, on_report: ReportListener) -> Life:
        life = self._fleet.lives[self.name] = Life(self._fleet, on_report)
        return life

    @override
    async def hello(self, client: ReplicaConnection, seed: int) -> WelcomeReply:
        failed = asyncio.ensure_future(client.failed())
        await asyncio.wait({failed}, timeout=None if self.name in self._fleet.stuck else self._start_s)
        if client.failure is not None:
            raise client.failure
        failed.cancel()
        self._fleet.began_s[self.name] = asyncio.get_running_loop().time()
        return await client.hello()

    @override
    async def end(self, client: ReplicaConnection | None, failure: Exception) -> EndedReplica:
        await asyncio.sleep(self._fleet.end_s)
        self._fleet.ended(self.name)
        if self.name in self._fleet.held:
            raise LifecycleError(f"the {self.name} cannot be killed")
        return EndedReplica(failure, by_itself=False)

    @override
    async def close(self, client: ReplicaConnection) -> None:
        await client.close()


class ElasticFleet(ModelledFleet):
    """For `Simulation(make_fleet=...)`. Make it on a running event loop."""

    def __init__(
        self,
        settings: RunSettings,
        plan: SimulationPlan,
        lengths: LengthSource,
        *,
        start_s: float = 20.0,
        machines: int | None = None,
    ) -> None:
        """Of a cluster with so many `machines`, which the run asks for more; without, it starts `min` and no more."""
        self.plan, self.lengths, self.machines = plan, lengths, machines
        self.on_machines = set[str]()
        """Names of those that have one."""
        self.given_back: list[str] = []
        """Names of those that had one, in order."""
        self.held = set[str]()
        """Names of those whose processes cannot be killed."""
        self.stuck = set[str]()
        """Names of those whose engines are never built."""
        self.end_s = 0.0
        """How long it takes until nothing is left of one."""
        self.lives: dict[str, Life] = {}
        self.began_s: dict[str, float] = {}
        """When those that are there were ready for weights."""
        self.there: list[tuple[float, float]] = []
        """From when until when those that are gone were there."""
        self.loading = 0
        self.redone_tokens: list[tuple[int, int]] = []
        """Running requests, and tokens that are sampled again, of each that died."""
        self._start_s, self._alive, self._sampled_by_dead = start_s, self.lives, 0
        chosen = settings.generator
        names = chosen.replica_names + (() if machines is None else chosen.spare_names)
        self.generators = Generators(settings, [ModelledSource(name, self, start_s) for name in names])
        self.router = self.generators.router

    @override
    async def run(self) -> None:
        try:
            await self.generators.watch()
        finally:
            await self.generators.close()

    async def take_machine(self, name: str) -> None:
        """Waits for one as long as a run does by itself. Raises `ClusterFull`."""
        waited_s = 0
        while self.machines is not None and name not in self.on_machines and len(self.on_machines) >= self.machines:
            await asyncio.sleep(1)
            if (waited_s := waited_s + 1) > WAIT_S:
                raise ClusterFull("the cluster had no room")
        self.on_machines.add(name)

    def join(self, start_s: float | None = None) -> str | None:
        """A guest asks to join; its name, or None where there is no room."""
        if (place := self.generators.take_in()) is None:
            return None
        self.generators.host(ModelledSource(place.name, self, self._start_s if start_s is None else start_s))
        return place.name

    def leave(self, name: str) -> None:
        """It asks to be let go."""
        self.generators.release(name, "it was asked to stop")

    def lose(self, name: str) -> None:
        """It dies."""
        if name in self.lives:
            self.lives[name].fail(EngineFailed(f"{name} died"))

    def ended(self, name: str) -> None:
        """Nothing is left of it."""
        now_s = asyncio.get_running_loop().time()
        if (life := self.lives.pop(name, None)) is None:  # it never had a machine
            return
        self._sampled_by_dead += life.engine.sampled_tokens(now_s)
        if name in self.began_s:
            self.there.append((self.began_s.pop(name), now_s))

    @property
    def serving(self) -> list[str]:
        """Names of those that serve."""
        pool = self.generators.pool
        return [name for name in pool.names if pool.standing(name) is Standing.SERVING]


def elastic(
    settings: RunSettings, plan: SimulationPlan, *, start_s: float = 20.0, machines: int | None = None
) -> Callable[[LengthSource], ElasticFleet]:
    """What `Simulation` makes its fleet by."""
    return lambda lengths: ElasticFleet(settings, plan, lengths, start_s=start_s, machines=machines)

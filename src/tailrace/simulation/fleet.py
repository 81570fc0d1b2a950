"""The modelled replicas behind the real router; one that dies is started again."""

from __future__ import annotations

import asyncio
from functools import partial

from tailrace.errors import EngineFailed
from tailrace.generation.router.router import Router
from tailrace.records import ModelStateDictRef
from tailrace.simulation.lengths import LengthSource
from tailrace.simulation.replica import ModelledReplica
from tailrace.simulation.settings import EngineSettings, ModelledTrainerSettings

_STARTED_AT_ONCE = 32
"""In one turn of the loop: processes are heard of one by one, however many begin in the same second."""


class ModelledFleet:
    """All replicas of a simulated run, and the router over them. Make it on a running event loop."""

    def __init__(
        self,
        engines: EngineSettings,
        trainer: ModelledTrainerSettings,
        lengths: LengthSource,
        *,
        max_staleness: int,
        restart_s: float = 60.0,
    ) -> None:
        """A replica that died serves again after `restart_s`, once it has the current weights."""
        self._engines, self._trainer, self._lengths, self._restart_s = engines, trainer, lengths, restart_s
        self._names = [f"replica{index}" for index in range(engines.replicas)]
        self.router = Router(self._names, engines.router, max_staleness=max_staleness)
        self._alive: dict[str, ModelledReplica] = {}
        self._sampled_by_dead = 0

    async def run(self) -> None:
        """Run every replica, again whenever it died, until cancelled."""
        async with asyncio.TaskGroup() as lives:
            for number, name in enumerate(self._names, start=1):
                lives.create_task(self._keep(name), name=name)
                if number % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def load(self, version: int) -> int:
        """Load weights into every live replica; the lowest version that they then hold."""
        return await self.router.load_model_state_dict(ModelStateDictRef(version=version, uri="modelled", num_bytes=0))

    def kill(self, index: int) -> bool:
        """Let a replica die with everything that it holds; whether it was alive."""
        name = self._names[index]
        if name in self._alive:
            self._alive[name].fail(EngineFailed(f"{name} died"))
        return name in self._alive

    async def interrupt(self) -> None:
        """Let every replica interrupt all of its requests, unasked."""
        for replica in [*self._alive.values()]:
            await replica.interrupt()

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return sum(replica.engine.running for replica in self._alive.values())

    @property
    def waiting(self) -> int:
        """Requests that replicas accepted and have no slot for."""
        return sum(replica.engine.waiting for replica in self._alive.values())

    @property
    def sampled_tokens(self) -> int:
        """Since the start, with what was lost with a replica."""
        now_s = asyncio.get_running_loop().time()
        return self._sampled_by_dead + sum(replica.engine.sampled_tokens(now_s) for replica in self._alive.values())

    @property
    def open_tokens(self) -> int:
        """Sampled of completions that are not finished."""
        return sum(replica.open_tokens for replica in self._alive.values())

    async def _keep(self, name: str) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            replica = ModelledReplica(
                self._engines,
                self._lengths,
                partial(self.router.report, name),
                load_s=self._trainer.sync_s,
                load_holds=self._trainer.sync_holds_engines,
            )
            self._alive[name] = replica
            try:
                await self.router.use(name, replica, replica.engine.statistics(clock()))
            finally:
                del self._alive[name]
                self._sampled_by_dead += replica.engine.sampled_tokens(clock())
            self.router.restarted(name)
            await asyncio.sleep(self._restart_s)

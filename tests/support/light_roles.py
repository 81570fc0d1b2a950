"""A trainer and generators without a model, as processes: real sockets, stores, files and signals; made-up weights.

They say where they are, so that a fault finds them there (`faults`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import msgspec
import numpy as np
from typing_extensions import override

from tailrace.environments import EnvironmentSpec, Policy, Task
from tailrace.errors import SettingsError, TailraceError
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.generation.engines.simulated import SimulatedEngine, simulated_logprobs
from tailrace.lifecycle.event_loop import first_done
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.records import (
    Batch,
    CheckpointWritten,
    ModelStateDictPublished,
    RunStatus,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.run.roles import RoleSettings
from tailrace.run.transports import TrainerEnds
from tailrace.transport.batches.queue import BatchReceiver
from tailrace.transport.events.log import EventLog
from tests.support.faults import PATIENCE_S, Fault, is_deaf, passing, stands_ready

_STEP_S = 0.01
_SOME = 4
"""Steps, versions and rollouts after which a run is in its middle."""
_VOCABULARY = 1024


async def leave_when_told(role: Role) -> None:
    """Says that it runs by a file in the folder that its settings name, and leaves once there is another."""
    folder = Path(role.spec.settings.decode())
    (folder / "running").touch()
    while not (folder / "leave").exists():  # noqa: ASYNC110
        await asyncio.sleep(_STEP_S)


class LightLauncher(LocalLauncher):
    """Starts this trainer and these generators in place of the run's own; any other role is the run's."""

    roles: ClassVar[Mapping[str, str]] = {"trainer": "trainer", "generator": "generator"}
    """Functions of this module, by what the names of roles begin with."""

    @override
    def start(self, spec: RoleSpec, *, is_replaceable: bool = False) -> RoleHandle:
        stands_ready("orchestrator")
        for name, role in self.roles.items():
            if spec.name.startswith(name):
                spec = replace(spec, entry=f"{__name__}:{role}")
        handle = super().start(spec, is_replaceable=is_replaceable)
        passing("orchestrator startup")  # with a child that has just been started
        return handle


class RefusingLauncher(LightLauncher):
    """Its generators refuse their settings."""

    roles = MappingProxyType({**LightLauncher.roles, "generator": "refusing_generator"})


async def stay_if_deaf() -> None:
    """For as long as nobody kills this process, where it is to hear of no wish."""
    while is_deaf():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE_S)


def playing() -> EnvironmentSpec:
    """One short turn, in an agent worker."""
    rows = [{"word": f"word {number}"} for number in range(256)]
    if getattr(sys.modules["__main__"].__spec__, "name", "") == "tailrace.rollouts.agent_workers.process":
        stands_ready("worker")
        passing("worker startup")
    return EnvironmentSpec(name="playing", agent=_play, train_tasks=rows)


_played = itertools.count()


async def _play(task: Task, policy: Policy) -> float:
    try:
        reply = await policy.chat([{"role": "user", "content": str(task["word"])}])
    except asyncio.CancelledError:
        await stay_if_deaf()
        raise
    if next(_played) >= _SOME:
        passing("worker step")
    return zlib.crc32(reply.content.encode()) % 97 / 97


async def generator(role: Role) -> None:
    """Samples tokens of no model."""
    stands_ready("generator")
    passing("generator startup")
    settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    weights = settings.run.generator.weights

    def engine() -> SimulatedEngine:
        return _FaultyEngine(slots=8, vocab_size=_VOCABULARY, max_model_tokens=512, chunk_tokens=4, step_s=0.001)

    await settings.transports().serve_generator(role, lambda payloads: Generator(engine, weights, payloads=payloads))
    passing("generator end")
    await stay_if_deaf()


REFUSAL = "generator.slots is more than this engine has"


async def refusing_generator(role: Role) -> None:
    """Refuses its settings as it builds its engine, once the run is at the place of its fault."""
    settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    weights, fault = settings.run.generator.weights, Fault.asked_for()
    assert fault is not None

    def engine() -> SimulatedEngine:
        while not fault.mark("reached-0").exists():
            time.sleep(_STEP_S)
        raise SettingsError(REFUSAL)

    await settings.transports().serve_generator(role, lambda payloads: Generator(engine, weights, payloads=payloads))


class _FaultyEngine(SimulatedEngine):
    @override
    def step(self) -> list[SampledTokens]:
        if self._running and self._version >= _SOME:
            passing("generator step")
        return super().step()

    @override
    def load_model_state_dict(self, tensors: object, version: int) -> None:
        if version >= _SOME:
            passing("generator transfer")
        super().load_model_state_dict({}, version)


async def trainer(role: Role) -> None:
    """One rank. Rank 0 takes steps that cost nothing, and saves as often as its settings say; others read along."""
    name = role.spec.name
    stands_ready(name)
    passing(f"{name} startup")
    settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    rank = settings.run.trainer.rank_names.index(name)
    async with settings.transports().trainer(rank, role.address) as ends:
        await _meet(settings, role.life, rank)
        role.ready()
        if rank == 0:
            await _train(settings, ends)
        else:
            await first_done(_read_along(ends.batches), _end_of(ends.log))
    passing(f"{name} end")
    await stay_if_deaf()


async def _meet(settings: RoleSettings, life: int, rank: int) -> None:
    """Rank 0 waits for the others, as ranks do that load a model together."""
    root, ranks = settings.paths.root, settings.run.trainer.ranks
    marks = [root / f".rank-{each}-{settings.epoch}-{life}" for each in range(ranks)]
    marks[rank].touch()
    while rank == 0 and not all(mark.exists() for mark in marks):  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.01)


async def _train(settings: RoleSettings, ends: TrainerEnds) -> None:
    stop = asyncio.create_task(_stop_request(ends.log))
    try:
        await _Training(settings, ends).run(stop)
        await _end_of(ends.log)
    finally:
        stop.cancel()
        await asyncio.gather(stop, return_exceptions=True)


async def _end_of(log: EventLog) -> None:
    async for _ in log.follow():
        pass


async def _read_along(batches: BatchReceiver) -> None:
    for count in itertools.count():
        batch = await batches.receive()
        require_whole(batch)
        if count == _SOME:
            passing("trainer-1 step")
        await batches.acknowledge(batch.summary.step)


def require_whole(batch: Batch) -> None:
    """Everything that was sampled is as the engine samples it."""
    sampled = batch.loss_mask
    if not np.array_equal(batch.logprobs[sampled], simulated_logprobs(batch.token_ids[sampled])):
        raise AssertionError(f"step {batch.summary.step} was given damaged bytes")


async def _stop_request(log: EventLog) -> StopRequested:
    async for event in log.follow():
        if isinstance(event, StopRequested):
            return event
    raise AssertionError("the log ended before training did")


class _Training:
    def __init__(self, settings: RoleSettings, ends: TrainerEnds) -> None:
        self._ends, self._epoch = ends, settings.epoch
        self._folder, self._max_steps = settings.paths.checkpoints, settings.run.max_steps or 0
        self._every_steps = settings.run.trainer.checkpoint_every_steps or 0
        newest = max(self._folder.glob("step_*"), default=None)
        self._step = 0 if newest is None else load_checkpoint(newest)

    async def run(self, stop: asyncio.Task[StopRequested]) -> None:
        """Until the last step, or a wish; the terminal record is written on every way out."""
        try:
            status, reason = await self._until_stopped(stop)
            passing("trainer last save")
            await self._save()
        except Exception as error:
            reason, kind = f"{type(error).__name__}: {error}", type(error).__name__
            await self._end(RunStatus.FAILED, reason, kind if isinstance(error, TailraceError) else "")
            raise
        await self._end(status, reason)

    async def _until_stopped(self, stop: asyncio.Task[StopRequested]) -> tuple[RunStatus, str]:
        await self._ends.log.append(TrainerStarted(epoch=self._epoch, step=self._step, version=self._step))
        await self._publish()
        while self._step < self._max_steps:
            receiving = asyncio.create_task(self._ends.batches.receive())
            await asyncio.wait({receiving, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                receiving.cancel()
                await asyncio.wait({receiving})
                return stop.result().status, stop.result().reason
            await self._train(receiving.result())
        return RunStatus.FINISHED, f"max_steps = {self._max_steps} reached"

    async def _train(self, batch: Batch) -> None:
        step = batch.summary.step
        assert step == self._step + 1
        require_whole(batch)
        await asyncio.sleep(_STEP_S)
        if step > _SOME:
            passing("trainer step")
        self._step = step
        await self._publish()
        await self._ends.log.append(StepTrained(epoch=self._epoch, step=step, version=step, metrics={}))
        await self._ends.batches.acknowledge(step)
        if self._every_steps and step % self._every_steps == 0:
            await self._save()

    async def _publish(self) -> None:
        ref = self._ends.model_state_dicts.publish({}, self._step)
        if self._step > _SOME:
            passing("trainer transfer")
        await self._ends.log.append(ModelStateDictPublished(epoch=self._epoch, ref=ref))

    async def _save(self) -> None:
        path = self._folder / f"step_{self._step:06d}"
        if not path.is_dir():
            part = self._folder / f".writing_{path.name}"
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(part)
            part.mkdir(parents=True)
            (part / "state").write_bytes(self._step.to_bytes(4, "little"))
            if self._step > self._every_steps:
                passing("trainer save")
            (part / "sum").write_bytes(zlib.crc32(self._step.to_bytes(4, "little")).to_bytes(4, "little"))
            part.rename(path)
        await self._ends.log.append(CheckpointWritten(epoch=self._epoch, step=self._step, path=str(path)))

    async def _end(self, status: RunStatus, reason: str, error: str = "") -> None:
        ended = TrainerEnded(epoch=self._epoch, status=status, step=self._step, reason=reason, error=error)
        await self._ends.log.append(ended)


def load_checkpoint(path: Path) -> int:
    """Its step. Raises where a part of it is missing or damaged."""
    state, expected = (path / "state").read_bytes(), int.from_bytes((path / "sum").read_bytes(), "little")
    assert zlib.crc32(state) == expected, f"{path} is damaged"
    return int.from_bytes(state, "little")

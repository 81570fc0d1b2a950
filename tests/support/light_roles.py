"""A trainer and generators without a model, as processes: real sockets, stores, files and signals; made-up weights.

One fault can be asked for by an environment variable: which role does what to itself, and where. It happens once, or as
often as it is asked for, and leaves a file that names the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from typing_extensions import override

from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.records import (
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
from tailrace.transport.events.log import EventLog

FAULT = "TAILRACE_TEST_FAULT"
_STEP_S = 0.01


class Fault(NamedTuple):
    """What a role does to itself."""

    role: str
    where: str
    """startup, step, save or end."""
    blow: str
    """killed, stopped, leaves (with status 0), hangs (whatever it is asked)."""
    mark: Path
    """Made when it happens."""
    times: int = 1

    @property
    def variable(self) -> str:
        """Of the environment."""
        return "|".join(map(str, self))

    @classmethod
    def asked_for(cls) -> Fault | None:
        """In this process."""
        if not (text := os.environ.get(FAULT)):
            return None
        role, where, blow, mark, times = text.split("|")
        return cls(role, where, blow, Path(mark), int(times))


class LightLauncher(LocalLauncher):
    """Starts these roles in place of the run's own."""

    @override
    def start(self, spec: RoleSpec, *, is_replaceable: bool = False) -> RoleHandle:
        entry = f"{__name__}:{'trainer' if spec.name.startswith('trainer') else 'generator'}"
        return super().start(replace(spec, entry=entry), is_replaceable=is_replaceable)


def suffer(role: str, where: str) -> None:
    """The fault, if it is asked for here and has not happened often enough; one that hangs never returns."""
    fault = Fault.asked_for()
    if fault is None or (fault.role, fault.where) != (role, where):
        return
    happened = fault.mark.read_text().split() if fault.mark.exists() else []
    if len(happened) >= fault.times:
        return
    fault.mark.write_text(" ".join([*happened, str(os.getpid())]))
    match fault.blow:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leaves":
            os._exit(0)
        case _:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()


async def generator(role: Role) -> None:
    """Samples tokens of no model."""
    suffer(role.spec.name, "startup")
    settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    weights = settings.run.generator.weights

    def engine() -> SimulatedEngine:
        return _FaultyEngine(slots=8, vocab_size=1024, max_model_tokens=512, chunk_tokens=4, step_s=0.001)

    await settings.transports().serve_generator(role, lambda payloads: Generator(engine, weights, payloads=payloads))
    suffer(role.spec.name, "end")


class _FaultyEngine(SimulatedEngine):
    @override
    def load_model_state_dict(self, tensors: object, version: int) -> None:
        if version >= 4:
            suffer("generator", "step")
        super().load_model_state_dict({}, version)


async def trainer(role: Role) -> None:
    """Takes steps that cost nothing, and saves as often as its settings say."""
    suffer("trainer", "startup")
    settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    async with settings.transports().trainer() as ends:
        role.ready()
        stop = asyncio.create_task(_stop_request(ends.log))
        try:
            await _Training(settings, ends).run(stop)
            async for _ in ends.log.follow():
                pass
        finally:
            stop.cancel()
            await asyncio.gather(stop, return_exceptions=True)
    suffer("trainer", "end")


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
        saved = [int(path.name.removeprefix("step_")) for path in self._folder.glob("step_*")]
        self._step = max(saved, default=0)

    async def run(self, stop: asyncio.Task[StopRequested]) -> None:
        """Until the last step, or a wish."""
        log, step = self._ends.log, self._step
        await log.append(TrainerStarted(epoch=self._epoch, step=step, version=step))
        await self._publish()
        status, reason = RunStatus.FINISHED, f"max_steps = {self._max_steps} reached"
        while self._step < self._max_steps:
            receiving = asyncio.create_task(self._ends.batches.receive())
            await asyncio.wait({receiving, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                status, reason = stop.result().status, stop.result().reason
                receiving.cancel()
                await asyncio.wait({receiving})
                break
            await self._train(receiving.result().summary.step)
        await self._save()
        await log.append(TrainerEnded(epoch=self._epoch, status=status, step=self._step, reason=reason))

    async def _train(self, step: int) -> None:
        assert step == self._step + 1
        await asyncio.sleep(_STEP_S)
        if step == 5:
            suffer("trainer", "step")
        self._step = step
        await self._publish()
        await self._ends.log.append(StepTrained(epoch=self._epoch, step=step, version=step, metrics={}))
        await self._ends.batches.acknowledge(step)
        if self._every_steps and step % self._every_steps == 0:
            await self._save()

    async def _publish(self) -> None:
        ref = self._ends.model_state_dicts.publish({}, self._step)
        await self._ends.log.append(ModelStateDictPublished(epoch=self._epoch, ref=ref))

    async def _save(self) -> None:
        path = self._folder / f"step_{self._step:06d}"
        if not path.is_dir():
            part = self._folder / f".writing_{path.name}"
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(part)
            part.mkdir(parents=True)
            if self._step > self._every_steps:
                suffer("trainer", "save")
            part.rename(path)
        await self._ends.log.append(CheckpointWritten(epoch=self._epoch, step=self._step, path=str(path)))

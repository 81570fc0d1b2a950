"""The other processes of `scheduler_overhead.py`: a generator and a trainer that do no work, over a run's sockets."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
from step_peers import RowReader, experts_of
from typing_extensions import override

from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import (
    Engine,
    EngineLimits,
    EngineStatistics,
    FailureListener,
    SampledTokens,
)
from tailrace.lifecycle.launchers import RoleHandle
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.roles import Role, RoleSpec
from tailrace.records import (
    FinishReason,
    GenerationRequest,
    Int32Array,
    RunStatus,
    StepTrained,
    StopRequested,
    TrainerEnded,
    TrainerStarted,
)
from tailrace.run.roles import RoleSettings
from tailrace.transport.events.log import EventLog

COMPLETION_TOKENS, ANSWERED_AT_ONCE = 16, 16
EXPERT_LAYERS = 48


def completion_ids(stop_token_id: int, length: int = COMPLETION_TOKENS) -> Int32Array:
    """What every completion is made of."""
    ids = 10 + np.arange(length, dtype=np.int32) % COMPLETION_TOKENS
    ids[-1] = stop_token_id
    return ids


class InstantEngine(Engine):
    """Answers at once, but for keeping `in_flight` requests waiting: the oldest first, a few per step.

    With experts, 48 layers' indices of 8 experts for every position that was not handed over before.
    """

    def __init__(self, in_flight: int, *, length: int = COMPLETION_TOKENS, with_experts: bool = False) -> None:
        self._in_flight, self._length, self._steps = in_flight, length, 0
        self._waiting: deque[GenerationRequest] = deque()
        self._logprobs = np.full(length, -1.0, np.float32)
        self._versions = np.zeros(length, np.int32)
        self._experts = experts_of(1 << 13, EXPERT_LAYERS, seed=0) if with_experts else None
        self._recorded: dict[str | None, int] = {}

    @property
    @override
    def limits(self) -> EngineLimits:
        return EngineLimits(vocab_size=1 << 20, max_model_tokens=1 << 20)

    @property
    @override
    def has_work(self) -> bool:
        return len(self._waiting) >= self._in_flight

    @override
    def watch(self, on_failure: FailureListener) -> None: ...

    @override
    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(request)

    @override
    def step(self) -> list[SampledTokens]:
        self._steps += 1
        return [self._sampled(self._waiting.popleft()) for _ in range(min(ANSWERED_AT_ONCE, len(self._waiting)))]

    @override
    def abort(self, request_id: str) -> None: ...

    @override
    def reseed(self, seed: int) -> None: ...

    @override
    def prepare(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        return tensors

    @override
    def load_model_state_dict(self, tensors: Mapping[str, Any], version: int) -> None: ...

    @override
    def reset_prefix_cache(self, *, preempt_running: bool) -> None: ...

    @override
    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            policy_version=0,
            running=len(self._waiting),
            waiting=0,
            kv_tokens=0,
            kv_capacity_tokens=1,
            steps_total=self._steps,
            sampled_tokens_total=0,
            prefilled_tokens_total=0,
        )

    @override
    def close(self) -> None: ...

    def _sampled(self, request: GenerationRequest) -> SampledTokens:
        ids = completion_ids(request.sampling.stop_token_ids[0], self._length)
        sampled = SampledTokens(
            request.request_id, ids, self._logprobs, self._versions, finish_reason=FinishReason.STOP
        )
        if self._experts is None or request.owner is None:
            return sampled
        start, end = self._recorded.get(request.owner, 0), len(request.prompt_token_ids) + self._length - 1
        self._recorded[request.owner] = end
        return replace(sampled, routed_experts=self._experts[: end - start], routed_experts_start=start)


class PeersLauncher(LocalLauncher):
    """`placement = "scheduler_peers:PeersLauncher"`: processes as in a run, whose roles are those below."""

    @override
    def start(self, spec: RoleSpec, *, is_replaceable: bool = False) -> RoleHandle:
        role = "trainer" if spec.name == "trainer" else "generator"
        return super().start(replace(spec, entry=f"scheduler_peers:{role}"), is_replaceable=is_replaceable)


async def generator(role: Role) -> None:
    """Serves an engine that does no work, as a run's generator serves its own."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    run = role_settings.run

    def make_engine() -> Engine:
        with_experts = run.generator.return_routed_experts
        return InstantEngine(run.max_running, length=run.rollouts.max_tokens, with_experts=with_experts)

    await role_settings.transports().serve_generator(role, lambda payloads: Generator(make_engine, payloads=payloads))


async def trainer(role: Role) -> None:
    """Receives each batch, makes tensors of it where there are experts, and says that it was trained."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    with_experts = role_settings.run.generator.return_routed_experts
    async with role_settings.transports().trainer() as ends:
        reader = RowReader(ends.payloads) if with_experts else None
        role.ready()
        await ends.log.append(TrainerStarted(epoch=role_settings.epoch, step=0, version=0))
        stopping = asyncio.create_task(_stop_request(ends.log))
        for step in count(1):
            receiving = asyncio.create_task(ends.batches.receive())
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                receiving.cancel()
                break
            started_s = time.perf_counter()
            if reader is not None:
                await asyncio.to_thread(reader.read, receiving.result())
            metrics = {"training/step_s": time.perf_counter() - started_s}
            await ends.log.append(StepTrained(epoch=role_settings.epoch, step=step, version=0, metrics=metrics))
            await ends.batches.acknowledge(step)
        await ends.log.append(
            TrainerEnded(epoch=role_settings.epoch, status=RunStatus.FINISHED, step=step - 1, reason="")
        )
        async for _ in ends.log.follow():
            pass


async def _stop_request(log: EventLog) -> None:
    async for event in log.follow():
        if isinstance(event, StopRequested):
            return

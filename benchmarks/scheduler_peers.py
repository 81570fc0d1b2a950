"""The other processes of `scheduler_overhead.py`: a generator and a trainer that do no work, over a run's sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
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


def completion_ids(stop_token_id: int) -> Int32Array:
    """What every completion is made of."""
    ids = np.arange(10, 10 + COMPLETION_TOKENS, dtype=np.int32)
    ids[-1] = stop_token_id
    return ids


class InstantEngine(Engine):
    """Answers at once, but for keeping `in_flight` requests waiting: the oldest first, a few per step."""

    def __init__(self, in_flight: int) -> None:
        self._in_flight, self._steps = in_flight, 0
        self._waiting: deque[GenerationRequest] = deque()
        self._logprobs = np.full(COMPLETION_TOKENS, -1.0, np.float32)
        self._versions = np.zeros(COMPLETION_TOKENS, np.int32)

    @property
    @override
    def limits(self) -> EngineLimits:
        return EngineLimits(vocab_size=1 << 20, max_model_tokens=4096)

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
            cached_prompt_tokens_total=0,
            evicted_sessions_total=0,
            step_s_total=0.0,
        )

    @override
    def close(self) -> None: ...

    def _sampled(self, request: GenerationRequest) -> SampledTokens:
        ids = completion_ids(request.sampling.stop_token_ids[0])
        return SampledTokens(request.request_id, ids, self._logprobs, self._versions, finish_reason=FinishReason.STOP)


class PeersLauncher(LocalLauncher):
    """`placement = "scheduler_peers:PeersLauncher"`: processes as in a run, whose roles are those below."""

    @override
    def start(self, spec: RoleSpec, *, is_replaceable: bool = False) -> RoleHandle:
        role = "trainer" if spec.name == "trainer" else "generator"
        return super().start(replace(spec, entry=f"scheduler_peers:{role}"), is_replaceable=is_replaceable)


async def generator(role: Role) -> None:
    """Serves an engine that does no work, as a run's generator serves its own."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    make_engine = lambda: InstantEngine(role_settings.run.max_running)  # noqa: E731
    await role_settings.transports().serve_generator(role, lambda _: Generator(make_engine))


async def trainer(role: Role) -> None:
    """Reads each batch, and says that it was trained."""
    role_settings = msgspec.json.decode(role.spec.settings, type=RoleSettings)
    async with role_settings.transports().trainer() as ends:
        role.ready()
        await ends.log.append(TrainerStarted(epoch=role_settings.epoch, step=0, version=0))
        stopping = asyncio.create_task(_stop_request(ends.log))
        for step in count(1):
            receiving = asyncio.create_task(ends.batches.receive())
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                receiving.cancel()
                break
            await ends.log.append(StepTrained(epoch=role_settings.epoch, step=step, version=0, metrics={}))
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

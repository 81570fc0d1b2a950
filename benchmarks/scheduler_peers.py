"""The other process of `scheduler_overhead.py`: a generator and a trainer that do no work, over a run's own sockets."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
from tailrace.generation.rpc.server import GeneratorServer
from tailrace.records import FinishReason, GenerationRequest, ModelStateDictRef, StepTrained
from tailrace.transport.batches.channels import shared_memory_receiver
from tailrace.transport.events.rpc import EventLogClient

EPOCH = "measured"
COMPLETION_TOKENS, ANSWERED_AT_ONCE = 16, 16


class InstantEngine(Engine):
    """Answers at once, but for keeping `in_flight` requests waiting: the oldest first, a few per step."""

    def __init__(self, in_flight: int, stop_token_id: int) -> None:
        self._in_flight, self._steps = in_flight, 0
        self._waiting: deque[GenerationRequest] = deque()
        self._ids = np.arange(10, 10 + COMPLETION_TOKENS, dtype=np.int32)
        self._ids[-1] = stop_token_id
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
            cached_sessions=0,
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
        return SampledTokens(
            request.request_id, self._ids, self._logprobs, self._versions, finish_reason=FinishReason.STOP
        )


@contextmanager
def peer(folder: Path, in_flight: int, stop_token_id: int) -> Iterator[None]:
    """The process, for as long as this context. Its sockets and shared memory lie in `folder`."""
    process = multiprocessing.get_context("spawn").Process(
        target=_main, args=(folder, in_flight, stop_token_id), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def address(folder: Path, name: str) -> str:
    """Of a socket."""
    return f"ipc://{folder / name}"


def _main(folder: Path, in_flight: int, stop_token_id: int) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(folder, in_flight, stop_token_id))


async def _serve(folder: Path, in_flight: int, stop_token_id: int) -> None:
    generator = Generator(lambda: InstantEngine(in_flight, stop_token_id))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(GeneratorServer(generator, _no_weights, address(folder, "generator")).serve())
        tasks.create_task(_train(folder))


def _no_weights(ref: ModelStateDictRef) -> Any:
    raise AssertionError("no weights are published")


async def _train(folder: Path) -> None:
    """Read each batch, and say that it was trained."""
    log = EventLogClient(address(folder, "events"), EPOCH)
    receiver = shared_memory_receiver(address(folder, "batches"), folder, spill=folder / "spill")
    while True:
        step = (await receiver.receive()).summary.step
        await log.append(StepTrained(epoch=EPOCH, step=step, version=0, metrics={}))
        await receiver.acknowledge(step)

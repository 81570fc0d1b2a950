"""What HTTP costs: rollouts through the gateway, over an engine without a model.

    python benchmarks/gateway.py [--json] [--quick] [--case whole ...]

1,024 rollouts of 5 turns at once (--quick: 256 of 3), each turn about 64 tokens, every rollout a client with a
connection of its own, in another process. The gateway's CPU is what the thread of the event loop takes per turn, less
what the same conversations take there without HTTP: `policy.chat` called in this process, over the same kind of engine.
`streamed` sends each token as an event. Loop lag: how late a timer of 5 ms comes, while clients are served. `memory`
plays 100,000 turns (--quick: 5,000) of a few tokens, in rollouts that come and go; growth is that of the process from a
fifth of them on. No row stands for vLLM's own server: it has no engine that answers without a model.
"""

from __future__ import annotations

import kit  # isort: skip

import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from tailrace.config.gateway import GatewaySettings
from tailrace.gateway import Gateway
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.models.loading import tokenizer_folder
from tailrace.records import Generate, GroupId, Message, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.rollouts import ChatRenderer, RolloutPolicy

TOKENS = 64
CPU_MS = {"whole": 1.0, "streamed": 2.0}
LAG_MS = 10.0
GROWTH_MB = 16.0
CLIENT = Path(__file__).parent / "gateway_client.py"


@dataclass(frozen=True)
class Row:
    case: str
    rollouts: int
    turns: int
    gateway_ms_per_turn: float
    chat_ms_per_turn: float
    target_ms: float
    lag_p99_ms: float
    target_lag_ms: float
    turns_per_s: float
    met: bool


@dataclass(frozen=True)
class MemoryRow:
    case: str
    rollouts: int
    turns: int
    rss_mb: float
    growth_mb: float
    target_mb: float
    met: bool


class Ground:
    """Policies over one engine."""

    def __init__(self, renderer: ChatRenderer, generate: Generate, gateway: Gateway | None) -> None:
        self._renderer, self._generate, self._gateway = renderer, generate, gateway
        self._count = 0

    def policy(self) -> RolloutPolicy:
        self._count += 1
        name = f"r{self._count}"
        rollout = Rollout(
            RolloutId(name), GroupId(name), Task(TaskId("t"), "e", 0, {}), SamplingParams(max_tokens=2 * TOKENS)
        )
        return RolloutPolicy(
            rollout,
            renderer=self._renderer,
            generate=self._generate,
            max_turns=10**9,
            max_model_tokens=4096,
            endpoints=self._gateway,
        )


@asynccontextmanager
async def ground(*, slots: int, chunk_tokens: int, step_s: float, gateway: Gateway | None) -> AsyncIterator[Ground]:
    with tempfile.TemporaryDirectory() as folder:
        renderer = ChatRenderer(tokenizer_folder("bundled:quickstart", Path(folder)))
        vocabulary = renderer.tokenizer.num_tokens
        async with Generator(
            lambda: SimulatedEngine(slots=slots, chunk_tokens=chunk_tokens, step_s=step_s, vocab_size=vocabulary)
        ) as generator:
            yield Ground(renderer, generator.generate, gateway)


async def clients(order: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(order).encode() + b"\n")
    if process.returncode:
        raise SystemExit(f"the clients failed with status {process.returncode}")
    answer: dict[str, Any] = json.loads(out)
    return answer


def order(
    gateway: Gateway, keys: list[str], *, turns: int, tokens: int, streams: bool, spread_s: float
) -> dict[str, Any]:
    return {
        "port": int(gateway.root_url.rpartition(":")[2]),
        "keys": keys,
        "turns": turns,
        "tokens": tokens,
        "streams": streams,
        "spread_s": spread_s,
        "seed": 1,
    }


async def measure_lag(into: list[float]) -> None:
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(0.005)
        into.append(time.perf_counter() - began_s - 0.005)


async def chat_alone(policy: RolloutPolicy, number: int, turns: int, spread_s: float) -> None:
    draws = random.Random(1 + number)
    await asyncio.sleep(draws.random() * spread_s)
    messages: list[Message] = [{"role": "user", "content": f"Sort these names: {number:012}"}]
    for _ in range(turns):
        reply = await policy.chat(messages, max_tokens=draws.randint(TOKENS // 2, TOKENS * 3 // 2))
        messages = [*messages, reply.message, {"role": "user", "content": "And now?"}]


async def cpu_case(name: str, rollouts: int, turns: int) -> Row:
    streams, step_s = name == "streamed", 0.05
    spread_s = TOKENS * step_s
    kind = {"slots": rollouts, "chunk_tokens": 1 if streams else TOKENS, "step_s": step_s}
    async with ground(**kind, gateway=None) as alone:
        policies = [alone.policy() for _ in range(rollouts)]
        gc.collect()
        began_s = time.thread_time()
        await asyncio.gather(*(chat_alone(one, number, turns, spread_s) for number, one in enumerate(policies)))
        chat_ms = 1e3 * (time.thread_time() - began_s) / (rollouts * turns)
    lags: list[float] = []
    async with (
        Gateway(GatewaySettings()) as gateway,
        ground(**kind, gateway=gateway) as served,
        AsyncExitStack() as stack,
    ):
        endpoints = [await stack.enter_async_context(served.policy().endpoint()) for _ in range(rollouts)]
        asked = order(
            gateway, [one.key for one in endpoints], turns=turns, tokens=TOKENS, streams=streams, spread_s=spread_s
        )
        gc.collect()
        watching = asyncio.create_task(measure_lag(lags))
        began_s, began_wall_s = time.thread_time(), time.perf_counter()
        played = await clients(asked)
        http_ms = 1e3 * (time.thread_time() - began_s) / played["turns"]
        wall_s = time.perf_counter() - began_wall_s
        watching.cancel()
    lag_ms = 1e3 * sorted(lags)[int(0.99 * len(lags))]
    return Row(
        case=name,
        rollouts=rollouts,
        turns=played["turns"],
        gateway_ms_per_turn=http_ms - chat_ms,
        chat_ms_per_turn=chat_ms,
        target_ms=CPU_MS[name],
        lag_p99_ms=lag_ms,
        target_lag_ms=LAG_MS,
        turns_per_s=played["turns"] / wall_s,
        met=http_ms - chat_ms <= CPU_MS[name] and lag_ms <= LAG_MS,
    )


async def memory_case(total_turns: int) -> MemoryRow:
    at_once, turns, played = 256, 5, 0
    sizes: list[tuple[int, float]] = []
    async with (
        Gateway(GatewaySettings()) as gateway,
        ground(slots=at_once, chunk_tokens=TOKENS, step_s=0.0005, gateway=gateway) as served,
    ):
        while played < total_turns:
            async with AsyncExitStack() as stack:
                endpoints = [await stack.enter_async_context(served.policy().endpoint()) for _ in range(at_once)]
                keys = [one.key for one in endpoints]
                done = await clients(order(gateway, keys, turns=turns, tokens=4, streams=False, spread_s=0.0))
            played += done["turns"]
            gc.collect()
            sizes.append((played, psutil.Process().memory_info().rss / 1e6))
    early = next(size for count, size in sizes if count >= total_turns / 5)
    growth = sizes[-1][1] - early
    return MemoryRow("memory", at_once, played, sizes[-1][1], growth, GROWTH_MB, growth <= GROWTH_MB)


async def run(options: kit.Options) -> list[Row | MemoryRow]:
    rollouts, turns, memory_turns = (256, 3, 5_000) if options.quick else (1024, 5, 100_000)
    rows: list[Row | MemoryRow] = []
    for case in options.choose([*CPU_MS, "memory"]):
        kit.progress(case)
        rows.append(await (memory_case(memory_turns) if case == "memory" else cpu_case(case, rollouts, turns)))
    return rows


if __name__ == "__main__":
    chosen = kit.parse_options(__doc__)
    kit.report("The gateway's cost", uvloop.run(run(chosen)), chosen)

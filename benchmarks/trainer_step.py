"""Steps of Tailrace's trainer on given tokens, as a process of its own: what `trainer.py` starts.

    python benchmarks/trainer_step.py job.json [RANK]

The job holds batches of groups, of which the first is for warming up; figures go where it says. CPU time is this
process's, wall time runs from the beginning of the first measured step to the end of the last.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import benchmarks.kit  # isort: skip  # noqa: F401 - pins threads

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tailrace.batching import Packing, compute_advantages, form_batch, sample_group
from tailrace.batching.slices import drained
from tailrace.cpu.products import fast_product, outer_product
from tailrace.models.loading import load_causal_lm
from tailrace.records import (
    Branch,
    Completion,
    FinishReason,
    Group,
    GroupId,
    PlannedBatch,
    Reward,
    Rollout,
    RolloutId,
    SamplingParams,
    Task,
    TaskId,
)
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer

ROW_TOKENS = 8192
MAX_FLOOR_ROWS = 2048
"""More rows than this change no matrix rate; shorter measurements do."""


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    ranks = joined(job, int(sys.argv[2])) if len(sys.argv) > 2 else ALONE
    torch.set_num_threads(1)
    settings = TrainerSettings(dtype=job["precision"], learning_rate=1e-6, ranks=ranks.size)
    trainer = Trainer(settings, model_name=job["model"], max_steps=1000, max_staleness=0, ranks=ranks)
    planned = [planned_batch(groups, step, ranks.size) for step, groups in enumerate(job["batches"], start=1)]
    batches = [batch.assembled(ranks.rank) for batch in planned]
    trainer.train_step(batches[0])
    cpu_s = []
    began_s = time.perf_counter()
    for batch in batches[1:]:
        cpu_began_s = time.process_time()
        assert trainer.train_step(batch).skipped is None
        cpu_s.append(time.process_time() - cpu_began_s)
    figures: dict[str, Any] = {"cpu_s": cpu_s, "wall_s": time.perf_counter() - began_s}
    figures["tokens"] = [batch.summary.loss_tokens for batch in planned[1:]]
    if job["floor"]:
        figures["floor_s"] = floor_s(job, planned[1:])
    if ranks.rank == 0:
        Path(job["figures"]).write_text(json.dumps(figures))


def joined(job: dict[str, Any], rank: int) -> Ranks:
    """This rank, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job["ranks"] == 1:
        return ALONE
    store = dist.FileStore(job["store"], job["ranks"])
    return JoinedRanks(store, rank, job["ranks"], device="cpu", deadline_s=300.0)


def planned_batch(groups: list[dict[str, Any]], step: int, ranks: int) -> PlannedBatch:
    """As the orchestrator plans it, every token sampled by the version that trains on it."""
    sampled = [sample_group(make_group(group, number, step), oldest_version=0) for number, group in enumerate(groups)]
    return drained(form_batch(sampled, step=step, trainer_version=step - 1, packing=Packing(ROW_TOKENS, ranks))).batch


def make_group(group: dict[str, Any], number: int, step: int) -> Group:
    """Every other rollout was right."""
    task = Task(TaskId(f"tokens/{number}"), "tokens", number, {})
    group_id = GroupId(f"tokens/train/{number}#{step}")
    rollouts = [
        Rollout(
            rollout_id=RolloutId(f"{group_id}.{index}"),
            group_id=group_id,
            task=task,
            sampling=SamplingParams(max_tokens=len(completion)),
            branches=[make_branch(group["prompt"], completion, step - 1)],
            reward=Reward(float(index % 2)),
        )
        for index, completion in enumerate(group["completions"])
    ]
    made = Group(group_id=group_id, task=task, rollouts=rollouts)
    compute_advantages(made, "mean")
    return made


def make_branch(prompt: list[int], completion: list[int], version: int) -> Branch:
    """One turn."""
    branch = Branch()
    branch.extend_context(np.array(prompt, np.int32))
    branch.extend_completion(
        Completion(
            token_ids=np.array(completion, np.int32),
            logprobs=np.full(len(completion), -5.0, np.float32),
            policy_versions=np.full(len(completion), version, np.int32),
            finish_reason=FinishReason.STOP,
        )
    )
    return branch


@dataclass(frozen=True)
class Product:
    """One of a model's matrices, and how many rows it is multiplied with in a step."""

    outputs: int
    inputs: int
    rows: int
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        """Of the forward product and the two of the backward pass."""
        return 6.0 * self.outputs * self.inputs * self.rows

    def measured_s(self) -> float:
        """CPU seconds of the three, each by the faster of two libraries, without anything around them."""
        rows = min(self.rows, MAX_FLOOR_ROWS)
        inputs, grads = (torch.randn(rows, size).to(self.dtype) for size in (self.inputs, self.outputs))
        matrix = torch.randn(self.outputs, self.inputs).to(self.dtype)
        forward = fastest(lambda: F.linear(inputs, matrix), lambda: fast_product(inputs, matrix))
        # The gradient of the input is a product with the transpose, laid out once.
        transpose = matrix.t().contiguous()
        of_inputs = fastest(lambda: grads @ matrix, lambda: fast_product(grads, transpose))
        of_matrix = fastest(lambda: grads.t() @ inputs, lambda: outer_product(grads, inputs))
        return (forward + of_inputs + of_matrix) * self.rows / rows


def floor_s(job: dict[str, Any], batches: Sequence[PlannedBatch]) -> float:
    """CPU seconds of steps that only multiplied: the model's matrices, and attention at their mean rate.

    Attention is 6 layers heads head_size operations per token and token of its sample, which is the lower triangle of
    scores and values, forward and backward. Tokens that samples share count once, since they are computed once.
    """
    model = load_causal_lm(job["model"], dtype="float32")
    config = model.config
    rows, loss_rows = sum(map(computed_tokens, batches)), sum(batch.summary.loss_tokens for batch in batches)
    dtype = getattr(torch, job["precision"])
    shapes = Counter(
        tuple(module.weight.shape) for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)
    )
    products = [(Product(outputs, inputs, rows, dtype), count) for (outputs, inputs), count in shapes.items()]
    # Logits are float32 unless trainer.head_dtype says otherwise.
    products.append((Product(config.vocab_size, config.hidden_size, loss_rows, torch.float32), 1))
    flops = sum(product.flops * count for product, count in products)
    product_s = sum(product.measured_s() * count for product, count in products)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_pair = 6.0 * config.num_hidden_layers * config.num_attention_heads * head_size
    attention = per_pair * sum(float(np.square(batch.lengths.astype(np.float64)).sum()) for batch in batches)
    return product_s * (1 + attention / flops)


def computed_tokens(batch: PlannedBatch) -> int:
    """Tokens of all rows, those that samples of a row share once."""
    return sum(row.input_ids.shape[1] for row in micro_batches(batch))


def micro_batches(batch: PlannedBatch) -> Iterator[MicroBatch]:
    whole = batch.assembled()
    edges = whole.row_offsets.tolist()
    for first, last in itertools.pairwise(edges):
        yield MicroBatch.of(whole.samples(first, last), batch.summary.trainer_version)


def fastest(*ways: Callable[[], Tensor], runs: int = 5) -> float:
    """Least CPU seconds that any of the ways took."""
    times = []
    for way in ways:
        way()
        for _ in range(runs):
            began_s = time.process_time()
            way()
            times.append(time.process_time() - began_s)
    return min(times)


if __name__ == "__main__":
    main()

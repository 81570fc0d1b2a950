"""What the torch engine samples from small mixtures of experts, with what it routed, and a pass of training over it."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import PreTrainedModel

from tailrace.records import BatchRow
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.model.router_replay import RouterReplay
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.generation.engine_support import Driver, make_engine, request
from tests.support.expert_models import VOCABULARY

UNKNOWN = 255
INDIFFERENT = 1e-6
"""Size of routers whose weights hardly move with them, so that what a perturbation changes is the choice."""


def sampled_row(model: PreTrainedModel, *, common: int = 0) -> tuple[BatchRow, np.ndarray]:
    """A packed row of what the torch engine sampled, and what it routed: [num_tokens, layers, top_k].

    Prompts begin alike for `common` tokens. The last token of each sample is unknown, as in any run.
    """
    generator = np.random.default_rng(0)
    beginning = generator.integers(0, VOCABULARY, common).tolist()
    prompts = [[*beginning, *generator.integers(0, VOCABULARY, length).tolist()] for length in (3, 9, 5, 17, 2)]
    driver = Driver(make_engine(model, slots=3, prefill_chunk_tokens=16, return_routed_experts=True))
    done = driver.run(*(request(f"r{index}", prompt, max_tokens=25) for index, prompt in enumerate(prompts)))
    experts = []
    for index in range(len(prompts)):
        routed = driver.chunks[f"r{index}"][-1].routed_experts
        experts += [routed, np.full_like(routed[:1], UNKNOWN)]
    lengths = [len(prompt) + one.num_tokens for prompt, one in zip(prompts, done, strict=True)]
    loss_mask = np.concatenate([[False] * len(p) + [True] * c.num_tokens for p, c in zip(prompts, done, strict=True)])
    logprobs = np.zeros(sum(lengths), np.float32)
    logprobs[loss_mask] = np.concatenate([one.logprobs for one in done])
    row = BatchRow(
        token_ids=np.concatenate([[*p, *c.token_ids] for p, c in zip(prompts, done, strict=True)]).astype(np.int32),
        logprobs=logprobs,
        policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
        loss_mask=loss_mask,
        mixed_cache=np.zeros_like(loss_mask),
        advantages=np.where(loss_mask, generator.normal(size=sum(lengths)), 0).astype(np.float32),
        temperatures=np.ones(len(lengths), np.float32),
        sample_lengths=np.asarray(lengths, np.int32),
    )
    return row, np.concatenate(experts)


def logprob_differences(
    model: PreTrainedModel, row: BatchRow, experts: np.ndarray | None, **options: object
) -> torch.Tensor:
    """Between the trainer's log-probabilities and the generator's, in nats: [num_loss_tokens]. The model stays."""
    output, _ = train_on(copy.deepcopy(model), row, experts, **options)
    return (output - torch.from_numpy(row.logprobs[row.loss_mask])).detach().abs()


def train_on(
    model: PreTrainedModel, row: BatchRow, experts: np.ndarray | None, **options: object
) -> tuple[torch.Tensor, dict[str, float]]:
    """Log-probabilities of one forward and backward pass; the model is used up, and keeps its gradients."""
    replay = RouterReplay(model)
    policy = PolicyModel(model, **options)
    assert policy.packs
    micro_batch = MicroBatch.of(row, 0, routed_experts=None if experts is None else experts.copy())
    model.zero_grad()
    with replay.using(micro_batch.routed_experts):
        output = policy(micro_batch, ClippedRatio(ClippedRatioSettings()))
        (output.total / 100.0).backward()
    return output.logprobs, replay.take_metrics()

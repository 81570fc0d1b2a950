"""Losses and tokens for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from tailrace.records import BatchSummary
from tailrace.training.losses import LOSSES, Divisor, Loss, LossTokens, load_loss
from tailrace.training.settings.losses import LossSettings
from tailrace.training.settings.trainer import TrainerSettings
from tests.training.tiny import build_batch

LENGTH = 20
"""Of `dr_grpo`, in tests."""
BUILT_IN = [str(settings.model_fields["name"].default) for settings in LOSSES]


def settings_of(name: str, **given: object) -> LossSettings:
    """Of a built-in loss, as a file would give them."""
    required = {"length": LENGTH} if name == "dr_grpo" else {}
    steps = {"steps_per_batch": 2} if name == "decoupled_ppo" else {}
    return TrainerSettings.model_validate({"loss": {"name": name, **required, **given}, **steps}).loss


def as_any_loss(loss: Loss) -> Loss:
    """The same, as a plain function: nobody knows that it is pointwise."""

    def plain(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        return loss(logprobs, entropy, tokens)

    return plain


@dataclass(frozen=True)
class Samples:
    """Tokens of several samples that bear loss, in float64, and what a policy says of them."""

    tokens: LossTokens
    logprobs: Tensor
    """The policy's."""
    entropy: Tensor

    def rows(self, edges: Sequence[int]) -> list[Samples]:
        """Samples `edges[i]` to `edges[i + 1]` in row i."""
        offsets = self.tokens.sample_offsets.tolist()
        found = []
        for first, last in itertools.pairwise(edges):
            where = slice(offsets[first], offsets[last])
            tokens = self.tokens
            columns = (tokens.targets, tokens.logprobs, tokens.advantages, tokens.temperatures, tokens.policy_versions)
            part = LossTokens(
                *(column[where] for column in columns), tokens.sample_offsets[first : last + 1] - offsets[first]
            )
            found.append(Samples(part, self.logprobs[where], self.entropy[where]))
        return found

    @property
    def summary(self) -> BatchSummary:
        """Of a batch of them; a sample without a token is in no batch."""
        counts = {"loss_tokens": len(self.logprobs), "num_samples": int((self.tokens.sample_lengths > 0).sum())}
        return msgspec.structs.replace(build_batch().summary, **counts)


def draw_samples(lengths: Sequence[int], seed: int, *, spread: float = 0.5, per_token: bool = False) -> Samples:
    """`spread` is the deviation of log ratios; advantages are per sample, or per token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    count, counts = sum(lengths), torch.tensor(lengths)
    sampled = -0.05 - torch.rand(count, generator=generator, dtype=torch.float64) * 4
    logprobs = (sampled + spread * normal(count)).clamp(max=-1e-3)
    advantages = normal(count) if per_token else normal(len(lengths)).repeat_interleave(counts)
    tokens = LossTokens(
        targets=torch.zeros(count, dtype=torch.int64),
        logprobs=sampled,
        advantages=advantages,
        temperatures=torch.ones(count, dtype=torch.float64),
        policy_versions=torch.zeros(count, dtype=torch.int32),
        sample_offsets=torch.tensor([0, *lengths]).cumsum(0),
    )
    return Samples(tokens, logprobs, torch.rand(count, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class Found:
    """What a trainer would train on."""

    loss: float
    gradient: Tensor
    """Of the objective by the policy's log-probabilities, [num_loss_tokens]."""
    kept: Tensor
    """[num_loss_tokens]"""


def train_on(settings: LossSettings, samples: Samples, edges: Sequence[int] | None = None) -> Found:
    """Row by row, as the trainer does: divided by the planned figure, then multiplied once by planned over final."""
    loss, divisor, summary = load_loss(settings), Divisor.of_loss(settings), samples.summary
    total, kept = 0.0, []
    leaf = samples.logprobs.clone().requires_grad_()
    rows = Samples(samples.tokens, leaf, samples.entropy).rows(edges or (0, len(samples.tokens.sample_lengths)))
    for row in rows:
        losses, keeps = loss(row.logprobs, row.entropy, row.tokens)
        row_total = losses.where(keeps, 0.0).sum()
        (row_total / divisor.planned(summary)).backward()
        total += float(row_total.detach())
        kept.append(keeps)
    final = divisor.final(summary, int(torch.cat(kept).sum()))
    assert leaf.grad is not None
    return Found(total / max(final, 1), leaf.grad * (divisor.planned(summary) / max(final, 1)), torch.cat(kept))

"""Where a loss is TRL's too, both train alike: values and gradients of TRL 1.16.0's formulas, padded as it pads them.

The formulas are those of `GRPOTrainer._compute_loss` in trl/trainer/grpo_trainer.py (lines 3068 to 3176) and, for what
masks do, `get_off_policy_mask` there (2945) and the modes of `vllm_importance_sampling_mode` (2660), written down anew:
TRL is not installed with the tests. Its `old_per_token_logps` are the generator's log-probabilities here, β is 0, and
a batch is one accumulation step of one process.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.training.losses.support import LENGTH, Samples, draw_samples, settings_of, train_on

LENGTHS = [5, 1, 9, 3]


class Padded:
    """[num_samples, longest] of what TRL calls by these names."""

    def __init__(self, samples: Samples) -> None:
        self._lengths = samples.tokens.sample_lengths.tolist()
        self.mask = self._pad(torch.ones_like(samples.logprobs))
        self.per_token_logps = self._pad(samples.logprobs).requires_grad_()
        self.old_per_token_logps = self._pad(samples.tokens.logprobs)
        self.advantages = self._pad(samples.tokens.advantages)[:, :1]

    def _pad(self, column: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(column.split(self._lengths)), batch_first=True)

    def gradient(self, loss: Tensor) -> Tensor:
        """By the log-probabilities of tokens that are not padding."""
        (gradient,) = torch.autograd.grad(loss, self.per_token_logps)
        return gradient[self.mask.bool()]


def token_ratio(batch: Padded) -> Tensor:
    return torch.exp(batch.per_token_logps - batch.old_per_token_logps)


def sequence_ratio(batch: Padded) -> Tensor:
    log_ratio = (batch.per_token_logps - batch.old_per_token_logps) * batch.mask
    return torch.exp(log_ratio.sum(-1) / batch.mask.sum(-1)).unsqueeze(-1)


def clipped(ratio: Tensor, batch: Padded, low: float, high: float) -> Tensor:
    bounded = torch.clamp(ratio, 1 - low, 1 + high)
    return -torch.min(ratio * batch.advantages, bounded * batch.advantages)


def mean_of_means(losses: Tensor, batch: Padded) -> Tensor:
    return ((losses * batch.mask).sum(-1) / batch.mask.sum(-1)).mean()


def mean_of_tokens(losses: Tensor, batch: Padded) -> Tensor:
    return (losses * batch.mask).sum() / batch.mask.sum()


def trl_loss(loss_type: str, batch: Padded) -> Tensor:
    ratio = token_ratio(batch)
    match loss_type:
        case "grpo":
            return mean_of_means(clipped(ratio, batch, 0.2, 0.2), batch)
        case "gspo":  # loss_type = "grpo" with importance_sampling_level = "sequence", and the paper's bounds
            return mean_of_means(clipped(sequence_ratio(batch), batch, 3e-4, 4e-4), batch)
        case "dapo":
            return mean_of_tokens(clipped(ratio, batch, 0.2, 0.28), batch)
        case "dr_grpo":
            losses = clipped(ratio, batch, 0.2, 0.2)
            return (losses * batch.mask).sum() / (len(losses) * LENGTH)  # max_completion_length
        case "cispo":  # epsilon_high = 5.0, as TRL's documentation recommends
            weights = torch.clamp(ratio, max=5.0).detach()
            return mean_of_tokens(-weights * batch.advantages * batch.per_token_logps, batch)
        case "sapo":
            positive, negative = (torch.tensor(value, dtype=torch.float64) for value in (1.0, 1.05))
            temperatures = torch.where(batch.advantages > 0, positive, negative)
            gate = torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures
            return mean_of_means(-gate * batch.advantages, batch)
    raise ValueError(loss_type)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "dr_grpo", "cispo", "sapo"])
def test_a_loss_that_trl_has_too_trains_alike(name: str, seed: int) -> None:
    samples = draw_samples(LENGTHS, seed, spread=5e-4 if name == "gspo" else 0.6)
    batch, found = Padded(samples), train_on(settings_of(name), samples)
    expected = trl_loss(name, batch)
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(found.gradient, batch.gradient(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_off_policy_sequences_are_those_that_trl_masks(seed: int) -> None:
    samples = draw_samples(LENGTHS, seed)
    batch = Padded(samples)
    divergence = ((batch.old_per_token_logps - batch.per_token_logps) * batch.mask).sum(1, True)
    keep = (batch.advantages >= 0) | (divergence / batch.mask.sum(1, True) <= 0.05)
    expected = mean_of_means(clipped(token_ratio(batch), batch, 0.2, 0.2) * keep, batch)
    masks = [{"name": "off_policy_sequence", "threshold": 0.05}]
    found = train_on(settings_of("grpo", masks=masks), samples)
    torch.testing.assert_close(found.gradient, batch.gradient(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_sequences_whose_ratio_exceeds_the_cap_are_those_that_trl_masks(seed: int) -> None:
    samples = draw_samples(LENGTHS, seed)
    batch = Padded(samples)
    products = torch.exp(((batch.per_token_logps - batch.old_per_token_logps) * batch.mask).sum(-1, keepdim=True))
    keep = (products <= 3.0).detach()  # vllm_importance_sampling_clip_max
    expected = mean_of_means(clipped(token_ratio(batch), batch, 0.2, 0.2) * keep, batch)
    found = train_on(settings_of("grpo", masks=[{"name": "sequence_ratio"}]), samples)
    torch.testing.assert_close(found.gradient, batch.gradient(expected), rtol=1e-12, atol=1e-14)

"""Mean and deviation of a batch's advantages, over every token that bears loss.

    A'_t = (A_t - mean) / deviation

Hu et al. 2025, "REINFORCE++" (arXiv:2501.03262): advantages are normalised over the whole batch, not over a prompt's
group; with a reward less its group's mean that is its variant with a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from tailrace.batching.advantages import EPSILON
from tailrace.batching.slices import SAMPLES_AT_ONCE
from tailrace.records import TrainingSample, Whitening

TOKENS_AT_ONCE = 1 << 18
"""Advantages per token that are read in one slice: about a millisecond."""


def whiten(samples: Sequence[TrainingSample]) -> Generator[None, None, Whitening]:
    """What makes the samples' advantages 0 on average, with deviation 1; yields now and then.

    O(samples); O(tokens) only of samples with an advantage for each token.
    """
    moments = np.empty((len(samples), 3))
    tokens_read = 0
    for number, sample in enumerate(samples):
        moments[number] = _moments(sample)
        if isinstance(sample.advantages, np.ndarray):
            tokens_read += sample.num_tokens
        if number % SAMPLES_AT_ONCE == SAMPLES_AT_ONCE - 1 or tokens_read >= TOKENS_AT_ONCE:
            tokens_read = 0
            yield
    counts, means, squares = moments.T
    num_tokens = max(counts.sum(), 1.0)
    mean = float(counts @ means / num_tokens)
    variance = float((squares + counts * (means - mean) ** 2).sum() / num_tokens)
    return Whitening(mean, math.sqrt(variance) + EPSILON)


def _moments(sample: TrainingSample) -> tuple[float, float, float]:
    """How many tokens bear loss, the mean of their advantages, and the sum of squared distances from it."""
    if not isinstance(sample.advantages, np.ndarray):
        return sum(sample.loss_versions().values()), sample.advantages, 0.0
    values = sample.advantages[sample.loss_mask].astype(np.float64)
    mean = float(values.mean()) if len(values) else 0.0
    return len(values), mean, float(((values - mean) ** 2).sum())

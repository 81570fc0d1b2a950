from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from tailrace.generation.engines.torch.sampler import sample, uniforms


def draw(logits: torch.Tensor, draws: np.ndarray, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0):
    rows = len(draws)
    return sample(
        logits.expand(rows, -1),
        temperatures=np.full(rows, temperature, np.float32),
        top_ps=np.full(rows, top_p, np.float32),
        top_ks=np.full(rows, top_k, np.int32),
        draws=draws,
        returns_supports=np.full(rows, top_p < 1 or top_k > 0),
    )


def warped(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """The distribution that transformers' own processors leave."""
    scores = logits[None] / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0].log_softmax(-1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
)
def test_tokens_follow_the_processed_distribution_and_report_its_logprobs(
    seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 2
    expected = warped(logits, temperature, top_p, top_k)
    draws = (np.arange(4000) + 0.5) / 4000  # an even grid over [0, 1) visits each token in proportion
    token_ids, logprobs, supports = draw(logits, draws, temperature, top_p, top_k)
    assert (supports is None) == (top_p == 1 and top_k == 0)
    if supports is not None:
        kept = set(torch.nonzero(expected > -torch.inf).flatten().tolist())
        assert supports.counts.tolist() == [len(kept)] * 4000
        assert {frozenset(row) for row in supports.token_ids.reshape(4000, -1).tolist()} == {frozenset(kept)}
    np.testing.assert_allclose(logprobs, expected[torch.from_numpy(token_ids)].numpy(), atol=1e-4)
    frequencies = np.bincount(token_ids, minlength=30) / 4000
    np.testing.assert_allclose(frequencies, expected.exp().numpy(), atol=1e-3)


def test_rows_keep_their_own_settings() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    token_ids, logprobs, supports = sample(
        logits,
        temperatures=np.array([0.0, 1.0, 1.0], np.float32),
        top_ps=np.array([1.0, 1.0, 0.01], np.float32),
        top_ks=np.array([0, 0, 0], np.int32),
        draws=np.array([0.999, 0.999, 0.999]),
    )
    assert supports is None
    assert token_ids.tolist() == [1, 2, 1]
    greedy = logits[0].log_softmax(-1)[1].item()
    np.testing.assert_allclose(logprobs, [greedy, logits[0].log_softmax(-1)[2].item(), 0.0], atol=1e-6)


def test_rows_bring_their_own_supports_where_they_ask() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(5, -1)
    sampled = sample(
        logits,
        temperatures=np.array([1.0, 1.0, 1.0, 1.0, 0.5], np.float32),
        top_ps=np.array([1.0, 0.5, 1.0, 0.5, 1.0], np.float32),
        top_ks=np.array([3, 2, 0, 0, 9], np.int32),
        draws=np.full(5, 0.999),
        returns_supports=np.array([True, True, False, False, True]),
    )
    assert sampled.supports is not None
    assert sampled.supports.counts.tolist() == [3, 1, 0, 0, 4]
    assert sampled.supports.token_ids.tolist() == [1, 3, 2, 1, 1, 3, 2, 0]
    assert sampled.token_ids[[1, 3]].tolist() == [1, 1]


def test_top_k_alone_keeps_tokens_that_hardly_ever_come() -> None:
    logits = torch.cat([torch.tensor([30.0, 29.0]), torch.zeros(98)])
    sampled = draw(logits, np.array([0.5]), top_k=50)
    assert sampled.supports is not None
    assert sampled.supports.counts.tolist() == [50]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    token_ids, *_ = draw(logits, np.array([0.0, 0.4999999, 0.5, 1 - 2.0**-53]))
    assert token_ids.tolist() == [1, 1, 3, 3]


def test_uniform_numbers_are_even_and_their_streams_unrelated() -> None:
    places = np.arange(20_000)
    one = uniforms(np.full(20_000, 1, np.uint64), places)
    other = uniforms(np.full(20_000, 2, np.uint64), places)
    for numbers in (one, other, uniforms(places.astype(np.uint64), np.zeros(20_000, np.int64))):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert np.abs(counts - 1000).max() < 160
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.03

"""The trainer's log-probabilities are those of the distribution that was sampled from, restricted as it was."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.errors import TrainingError
from tailrace.records import (
    Batch,
    Branch,
    Completion,
    GroupId,
    PlannedBatch,
    RolloutId,
    Supports,
    TrainingSample,
)
from tailrace.training.losses import Divisor, Loss, LossTokens, load_components
from tailrace.training.losses.supports import TokenSupports
from tailrace.training.model.head import LogprobHead, loss_of_logits
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.step.gradients import GradientPasses
from tests.generation.engine_support import Driver, make_engine, make_model, prompts, request, restricted_logprobs
from tests.training.losses.support import as_any_loss
from tests.training.model.test_head import DEFAULT, gradients, make_head, sequence_loss, tokens_of
from tests.training.tiny import build_batch, demonstrating, tiny_model
from tests.transport.transport_builders import make_summary


def restricted(tokens: LossTokens, kept: list[list[int]]) -> LossTokens:
    counts = torch.tensor([len(one) for one in kept], dtype=torch.int32)
    flat = torch.tensor([token_id for one in kept for token_id in one], dtype=torch.int32)
    offsets = np.concatenate([[0], np.cumsum(counts.numpy(), dtype=np.int64)])
    return dataclasses.replace(tokens, supports=TokenSupports(flat, counts, offsets))


def reference(logits: Tensor, tokens: LossTokens, kept: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, token by token over a list of logits; an empty list is the whole vocabulary."""
    logprobs, entropies = [], []
    for place, support in enumerate(kept):
        scores = logits[place] / tokens.temperatures[place]
        chosen = scores[support or range(len(scores))]
        scaled = chosen - chosen.logsumexp(0)
        logprobs.append(scores[tokens.targets[place]] - chosen.logsumexp(0))
        entropies.append(-(scaled.exp() * scaled).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@given(
    data=st.data(),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    vocabulary=st.integers(2, 30),
    chunk=st.integers(1, 30),
    kind=st.sampled_from([{}, {"bias": True}, {"softcap": 2.0, "scale": 1.5, "bias": True}]),
    loss=st.sampled_from([DEFAULT, sequence_loss]),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_those_of_the_kept_logits_alone(
    *, data: st.DataObject, lengths: list[int], vocabulary: int, chunk: int, kind: dict[str, float], loss: Loss
) -> None:
    tokens = tokens_of(lengths, vocabulary)
    others = st.lists(st.integers(0, vocabulary - 1), max_size=5)
    kept = [
        sorted({int(target), *data.draw(others)}) if data.draw(st.integers(0, 3)) else [] for target in tokens.targets
    ]
    tokens, head = restricted(tokens, kept), make_head(vocabulary, **kind, dtype=torch.float64)
    hidden = torch.randn(sum(lengths), 8, dtype=torch.float64).requires_grad_()
    logprobs, entropy = reference(head.logits(hidden), tokens, kept)
    losses, keeps = loss(logprobs, entropy, tokens)
    expected = gradients(head, hidden, losses[keeps].sum())
    module = LogprobHead(head, torch.float64, chunk_bytes=4 * vocabulary * chunk)
    for own_loss in (loss, as_any_loss(loss)):
        output = module(hidden, tokens, own_loss)
        torch.testing.assert_close(output.logprobs, logprobs.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(output.entropy, entropy.detach(), rtol=0, atol=1e-10)
        for found, wanted in zip(gradients(head, hidden, output.total), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def both(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    return logprobs + entropy, torch.ones_like(tokens.targets, dtype=torch.bool)


def test_whole_logits_are_restricted_alike_where_the_head_is_not_known() -> None:
    tokens = tokens_of([3, 2], 9)
    kept = [[int(target), (int(target) + 2) % 9] for target in tokens.targets[:-1]] + [[]]
    logits = torch.randn(5, 9, requires_grad=True)
    output = loss_of_logits(both, logits, restricted(tokens, kept))
    logprobs, entropy = reference(logits.double(), tokens, kept)
    torch.testing.assert_close(output.logprobs.double(), logprobs.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.entropy.double(), entropy.detach(), rtol=0, atol=1e-5)
    gradient, wanted = (torch.autograd.grad(total, logits)[0] for total in (output.total, (logprobs + entropy).sum()))
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-5)
    assert (gradient[0] != 0).sum() == 2


def test_no_gradient_reaches_what_no_token_could_have_been() -> None:
    tokens = tokens_of([4], 12, torch.float32)
    kept = [sorted({int(target), 3}) for target in tokens.targets]
    head = make_head(12, dtype=torch.float32)
    output = LogprobHead(head, torch.float32)(torch.randn(4, 8), restricted(tokens, kept), sequence_loss)
    (gradient,) = torch.autograd.grad(output.total, head.linear.weight)
    outside = sorted(set(range(12)) - {token_id for one in kept for token_id in one})
    assert not gradient[outside].any()
    assert gradient[3].any()


def batch_of(done: list[tuple[list[int], Completion]], temperature: float, oldest_version: int) -> Batch:
    samples = []
    for index, (prompt, completion) in enumerate(done):
        branch = Branch()
        branch.extend_context(prompt)
        branch.extend_completion(completion)
        name = RolloutId(f"r{index}")
        samples.append(TrainingSample(name, GroupId("g"), temperature, branch, 1.0, oldest_version=oldest_version))
    lengths = np.array([sample.num_tokens for sample in samples], np.int32)
    total = int(lengths.sum())
    return PlannedBatch(
        summary=make_summary(1, num_samples=len(samples), num_tokens=total, num_rows=1, row_tokens=total),
        samples=samples,
        lengths=lengths,
        row_offsets=np.array([0, len(samples)], np.int32),
        rank_offsets=np.array([0, 1], np.int32),
        num_support_ids=sum(sample.branch.num_support_ids for sample in samples),
    ).assembled()


def sampled_over_a_change_of_weights(
    old: PreTrainedModel, new: PreTrainedModel, **sampling: float
) -> list[tuple[list[int], Completion]]:
    """Completions whose first tokens `old` sampled and whose last ones `new` did, over a cache of its own."""
    driver = Driver(make_engine(old, slots=4, chunk_tokens=4))
    asked = [request(f"r{i}", p, max_tokens=16, returns_supports=True, **sampling) for i, p in enumerate(prompts(4))]
    for one in asked:
        driver.engine.add(one)
    for _ in range(8):
        driver.step()
    driver.engine.reset_prefix_cache(preempt_running=True)
    driver.engine.load_model_state_dict(new.state_dict(), 1)
    driver.finish()
    return [(one.prompt_token_ids.tolist(), driver.done[one.request_id]) for one in asked]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20}, {}])
def test_trainer_and_generator_agree_on_fresh_tokens_as_at_top_p_1(
    sampling: dict[str, float], temperature: float
) -> None:
    old, new = make_model(), make_model(seed=1)
    done = sampled_over_a_change_of_weights(old, new, temperature=temperature, **sampling)
    expected = np.concatenate(
        [restricted_logprobs(new, prompt, one, temperature) for prompt, one in done if one.supports is not None]
        or [np.zeros(0)]
    )
    policy = PolicyModel(new)
    for oldest_version in (0, 1):  # with and without stale tokens that are masked
        micro_batch = MicroBatch.of(batch_of(done, temperature, oldest_version).row(0), 1)
        tokens, fresh = micro_batch.tokens, micro_batch.fresh
        with torch.no_grad():
            logprobs = policy(micro_batch, DEFAULT).logprobs
        assert 0 < fresh.sum() <= len(fresh)
        assert (fresh.sum() < len(fresh)) == (oldest_version == 0)
        assert float((logprobs - tokens.logprobs)[fresh].abs().max()) < 1e-4
        if sampling and oldest_version == 0:  # those of older weights: over what the older weights kept
            np.testing.assert_allclose(logprobs.numpy(), expected, rtol=0, atol=1e-4)
            assert float((logprobs - tokens.logprobs)[~fresh].abs().max()) > 0.1
            whole = policy(dataclasses.replace(micro_batch, tokens=dataclasses.replace(tokens, supports=None)), DEFAULT)
            assert float((whole.logprobs - tokens.logprobs)[fresh].abs().max()) > 0.05


def test_a_token_outside_its_own_support_is_refused() -> None:
    row = build_batch(supports=True).row(0)
    assert row.supports is not None
    ids, counts = row.supports.token_ids.copy(), row.supports.counts
    ids[counts.cumsum()[counts > 0] - 1] += 1  # the last one of each is the token itself
    damaged = dataclasses.replace(row, supports=Supports(ids, counts))
    MicroBatch.of(row, 0)
    with pytest.raises(TrainingError, match="not among those that it was sampled from"):
        MicroBatch.of(damaged, 0)


def test_slices_of_tokens_know_their_supports() -> None:
    tokens = MicroBatch.of(build_batch(supports=True).row(0), 0).tokens
    assert tokens.supports is not None
    whole = torch.zeros(len(tokens.targets), 64)
    tokens.supports.restrict(whole)
    assert (whole.bool().any(1) & ~whole.bool().all(1)).all()
    for start, end in ((0, 0), (0, 5), (3, 11), (11, len(tokens.targets))):
        part = tokens.part(slice(start, end)).supports
        assert part is not None
        logits = torch.zeros(end - start, 64)
        part.restrict(logits)
        assert torch.equal(logits, whole[start:end])


def test_a_loss_sees_the_same_supports_however_samples_lie_in_rows() -> None:
    """Demonstrated tokens, which no loss of rewards sees, lie beside sampled ones in one of the two."""
    seen: list[Tensor] = []

    def loss(logprobs: Tensor, _entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        assert tokens.supports is not None
        assert np.array_equal(np.diff(tokens.supports.offsets), tokens.supports.counts)
        seen.append(tokens.supports.counts)
        weights = tokens.supports.counts.clamp(min=1).to(logprobs.dtype).rsqrt()
        return -weights * tokens.advantages * logprobs, torch.ones_like(logprobs, dtype=torch.bool)

    gradients, supports = [], []
    for rows in ((4,), (1, 1, 1, 1)):
        batch = demonstrating(build_batch(lengths=(9, 14, 5, 12), rows=rows, supports=True), (1,))
        given = ClippedRatioSettings.model_validate({"cross_entropy": {"coefficient": 0.7}})
        policy = PolicyModel(tiny_model("qwen3").double(), native_kernels=False)
        passes = GradientPasses(policy, loss, Divisor.of_loss(given), components=load_components(given))
        passes.add(batch, 0)
        gradients.append(torch.cat([weight.grad.flatten() for weight in passes.weights if weight.grad is not None]))
        supports.append(torch.cat(seen).sort().values)
        seen.clear()
    assert supports[0].any()
    assert torch.equal(*supports)
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)

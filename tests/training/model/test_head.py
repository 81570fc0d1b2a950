"""The chunked head gives the values and gradients of whole logits, whatever the chunks, the dtypes and the loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tailrace.models.heads import OutputHead
from tailrace.training.losses import Loss, LossTokens, PointwiseLoss, load_loss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.losses.no_loss import NO_LOSS
from tailrace.training.model.head import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES, LogprobHead, TorchProducts, chunk_tokens
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.training.losses.support import BUILT_IN, as_any_loss, settings_of

DEFAULT = ClippedRatio(ClippedRatioSettings())
UNCORRECTED = ClippedRatio(ClippedRatioSettings(correction="none"))
MASKS = [{"name": "icepop"}]
BUILT_IN_LOSSES = [
    *(load_loss(settings_of(name, masks=masks)) for name in BUILT_IN for masks in ([], MASKS)),
    load_loss(settings_of("grpo", masks=[*MASKS, {"name": "sequence_ratio"}], entropy=0.05)),
]


class KeepsUnlikely(PointwiseLoss):
    """Rejects every token that the policy finds likely."""

    def with_derivative(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        return logprobs * tokens.advantages, tokens.advantages, logprobs < -1.5


def tokens_of(lengths: list[int], vocabulary: int, dtype: torch.dtype = torch.float64) -> LossTokens:
    generator = torch.Generator().manual_seed(len(lengths))
    count = sum(lengths)
    return LossTokens(
        targets=torch.randint(vocabulary, (count,), generator=generator),
        logprobs=-torch.rand(count, generator=generator, dtype=dtype) * 3,
        advantages=torch.randn(count, generator=generator, dtype=dtype),
        temperatures=0.5 + torch.rand(count, generator=generator, dtype=dtype),
        policy_versions=torch.zeros(count, dtype=torch.int32),
        sample_offsets=torch.tensor([0, *lengths]).cumsum(0),
    )


def make_head(
    vocabulary: int, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None, dtype: torch.dtype
) -> OutputHead:
    torch.manual_seed(0)
    return OutputHead(nn.Linear(8, vocabulary, bias=bias, dtype=dtype), scale, softcap)


def reference(head: OutputHead, hidden: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by plain autograd, over whole logits."""
    scores = torch.log_softmax(head.logits(hidden) / tokens.temperatures[:, None], -1)
    return scores.gather(1, tokens.targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)


def gradients(head: OutputHead, hidden: Tensor, total: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, [hidden, *head.linear.parameters()]))


def sequence_loss(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """A sequence-level ratio (GSPO, arXiv:2507.18071, eq. 7), an entropy bonus, and samples that drifted left out."""
    lengths = tokens.sample_offsets.diff().clamp(min=1)
    ratio = (tokens.sum_by_sample(logprobs - tokens.logprobs) / lengths).exp()
    weight = tokens.spread(ratio)
    return -weight * tokens.advantages - 0.1 * entropy, (weight < 3.0)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 50),
    kind=st.sampled_from([{}, {"bias": True}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5, "bias": True}]),
    loss=st.sampled_from([DEFAULT, UNCORRECTED, KeepsUnlikely(), sequence_loss, *BUILT_IN_LOSSES]),
)
@settings(max_examples=100)
def test_values_and_gradients_are_those_of_whole_logits(
    lengths: list[int], vocabulary: int, chunk: int, kind: dict[str, float], loss: Loss
) -> None:
    head, tokens = make_head(vocabulary, **kind, dtype=torch.float64), tokens_of(lengths, vocabulary)
    hidden = torch.randn(sum(lengths), 8, dtype=torch.float64).requires_grad_()
    logprobs, entropy = reference(head, hidden, tokens)
    losses, kept = loss(logprobs, entropy, tokens)
    expected = gradients(head, hidden, losses[kept].sum())
    module = LogprobHead(head, torch.float64, chunk_bytes=4 * vocabulary * chunk)
    for own_loss in (loss, as_any_loss(loss)):  # a pointwise loss takes the short way, then the general one
        output = module(hidden, tokens, own_loss)
        torch.testing.assert_close(output.logprobs, logprobs.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(output.entropy, entropy.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(output.losses, losses.detach().where(kept, 0.0), rtol=0, atol=1e-10)
        assert torch.equal(output.kept, kept)
        for found, wanted in zip(gradients(head, hidden, output.total), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", [DEFAULT, KeepsUnlikely()])
def test_both_ways_agree_in_float32_for_every_chunk(loss: PointwiseLoss) -> None:
    tokens = tokens_of([13, 1, 22, 7], 50, torch.float32)
    head = make_head(50, dtype=torch.float32)
    hidden = torch.randn(43, 8).requires_grad_()
    ways: list[Loss] = [loss, as_any_loss(loss)]
    expected = gradients(head, hidden, LogprobHead(head, torch.float32)(hidden, tokens, loss).total)
    for chunk in range(1, 44):
        for way in ways:
            output = LogprobHead(head, torch.float32, chunk_bytes=200 * chunk)(hidden, tokens, way)
            for found, wanted in zip(gradients(head, hidden, output.total), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_pointwise", [True, False])
def test_a_16_bit_heads_gradient_grows_in_float32(is_pointwise: bool) -> None:
    """Each of 4,000 chunks adds the same little to the rare token's row; bfloat16 sums stop growing at 256 of them."""
    count, vocabulary = 4_000, 3_000
    tokens = tokens_of([count], vocabulary, torch.float32)
    tokens.advantages.fill_(1.0)
    head = make_head(vocabulary, dtype=torch.float32)
    hidden = torch.ones(count, 8)
    loss = UNCORRECTED if is_pointwise else as_any_loss(UNCORRECTED)
    found = gradients_of_weight(head, hidden, tokens, loss, torch.bfloat16)
    exact = make_head(vocabulary, dtype=torch.float64)
    exact.linear.weight.data.copy_(head.linear.weight)
    wanted = gradients_of_weight(exact, hidden.double(), in_float64(tokens), loss, torch.float64)
    assert found.dtype is torch.float32
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    per_chunk = wanted / count
    summed = torch.zeros_like(per_chunk, dtype=torch.bfloat16)
    for _ in range(count):
        summed += per_chunk.bfloat16()
    assert (summed - wanted).norm() > 0.5 * wanted.norm()


def in_float64(tokens: LossTokens) -> LossTokens:
    columns = ("logprobs", "advantages", "temperatures")
    return dataclasses.replace(tokens, **{name: getattr(tokens, name).double() for name in columns})


def gradients_of_weight(head: OutputHead, hidden: Tensor, tokens: LossTokens, loss: Loss, dtype: torch.dtype) -> Tensor:
    module = LogprobHead(head, dtype, chunk_bytes=4 * head.linear.out_features)
    (gradient,) = torch.autograd.grad(module(hidden, tokens, loss).total, head.linear.weight)
    return gradient


def test_a_heads_16_bit_gradient_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, head = tokens_of([20], 64, torch.float32), make_head(64, dtype=torch.float32)
    hidden = torch.randn(20, 8)
    whole = gradients_of_weight(head, hidden, tokens, DEFAULT, torch.bfloat16)
    monkeypatch.setattr("tailrace.training.model.head._GRADIENT_BLOCK_BYTES", 16 * 10)
    assert torch.equal(gradients_of_weight(head, hidden, tokens, DEFAULT, torch.bfloat16), whole)


@pytest.mark.parametrize("vocabulary", [64, 1_024, 49_152, 151_936, 262_144])
def test_logits_that_are_held_at_once_are_bounded(vocabulary: int) -> None:
    gpu = chunk_tokens(vocabulary, torch.device("cuda")) * 4 * vocabulary
    assert GPU_CHUNK_BYTES - 4 * vocabulary < gpu <= GPU_CHUNK_BYTES
    cpu = chunk_tokens(vocabulary, torch.device("cpu")) * 4 * vocabulary
    assert cpu <= CPU_CHUNK_BYTES or cpu <= GPU_CHUNK_BYTES / 1.5
    assert chunk_tokens(vocabulary, torch.device("cpu"), chunk_bytes=1) == 1


def test_no_tensor_of_all_logits_is_made_or_kept() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    count, vocabulary = 300, 500
    tokens, head = tokens_of([count], vocabulary, torch.float32), make_head(vocabulary, dtype=torch.float32)
    hidden = torch.randn(count, 8).requires_grad_()
    for loss in (DEFAULT, sequence_loss):
        with Watch():
            LogprobHead(head, torch.float32, chunk_bytes=4 * vocabulary * 20)(hidden, tokens, loss).total.backward()
    assert largest == 20 * vocabulary


def test_gradients_that_nobody_needs_are_left_out() -> None:
    tokens, head = tokens_of([6], 9, torch.float32), make_head(9, bias=True, dtype=torch.float32)
    head.linear.requires_grad_(False)
    hidden = torch.randn(6, 8).requires_grad_()
    for loss in (DEFAULT, sequence_loss):
        LogprobHead(head, torch.float32)(hidden, tokens, loss).total.backward()
    assert hidden.grad is not None
    assert head.linear.weight.grad is None


class NoOuterProducts(TorchProducts):
    def add_outer_product(self, total: Tensor, grads: Tensor, inputs: Tensor) -> None:
        raise AssertionError("a gradient of the weight was computed")


@pytest.mark.parametrize("loss", [NO_LOSS, DEFAULT, KeepsUnlikely()])
def test_without_gradients_a_pointwise_loss_computes_none(loss: PointwiseLoss) -> None:
    tokens, head = tokens_of([6], 9, torch.float32), make_head(9, dtype=torch.float32)
    hidden = torch.randn(6, 8)
    expected = LogprobHead(head, torch.float32)(hidden, tokens, loss)
    with torch.no_grad():
        found = LogprobHead(head, torch.float32, products=NoOuterProducts())(hidden, tokens, loss)
    assert not found.total.requires_grad
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_second_backward_pass_of_the_short_way_is_refused() -> None:
    tokens, head = tokens_of([6], 9, torch.float32), make_head(9, dtype=torch.float32)
    output = LogprobHead(head, torch.float32)(torch.randn(6, 8).requires_grad_(), tokens, DEFAULT)
    output.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.total.backward()

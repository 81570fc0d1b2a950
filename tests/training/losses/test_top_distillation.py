"""The divergence from a teacher over what it finds likeliest, against autograd over whole logits in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailrace.records import DISTILLATION_WEIGHTS, TEACHER_TOP_LOGPROBS, Batch
from tailrace.training.losses import CandidateComponent, Divisor, Loss, LossTokens, add_up, load_components, load_loss
from tailrace.training.model.head import LogprobHead, loss_of_logits
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.step.gradients import GradientPasses, RowOutput
from tests.training.losses.support import draw_samples, settings_of
from tests.training.model.test_head import gradients, make_head, reference, tokens_of
from tests.training.test_trainer import make_trainer
from tests.training.tiny import build_batch, taught, tiny_model, weighing

TEACHER: dict[str, Any] = {"url": "http://teacher/v1", "model": "big"}
EPSILON = 1e-5
DIVERGENCES = ["reverse", "forward"]


def distillation(**given: Any) -> CandidateComponent:
    (component,) = load_components(settings_of("clipped_ratio", distillation={**TEACHER, "top_k": 3, **given}))
    assert isinstance(component, CandidateComponent)
    return component


def divergence(kind: str, policy: Tensor, teacher: Tensor, token_ids: list[int]) -> Tensor:
    """Of two distributions over a vocabulary: over some of its tokens and all others as one, to which EPSILON comes."""
    pairs = [(policy[token_id], teacher[token_id]) for token_id in token_ids]
    pairs.append(tuple(1 - sum(column, torch.zeros(())) + EPSILON for column in zip(*pairs, strict=True)))
    ordered = pairs if kind == "reverse" else [(second, first) for first, second in pairs]
    return torch.stack([first * (first / second).log() for first, second in ordered]).sum()


def drawn(tokens: LossTokens, vocabulary: int, top_k: int, seed: int) -> tuple[LossTokens, Tensor, list[list[int]]]:
    """Tokens with columns, the teacher's distributions, and which tokens it names: perhaps fewer than `top_k`."""
    generator = torch.Generator().manual_seed(seed)
    count = len(tokens.targets)
    logits = torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) * 3
    teacher = torch.softmax(logits, -1)
    named = [int(n) for n in torch.randint(1, top_k + 1, (count,), generator=generator)]
    top = teacher.topk(top_k)
    ids = torch.where(torch.arange(top_k) < torch.tensor(named)[:, None], top.indices, -1)
    columns = {"teacher_top_ids": ids.int(), "teacher_top_logprobs": top.values.log().where(ids >= 0, 0.0)}
    if seed % 2:
        columns["distillation_weights"] = torch.randint(-1, 3, (count,), generator=generator) / 2
    rewarded = torch.rand(count, generator=generator) < 0.8
    tokens = dataclasses.replace(tokens, columns=columns, rewarded=rewarded)
    return tokens, teacher, [row[row >= 0].tolist() for row in ids]


class Doubled(torch.nn.Module):
    """A loss that is no component's business."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        return logprobs * tokens.advantages - 0.1 * entropy, tokens.advantages > -0.5


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    vocabulary=st.integers(4, 30),
    chunk=st.integers(1, 20),
    top_k=st.integers(1, 4),
    kind=st.sampled_from([{}, {"bias": True}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5, "bias": True}]),
    chosen=st.sampled_from(DIVERGENCES),
    is_pointwise=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_those_of_whole_logits(
    *,
    lengths: list[int],
    vocabulary: int,
    chunk: int,
    top_k: int,
    kind: dict[str, float],
    chosen: str,
    is_pointwise: bool,
    seed: int,
) -> None:
    head = make_head(vocabulary, **kind, dtype=torch.float64)
    tokens, teacher, named = drawn(tokens_of(lengths, vocabulary), vocabulary, top_k, seed)
    hidden = torch.randn(sum(lengths), 8, dtype=torch.float64).requires_grad_()
    component = distillation(top_k=top_k, divergence=chosen, coefficient=0.7)
    of_rewards: Loss = load_loss(settings_of("clipped_ratio")) if is_pointwise else Doubled()
    summary = draw_samples(lengths, seed).summary
    loss = add_up(of_rewards, 3.0, [component], summary)

    policy = torch.softmax(head.logits(hidden) / tokens.temperatures[:, None], -1)
    assert tokens.rewarded is not None
    each = [
        divergence(chosen, mine, its, ids) * bears
        for mine, its, ids, bears in zip(policy, teacher, named, tokens.rewarded, strict=True)
    ]
    logprobs, entropy = reference(head, hidden, tokens)
    losses, kept = of_rewards(logprobs, entropy, tokens)
    kept = kept & tokens.rewarded if is_pointwise else kept
    weights = tokens.columns.get("distillation_weights", torch.ones(len(each)))
    added = (torch.stack(each) * weights).sum() * 0.7 / summary.loss_tokens
    expected = gradients(head, hidden, losses[kept].sum() / 3.0 + added)
    output = LogprobHead(head, torch.float64, chunk_bytes=4 * vocabulary * chunk)(hidden, tokens, loss)
    told = torch.stack(each).detach() * (weights != 0)
    torch.testing.assert_close(output.candidate_losses, told, rtol=1e-9, atol=1e-10)
    for found, wanted in zip(gradients(head, hidden, output.total), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("chosen", DIVERGENCES)
def test_a_head_that_is_not_known_gives_the_same(chosen: str) -> None:
    head = make_head(20, dtype=torch.float32)
    tokens, _, _ = drawn(tokens_of([3, 4], 20, torch.float32), 20, 4, 1)
    hidden = torch.randn(7, 8).requires_grad_()
    loss = add_up(Doubled(), 3.0, [distillation(top_k=4, divergence=chosen)], draw_samples([3, 4], 0).summary)
    known = LogprobHead(head, torch.float32)(hidden, tokens, loss)
    whole = loss_of_logits(loss, head.logits(hidden), tokens)
    torch.testing.assert_close(whole.candidate_losses, known.candidate_losses)
    torch.testing.assert_close(whole.total, known.total)
    for found, wanted in zip(gradients(head, hidden, whole.total), gradients(head, hidden, known.total), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("seed", range(5))
def test_over_the_whole_vocabulary_it_is_the_divergence_and_over_less_no_more(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, teacher = (torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    whole = {
        "reverse": float((policy.exp() * (policy - teacher)).sum()),
        "forward": float((teacher.exp() * (teacher - policy)).sum()),
    }
    for chosen in DIVERGENCES:
        found = []
        for top_k in range(1, 9):
            top = teacher.topk(top_k)
            columns = {"teacher_top_ids": top.indices[None].int(), "teacher_top_logprobs": top.values[None]}
            tokens = dataclasses.replace(draw_samples([1], 0).tokens, columns=columns)
            losses, _ = distillation(divergence=chosen).with_derivatives(policy[top.indices][None], tokens)
            found.append(float(losses))
        assert found == sorted(found)
        assert found[-1] == pytest.approx(whole[chosen], rel=1e-6)
        assert found[0] >= 0


@pytest.mark.parametrize("chosen", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_policy_that_is_its_teacher_learns_nothing_and_extremes_are_finite(chosen: str, dtype: torch.dtype) -> None:
    told = torch.tensor([[-0.1, -3.0], [-1e-8, -25.0], [-0.6931472, -0.6931472], [-4.0, -5.0]], dtype=dtype)
    columns = {"teacher_top_ids": torch.tensor([[3, 1]] * 4, dtype=torch.int32), "teacher_top_logprobs": told}
    tokens = dataclasses.replace(draw_samples([4], 0).tokens, columns=columns)
    losses, derivatives = distillation(divergence=chosen).with_derivatives(told, tokens)
    assert float(losses.abs().max()) < 1e-6
    assert float(derivatives.abs().max()) < 1e-6
    away = torch.tensor([[-200.0, -90.0], [-60.0, -1e-7], [0.0, -300.0], [-1e4, -1e4]], dtype=dtype)
    losses, derivatives = distillation(divergence=chosen).with_derivatives(away, tokens)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(derivatives).all()
    assert (losses > 0).all()


def test_a_token_that_has_become_impossible_harms_no_other() -> None:
    columns = {
        "teacher_top_ids": torch.tensor([[3, 1]], dtype=torch.int32),
        "teacher_top_logprobs": torch.tensor([[-0.5, -1.5]]),
    }
    tokens = dataclasses.replace(draw_samples([1], 0).tokens, columns=columns)
    losses, derivatives = distillation().with_derivatives(torch.tensor([[-math.inf, -0.2]]), tokens)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(derivatives).all()


@pytest.mark.parametrize("entropy", [0.0, 1e-3])
@pytest.mark.parametrize(("chosen", "unusable"), [("reverse", -math.inf), ("forward", math.nan)])
def test_a_token_without_a_weight_harms_no_other_whatever_its_teacher_says(
    chosen: str, unusable: float, entropy: float
) -> None:
    given = settings_of("clipped_ratio", entropy=entropy, distillation={**TEACHER, "top_k": 5, "divergence": chosen})
    policy = PolicyModel(tiny_model("qwen3"), native_kernels=False)
    passes = GradientPasses(policy, load_loss(given), Divisor.of_loss(given), components=load_components(given))
    batch = weighing(taught(build_batch(), 5), DISTILLATION_WEIGHTS)
    told = batch.columns[TEACHER_TOP_LOGPROBS].copy()
    told[(batch.columns[DISTILLATION_WEIGHTS] == 0) & batch.loss_mask] = unusable
    passes.add(dataclasses.replace(batch, columns={**batch.columns, TEACHER_TOP_LOGPROBS: told}), 0)
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in passes.weights)


@pytest.mark.parametrize("added", [{}, {"distillation": {**TEACHER, "top_k": 5}}])
def test_of_a_token_13_bytes_are_kept_until_the_step_is_over(added: dict[str, Any]) -> None:
    given = settings_of("clipped_ratio", **added)
    policy = PolicyModel(tiny_model("qwen3"), native_kernels=False)
    passes = GradientPasses(policy, load_loss(given), Divisor.of_loss(given), components=load_components(given))
    batch, outputs = taught(build_batch(), 5), list[RowOutput]()
    passes.add(batch, 0, outputs)
    kept = [column for one in outputs for column in one.output[1:] if column is not None]
    assert sum(column.nbytes for column in kept) == 13 * batch.loss_mask.sum()


def batch_with(step: int, top_k: int) -> Batch:
    return taught(build_batch(lengths=(9, 14, 5, 12), rows=(2, 1, 1), step=step), top_k)


@pytest.mark.parametrize("chosen", DIVERGENCES)
@pytest.mark.parametrize("loss", ["clipped_ratio", "gspo"])
def test_a_trainer_comes_nearer_to_its_teacher_and_says_so(model_folder: Path, loss: str, chosen: str) -> None:
    teacher = {**TEACHER, "top_k": 6, "divergence": chosen, "coefficient": 5.0}
    trainer = make_trainer(
        model_folder, max_staleness=9, learning_rate=1e-2, loss={"name": loss, "distillation": teacher}
    )
    found = [trainer.train_step(batch_with(step, 6)).metrics for step in range(1, 7)]
    divergences = [metrics["training/distillation"] for metrics in found]
    assert divergences[-1] < 0.7 * divergences[0]
    total = found[0]["training/reward_loss"] + 5.0 * divergences[0]
    assert found[0]["training/loss"] == pytest.approx(total, rel=1e-5)

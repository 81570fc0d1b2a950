"""Cross-entropy of demonstrations beside a loss of rewards: each sees its own tokens, and has its own divisor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tailrace.records import CROSS_ENTROPY_WEIGHTS, NOTHING_TRAINABLE, Batch, SampleOrigins
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.training.losses import Divisor, load_components, load_loss
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.step.gradients import GradientPasses
from tests.support.exported_tokens import read_tokens
from tests.training.losses.support import settings_of
from tests.training.reports.test_token_export import train as export_of
from tests.training.test_trainer import make_trainer, weights
from tests.training.tiny import build_batch, demonstrating, tiny_model

TEACHER = {"url": "http://localhost/v1", "model": "teacher"}
LENGTHS, ROWS = (9, 14, 5, 12, 7), (2, 1, 2)
SHOWN = (1, 2)
"""A sample beside another, and one that is a row by itself."""
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("clipped_ratio", {}),
    ("clipped_ratio", {"masks": [{"name": "icepop", "low": 0.9, "high": 1.1}]}),
    ("grpo", {}),
    ("dr_grpo", {}),
    ("dppo", {}),
    ("gspo", {"masks": [{"name": "sequence_ratio"}], "entropy": 0.01}),
    ("selected_cross_entropy", {}),
]


def gradients(loss: str, given: dict[str, Any], batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What a trainer would come to, in float64."""
    settings, policy = settings_of(loss, **given), PolicyModel(tiny_model("qwen3").double(), native_kernels=False)
    passes = GradientPasses(
        policy, load_loss(settings), Divisor.of_loss(settings), components=load_components(settings)
    )
    metrics, kept = passes.add(batch, 0).read(batch.summary)
    factor = passes.rescaling(batch.summary, kept)
    return {name: weight.grad * factor for name, weight in policy.model.named_parameters()}, metrics


def demonstrated(batch: Batch) -> tuple[dict[str, Tensor], float]:
    """Gradients of the mean weighted cross-entropy, and the mean without weights, by transformers and torch alone."""
    model = tiny_model("qwen3").double()
    shown = batch.columns[CROSS_ENTROPY_WEIGHTS]
    total, plain = torch.zeros(()), 0.0
    for start, end in zip(batch.sample_offsets[:-1], batch.sample_offsets[1:], strict=True):
        ids, own = torch.tensor(batch.token_ids[start:end].astype(np.int64)), torch.tensor(shown[start + 1 : end])
        each = cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        total = total + (own * each).sum()
        plain += float((each.detach() * (own != 0)).sum())
    count = np.count_nonzero(shown)
    (total / count).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, plain / count


def require_sum(
    both: dict[str, Tensor], rewards: dict[str, Tensor], shown: dict[str, Tensor], coefficient: float
) -> None:
    """By the norm of each weight's gradient; the head computes in float32."""
    for name, gradient in shown.items():
        expected = rewards[name] + coefficient * gradient
        assert float((both[name] - expected).norm() / expected.norm()) < 1e-5, name
        assert float((both[name] - rewards[name]).norm() / expected.norm()) > 1e-2, name


@pytest.mark.parametrize(("loss", "given"), LOSSES)
def test_gradients_are_those_of_both_added_up(loss: str, given: dict[str, Any]) -> None:
    batch = demonstrating(build_batch(lengths=LENGTHS, rows=ROWS), SHOWN)
    both, metrics = gradients(loss, {**given, "cross_entropy": {"coefficient": 0.3}}, batch)
    rewards, of_rewards = gradients(loss, given, batch)
    shown, mean = demonstrated(batch)
    require_sum(both, rewards, shown, 0.3)
    assert metrics["training/cross_entropy"] == pytest.approx(mean, rel=1e-6)
    assert metrics["training/reward_loss"] == pytest.approx(of_rewards["training/loss"], rel=1e-9)
    for name in of_rewards.keys() - {"training/loss"}:
        assert metrics[name] == pytest.approx(of_rewards[name], rel=1e-9), name


def test_tokens_that_were_sampled_may_have_a_weight_too() -> None:
    plain = build_batch(lengths=LENGTHS, rows=ROWS)
    shown = plain.loss_mask * np.float32(0.5)
    summary = msgspec.structs.replace(plain.summary, cross_entropy_tokens=int(plain.loss_mask.sum()))
    batch = dataclasses.replace(plain, columns={CROSS_ENTROPY_WEIGHTS: shown}, summary=summary)
    both, _ = gradients("clipped_ratio", {"cross_entropy": {"coefficient": 2.0}}, batch)
    rewards, _ = gradients("clipped_ratio", {}, batch)
    alone, _ = demonstrated(batch)
    require_sum(both, rewards, alone, 2.0)


def test_weights_are_as_if_they_were_not_there_without_the_component(model_folder: Path) -> None:
    batch = demonstrating(build_batch(lengths=LENGTHS, rows=ROWS), SHOWN)
    without = dataclasses.replace(batch, columns={})
    left, right = (make_trainer(model_folder).train_step(one).metrics for one in (batch, without))
    assert left["training/grad_norm"] == right["training/grad_norm"]
    assert "training/cross_entropy" not in left


@pytest.mark.parametrize("others", [{}, {"distillation": TEACHER}, {"distillation": {**TEACHER, "top_k": 4}}])
def test_a_batch_of_demonstrations_alone_is_trained_on(model_folder: Path, others: dict[str, Any]) -> None:
    trainer = make_trainer(model_folder, learning_rate=1e-2, loss={"cross_entropy": {}, **others})
    found = []
    for step in range(1, 6):
        batch = demonstrating(build_batch(lengths=LENGTHS, rows=ROWS, step=step), range(len(LENGTHS)))
        result = trainer.train_step(batch)
        assert (result.version, result.skipped) == (step, None)
        found.append(result.metrics["training/cross_entropy"])
    assert found[-1] < 0.7 * found[0]
    assert result.metrics["training/reward_loss"] == 0
    assert "training/kl" not in result.metrics
    before = weights(trainer)
    nothing = demonstrating(build_batch(lengths=LENGTHS, rows=ROWS, step=6), range(len(LENGTHS)), weight=0)
    assert trainer.train_step(nothing).skipped == NOTHING_TRAINABLE
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer).items())


def test_what_is_demonstrated_is_told_of_each_environment(model_folder: Path) -> None:
    batch = demonstrating(build_batch(lengths=LENGTHS, rows=ROWS), SHOWN)
    told = [(f"r{index}", 0, "names" if index < 2 else "sums") for index in range(len(LENGTHS))]
    batch = dataclasses.replace(batch, origins=SampleOrigins.of(told))  # type: ignore[arg-type]
    metrics = make_trainer(model_folder, loss={"cross_entropy": {}}).train_step(batch).metrics
    counts = [LENGTHS[1] - 3, LENGTHS[2] - 3]
    parts = [metrics[f"training/{name}/cross_entropy"] for name in ("names", "sums")]
    whole = sum(count * part for count, part in zip(counts, parts, strict=True)) / sum(counts)
    assert metrics["training/cross_entropy"] == pytest.approx(whole, rel=1e-6)
    accumulator = MetricsAccumulator()
    for name, value in metrics.items():
        accumulator.add(name, value)  # refuses what is not in the table


def test_sampled_tokens_too_old_for_rewards_are_exported_with_what_they_were_sampled_with(
    model_folder: Path, tmp_path: Path
) -> None:
    plain = build_batch(lengths=LENGTHS, rows=ROWS)
    old = plain.loss_mask & (np.arange(len(plain.loss_mask)) < plain.sample_offsets[2])
    summary = msgspec.structs.replace(
        plain.summary, loss_tokens=int((plain.loss_mask & ~old).sum()), cross_entropy_tokens=int(old.sum())
    )
    columns = {CROSS_ENTROPY_WEIGHTS: old.astype(np.float32)}
    batch = dataclasses.replace(plain, loss_mask=plain.loss_mask & ~old, columns=columns, summary=summary)
    export_of(tmp_path, model_folder, "jsonl", batch, loss={"cross_entropy": {}})
    (path,) = tmp_path.glob("*.jsonl")
    tokens: list[dict[str, Any]] = read_tokens(path)
    assert [one["loss_mask"] for one in tokens] == (~old)[plain.loss_mask].tolist()
    assert [one["policy_version"] for one in tokens] == plain.policy_versions[plain.loss_mask].tolist()
    assert [one["generator_logprob"] for one in tokens] == pytest.approx(plain.logprobs[plain.loss_mask].tolist())
    for one in tokens:
        assert one["ratio"] == pytest.approx(np.exp(one["trainer_logprob"] - one["generator_logprob"]), rel=1e-4)


def test_demonstrated_tokens_are_exported_beside_others_and_told_apart(model_folder: Path, tmp_path: Path) -> None:
    batch = demonstrating(build_batch(lengths=LENGTHS, rows=ROWS), SHOWN)
    (metrics,) = export_of(tmp_path, model_folder, "jsonl", batch, loss={"cross_entropy": {}})
    (path,) = tmp_path.glob("*.jsonl")
    tokens: list[dict[str, Any]] = read_tokens(path)
    sampled, shown = ([one for one in tokens if one["loss_mask"] is kind] for kind in (True, False))
    assert [one["token_id"] for one in sampled] == batch.token_ids[batch.loss_mask].tolist()
    assert [one["token_id"] for one in shown] == batch.token_ids[batch.columns[CROSS_ENTROPY_WEIGHTS] != 0].tolist()
    assert [one["generator_logprob"] for one in sampled] == pytest.approx(batch.logprobs[batch.loss_mask].tolist())
    assert np.mean([one["loss"] for one in sampled]) == pytest.approx(metrics["training/reward_loss"], rel=1e-5)
    assert -np.mean([one["trainer_logprob"] for one in shown]) == pytest.approx(
        metrics["training/cross_entropy"], rel=1e-5
    )
    nobody = {"kept": False, "loss": 0, "generator_logprob": None, "ratio": None, "policy_version": -1}
    assert all(one.items() >= nobody.items() for one in shown)

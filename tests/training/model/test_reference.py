"""A frozen model beside the policy: whose it is, what it is told by, and what it holds the policy to."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from tailrace.errors import ModelError
from tailrace.records import Batch, SampleOrigins
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.training.trainer import Trainer
from tests.training.test_trainer import make_trainer, weights
from tests.training.tiny import VOCABULARY, build_batch, tiny_model


def with_kl(**given: object) -> dict[str, object]:
    return {"loss": {"name": "clipped_ratio", "reference_kl": given}}


def train(trainer: Trainer, steps: int, **batch: object) -> list[dict[str, float]]:
    first = trainer.step + 1
    batches = (build_batch(step=step, version=step - 1, seed=step, **batch) for step in range(first, first + steps))  # type: ignore[arg-type]
    return [trainer.train_step(one).metrics for one in batches]


def of_two_environments(batch: Batch) -> Batch:
    told = [(f"r{index}", 0, name) for index, name in enumerate(("names", "sums", "names", "sums"))]
    return dataclasses.replace(batch, origins=SampleOrigins.of(told))  # type: ignore[arg-type]


def test_the_initial_model_is_the_reference_and_a_coefficient_holds_the_policy_to_it(model_folder: Path) -> None:
    free, held = (
        make_trainer(model_folder, learning_rate=1e-2, **with_kl(coefficient=coefficient))
        for coefficient in (0.0, 10.0)
    )
    (first, *_, last), (_, *_, near) = train(free, 6), train(held, 6)
    assert first["training/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert last["training/reference_kl"] > 0.01
    assert near["training/reference_kl"] < 0.6 * last["training/reference_kl"]
    accumulator = MetricsAccumulator()
    for name, figure in near.items():
        accumulator.add(name, figure)  # refuses what is not in the table


def test_a_divergence_that_is_only_measured_changes_nothing(model_folder: Path) -> None:
    plain, measured = make_trainer(model_folder), make_trainer(model_folder, **with_kl(coefficient=0))
    (left,), (right,) = train(plain, 1), train(measured, 1)
    assert right["training/loss"] == pytest.approx(left["training/loss"], rel=1e-6)
    assert right["training/reward_loss"] == right["training/loss"]
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(measured)[name], tensor, rtol=0, atol=1e-4)  # AdamW enlarges rounding


def test_it_is_told_of_each_environment_and_added_to_the_loss(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, learning_rate=1e-2, **with_kl(coefficient=0.5, estimator="k3"))
    trainer.train_step(build_batch())
    batch = of_two_environments(build_batch(step=2, version=1, seed=2))
    metrics = trainer.train_step(batch).metrics
    counts, parts = zip(
        *(
            (metrics[f"training/{name}/loss_tokens"], metrics[f"training/{name}/reference_kl"])
            for name in ("names", "sums")
        ),
        strict=True,
    )
    whole = sum(count * part for count, part in zip(counts, parts, strict=True)) / sum(counts)
    assert metrics["training/reference_kl"] == pytest.approx(whole, rel=1e-6)
    assert metrics["training/loss"] == pytest.approx(
        metrics["training/reward_loss"] + 0.5 * metrics["training/reference_kl"], rel=1e-6
    )


@pytest.mark.parametrize("loss", [{"name": "cispo", "masks": [{"name": "icepop"}]}, {"name": "gspo"}, {"name": "dppo"}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_change_nothing_and_what_is_rejected_is_counted_as_before(
    model_folder: Path, loss: dict[str, object], temperature: float
) -> None:
    plain = make_trainer(model_folder, loss=loss).train_step(build_batch(temperature=temperature)).metrics
    found = []
    for rows in ((4,), (1, 2, 1)):
        trainer = make_trainer(model_folder, loss={**loss, "reference_kl": {"coefficient": 1.0}})
        trainer.train_step(build_batch(temperature=temperature))
        found.append(trainer.train_step(build_batch(step=2, rows=rows, temperature=temperature)).metrics)
    one, many = found
    for name in ("training/loss", "training/grad_norm", "training/reference_kl", "training/reward_loss"):
        assert one[name] == pytest.approx(many[name], rel=1e-4)
    first = make_trainer(model_folder, loss={**loss, "reference_kl": {"coefficient": 1.0}}).train_step(
        build_batch(temperature=temperature)
    )
    assert first.metrics["training/reward_loss"] == pytest.approx(plain["training/loss"], rel=1e-5)
    assert first.metrics.get("training/rejected_share") == plain.get("training/rejected_share")
    assert first.metrics["training/grad_norm"] == pytest.approx(plain["training/grad_norm"], rel=1e-4)


def test_a_resumed_run_keeps_its_reference(model_folder: Path, tmp_path: Path) -> None:
    chosen = with_kl(coefficient=0.1)
    trainer = make_trainer(model_folder, **chosen)
    train(trainer, 2)
    saved = trainer.save_checkpoint(tmp_path)
    expected = train(trainer, 1)[0]["training/reference_kl"]
    resumed = make_trainer(model_folder, **chosen)
    resumed.restore(saved)
    assert train(resumed, 1)[0]["training/reference_kl"] == pytest.approx(expected, rel=1e-5)
    assert expected > 0


def test_a_model_that_is_named_is_the_reference(model_folder: Path, tmp_path: Path) -> None:
    tiny_model("llama", seed=3).save_pretrained(tmp_path / "other")
    (metrics,) = train(make_trainer(model_folder, **with_kl(model=str(tmp_path / "other"))), 1)
    assert metrics["training/reference_kl"] > 0.1


def test_a_reference_that_cannot_compute_packed_rows_is_refused(model_folder: Path, tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(
        ModelError, match=r"mamba' \(MambaForCausalLM\) cannot compute the rows .* for Qwen3ForCausalLM"
    ):
        make_trainer(model_folder, **with_kl(model=str(tmp_path / "mamba")))
    with pytest.raises(ModelError, match="is no folder"):
        make_trainer(model_folder, **with_kl(model="./nowhere"))


def test_an_estimator_that_holds_nothing_back_warns(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_trainer(model_folder, **with_kl(estimator="k1"))
    assert "its gradient is 0 on average" in caplog.text


def test_under_an_adapter_the_reference_is_the_model_without_it(model_folder: Path) -> None:
    """And no second one, whose divergence it equals."""
    given = {"learning_rate": 1e-2, "lora": {"rank": 4}}
    under, beside = (
        make_trainer(model_folder, **given, **with_kl(coefficient=0.5, **named))
        for named in ({}, {"model": str(model_folder)})
    )
    found, expected = train(under, 4), train(beside, 4)
    assert found[0]["training/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert found[-1]["training/reference_kl"] > 1e-3
    for name in ("training/loss", "training/reference_kl", "training/grad_norm"):
        assert [one[name] for one in found] == pytest.approx([one[name] for one in expected], rel=1e-3, abs=1e-7)

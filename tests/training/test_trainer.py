"""A batch becomes a policy version, or says why not."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tailrace.errors import Diverged, SettingsError, TrainingError
from tailrace.records import NOTHING_TRAINABLE, Batch
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import NOT_FINITE, SKIPPED_BEFORE, Trainer
from tests.training.tiny import VOCABULARY, build_batch


def make_trainer(model_folder: Path, *, max_staleness: int = 4, max_steps: int = 10, **settings: object) -> Trainer:
    defaults: dict[str, object] = {"learning_rate": 1e-3}
    return Trainer(
        TrainerSettings.model_validate(defaults | settings),
        model_name=str(model_folder),
        max_steps=max_steps,
        max_staleness=max_staleness,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.snapshot().wait().items()}


def trainer_logprobs(trainer: Trainer, batch: Batch) -> Batch:
    """The batch as a generator with the trainer's own weights would have sampled it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trainer.model_name)
    model.load_state_dict(trainer.snapshot().wait(), strict=False)
    logprobs = np.zeros_like(batch.logprobs)
    for start, end in zip(batch.sample_offsets[:-1], batch.sample_offsets[1:], strict=True):
        ids = torch.tensor(batch.token_ids[start:end].astype(np.int64))
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        logprobs[start + 1 : end] = scores.gather(1, ids[1:, None])[:, 0].numpy()
    logprobs[~batch.loss_mask] = 0
    return dataclasses.replace(batch, logprobs=logprobs)


def test_a_step_makes_a_version_and_every_metric_is_in_the_table(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    before = weights(trainer)
    result = trainer.train_step(build_batch())
    assert (result.step, result.version, result.skipped) == (1, 1, None)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    accumulator = MetricsAccumulator()
    for name, value in result.metrics.items():
        assert math.isfinite(value)
        accumulator.add(name, value)
    assert "training/logprob_difference_fresh" in result.metrics


def test_tied_weights_are_published_once_and_in_the_dtype_asked_for(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    names = trainer.snapshot().wait().keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    published = trainer.snapshot("bfloat16").wait()
    exact = {name for name, tensor in published.items() if tensor.dtype == torch.float32}
    assert exact == {name for name in published if "norm" in name or "embed" in name}
    assert {published[name].dtype for name in published.keys() - exact} == {torch.bfloat16}


def test_a_snapshot_that_stays_is_never_written_to_again(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    kept = trainer.snapshot(stays=True)
    before = {name: weight.clone() for name, weight in kept.wait().items()}
    trainer.train_step(build_batch())
    trainer.snapshot(stays=True)
    assert kept.is_detached
    assert all(torch.equal(weight, before[name]) for name, weight in kept.weights.items())
    assert any(not torch.equal(before[name], now) for name, now in trainer.snapshot().wait().items())


def test_a_device_that_is_not_there_is_told_as_a_setting(model_folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"^trainer\.device = 'cuda:77' cannot be used here: "):
        make_trainer(model_folder, device="cuda:77")


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_holds_the_weights_before_the_step_that_runs_meanwhile(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, device="cuda")
    for step in (1, 2):  # the second one into the memory of the first
        before = {name: weight.clone() for name, weight in trainer.snapshot("bfloat16").wait().items()}
        snapshot = trainer.snapshot("bfloat16")
        trainer.train_step(build_batch(step=step))
        weights = snapshot.wait()
        assert snapshot.is_detached
        assert snapshot.version == step - 1
        assert all(weights[name].is_pinned() and torch.equal(weights[name], before[name]) for name in before)
        assert any(not torch.equal(before[name], now) for name, now in trainer.snapshot("bfloat16").wait().items())


def test_rows_do_not_change_what_a_batch_teaches(model_folder: Path) -> None:
    one, many = make_trainer(model_folder), make_trainer(model_folder)
    left = one.train_step(build_batch(rows=(4,)))
    right = many.train_step(build_batch(rows=(1, 2, 1)))
    assert left.metrics["training/loss"] == pytest.approx(right.metrics["training/loss"], rel=1e-5)
    assert left.metrics["training/grad_norm"] == pytest.approx(right.metrics["training/grad_norm"], rel=1e-5)


def test_a_policy_that_sampled_its_own_batch_shows_ratio_one(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    metrics = trainer.train_step(trainer_logprobs(trainer, build_batch())).metrics
    assert metrics["training/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["training/logprob_difference_fresh"] < 1e-4
    assert metrics["training/kl"] < 1e-6
    assert metrics["training/clip_share"] == 0


def test_what_was_sampled_over_older_caches_has_a_figure_of_its_own(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    own = trainer_logprobs(trainer, build_batch(mixed=range(6, 10)))
    mixed = np.isin(np.arange(len(own.token_ids)), range(6, 10))
    shifted = dataclasses.replace(own, logprobs=np.where(mixed & own.loss_mask, own.logprobs - 0.25, own.logprobs))
    metrics = trainer.train_step(shifted).metrics
    assert metrics["training/logprob_difference_fresh"] < 1e-4
    assert metrics["training/logprob_difference_mixed"] == pytest.approx(0.25, abs=1e-4)
    metrics = trainer.train_step(build_batch(step=2, version=1)).metrics
    assert "training/logprob_difference_mixed" not in metrics


def test_stale_tokens_are_left_out_of_the_fresh_difference(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    trainer.train_step(build_batch())
    metrics = trainer.train_step(build_batch(step=2, version=0)).metrics
    assert "training/logprob_difference_fresh" not in metrics
    assert metrics["training/logprob_difference"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewarded_tokens_become_more_likely(model_folder: Path, dtype: str) -> None:
    trainer = make_trainer(model_folder, learning_rate=1e-2, dtype=dtype, max_steps=100)
    learned = []
    for step in range(1, 13):
        batch = build_batch(lengths=(16,) * 8, rows=(8,), step=step, version=step - 1, seed=step, advantages=[0.0] * 8)
        good = (batch.token_ids < VOCABULARY // 2) & batch.loss_mask
        advantages = (np.where(good, 1.0, -1.0) * batch.loss_mask).astype(np.float32)
        per_token = dataclasses.replace(batch, advantages=advantages, advantage_offsets=batch.sample_offsets)
        batch = trainer_logprobs(trainer, per_token)
        learned.append(float(np.exp(batch.logprobs[good]).mean()))
        trainer.train_step(batch)
    assert learned[-1] > 1.2 * learned[0]


def test_bfloat16_stays_close_to_float32(model_folder: Path) -> None:
    batch = build_batch(lengths=(60, 61, 40), rows=(3,))
    exact = make_trainer(model_folder).train_step(batch).metrics
    rounded = make_trainer(model_folder, dtype="bfloat16").train_step(batch).metrics
    assert rounded["training/loss"] == pytest.approx(exact["training/loss"], rel=0.005)
    assert rounded["training/grad_norm"] == pytest.approx(exact["training/grad_norm"], rel=0.01)
    assert rounded["training/grad_norm"] != pytest.approx(exact["training/grad_norm"], rel=1e-6)


def test_gradient_checkpointing_changes_memory_and_nothing_else(model_folder: Path) -> None:
    plain = make_trainer(model_folder).train_step(build_batch()).metrics
    checkpointed = make_trainer(model_folder, gradient_checkpointing=True).train_step(build_batch()).metrics
    assert checkpointed["training/grad_norm"] == pytest.approx(plain["training/grad_norm"], rel=1e-5)


def test_a_batch_that_bears_no_loss_is_skipped(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    batch = build_batch()
    summary = msgspec.structs.replace(batch.summary, loss_tokens=0)
    empty = dataclasses.replace(batch, summary=summary, loss_mask=np.zeros_like(batch.loss_mask))
    result = trainer.train_step(empty)
    assert (result.step, result.version, result.skipped) == (1, 0, NOTHING_TRAINABLE)


def test_a_step_that_is_not_finite_changes_no_weight_and_repeated_ones_end_the_run(
    model_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(model_folder, max_nonfinite_steps=3)
    before = weights(trainer)
    for step in (1, 2):
        result = trainer.train_step(build_batch(step=step, advantages=[math.nan, 1, 1, 1]))
        assert (result.step, result.version, result.skipped) == (step, 0, NOT_FINITE)
    for name, tensor in weights(trainer).items():
        assert torch.equal(before[name], tensor)
    resumed = make_trainer(model_folder, max_nonfinite_steps=3)
    resumed.restore(trainer.save_checkpoint(tmp_path))
    for one in (trainer, resumed):
        with pytest.raises(Diverged, match="3 steps in a row"):
            one.train_step(build_batch(step=3, advantages=[math.inf, 1, 1, 1]))


def test_a_finite_step_forgives_earlier_ones(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, max_nonfinite_steps=2)
    trainer.train_step(build_batch(step=1, advantages=[math.nan] * 4))
    trainer.train_step(build_batch(step=2))
    assert trainer.train_step(build_batch(step=3, advantages=[math.nan] * 4)).skipped == NOT_FINITE


def test_a_step_that_was_skipped_before_is_skipped_again(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    before = weights(trainer)
    result = trainer.train_step(dataclasses.replace(build_batch(step=1), version_after=0))
    assert (result.step, result.version, result.skipped) == (1, 0, SKIPPED_BEFORE)
    for name, tensor in weights(trainer).items():
        assert torch.equal(before[name], tensor)
    assert trainer.train_step(dataclasses.replace(build_batch(step=2), version_after=1)).version == 1


def test_a_step_that_was_trained_before_makes_its_version_though_it_is_not_finite_now(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model_folder, max_nonfinite_steps=2)
    before = weights(trainer)
    batch = build_batch(step=1, advantages=[math.nan, 1, 1, 1])
    result = trainer.train_step(dataclasses.replace(batch, version_after=1))
    assert (result.step, result.version, result.skipped) == (1, 1, NOT_FINITE)
    assert "version 1 has the weights of version 0" in caplog.text
    for name, tensor in weights(trainer).items():
        assert torch.equal(before[name], tensor)
    result = trainer.train_step(build_batch(step=2, version=1))
    assert (result.version, result.skipped) == (2, None)


def test_a_step_cannot_end_as_it_did_where_the_one_before_did_not(model_folder: Path) -> None:
    with pytest.raises(TrainingError, match="ended with version 3 before, and now begins with version 0"):
        make_trainer(model_folder).train_step(dataclasses.replace(build_batch(), version_after=3))


def test_staleness_is_asserted(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, max_staleness=1)
    for step in (1, 2):
        trainer.train_step(build_batch(step=step, version=step - 1))
    with pytest.raises(TrainingError, match="2 versions old; max_staleness is 1"):
        trainer.train_step(build_batch(step=3, version=0))
    with pytest.raises(TrainingError, match="before the trainer reached it"):
        trainer.train_step(build_batch(step=3, version=3))


def test_a_batch_of_another_step_is_refused(model_folder: Path) -> None:
    with pytest.raises(TrainingError, match="was sent the batch of step 2"):
        make_trainer(model_folder).train_step(build_batch(step=2))


def test_no_correction_warns_and_ignores_the_generators_logprobs(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(model_folder, loss=ClippedRatioSettings(correction="none").model_dump())
    assert "biased" in caplog.text
    other = make_trainer(model_folder, loss={"correction": "none"})
    batch = build_batch()
    shifted = dataclasses.replace(batch, logprobs=batch.logprobs - batch.loss_mask.astype(np.float32))
    left, right = trainer.train_step(batch).metrics, other.train_step(shifted).metrics
    assert left["training/grad_norm"] == right["training/grad_norm"]


def test_warmup_and_decay_reach_the_optimizer(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, learning_rate=1.0, warmup_steps=2, decay="linear", decay_end=0.5, max_steps=4)
    rates = [trainer.train_step(build_batch(step=step)).metrics["training/learning_rate"] for step in (1, 2, 3, 4)]
    assert rates == [0.5, 1.0, 0.75, 0.5]

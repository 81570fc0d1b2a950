"""Losses in the trainer: each built-in one, one's own, rejected tokens, and the default one the general way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tailrace.errors import TrainingError
from tailrace.records import NOTHING_TRAINABLE
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.training.losses import LossTokens
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.losses.reference_kl import REFERENCE_LOGPROBS
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.trainer import StepResult
from tests.training.losses.support import BUILT_IN
from tests.training.test_trainer import make_trainer, trainer_logprobs, weights
from tests.training.tiny import build_batch

EFFECTIVE = "training/effective_sample_share"
DEFAULT = ClippedRatio(ClippedRatioSettings())


def clipped_ratio(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The default loss as a plain function, so that nobody knows that it is pointwise."""
    return DEFAULT(logprobs, entropy, tokens)


def odd_tokens_only(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    return DEFAULT(logprobs, entropy, tokens)[0], tokens.targets % 2 == 1


def nothing(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    return -logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


def better_rows_only(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Has no gradient for a row of which no token did well."""
    better = tokens.advantages > 0
    return (-tokens.advantages * logprobs if better.any() else torch.zeros_like(logprobs)), better


def zero_without_better(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """The same losses, and keeps all tokens."""
    better = tokens.advantages > 0
    losses = -tokens.advantages * logprobs * better if better.any() else torch.zeros_like(logprobs)
    return losses, torch.ones_like(better)


def near_the_reference(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Rejects what the policy made likelier than the reference finds it."""
    return DEFAULT(logprobs, entropy, tokens)[0], logprobs.detach() <= tokens.columns[REFERENCE_LOGPROBS] + 1e-3


def sequence_ratio(logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """A toy of GSPO (arXiv:2507.18071, eq. 7), unclipped, with a bonus for entropy."""
    lengths = tokens.sample_offsets.diff().clamp(min=1)
    ratio = tokens.spread((tokens.sum_by_sample(logprobs - tokens.logprobs) / lengths).exp())
    return -ratio * tokens.advantages - 0.01 * entropy, torch.ones_like(ratio, dtype=torch.bool)


class Telling:
    """The default loss, which tells of much by names that other figures have, too."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        return clipped_ratio(logprobs, entropy, tokens)

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> dict[str, Tensor]:
        names = ("tokens", "loss", "rejected", "training/kl", "training/drift", "far/off", "training/clip_share")
        return {name: torch.full_like(logprobs, 7.0) for name in names}


class TellingLess(Telling):
    """Of each row something else."""

    def token_metrics(self, logprobs: Tensor, tokens: LossTokens) -> dict[str, Tensor]:
        return {f"from {float(tokens.advantages[0]):g}": logprobs}


def step(model_folder: Path, loss: str | None, **batch: object) -> tuple[StepResult, dict[str, Tensor]]:
    settings = {} if loss is None else {"loss": {"name": f"{__name__}:{loss}"}}
    trainer = make_trainer(model_folder, **settings)
    result = trainer.train_step(build_batch(**batch))  # type: ignore[arg-type]
    return result, weights(trainer)


def train(model_folder: Path, rows: tuple[int, ...] = (2, 2), **loss: object) -> dict[str, float]:
    """The metrics of a step with this loss; all of them are in the table."""
    required = {"length": 20} if loss.get("name") == "dr_grpo" else {}
    steps = {"steps_per_batch": 2} if loss.get("name") == "decoupled_ppo" else {}
    trainer = make_trainer(model_folder, loss=loss | required, **steps)
    result = trainer.train_step(build_batch(rows=rows))
    assert (result.version, result.skipped) == (1, None)
    accumulator = MetricsAccumulator()
    for name, value in result.metrics.items():
        accumulator.add(name, value)
    return result.metrics


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_loss_takes_a_step_that_does_not_depend_on_rows(model_folder: Path, name: str) -> None:
    one, many = (train(model_folder, rows, name=name) for rows in ((4,), (1, 2, 1)))
    for metric in ("training/loss", "training/grad_norm", *(() if name == "selected_cross_entropy" else (EFFECTIVE,))):
        assert one[metric] == pytest.approx(many[metric], rel=1e-4)
    assert name == "selected_cross_entropy" or 0 < one[EFFECTIVE] < 1
    assert ("training/rejected_share" in one) == (name in {"ipo", "dppo", "decoupled_ppo", "selected_cross_entropy"})


def test_masks_and_a_bonus_are_reported_by_reason(model_folder: Path) -> None:
    masks = [{"name": "icepop", "low": 0.5, "high": 2.0}, {"name": "off_policy_sequence", "threshold": 1e-6}]
    plain, masked = train(model_folder, name="cispo"), train(model_folder, name="cispo", masks=masks)
    by_reason = {name: masked[f"training/rejected_share/{name}"] for name in ("icepop", "off_policy_sequence")}
    assert max(by_reason.values()) <= masked["training/rejected_share"] <= sum(by_reason.values())
    assert by_reason["icepop"] > 0
    assert masked["training/effective_sample_share"] < plain["training/effective_sample_share"]
    bonus = train(model_folder, name="cispo", entropy=0.01)
    assert bonus["training/loss"] == pytest.approx(plain["training/loss"] - 0.01 * plain["training/entropy"], rel=1e-4)


def test_equal_weights_have_the_full_sample_size(model_folder: Path) -> None:
    trainer = make_trainer(model_folder)
    metrics = trainer.train_step(trainer_logprobs(trainer, build_batch())).metrics
    assert metrics["training/effective_sample_share"] == pytest.approx(1, abs=1e-6)
    assert metrics["training/effective_sample_share"] <= 1


def test_the_general_way_trains_as_the_short_one_does(model_folder: Path) -> None:
    (short, left), (general, right) = (step(model_folder, name) for name in (None, "clipped_ratio"))
    for name in ("training/loss", "training/grad_norm", "training/kl", "training/entropy", "training/ratio_max"):
        assert general.metrics[name] == pytest.approx(short.metrics[name], rel=1e-5)
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=0, atol=1e-4)  # AdamW enlarges gradients that are almost 0


def test_rejected_tokens_leave_what_a_batch_without_them_would_teach(model_folder: Path) -> None:
    rejecting, without = (
        make_trainer(model_folder, loss={"name": f"{__name__}:odd_tokens_only"}),
        make_trainer(model_folder),
    )
    batch = build_batch()
    mask = batch.loss_mask & (batch.token_ids % 2 == 1)
    summary = msgspec.structs.replace(batch.summary, loss_tokens=int(mask.sum()))
    found = rejecting.train_step(batch).metrics
    expected = without.train_step(dataclasses.replace(batch, loss_mask=mask, summary=summary)).metrics
    assert found["training/rejected_share"] == pytest.approx(1 - mask.sum() / batch.loss_mask.sum())
    assert "training/rejected_share" not in expected
    for name in ("training/loss", "training/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    for name, tensor in weights(without).items():
        torch.testing.assert_close(weights(rejecting)[name], tensor, rtol=0, atol=1e-4)
    accumulator = MetricsAccumulator()
    for name, value in found.items():
        accumulator.add(name, value)  # refuses what is not in the table


def test_a_loss_that_keeps_nothing_changes_no_weight(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, loss={"name": f"{__name__}:nothing"})
    before = weights(trainer)
    result = trainer.train_step(build_batch())
    assert (result.version, result.skipped) == (0, NOTHING_TRAINABLE)
    assert result.metrics["training/rejected_share"] == 1
    for name, tensor in weights(trainer).items():
        assert torch.equal(before[name], tensor)


@pytest.mark.parametrize("added", [{}, {"reference_kl": {"coefficient": 0.1}}])
@pytest.mark.parametrize(("loss", "rejects"), [("better_rows_only", True), ("zero_without_better", False)])
def test_a_row_of_which_nothing_is_kept_or_whose_losses_are_0_needs_no_gradient(
    model_folder: Path, loss: str, rejects: bool, added: dict[str, object]
) -> None:
    found = []
    for rows in ((4,), (1, 1, 1, 1)):
        trainer = make_trainer(model_folder, loss={"name": f"{__name__}:{loss}", **added})
        found.append(trainer.train_step(build_batch(rows=rows)).metrics)
    one, many = found
    assert (0 < one.get("training/rejected_share", 0) < 1) == rejects
    for name in ("training/loss", "training/grad_norm"):
        assert one[name] == pytest.approx(many[name], rel=1e-4)


@pytest.mark.parametrize("denominator", ["kept_tokens", "planned_tokens"])
def test_a_loss_reads_what_the_reference_says_whatever_it_is_divided_by(model_folder: Path, denominator: str) -> None:
    chosen = {"name": f"{__name__}:near_the_reference", "denominator": denominator}
    found = []
    for rows in ((4,), (1, 2, 1)):
        trainer = make_trainer(model_folder, learning_rate=1e-2, loss={**chosen, "reference_kl": {"coefficient": 0}})
        first = trainer.train_step(build_batch(rows=rows)).metrics
        assert "training/rejected_share" not in first
        found.append(trainer.train_step(build_batch(step=2, rows=rows)).metrics)
    one, many = found
    assert 0 < one["training/rejected_share"] < 1
    assert one["training/loss"] == pytest.approx(many["training/loss"], rel=1e-4)


def test_a_loss_over_whole_sequences_does_not_depend_on_how_they_lie_in_rows(model_folder: Path) -> None:
    one, many = (step(model_folder, "sequence_ratio", rows=rows)[0].metrics for rows in ((4,), (1, 2, 1)))
    for name in ("training/loss", "training/grad_norm"):
        assert one[name] == pytest.approx(many[name], rel=1e-4)
    other = step(model_folder, None)[0].metrics
    assert one["training/grad_norm"] != pytest.approx(other["training/grad_norm"], rel=1e-3)
    assert "training/clip_share" not in one


def test_what_a_loss_of_ones_own_tells_takes_no_other_figures_place(model_folder: Path) -> None:
    """By whatever names it tells of it."""
    plain, told = (train(model_folder, name=f"{__name__}:{name}") for name in ("clipped_ratio", "Telling"))
    own = {name: told.pop(name) for name in sorted(told) if name.startswith("own_loss/")}
    assert own == {f"own_loss/{name}": 7 for name in ("drift", "far/off", "kl", "loss", "rejected", "tokens")}
    assert told.pop("training/clip_share") == 7
    assert told.keys() == plain.keys()
    for name in ("training/loss", "training/grad_norm", "training/kl"):
        assert told[name] == plain[name]


def test_a_loss_that_does_not_tell_the_same_of_every_row_is_refused(model_folder: Path) -> None:
    with pytest.raises(TrainingError, match=r"does not tell of others \(own_loss/from 1, own_loss/from 2\)"):
        step(model_folder, "TellingLess", advantages=[1, 1, 2, 2])

"""Several optimizer steps on each batch are one version, of weights that a plain loop over them would come to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrace.records import Batch, RolloutId, SampleOrigins
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.training.losses import LossTokens
from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.support.exported_tokens import read_tokens
from tests.training.rank_processes import run_ranks
from tests.training.reports.test_token_export import train
from tests.training.test_trainer import make_trainer, trainer_logprobs, weights
from tests.training.tiny import build_batch, demonstrating, rows_of

DECOUPLED = {"loss": {"name": "decoupled_ppo"}, "learning_rate": 3e-3}


def log_policy(logprobs, entropy, tokens: LossTokens):  # type: ignore[no-untyped-def]
    """Without ratios, so that a second step does not ask where the first one began."""
    return -tokens.advantages * logprobs, torch.ones_like(logprobs, dtype=torch.bool)


def explodes_at_the_second_step(logprobs, entropy, tokens: LossTokens):  # type: ignore[no-untyped-def]
    losses, kept = log_policy(logprobs, entropy, tokens)
    return losses * (torch.inf if "proximal_logprobs" in tokens.columns else 1.0), kept


def test_they_are_one_version_of_the_weights_that_as_many_batches_would_make(model_folder: Path) -> None:
    loss = {"loss": {"name": f"{__name__}:log_policy"}}
    several = make_trainer(model_folder, steps_per_batch=3, **loss)
    result = several.train_step(build_batch())
    assert (result.step, result.version) == (1, 1)
    plain = make_trainer(model_folder, **loss)
    metrics = [plain.train_step(build_batch(step=step, version=0)).metrics for step in (1, 2, 3)]
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(several)[name], tensor, rtol=0, atol=0)
    assert result.metrics["training/optimizer_steps"] == 3
    for name in ("loss", "grad_norm", "ratio_max"):
        assert result.metrics[f"training/{name}"] == metrics[0][f"training/{name}"]
        assert result.metrics[f"training/last_{name}"] == metrics[2][f"training/{name}"]
    accumulator = MetricsAccumulator()
    for name, value in result.metrics.items():
        accumulator.add(name, value)  # each is in the table
    assert several.train_step(build_batch(step=2, version=1)).version == 2


def test_components_are_added_in_each_of_them(model_folder: Path) -> None:
    """Of demonstrations, and from a reference that stays where the first step began."""
    given = {
        "loss": {
            "name": f"{__name__}:log_policy",
            "cross_entropy": {"coefficient": 0.5},
            "reference_kl": {"coefficient": 0.7, "estimator": "k3"},
        },
        "learning_rate": 3e-3,
    }
    batch = demonstrating(build_batch(), (1, 2))
    several, plain = make_trainer(model_folder, steps_per_batch=3, **given), make_trainer(model_folder, **given)
    result = several.train_step(batch)
    metrics = []
    for step in (1, 2, 3):
        summary = msgspec.structs.replace(batch.summary, step=step)
        metrics.append(plain.train_step(dataclasses.replace(batch, summary=summary)).metrics)
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(several)[name], tensor), name
    assert metrics[0]["training/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[2]["training/reference_kl"] > 1e-4
    for name in ("reference_kl", "cross_entropy", "reward_loss"):
        assert result.metrics[f"training/{name}"] == metrics[0][f"training/{name}"]
    assert result.metrics["training/last_loss"] == metrics[2]["training/loss"]


def test_decoupled_ppo_sees_the_policy_before_them_at_sampled_tokens_alone(model_folder: Path) -> None:
    """Between demonstrations, some of which share a row with it and some of which have one to themselves."""
    batch = demonstrating(build_batch(lengths=(9, 14, 5, 12, 7), rows=(2, 2, 1)), (1, 4))
    trainer = make_trainer(
        model_folder, steps_per_batch=2, loss={"name": "decoupled_ppo", "cross_entropy": {}}, learning_rate=1e-6
    )
    metrics = trainer.train_step(trainer_logprobs(trainer, batch)).metrics
    assert metrics["training/optimizer_steps"] == 2
    assert (metrics["training/last_clip_share"], metrics["training/last_rejected_share"]) == (0, 0)


def test_the_first_step_clips_nothing_and_the_last_clips_against_the_policy_before_it(model_folder: Path) -> None:
    trainer = make_trainer(model_folder, steps_per_batch=8, **DECOUPLED | {"learning_rate": 3e-2})
    batch = build_batch()
    metrics = trainer.train_step(trainer_logprobs(trainer, batch)).metrics
    assert metrics["training/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["training/clip_share"] == 0
    assert metrics["training/last_clip_share"] > 0.1
    assert metrics["training/last_ratio_max"] > 1.2


def test_what_is_clipped_is_not_what_is_stale(model_folder: Path) -> None:
    """The generator was a policy far from the trainer's: a ratio to it is clipped, one to the proximal one is not."""
    stale = build_batch(seed=3)
    decoupled = make_trainer(model_folder, steps_per_batch=2, **DECOUPLED | {"learning_rate": 1e-6})
    coupled = make_trainer(model_folder, steps_per_batch=2, loss={"name": "dapo"}, learning_rate=1e-6)
    assert decoupled.train_step(stale).metrics["training/last_clip_share"] == 0
    assert coupled.train_step(stale).metrics["training/last_clip_share"] > 0.2


def test_a_later_step_that_is_not_finite_is_not_taken_and_those_before_it_stand(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exploding = make_trainer(model_folder, steps_per_batch=3, loss={"name": f"{__name__}:explodes_at_the_second_step"})
    result = exploding.train_step(build_batch())
    assert (result.version, result.skipped, result.metrics["training/optimizer_steps"]) == (1, None, 1)
    assert "optimizer step 2 was not taken: not finite are 2 rows of rank 0" in caplog.text
    once = make_trainer(model_folder, loss={"name": f"{__name__}:log_policy"})
    once.train_step(build_batch())
    for name, tensor in weights(once).items():
        assert torch.equal(weights(exploding)[name], tensor)


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(model_folder: Path, tmp_path: Path) -> None:
    straight, stopped = (make_trainer(model_folder, steps_per_batch=2, **DECOUPLED) for _ in range(2))
    batches = [build_batch(step=step, version=step - 1, seed=step) for step in (1, 2, 3)]
    for batch in batches:
        straight.train_step(batch)
    stopped.train_step(batches[0])
    resumed = make_trainer(model_folder, steps_per_batch=2, **DECOUPLED)
    resumed.restore(stopped.save_checkpoint(tmp_path))
    assert (resumed.step, resumed.version) == (1, 1)
    for batch in batches[1:]:
        resumed.train_step(batch)
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_exported_tokens_are_those_of_the_first_step(model_folder: Path, tmp_path: Path) -> None:
    origins = SampleOrigins.of([(RolloutId(str(index)), 0, "names") for index in range(4)])
    batch = dataclasses.replace(build_batch(), origins=origins)
    (metrics,) = train(tmp_path, model_folder, "jsonl", batch, steps_per_batch=2)
    (path,) = tmp_path.iterdir()
    tokens = read_tokens(path)
    assert len(tokens) == batch.summary.loss_tokens
    assert np.mean([one["ratio"] for one in tokens]) == pytest.approx(metrics["training/ratio_mean"], rel=1e-5)


def ppo(model: PreTrainedModel, mini_batches: Sequence[Batch], chosen: TrainerSettings) -> dict[str, torch.Tensor]:
    """One step of PPO on each, judged against the policy that sampled all of them; sample by sample, in float64."""
    betas = (chosen.beta1, chosen.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=chosen.learning_rate, betas=betas, eps=chosen.epsilon, weight_decay=0.0
    )
    for batch in mini_batches:
        terms = []
        for sample, (start, end) in enumerate(itertools.pairwise(batch.sample_offsets.tolist())):
            ids = torch.from_numpy(batch.token_ids[start:end].astype(np.int64))
            scores = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            differences = scores - torch.from_numpy(batch.logprobs[start + 1 : end])
            ratios = differences[torch.from_numpy(batch.loss_mask[start + 1 : end])].exp()
            advantage = float(batch.advantages[sample])
            terms.append(-torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.28) * advantage))
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("given", [{}, {"max_grad_norm": 0.3, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}], ids=str)
def test_batches_one_after_the_other_are_mini_batches_of_ppo(model_folder: Path, given: dict[str, float]) -> None:
    """Of other sizes, and all sampled before the first step: later ones are as stale as their place says."""
    trainer = make_trainer(model_folder, learning_rate=1e-2, loss={"name": "dapo"}, **given)
    before = weights(trainer)
    shapes = [((9, 14, 5, 12), (2, 2)), ((7, 30), (2,)), ((6, 11, 8), (1, 2))]
    batches = [
        trainer_logprobs(trainer, build_batch(lengths=lengths, rows=rows, step=step, seed=step))
        for step, (lengths, rows) in enumerate(shapes, 1)
    ]
    results = [trainer.train_step(batch) for batch in batches]
    assert [result.version for result in results] == [1, 2, 3]
    assert results[-1].metrics["training/clip_share"] > 0.1
    expected = ppo(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64), batches, trainer.settings)
    for name, weight in weights(trainer).items():
        moved = expected[name] - before[name]
        assert float((weight - expected[name]).norm()) <= 1e-2 * float(moved.norm()), name


def several_steps(ranks: Ranks, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    components = {"reference_kl": {"coefficient": 0.2}, "cross_entropy": {"coefficient": 0.5}}
    loss = {"name": "decoupled_ppo", **components}
    settings = TrainerSettings.model_validate(
        {"loss": loss, "learning_rate": 3e-3, "steps_per_batch": 3, "native_kernels": False}
    )
    trainer = Trainer(settings, model_name=folder, max_steps=9, max_staleness=4, ranks=ranks)
    metrics = [trainer.train_step(_share(step, ranks)).metrics for step in (1, 2)][-1]
    return dict(trainer.snapshot().wait()), metrics


def _share(step: int, ranks: Ranks) -> Batch:
    batch = build_batch(
        lengths=(9, 14, 5, 12, 30, 4), rows=(2, 1, 3), step=step, version=step - 1, seed=step, supports=True
    )
    return rows_of(demonstrating(batch, (2, 4)), ranks.rank, ranks.size)


@pytest.mark.xdist_group("trainer ranks")
def test_ranks_come_to_the_weights_of_one_process(model_folder: Path, tmp_path: Path) -> None:
    expected, metrics = several_steps(ALONE, str(model_folder))
    found = run_ranks(several_steps, 2, tmp_path, str(model_folder))
    for _, rank_metrics in found:
        for name in ("training/loss", "training/last_loss", "training/optimizer_steps", "training/last_clip_share"):
            assert rank_metrics[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[0][0][name], tensor, rtol=0, atol=2e-4)

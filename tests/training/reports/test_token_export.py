"""Exported tokens are those that a step trained on, with the figures that it trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tailrace.records import Batch, RolloutId, SampleOrigins
from tailrace.reporting.tokens.files import is_beside_rollouts
from tailrace.training.reports.token_export import TokenExport
from tailrace.training.settings.losses import ClippedRatioSettings
from tailrace.training.settings.trainer import ExportFormat, TrainerSettings
from tailrace.training.trainer import Trainer
from tests.support.exported_tokens import read_tokens
from tests.training.tiny import VOCABULARY, build_batch

ORIGINS = SampleOrigins.of(
    [
        (RolloutId("a"), 0, "names"),
        (RolloutId("a"), 1, "names"),
        (RolloutId("b"), 0, "sums"),
        (RolloutId("c"), 0, "names"),
    ]
)


@pytest.fixture(params=get_args(ExportFormat))
def form(request: pytest.FixtureRequest) -> ExportFormat:
    return request.param


def train(
    folder: Path, model_folder: Path, form: ExportFormat, *batches: Batch, **given: object
) -> list[dict[str, float]]:
    """Metrics of each step, once its tokens are written."""
    tokenizer = Tokenizer(WordLevel({f"word{token_id}": token_id for token_id in range(VOCABULARY)}, "word0"))
    export = TokenExport(folder, tokenizer, form)
    settings = TrainerSettings.model_validate({"learning_rate": 1e-3, **given})
    trainer = Trainer(settings, model_name=str(model_folder), max_steps=9, max_staleness=4, export=export)
    metrics = [trainer.train_step(batch).metrics for batch in batches]
    export.close()
    return metrics


def test_every_trained_token_is_there_once_with_its_place_and_figures(
    tmp_path: Path, model_folder: Path, form: ExportFormat
) -> None:
    batch = dataclasses.replace(build_batch(supports=True), origins=ORIGINS)
    (metrics,) = train(tmp_path, model_folder, form, batch)
    (path,) = tmp_path.iterdir()
    assert path.name == f"step_000001_rank_0.{form}"
    tokens, positions = read_tokens(path), np.flatnonzero(batch.loss_mask)
    samples = [(name, branch) for name, branch in zip(ORIGINS.rollout_ids, ORIGINS.branches, strict=True)]
    starts = [int(batch.sample_offsets[samples.index((one["rollout_id"], one["branch"]))]) for one in tokens]
    assert [start + one["position"] for start, one in zip(starts, tokens, strict=True)] == positions.tolist()
    assert [one["token_id"] for one in tokens] == batch.token_ids[positions].tolist()
    assert [one["support_size"] for one in tokens] == batch.support_counts[positions].tolist()
    assert [one["text"] for one in tokens] == [f"word{one['token_id']}" for one in tokens]
    assert {one["rollout_id"]: one["environment"] for one in tokens} == {"a": "names", "b": "sums", "c": "names"}
    np.testing.assert_allclose([one["generator_logprob"] for one in tokens], batch.logprobs[positions], rtol=1e-6)
    differences = [abs(one["trainer_logprob"] - one["generator_logprob"]) for one in tokens]
    assert np.mean(differences) == pytest.approx(metrics["training/logprob_difference"], rel=1e-5)
    assert np.mean([one["ratio"] for one in tokens]) == pytest.approx(metrics["training/ratio_mean"], rel=1e-5)
    assert np.mean([one["loss"] for one in tokens]) == pytest.approx(metrics["training/loss"], rel=1e-5)
    assert np.mean([one["entropy"] for one in tokens]) == pytest.approx(metrics["training/entropy"], rel=1e-5)
    assert all(one["kept"] for one in tokens)
    weights = np.minimum([one["ratio"] for one in tokens], ClippedRatioSettings().truncation)
    effective = weights.sum() ** 2 / (len(tokens) * np.square(weights).sum())
    assert metrics["training/effective_sample_share"] == pytest.approx(effective, rel=1e-5)
    for environment in ("names", "sums"):
        own = [one for one in tokens if one["environment"] == environment]
        assert metrics[f"training/{environment}/loss_tokens"] == len(own) > 0
        for metric, column in (("loss", "loss"), ("entropy", "entropy"), ("ratio_mean", "ratio")):
            mean = np.mean([one[column] for one in own])
            assert metrics[f"training/{environment}/{metric}"] == pytest.approx(mean, rel=1e-5), metric


DIVISORS: dict[str, Callable[[list[dict[str, Any]]], float]] = {
    "kept_tokens": lambda tokens: max(1, sum(one["kept"] for one in tokens)),
    "planned_tokens": len,
    "sequences": lambda tokens: len({(one["rollout_id"], one["branch"]) for one in tokens}),
    "sequences_times_length": lambda tokens: 32 * len({(one["rollout_id"], one["branch"]) for one in tokens}),
}
MASKED = {"masks": [{"name": "icepop", "low": 0.5, "high": 2.0}]}


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        ({"name": "clipped_ratio", **MASKED}, "kept_tokens"),
        ({"name": "ipo", "threshold": 0.01}, "planned_tokens"),
        ({"name": "grpo", **MASKED}, "sequences"),
        ({"name": "gspo"}, "sequences"),
        ({"name": "sapo"}, "sequences"),
        ({"name": "dr_grpo", "length": 32}, "sequences_times_length"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_tokens_sum_up_to_the_loss_of_the_batch_and_of_each_environment(
    tmp_path: Path, model_folder: Path, loss: dict[str, Any], divisor: str
) -> None:
    batch = dataclasses.replace(build_batch(), origins=ORIGINS)
    (metrics,) = train(tmp_path, model_folder, "jsonl", batch, loss=loss)
    (path,) = tmp_path.iterdir()
    tokens: list[dict[str, Any]] = read_tokens(path)
    assert any(one["kept"] for one in tokens)
    assert all(one["kept"] for one in tokens) == (loss["name"] in ("gspo", "sapo", "dr_grpo"))
    for name in ("", "names/", "sums/"):
        own = [one for one in tokens if name in ("", f"{one['environment']}/")]
        expected = sum(one["loss"] for one in own) / DIVISORS[divisor](own)
        assert metrics[f"training/{name}loss"] == pytest.approx(expected, rel=1e-5), name
        assert metrics[f"training/{name}ratio_max"] == pytest.approx(max(one["ratio"] for one in own), rel=1e-5)
        if reason := "icepop" if "masks" in loss else {"ipo": "ipo"}.get(loss["name"]):
            rejected = 1 - sum(one["kept"] for one in own) / len(own)
            assert metrics[f"training/{name}rejected_share/{reason}"] == pytest.approx(rejected, abs=1e-9), name


def test_the_age_of_tokens_is_told_of_each_environment(tmp_path: Path, model_folder: Path) -> None:
    batches = [dataclasses.replace(build_batch(step=step), origins=ORIGINS) for step in (1, 2, 3)]
    fresh = np.arange(len(batches[2].token_ids)) % 2 == 0
    versions = np.where(batches[2].loss_mask & fresh, 2, batches[2].policy_versions).astype(np.int32)
    batches[2] = dataclasses.replace(batches[2], policy_versions=versions)
    first, second, third = train(tmp_path, model_folder, "jsonl", *batches)
    tokens: list[dict[str, Any]] = read_tokens(tmp_path / "step_000003_rank_0.jsonl")
    for name in ("names", "sums"):
        assert (first[f"training/{name}/staleness"], second[f"training/{name}/staleness"]) == (0, 1)
        ages = [2 - one["policy_version"] for one in tokens if one["environment"] == name]
        assert third[f"training/{name}/staleness"] == pytest.approx(np.mean(ages))
        assert third[f"training/{name}/staleness_max"] == max(ages)


def test_each_step_has_a_file_of_its_own(tmp_path: Path, model_folder: Path, form: ExportFormat) -> None:
    batches = [dataclasses.replace(build_batch(step=step, version=step - 1), origins=ORIGINS) for step in (1, 2, 3)]
    train(tmp_path, model_folder, form, *batches)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{n:06d}_rank_0.{form}" for n in (1, 2, 3)]
    versions = [read_tokens(path)[0]["policy_version"] for path in sorted(tmp_path.iterdir())]
    assert versions == [0, 1, 2]


def test_a_folder_that_cannot_be_written_ends_nothing(
    tmp_path: Path, model_folder: Path, form: ExportFormat, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokens").write_text("in the way")
    (metrics,) = train(tmp_path / "tokens", model_folder, form, dataclasses.replace(build_batch(), origins=ORIGINS))
    assert metrics["training/loss"] != 0
    assert "the tokens of step 1 could not be exported" in caplog.text


@pytest.mark.parametrize("beside_rollouts", [False, True])
def test_a_file_says_whether_it_goes_with_those_of_rollouts(
    tmp_path: Path, model_folder: Path, form: ExportFormat, beside_rollouts: bool
) -> None:
    tokenizer = Tokenizer(WordLevel({f"word{token_id}": token_id for token_id in range(VOCABULARY)}, "word0"))
    export = TokenExport(tmp_path, tokenizer, form, beside_rollouts=beside_rollouts)
    trainer = Trainer(
        TrainerSettings(learning_rate=1e-3), model_name=str(model_folder), max_steps=9, max_staleness=9, export=export
    )
    trainer.train_step(build_batch())
    export.close()
    (path,) = tmp_path.iterdir()
    assert is_beside_rollouts(path) is (beside_rollouts and form == "parquet")


def test_steps_that_are_left_out_have_no_file(tmp_path: Path, model_folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"word{token_id}": token_id for token_id in range(VOCABULARY)}, "word0"))
    export = TokenExport(tmp_path, tokenizer, "jsonl", every_steps=2)
    trainer = Trainer(
        TrainerSettings(learning_rate=1e-3), model_name=str(model_folder), max_steps=9, max_staleness=9, export=export
    )
    for step in (1, 2, 3):
        trainer.train_step(build_batch(step=step))
    export.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002_rank_0.jsonl"]

"""Rows that made a step not finite are kept, found by what they are, and read back by one line."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.errors import Diverged
from tailrace.records import CROSS_ENTROPY, RolloutId, SampleOrigins
from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.reports.nonfinite_rows import KEPT_FILES, MAX_ROWS
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import NOT_FINITE, Trainer
from tests.training.rank_processes import run_ranks
from tests.training.tiny import build_batch, demonstrating, rows_of

STEEP = {"name": "tests.support.losses:steep"}
ORIGINS = SampleOrigins.of([(RolloutId(f"task#{index}"), index % 2, "sums") for index in range(4)])
BAD = [1.0, 1.0, 1.0, math.nan]


def make_trainer(model_folder: Path, folder: Path | None, ranks: Ranks = ALONE, **settings: object) -> Trainer:
    return Trainer(
        TrainerSettings.model_validate({"learning_rate": 1e-3, **settings}),
        model_name=str(model_folder),
        max_steps=100,
        max_staleness=4,
        nonfinite_folder=folder,
        ranks=ranks,
    )


def read(path: Path) -> dict[str, Any]:
    return dict(np.load(path))


def test_the_row_that_is_not_finite_is_kept_whole_and_named(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model_folder, tmp_path / "nonfinite", max_nonfinite_steps=2)
    batch = dataclasses.replace(build_batch(advantages=BAD, mixed=[27]), origins=ORIGINS)
    assert trainer.train_step(batch).skipped == NOT_FINITE
    (path,) = (tmp_path / "nonfinite").iterdir()
    assert path.name == "step_000001_rank_0.npz"
    assert f"not finite are 1 row of rank 0 (kept in {path})" in caplog.text
    kept, row = read(path), batch.row(1)
    assert {len(column) for column in kept.values()} == {len(row.token_ids)}
    assert set(kept["row"]) == {1}
    assert set(kept["not_finite"]) == {"loss"}
    for name, column in {
        "token_id": row.token_ids, "loss_mask": row.loss_mask, "mixed_cache": row.mixed_cache,
        "advantage": row.advantages, "generator_logprob": row.logprobs, "policy_version": row.policy_versions,
    }.items():  # fmt: skip
        np.testing.assert_array_equal(kept[name], column, err_msg=name)
    first, second = row.sample_lengths
    assert kept["rollout_id"].tolist() == ["task#2"] * first + ["task#3"] * second
    assert kept["branch"].tolist() == [0] * first + [1] * second
    assert kept["position"].tolist() == [*range(first), *range(second)]
    assert set(kept["environment"]) == {"sums"}
    assert np.isfinite(kept["trainer_logprob"]).tolist() == row.loss_mask.tolist()
    assert np.isfinite(kept["loss"]).tolist() == [
        bears and place < first for place, bears in enumerate(row.loss_mask.tolist())
    ]
    with pytest.raises(Diverged, match=r"1 row of rank 0 \(kept in .*step_000002_rank_0.npz\)"):
        trainer.train_step(build_batch(step=2, advantages=BAD))


def test_a_row_is_found_by_what_components_add_to_its_loss(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A demonstration of a row in which other samples bear the loss of rewards, and one of a row that has no others."""
    trainer = make_trainer(model_folder, tmp_path, loss={"name": "clipped_ratio", "cross_entropy": {}})
    batch = demonstrating(build_batch(lengths=(9, 14, 5, 12), rows=(1, 2, 1)), (1, 3))
    weights = batch.columns[CROSS_ENTROPY].copy()
    weights[[batch.sample_offsets[2] - 1, -1]] = np.inf
    assert trainer.train_step(dataclasses.replace(batch, columns={CROSS_ENTROPY: weights})).skipped == NOT_FINITE
    assert "not finite are 2 rows of rank 0" in caplog.text
    kept = read(tmp_path / "step_000001_rank_0.npz")
    assert (set(kept["row"]), set(kept["not_finite"])) == ({1, 2}, {"components"})
    assert np.isfinite(kept["loss"]).tolist() == kept["loss_mask"].tolist()


def test_a_row_whose_loss_is_finite_is_found_by_its_gradient(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model_folder, tmp_path, loss=STEEP)
    before = {name: weight.clone() for name, weight in trainer.snapshot().wait().items()}
    batch = build_batch(rows=(1, 2, 1), advantages=[1.0, 1.0, 99.0, 1.0])
    assert trainer.train_step(batch).skipped == NOT_FINITE
    kept = read(tmp_path / "step_000001_rank_0.npz")
    assert set(kept["row"]) == {1}
    assert set(kept["not_finite"]) == {"gradient"}
    assert kept["token_id"].tolist() == batch.row(1).token_ids.tolist()
    assert all((before[name] == weight).all() for name, weight in trainer.snapshot().wait().items())
    assert trainer.train_step(build_batch(step=2)).version == 1


def test_rows_that_are_finite_by_themselves_are_not_blamed(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each gradient is finite, their norm is not."""
    trainer = make_trainer(model_folder, tmp_path, loss={"name": "tests.support.losses:enormous"})
    with caplog.at_level(logging.WARNING):
        assert trainer.train_step(build_batch(rows=(1, 1, 1, 1))).skipped == NOT_FINITE
    assert "every row is finite by itself" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_finite_steps_leave_nothing_and_files_are_bounded(tmp_path: Path, model_folder: Path) -> None:
    trainer = make_trainer(model_folder, tmp_path / "nonfinite", max_nonfinite_steps=10**6)
    trainer.train_step(build_batch(step=1))
    assert not (tmp_path / "nonfinite").exists()
    count = MAX_ROWS + 3
    for step in range(2, KEPT_FILES + 4):
        bad = build_batch(lengths=(6,) * count, rows=(1,) * count, step=step, advantages=[math.nan] * count)
        trainer.train_step(bad)
    names = sorted(path.name for path in (tmp_path / "nonfinite").iterdir())
    assert names == [f"step_{step:06d}_rank_0.npz" for step in range(4, KEPT_FILES + 4)]
    assert sorted(set(read(tmp_path / "nonfinite" / names[0])["row"].tolist())) == [*range(MAX_ROWS)]


def test_a_folder_that_cannot_be_written_ends_nothing(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    trainer = make_trainer(model_folder, tmp_path / "file")
    assert trainer.train_step(build_batch(advantages=BAD)).skipped == NOT_FINITE
    assert "could not be kept" in caplog.text
    assert "not finite are 1 row of rank 0" in caplog.text


LENGTHS, ROWS = (9, 14, 5, 12, 30, 4), (2, 1, 3)


def skip_on_ranks(ranks: Ranks, model_folder: Path, folder: Path) -> str:
    """A step that is finite, one whose gradient is infinite in rank 1's row, and then one with a loss of NaN."""
    trainer = make_trainer(model_folder, folder, ranks, loss=STEEP, max_nonfinite_steps=2)
    for step, bad in enumerate([1.0, 99.0, math.nan], 1):
        batch = build_batch(lengths=LENGTHS, rows=ROWS, step=step, advantages=[1, 1, 1, 1, bad, 1])
        try:
            trainer.train_step(rows_of(batch, ranks.rank, ranks.size))
        except Diverged as error:
            return str(error)
    return "did not diverge"


@pytest.mark.xdist_group("trainer ranks")
def test_every_rank_keeps_its_own_rows_and_all_name_them(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "nonfinite"
    told = run_ranks(skip_on_ranks, 2, tmp_path / "ranks", model_folder, folder)
    assert told[0] == told[1]
    assert f"1 row of rank 1 (kept in {folder / 'step_000003_rank_1.npz'})" in told[0]
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002_rank_1.npz", "step_000003_rank_1.npz"]
    kept = read(folder / "step_000002_rank_1.npz")
    assert (set(kept["row"]), set(kept["not_finite"])) == ({0}, {"gradient"})
    assert len(kept["token_id"]) == sum(LENGTHS[3:])

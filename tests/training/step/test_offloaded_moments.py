"""AdamW's moments on the host: the same bits as without, however they are cut, also across checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tailrace.training.ranks import ALONE, Ranks
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.step.offloaded_moments import OffloadedAdamW
from tailrace.training.trainer import Trainer
from tests.support.cuda_streams import run_at_once
from tests.training.rank_processes import run_ranks
from tests.training.tiny import build_batch, rows_of

LENGTHS, ROWS = (9, 14, 5, 12, 30, 4), (2, 1, 3)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run_at_once(monkeypatch.setattr)


def groups_of(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Weights of many sizes: more than a block, just one, less, none, and one that gets no gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 37), (128,), (3, 5), (0, 4), (7,)), ((200,), (1,))
    made = [
        [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in some] for some in shapes
    ]
    return [{"params": made[0], "weight_decay": 0.1}, {"params": made[1], "weight_decay": 0.0}]


def give_gradients(groups: list[dict[str, Any]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in groups:
        for weight in group["params"]:
            gradient = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.grad = None if weight.shape == (7,) and seed < 2 else gradient


@pytest.mark.parametrize("block_numbers", [64, 128, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_adamw_to_the_bit(dtype: torch.dtype, block_numbers: int) -> None:
    expected, found = groups_of(dtype), groups_of(dtype)
    plain = torch.optim.AdamW(expected, **OPTIONS, fused=True)
    offloaded = OffloadedAdamW(found, **OPTIONS, block_numbers=block_numbers)
    for seed in range(5):
        for groups, optimizer in ((expected, plain), (found, offloaded)):
            give_gradients(groups, seed)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + seed)
            optimizer.step()
    for one, other in zip(plain.param_groups, offloaded.param_groups, strict=True):
        for weight, same in zip(one["params"], other["params"], strict=True):
            assert torch.equal(weight, same)
            assert plain.state[weight].keys() == offloaded.state[same].keys()
            for kind, moment in plain.state[weight].items():
                assert torch.equal(moment, offloaded.state[same][kind]), kind


def make_trainer(model_folder: Path, *, offload: bool, ranks: Ranks = ALONE, **given: Any) -> Trainer:
    """On a CPU, where settings refuse it."""
    settings = TrainerSettings.model_validate({"learning_rate": 1e-3, "weight_decay": 0.1, **given})
    settings = settings.model_copy(update={"offload_optimizer": offload})
    return Trainer(settings, model_name=str(model_folder), max_steps=8, max_staleness=8, ranks=ranks)


def train(trainer: Trainer, steps: range, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    for step in steps:
        batch = build_batch(lengths=LENGTHS, rows=ROWS, step=step, seed=step)
        trainer.train_step(rows_of(batch, ranks.rank, ranks.size))
    return {name: weight.clone() for name, weight in trainer.snapshot().wait().items()}


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("given", [{}, {"lora": {"rank": 4}}, {"steps_per_batch": 2}], ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["begun with", "begun without"])
def test_a_run_goes_on_with_and_without_as_if_it_had_never_stopped(
    model_folder: Path, tmp_path: Path, given: dict[str, Any], before: bool
) -> None:
    straight = train(make_trainer(model_folder, offload=False, **given), range(1, 6))
    first = make_trainer(model_folder, offload=not before, **given)
    second = make_trainer(model_folder, offload=before, **given)
    train(first, range(1, 4))
    second.restore(first.save_checkpoint(tmp_path))
    require_equal(train(second, range(4, 6)), straight)


def train_on_ranks(ranks: Ranks, model_folder: Path, folder: Path, offload: bool, lora: dict[str, int]) -> Any:
    """Two steps, a checkpoint, and a third step of a trainer that goes on from it in the other way."""
    run_at_once()
    trainer = make_trainer(model_folder, offload=offload, ranks=ranks, lora=lora)
    two = train(trainer, range(1, 3), ranks)
    path = trainer.save_checkpoint(folder)
    other = make_trainer(model_folder, offload=not offload, ranks=ranks, lora=lora)
    other.restore(path)
    return two, train(other, range(3, 4), ranks), train(trainer, range(3, 4), ranks)


@pytest.mark.xdist_group("trainer ranks")
@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["all weights", "adapters"])
def test_ranks_keep_their_shares_on_the_host(model_folder: Path, tmp_path: Path, lora: dict[str, int]) -> None:
    folders = [tmp_path / "with", tmp_path / "without"]
    with_it, without = (
        run_ranks(train_on_ranks, 2, folder / "ranks", model_folder, folder, offload, lora)[0]
        for folder, offload in zip(folders, (True, False), strict=True)
    )
    for found, expected in zip(with_it, without, strict=True):
        require_equal(found, expected)
    alone = make_trainer(model_folder, offload=True, lora=lora)
    alone.restore(folders[0] / "step_000002")
    for name, weight in train(alone, range(3, 4)).items():
        torch.testing.assert_close(weight, with_it[2][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("given", "why"),
    [({}, "device = 'cpu' has them there"), ({"device": "cuda", "optimizer": "muon"}, "those of a whole matrix")],
)
def test_settings_under_which_it_means_nothing_are_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainerSettings.model_validate({"offload_optimizer": True, **given})


@pytest.mark.gpu
def test_a_gpu_takes_the_same_steps(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = []
    for offload in (False, True):
        trainer = make_trainer(model_folder, offload=offload, device="cuda")
        train(trainer, range(1, 3))
        trainer.restore(trainer.save_checkpoint(tmp_path / str(offload)))
        found.append(train(trainer, range(3, 5)))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-7, msg=name)

"""A checkpoint is whole or not there, and continuing from it is continuing."""

from __future__ import annotations

import errno
import json
import random
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tailrace.errors import CheckpointError
from tailrace.training.checkpoints.files import latest_checkpoint, put_back, verify_checkpoint
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.training.tiny import build_batch


def make_trainer(model_folder: Path, **settings: object) -> Trainer:
    defaults: dict[str, object] = {"learning_rate": 1e-3, "warmup_steps": 2, "decay": "cosine", "weight_decay": 0.1}
    return Trainer(
        TrainerSettings.model_validate(defaults | settings), model_name=str(model_folder), max_steps=8, max_staleness=8
    )


def train(trainer: Trainer, steps: range) -> None:
    for step in steps:
        trainer.train_step(build_batch(step=step, seed=step))


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_resuming_equals_never_having_stopped_bit_for_bit(model_folder: Path, tmp_path: Path) -> None:
    straight = make_trainer(model_folder)
    train(straight, range(1, 7))

    first = make_trainer(model_folder)
    train(first, range(1, 4))
    path = first.save_checkpoint(tmp_path)
    drawn = (random.random(), np.random.random(), torch.rand(1).item())
    second = make_trainer(model_folder)
    second.restore(path)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn
    assert (second.step, second.version) == (3, 3)
    train(second, range(4, 7))

    for name, tensor in straight.snapshot().wait().items():
        assert torch.equal(tensor, second.snapshot().wait()[name]), name


def test_transformers_loads_a_checkpoint_as_a_model(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    train(trainer, range(1, 2))
    path = trainer.save_checkpoint(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trainer.snapshot().wait()[name])
    assert AutoTokenizer.from_pretrained(path).chat_template
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_a_checkpoint_of_another_format_is_refused(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    path = trainer.save_checkpoint(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": "tailrace-checkpoint-1"}))
    refused = "step_000000 has the format 'tailrace-checkpoint-1'; this version reads 'tailrace-checkpoint-2'"
    with pytest.raises(CheckpointError, match=refused):
        trainer.restore(path)
    with pytest.raises(CheckpointError, match=refused):
        latest_checkpoint(tmp_path)


def test_what_a_crash_left_half_written_goes_with_the_next_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".writing_step_000007" / "optimizer").mkdir(parents=True)
    path = make_trainer(model_folder).save_checkpoint(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == [path.name]


def test_training_goes_on_while_a_checkpoint_of_before_is_written(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    train(trainer, range(1, 3))
    before = {name: tensor.clone() for name, tensor in trainer.snapshot().wait().items()}
    staged = trainer.stage_checkpoint(tmp_path)
    train(trainer, range(3, 5))
    model = AutoModelForCausalLM.from_pretrained(trainer.write_checkpoint(staged))
    assert staged.state.step == 2
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(model_folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "step_000007"
    foreign.mkdir()
    trainer = make_trainer(model_folder)
    with pytest.raises(CheckpointError, match="step_000007 is no checkpoint"):
        trainer.restore(foreign)
    with pytest.raises(CheckpointError, match="step_000007 is no checkpoint"):
        latest_checkpoint(tmp_path)


def test_the_newest_whole_checkpoint_is_found(model_folder: Path, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    trainer = make_trainer(model_folder)
    path = trainer.save_checkpoint(tmp_path)
    (tmp_path / "step_000099").mkdir()
    (tmp_path / ".writing_step_000100").mkdir()
    assert latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "missing"])
def test_a_damaged_checkpoint_is_refused(model_folder: Path, tmp_path: Path, file: str, damage: str) -> None:
    trainer = make_trainer(model_folder)
    path = trainer.save_checkpoint(tmp_path)
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "changed":
            (path / file).write_bytes(content)
        case "truncated":
            (path / file).write_bytes(content[:-1])
        case _:
            (path / file).unlink()
    with pytest.raises(CheckpointError, match=f"damaged: {file}"):
        trainer.restore(path)


def test_a_checkpoint_of_another_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    path = make_trainer(model_folder).save_checkpoint(tmp_path)
    from tests.training.tiny import tiny_model

    tiny_model("llama").save_pretrained(tmp_path / "llama")
    other = Trainer(TrainerSettings(), model_name=str(tmp_path / "llama"), max_steps=1, max_staleness=1)
    with pytest.raises(CheckpointError, match="does not fit this run's model"):
        other.restore(path)


@pytest.mark.parametrize("limit", [100, 3_000, 60_000])
def test_a_disk_that_takes_no_more_leaves_the_previous_checkpoint_intact(
    model_folder: Path, tmp_path: Path, limit: int
) -> None:
    trainer = make_trainer(model_folder)
    previous = trainer.save_checkpoint(tmp_path)
    train(trainer, range(1, 2))
    with files_up_to(limit), pytest.raises(CheckpointError, match="cannot be written"):
        trainer.save_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [previous.name]
    verify_checkpoint(previous)
    assert trainer.save_checkpoint(tmp_path).name == "step_000001"


def test_a_full_disk_says_so(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(model_folder)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tailrace.training.checkpoints.files.torch.save", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.save_checkpoint(tmp_path)


def test_a_checkpoint_needs_nothing_of_where_the_model_came_from(model_folder: Path, tmp_path: Path) -> None:
    """A folder may be gone, and a hub not answer, when the last one is written."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    trainer = make_trainer(folder)
    shutil.rmtree(folder)
    path = trainer.save_checkpoint(tmp_path / "checkpoints")
    assert AutoTokenizer.from_pretrained(path).chat_template
    assert (path / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()


def test_whatever_a_checkpoint_cannot_be_written_for_is_told_and_leaves_nothing_behind(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("lm_head.weight")

    trainer = make_trainer(model_folder)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"step_000000 cannot be written: 'lm_head\.weight'"):
        trainer.save_checkpoint(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_saving_a_step_again_replaces_it(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder)
    trainer.save_checkpoint(tmp_path)
    trainer.version = 1
    path = trainer.save_checkpoint(tmp_path)
    assert verify_checkpoint(path).version == 1
    assert [folder.name for folder in tmp_path.iterdir()] == [path.name]


def test_only_the_newest_checkpoints_are_kept(model_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder, keep_checkpoints=2)
    (tmp_path / "step_000000_of_somebody_else").mkdir()
    for step in range(1, 5):
        train(trainer, range(step, step + 1))
        trainer.save_checkpoint(tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step_000000_of_somebody_else", "step_000003", "step_000004"]


def test_a_folder_that_nothing_can_be_resumed_from_counts_for_none_of_those_that_are_kept(
    model_folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(model_folder, keep_checkpoints=1)
    train(trainer, range(1, 2))
    of_another_version = trainer.save_checkpoint(tmp_path).rename(tmp_path / "step_000007")
    manifest = of_another_version / "manifest.json"
    manifest.write_text(manifest.read_text().replace("tailrace-checkpoint-2", "tailrace-checkpoint-3"))
    train(trainer, range(2, 3))
    path = trainer.save_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path) == path
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step_000002", "step_000007"]


def test_a_checkpoint_that_was_being_replaced_is_put_back(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its successor's renaming fails, or the process ends before it."""
    trainer = make_trainer(model_folder)
    train(trainer, range(1, 2))
    path = trainer.save_checkpoint(tmp_path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == f".writing_{path.name}":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            trainer.save_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path) == path
    verify_checkpoint(path)

    path.rename(tmp_path / f".writing_{path.name}_replaced")
    assert latest_checkpoint(tmp_path) is None
    put_back(tmp_path)
    assert latest_checkpoint(tmp_path) == path

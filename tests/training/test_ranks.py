"""Trainers of several ranks: what they do alike, what they leave behind, and how they end when one of them is gone."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import PreTrainedModel

from tailrace.errors import (
    CheckpointError,
    CorruptData,
    Diverged,
    ModelError,
    PeerGone,
    RankLost,
    TailraceError,
    TrainingError,
)
from tailrace.records import Batch
from tailrace.training import leading
from tailrace.training.checkpoints import files
from tailrace.training.checkpoints.files import Manifest, verify_checkpoint
from tailrace.training.model.adapter import PlainWeight, plain_weights
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.model.sharding import share_out
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.settings.lora import LoraSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import NOT_FINITE, StepResult, Trainer
from tests.training.rank_processes import PATIENCE_S, run_ranks
from tests.training.tiny import build_batch, rows_of, tiny_model

pytestmark = pytest.mark.xdist_group("trainer ranks")

LENGTHS, ROWS = (9, 14, 5, 12, 30, 4), (2, 1, 3)
STEPS = 3
DEADLINE_S = 5.0
"""Of an exchange, and of ranks that meet and load, which a busy machine takes its time for."""
BRIEF_S = 3.0
"""The same, where something takes longer."""


def make_trainer(model_folder: Path, ranks: Ranks = ALONE, lora_rank: int | None = None) -> Trainer:
    lora = LoraSettings(rank=lora_rank)
    settings = TrainerSettings(learning_rate=1e-3, weight_decay=0.1, checkpoint_every_steps=1, lora=lora)
    return Trainer(settings, model_name=str(model_folder), max_steps=10, max_staleness=8, ranks=ranks)


def batch_of(step: int, ranks: Ranks) -> Batch:
    return rows_of(build_batch(lengths=LENGTHS, rows=ROWS, step=step, seed=step), ranks.rank, ranks.size)


def train(trainer: Trainer, steps: range, ranks: Ranks = ALONE) -> list[StepResult]:
    return [trainer.train_step(batch_of(step, ranks)) for step in steps]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.snapshot().wait().items()}


def train_and_save(
    ranks: Ranks, model_folder: Path, folder: Path, written: Path, lora_rank: int | None
) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; then the third again from the checkpoint of one process."""
    trainer = make_trainer(model_folder, ranks, lora_rank)
    results = train(trainer, range(1, STEPS), ranks)
    path = trainer.save_checkpoint(folder)
    results += train(trainer, range(STEPS, STEPS + 1), ranks)
    found: dict[str, Any] = {"path": path, "results": results, "weights": weights(trainer)}
    trainer.restore(written)
    train(trainer, range(STEPS, STEPS + 1), ranks)
    found["resumed"] = weights(trainer)
    own_nan = build_batch(lengths=LENGTHS, rows=ROWS, step=STEPS + 1, advantages=[0, 0, math.nan, 0, 0, 0])
    found["not finite"] = trainer.train_step(rows_of(own_nan, ranks.rank, ranks.size))
    found["unchanged"] = weights(trainer)
    try:
        trainer.train_step(batch_of(STEPS + 2 + ranks.rank, ranks))
    except TrainingError as error:
        found["of another step"] = str(error)
    return found


@pytest.fixture(scope="module", params=[(2, None), (3, None), (2, 4)], ids=["2", "3", "2 with adapters"])
def found(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Trainer, Path]:
    """What each rank came to; and one process's trainer after three steps, and its checkpoint of two."""
    folder, (size, lora_rank) = tmp_path_factory.mktemp("ranks"), request.param
    alone = make_trainer(model_folder, lora_rank=lora_rank)
    train(alone, range(1, STEPS))
    written = alone.save_checkpoint(folder / "alone")
    train(alone, range(STEPS, STEPS + 1))
    results = run_ranks(train_and_save, size, folder, model_folder, folder / "together", written, lora_rank)
    return results, alone, folder / "together"


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_ranks_train_as_one_process_does(found: tuple[list[Any], Trainer, Path]) -> None:
    (first, *others), alone, _ = found
    require_close(first["weights"], weights(alone))
    assert [other["weights"] for other in others] == [{}] * len(others)
    for step, result in enumerate(first["results"], 1):
        assert (result.step, result.version, result.skipped) == (step, step, None)
        for other in others:
            timed = {name for name in result.metrics if name.endswith("_s")}
            same = {name: other["results"][step - 1].metrics[name] for name in result.metrics.keys() - timed}
            assert same == {name: value for name, value in result.metrics.items() if name not in timed}


def test_one_process_reads_what_ranks_wrote(found: tuple[list[Any], Trainer, Path], model_folder: Path) -> None:
    (first, *_), alone, folder = found
    assert verify_checkpoint(first["path"]).version == STEPS - 1
    assert [path.name for path in folder.iterdir()] == [first["path"].name]
    trainer = make_trainer(model_folder, lora_rank=alone.settings.lora.rank)
    trainer.restore(first["path"])
    train(trainer, range(STEPS, STEPS + 1))
    require_close(weights(trainer), weights(alone))


def test_ranks_read_what_one_process_wrote(found: tuple[list[Any], Trainer, Path]) -> None:
    (first, *_), alone, _ = found
    require_close(first["resumed"], weights(alone))


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    found: tuple[list[Any], Trainer, Path],
) -> None:
    results, _, _ = found
    for rank in results:
        skipped = rank["not finite"]
        assert (skipped.step, skipped.version, skipped.skipped) == (STEPS + 1, STEPS, NOT_FINITE)
    assert all(torch.equal(results[0]["unchanged"][name], tensor) for name, tensor in results[0]["resumed"].items())


def test_an_error_of_one_rank_is_raised_by_all(found: tuple[list[Any], Trainer, Path]) -> None:
    results, _, _ = found
    assert "was sent the batch of step 6" in results[1]["of another step"]
    assert results[0]["of another step"] == f"rank 1: {results[1]['of another step']}"


def step_without_one(ranks: JoinedRanks, model_folder: Path, how: str) -> str:
    """Rank 1 is gone in the midst of a step: what the others say of it."""
    trainer = make_trainer(model_folder, ranks)
    train(trainer, range(1, 2), ranks)
    if ranks.rank == 1:
        AS_ASKED[how](ranks)
    try:
        train(trainer, range(2, 3), ranks)
    except RankLost as error:
        return str(error)
    return "nobody was missed"


def fail(ranks: JoinedRanks) -> None:
    error = MemoryError("no memory is left")
    ranks.tell(error)
    raise error


AS_ASKED: dict[str, Callable[[JoinedRanks], None]] = {
    "dies": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "fails": fail,
}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dies", "rank 1 of the trainer died or stopped"),
        ("stops", r"rank 1 of the trainer died or stopped; .* within 5 s \(trainer.collective_timeout_s\)"),
        ("fails", "rank 1 of the trainer failed: MemoryError: no memory is left"),
    ],
)
def test_the_others_miss_a_rank_within_the_deadline_and_name_it(
    model_folder: Path, tmp_path: Path, how: str, why: str
) -> None:
    import re

    first, _, last = run_ranks(step_without_one, 3, tmp_path, model_folder, how, deadline_s=DEADLINE_S, missing=1)
    assert re.search(why, first)
    assert re.search("rank 1 of the trainer", last)


def save_without_one(ranks: JoinedRanks, model_folder: Path, folder: Path) -> str:
    """Rank 1 is gone when the others write a checkpoint: what they say of it."""
    trainer = make_trainer(model_folder, ranks)
    train(trainer, range(1, 2), ranks)
    staged = trainer.stage_checkpoint(folder)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        trainer.write_checkpoint(staged)
    except RankLost as error:
        return str(error)
    return "nobody was missed"


def test_a_checkpoint_that_a_rank_is_lost_in_is_no_error_of_the_disk(model_folder: Path, tmp_path: Path) -> None:
    """A trainer that may be started again is, whatever its ranks were doing together."""
    folder = tmp_path / "checkpoints"
    first, _, last = run_ranks(save_without_one, 3, tmp_path, model_folder, folder, deadline_s=DEADLINE_S, missing=1)
    assert "rank 1 of the trainer" in first
    assert "rank 1 of the trainer" in last
    assert list(folder.iterdir()) == []


def restore_slowly(ranks: JoinedRanks, model_folder: Path, written: Path) -> int:
    """Rank 0, which reads every byte, takes longer for that than any other exchange may last."""

    def verify_slowly(path: Path) -> Manifest:
        time.sleep(BRIEF_S + 1)
        return verify_checkpoint(path)

    pytest.MonkeyPatch().setattr(files, "verify_checkpoint", verify_slowly)
    trainer = make_trainer(model_folder, ranks)
    trainer.restore(written)
    return trainer.step


def test_ranks_wait_for_a_checkpoint_to_be_read_for_longer_than_for_an_exchange(
    model_folder: Path, tmp_path: Path
) -> None:
    alone = make_trainer(model_folder)
    train(alone, range(1, 2))
    written = alone.save_checkpoint(tmp_path / "checkpoints")
    found = run_ranks(restore_slowly, 2, tmp_path / "ranks", model_folder, written, deadline_s=BRIEF_S)
    assert found == [1, 1]


def refuse_alone(ranks: JoinedRanks, model_folder: Path, written: Path, what: str) -> str:
    """Rank 1 does not find what the others do: what each says of it."""

    def refuse(path: Path) -> dict[str, Any]:
        raise CheckpointError(f"{path.name} is not here")

    def refuse_moments(reader: FileSystemReader) -> NoReturn:
        raise OSError("no moments are here")

    if ranks.rank == 1 and what == "state":
        pytest.MonkeyPatch().setattr(files, "read_trainer_state", refuse)
    elif ranks.rank == 1:
        pytest.MonkeyPatch().setattr(FileSystemReader, "read_metadata", refuse_moments)
    trainer = make_trainer(model_folder, ranks)
    try:
        trainer.restore(written)
    except CheckpointError as error:
        return str(error)
    return "nobody refused it"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("state", "step_000001 is not here"),
        ("moments", "checkpoint {written} has no moments that can be read: no moments are here"),
    ],
)
def test_a_checkpoint_that_one_rank_alone_refuses_is_refused_by_all(
    model_folder: Path, tmp_path: Path, what: str, says: str
) -> None:
    alone = make_trainer(model_folder)
    train(alone, range(1, 2))
    written = alone.save_checkpoint(tmp_path / "checkpoints")
    found = run_ranks(refuse_alone, 2, tmp_path / "ranks", model_folder, written, what)
    assert found == [f"rank 1: {says.format(written=written)}"] * 2


class SlowWeight(PlainWeight):
    """Takes long to copy, once all ranks have gathered it."""

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        found = super().whole(dtype)
        time.sleep(BRIEF_S + 1)
        return found


def copy_slowly(ranks: JoinedRanks, model_folder: Path, folder: Path, slow: int, ahead_bytes: int) -> Path:
    """Rank 0, which keeps the weights, takes longer for one of them than any other exchange may last."""

    def slowly(model: PreTrainedModel) -> Iterator[tuple[str, PlainWeight]]:
        found = [*plain_weights(model)]
        if ranks.rank == 0:
            name, weight = found[slow]
            found[slow] = name, SlowWeight(weight.own, weight.adapted)
        yield from found

    patch = pytest.MonkeyPatch()
    patch.setattr(files, "plain_weights", slowly)
    patch.setattr(files, "_MOST_AHEAD_BYTES", ahead_bytes)
    trainer = make_trainer(model_folder, ranks)
    train(trainer, range(1, 2), ranks)
    return trainer.save_checkpoint(folder)


@pytest.mark.parametrize(("slow", "ahead_bytes"), [(2, 0), (-1, 1 << 30)], ids=["one of many", "the last"])
def test_ranks_wait_for_weights_to_be_copied_for_a_checkpoint_for_longer_than_for_an_exchange(
    model_folder: Path, tmp_path: Path, slow: int, ahead_bytes: int
) -> None:
    asked = model_folder, tmp_path / "checkpoints", slow, ahead_bytes
    written, _ = run_ranks(copy_slowly, 2, tmp_path / "ranks", *asked, deadline_s=BRIEF_S)
    assert verify_checkpoint(written).step == 1


class RowsOf:
    """This rank's end of a queue that holds one batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    async def receive(self) -> Batch:
        return self._batch

    async def acknowledge(self, step: int) -> None:
        pass

    async def close(self) -> None:
        pass


def say_late(ranks: JoinedRanks, seconds: float) -> None:
    """What this rank tells of its end comes so much later."""
    tell = ranks.tell

    def tell_late(error: BaseException, *, lost: bool = False) -> None:
        time.sleep(seconds)
        tell(error, lost=lost)

    pytest.MonkeyPatch().setattr(ranks, "tell", tell_late)


def fail_while_writing(ranks: JoinedRanks, model_folder: Path, folder: Path, error: type[TrainingError]) -> Path:
    """Rank 0 writes its part of a checkpoint when all ranks fail together, and ends training afterwards.

    It tells of that in time; of divergence, which all ranks know of each other, long past it.
    """
    settings = TrainerSettings(max_nonfinite_steps=1)

    def make(kind: type[Trainer]) -> Trainer:
        return kind(settings, model_name=str(model_folder), max_steps=10, max_staleness=8, ranks=ranks)

    async def request_stop(reason: str) -> None:
        raise AssertionError(f"rank 0 ends training by itself, and was asked to: {reason}")

    step = 1 if error is Diverged else 1 + ranks.rank
    nan = build_batch(lengths=LENGTHS, rows=ROWS, step=step, advantages=[0, 0, math.nan, 0, 0, 0])
    batch = rows_of(nan, ranks.rank, ranks.size)
    if error is Diverged:
        leading._LAST_WORD_S = 0.05
    if error is Diverged and ranks.rank == 0:
        say_late(ranks, 1.0)
    if ranks.rank:
        asyncio.run(leading.follow(lambda: make(Trainer), RowsOf(batch), ranks, request_stop))
    trainer = make(leading.LeadingTrainer)
    staged = trainer.stage_checkpoint(folder)
    with pytest.raises(error):
        trainer.train_step(batch)
    time.sleep(leading._LAST_WORD_S + 1)
    path = trainer.write_checkpoint(staged)
    trainer.close()
    return path


@pytest.mark.parametrize("error", [Diverged, TrainingError])
def test_a_rank_that_fails_with_all_others_writes_its_part_of_a_checkpoint_and_waits_for_the_end(
    model_folder: Path, tmp_path: Path, error: type[TrainingError]
) -> None:
    """One that left earlier would be taken for one that died: the trainer would be started again, and fail again."""
    folder = tmp_path / "checkpoints"
    path, failed = run_ranks(fail_while_writing, 2, tmp_path / "ranks", model_folder, folder, error)
    assert verify_checkpoint(path).step == 0
    assert type(failed) is error


class NothingFor:
    """This rank's end of a queue that fails."""

    def __init__(self, error: type[TailraceError]) -> None:
        self._error = error

    async def receive(self) -> Batch:
        raise self._error("no rows")

    async def acknowledge(self, step: int) -> None:
        pass

    async def close(self) -> None:
        pass


def leave_alone(ranks: JoinedRanks, model_folder: Path, left: Path, error: type[TailraceError]) -> list[str]:
    """Rank 1 fails while rank 0 goes on: for what it asks to end the run."""
    asked: list[str] = []

    async def request_stop(reason: str) -> None:
        asked.append(reason)

    leading._LAST_WORD_S = 0.05
    if ranks.rank:
        with pytest.raises(error):
            asyncio.run(
                leading.follow(lambda: make_trainer(model_folder, ranks), NothingFor(error), ranks, request_stop)
            )
        left.touch()
        return asked
    make_trainer(model_folder, ranks)
    ranks.send_order(msgspec.msgpack.encode(leading.TrainStep(1)))
    deadline_s = time.monotonic() + PATIENCE_S
    while not left.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return asked


@pytest.mark.parametrize(("error", "asked"), [(TrainingError, ["no rows"]), (CorruptData, ["no rows"]), (PeerGone, [])])
def test_a_rank_asks_to_end_the_run_for_what_would_come_again_and_for_no_loss_on_the_way(
    model_folder: Path, tmp_path: Path, error: type[TailraceError], asked: list[str]
) -> None:
    """Ranks that are started again are sent the batch again, from where it lies."""
    assert run_ranks(leave_alone, 2, tmp_path / "ranks", model_folder, tmp_path / "left", error) == [[], asked]


def refusals(ranks: JoinedRanks, folders: dict[str, Path], other: Path) -> dict[str, str]:
    """What each model is refused for; and a checkpoint of another one."""
    found = {}
    for name, folder in folders.items():
        try:
            make_trainer(folder, ranks)
        except ModelError as error:
            found[name] = str(error)
    trainer = make_trainer(other, ranks)
    for name, folder in folders.items():
        try:
            trainer.restore(folder)
        except CheckpointError as error:
            found[f"{name} as a checkpoint"] = str(error)
    return found


def test_what_ranks_cannot_train_is_refused_by_all_alike(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    folders = {"nothing": tmp_path / "nothing"}
    first, second = run_ranks(refusals, 2, tmp_path / "ranks", folders, model_folder)
    assert "holds no config.json" in first["nothing"]
    assert "is no checkpoint" in first["nothing as a checkpoint"]
    assert second == {
        "nothing": first["nothing"],
        "nothing as a checkpoint": f"rank 0: {first['nothing as a checkpoint']}",
    }


def of_layers_with_a_weight_of_two(model: PreTrainedModel, _: JoinedRanks) -> None:
    first, second = model.base_model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def of_no_layers(model: PreTrainedModel, _: JoinedRanks) -> None:
    model.base_model.layers = nn.ModuleList()


def of_other_weights_on_a_rank(model: PreTrainedModel, ranks: JoinedRanks) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += ranks.rank


CHANGES = (of_layers_with_a_weight_of_two, of_no_layers, of_other_weights_on_a_rank)


def sharings(ranks: JoinedRanks) -> list[str]:
    """What each model is refused for."""
    found = []
    for change in CHANGES:
        model = tiny_model("llama")
        change(model, ranks)
        try:
            share_out(PolicyModel(model, native_kernels=False), ranks)
        except ModelError as error:
            found.append(str(error))
    return found


def test_models_that_ranks_cannot_share_are_refused_on_all_of_them(tmp_path: Path) -> None:
    first, second = run_ranks(sharings, 2, tmp_path)
    assert first == second
    shared, none, different = first
    assert shared.startswith("layers of LlamaForCausalLM share weights, which FSDP cannot share out: ")
    assert none.startswith("LlamaForCausalLM has no decoder layers to share out over ranks: ")
    assert different.startswith("the trainer's ranks loaded different weights of LlamaForCausalLM: ")


def numbers(ranks: JoinedRanks) -> list[Any]:
    return ranks.gather([ranks.rank, "x" * ranks.rank, float("nan"), None])


def test_ranks_gather_values_of_any_length(tmp_path: Path) -> None:
    for gathered in run_ranks(numbers, 3, tmp_path):
        assert [part[:2] for part in gathered] == [[0, ""], [1, "x"], [2, "xx"]]
        assert all(np.isnan(part[2]) and part[3] is None for part in gathered)

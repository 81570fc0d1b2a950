"""Ranks that share every row train as one process does, leave behind what it leaves, and refuse what they cannot do."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tailrace.errors import ModelError, RankLost, SettingsError
from tailrace.records import Batch, PayloadChunk, PayloadRef, RolloutId, SampleOrigins
from tailrace.records.payload_table import PayloadTableBuilder
from tailrace.training.ranks import ALONE, JoinedRanks, Ranks
from tailrace.training.reports.token_export import TokenExport
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.rows.row_sharing import RowGroup
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import NOT_FINITE, Trainer
from tests.support.expert_models import expert_model
from tests.support.exported_tokens import read_tokens
from tests.training.rank_processes import run_ranks
from tests.training.tiny import VOCABULARY, build_batch, rows_of, tiny_model

pytestmark = pytest.mark.xdist_group("trainer ranks")

LENGTHS, ROWS = (9, 14, 5, 12, 30, 4), (2, 1, 3)
ORIGINS = SampleOrigins.of([(RolloutId(f"task#{i}"), i % 2, "sums" if i < 3 else "names") for i in range(len(LENGTHS))])
STEPS = 2
BAD = [0.0, 0.0, 0.0, 0.0, math.nan, 0.0]
GSPO = {"name": "gspo", "masks": [{"name": "sequence_ratio", "high": 50.0}]}


def make_trainer(model_folder: Path, ranks: Ranks = ALONE, **given: Any) -> Trainer:
    options = {name: given.pop(name) for name in ("export", "nonfinite_folder", "open_payload") if name in given}
    own = {"ranks": ranks.size, "sequence_parallel": ranks.size // ranks.data_size, "learning_rate": 1e-3}
    settings = TrainerSettings.model_validate({**own, **given})
    return Trainer(settings, model_name=str(model_folder), max_steps=10, max_staleness=8, ranks=ranks, **options)


def batch_of(step: int, ranks: Ranks = ALONE, **options: Any) -> Batch:
    batch = build_batch(lengths=LENGTHS, rows=ROWS, step=step, seed=step, **options)
    return rows_of(dataclasses.replace(batch, origins=ORIGINS), ranks.data_rank, ranks.data_size)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.snapshot().wait().items()}


def new_export(folder: Path, rank: int = 0) -> TokenExport:
    tokenizer = Tokenizer(WordLevel({f"word{token_id}": token_id for token_id in range(VOCABULARY)}, "word0"))
    return TokenExport(folder, tokenizer, "jsonl", rank=rank)


def train(ranks: Ranks, model_folder: Path, folder: Path) -> dict[str, Any]:
    """Two steps with every token exported, a checkpoint, a third step that is not finite."""
    export = new_export(folder / "tokens", ranks.rank)
    trainer = make_trainer(
        model_folder,
        ranks,
        export=export,
        nonfinite_folder=folder / "nonfinite",
        loss=GSPO,
        gradient_checkpointing=True,
    )
    results = [trainer.train_step(batch_of(step, ranks)) for step in range(1, STEPS + 1)]
    path = trainer.save_checkpoint(folder / "checkpoints")
    found = {"metrics": [result.metrics for result in results], "weights": weights(trainer), "path": path}
    found["skipped"] = trainer.train_step(batch_of(STEPS + 1, ranks, advantages=BAD)).skipped
    export.close()
    return found


@pytest.fixture(scope="module", params=[(2, 2), (4, 2)], ids=lambda ranks: f"{ranks[0]} ranks, {ranks[1]} a row")
def both(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], dict[str, Any], Path]:
    """What each rank came to, what one process comes to, and the folder of `together` and `alone`."""
    folder = tmp_path_factory.mktemp("ranks")
    size, ranks_per_row = request.param
    together = run_ranks(train, size, folder, model_folder, folder / "together", ranks_per_row=ranks_per_row)
    return together, train(ALONE, model_folder, folder / "alone"), folder


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    """Without what depends on the machine."""
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "_bytes"))}


def test_metrics_of_every_environment_and_weights_are_those_of_one_process(
    both: tuple[list[Any], dict[str, Any], Path],
) -> None:
    together, alone, _ = both
    assert "training/names/kl" in alone["metrics"][0]
    for rank in together:
        for found, expected in zip(rank["metrics"], alone["metrics"], strict=True):
            assert of_training(found) == pytest.approx(of_training(expected), rel=1e-4)
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(together[0]["weights"][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def exported(folder: Path, step: int) -> list[dict[str, Any]]:
    """Every token of a step, of all ranks."""
    tokens = [one for path in folder.glob(f"step_{step:06d}_*") for one in read_tokens(path)]
    return sorted(tokens, key=lambda one: (one["rollout_id"], one["branch"], one["position"]))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_each_trained_token_is_exported_by_one_rank(both: tuple[list[Any], dict[str, Any], Path], step: int) -> None:
    *_, folder = both
    found, expected = (exported(folder / who / "tokens", step) for who in ("together", "alone"))
    assert len(expected) == batch_of(step).summary.loss_tokens
    for one, other in zip(found, expected, strict=True):
        same = [name for name, value in other.items() if not isinstance(value, float)]
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        for name in other.keys() - {*same}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


def test_one_process_goes_on_from_the_checkpoint(
    both: tuple[list[Any], dict[str, Any], Path], model_folder: Path
) -> None:
    together, alone, _ = both
    trainers = [make_trainer(model_folder, loss=GSPO) for _ in range(2)]
    for trainer, path in zip(trainers, (together[0]["path"], alone["path"]), strict=True):
        trainer.restore(path)
        trainer.train_step(batch_of(STEPS + 1))
    left, right = map(weights, trainers)
    for name, tensor in right.items():
        torch.testing.assert_close(left[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_a_row_that_is_not_finite_skips_the_step_on_all_and_is_kept(
    both: tuple[list[Any], dict[str, Any], Path],
) -> None:
    together, _, folder = both
    assert {rank["skipped"] for rank in together} == {NOT_FINITE}
    row = batch_of(STEPS + 1, advantages=BAD).row(2)
    kept = [dict(np.load(path)) for path in (folder / "together" / "nonfinite").iterdir()]
    for columns in kept:
        np.testing.assert_array_equal(columns["token_id"], row.token_ids)
        np.testing.assert_array_equal(columns["loss_mask"], row.loss_mask)
    computed = np.sum([np.isfinite(columns["trainer_logprob"]) for columns in kept], axis=0)
    bad = row.loss_mask & np.repeat(np.isnan(BAD[3:]), row.sample_lengths)
    assert computed[bad].tolist() == [1] * int(bad.sum())
    assert computed.max() == 1


def replay(ranks: Ranks, folder: Path) -> dict[str, float]:
    """A step with experts that another router chose."""
    generator, table, payloads = np.random.default_rng(0), PayloadTableBuilder(), dict[str, NDArray[np.uint8]]()
    for index, length in enumerate(LENGTHS):
        payload = np.stack([generator.permutation(8)[:2] for _ in range((length - 1) * 3)]).astype(np.uint8)
        payloads[f"test:{index}"] = payload.reshape(length - 1, 3, 2)
        ref = PayloadRef(f"test:{index}", "uint8", payloads[f"test:{index}"].shape)
        table.add(length, (PayloadChunk(0, length - 1, ref), PayloadChunk(length - 1, length)))
    batch = dataclasses.replace(batch_of(1), payloads=table.table())
    trainer = make_trainer(folder, ranks, open_payload=lambda ref: payloads[ref.uri])
    return of_training(trainer.train_step(batch).metrics)


def test_each_rank_replays_the_experts_of_its_slice(tmp_path: Path) -> None:
    expert_model("qwen3-moe").save_pretrained(tmp_path / "model")
    expected = replay(ALONE, tmp_path / "model")
    assert 0 < expected["training/router_agreement"] < 1
    for found in run_ranks(replay, 2, tmp_path / "ranks", tmp_path / "model", ranks_per_row=2):
        assert found == pytest.approx(expected, rel=1e-4)


class OneSlice(RowGroup):
    """Without the other ranks, who are only there to be counted."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


@pytest.mark.parametrize("size", [2, 3, 4, 8, 40])
def test_every_token_and_every_loss_token_is_in_one_slice(size: int) -> None:
    batch = batch_of(1)
    token_ids = batch.token_ids.copy()
    token_ids[9:15] = token_ids[:6]  # a prefix that two samples share
    row = dataclasses.replace(batch, token_ids=token_ids).row(0)
    whole = MicroBatch.of(row, 0)
    slices = [MicroBatch.of(row, 0, group=OneSlice(index, size)) for index in range(size)]
    input_ids = torch.cat([one.input_ids for one in slices], dim=1)
    if input_ids.shape == whole.input_ids.shape:
        assert torch.equal(input_ids, whole.input_ids)
    counts = [one.input_ids.shape[1] for one in slices]
    assert 1 <= min(counts) <= max(counts) <= min(counts) + 1
    positions = np.concatenate([one.positions for one in slices])
    assert sorted(positions.tolist()) == whole.positions.tolist() == np.flatnonzero(row.loss_mask).tolist()
    for one in slices:
        assert torch.equal(one.tokens.sample_lengths, whole.tokens.sample_lengths)
        predictors = one.input_ids[0, one.predictors].numpy()
        np.testing.assert_array_equal(predictors, row.token_ids[one.positions - 1])
        np.testing.assert_array_equal(one.tokens.targets.numpy(), row.token_ids[one.positions])


def refusals(ranks: JoinedRanks, folders: dict[str, Path], losses: dict[str, str]) -> dict[str, str]:
    """What each model and each loss is refused for."""
    found = dict[str, str]()
    tried = [(name, folder, {}) for name, folder in folders.items()]
    tried += [(name, folders["llama"], {"loss": {"name": loss}}) for name, loss in losses.items()]
    for name, folder, given in tried:
        try:
            make_trainer(folder, ranks, **given)
        except (ModelError, SettingsError) as error:
            found[name] = str(error)
    return found


def test_what_ranks_cannot_share_is_refused_by_all_alike(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("llama", "gemma2 with soft caps", "three heads")}
    tiny_model("llama").save_pretrained(folders["llama"])
    tiny_model("gemma2 with soft caps").save_pretrained(folders["gemma2 with soft caps"])
    heads = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=16, num_hidden_layers=1, num_attention_heads=3
    )
    LlamaForCausalLM(heads).save_pretrained(folders["three heads"])
    own = {"by function": "tests.support.losses:enormous", "by token": "tests.support.losses:ByToken"}
    first, second = run_ranks(refusals, 2, tmp_path / "ranks", folders, own, ranks_per_row=2)
    assert first == second
    assert first.keys() == {"gemma2 with soft caps", "three heads", "by function"}
    assert "Gemma2ForCausalLM trains one sample at a time" in first["gemma2 with soft caps"]
    assert "trainer.sequence_parallel = 2: 3 heads of attention and 3 of keys cannot be shared" in first["three heads"]
    assert "tests.support.losses:enormous' may look at whole ones" in first["by function"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ranks": 3, "sequence_parallel": 2}, "ranks = 3 cannot be parted into groups of sequence_parallel = 2"),
        ({"sequence_parallel": 2}, "write ranks = 2, for example"),
        ({"ranks": 2, "sequence_parallel": 2, "steps_per_batch": 2}, "has slices of rows: leave one of them out"),
        ({"context_parallel": 2}, "write ranks = 2 and sequence_parallel = 2"),
    ],
)
def test_settings_that_contradict_are_refused(given: dict[str, int], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainerSettings.model_validate(given)


def exchange_without_one(ranks: JoinedRanks) -> str:
    """Rank 1 stops before tokens are exchanged for heads: what rank 0 says of it."""
    group = ranks.row_group
    assert group is not None
    group.exchange(torch.zeros(2, 1), [1, 1], [1, 1])
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with ranks.exchanging():
            group.exchange(torch.zeros(2, 1), [1, 1], [1, 1])
    except RankLost as error:
        return str(error)
    return "nobody was missed"


def test_an_exchange_has_a_deadline_and_names_who_is_missing(tmp_path: Path) -> None:
    first, _ = run_ranks(exchange_without_one, 2, tmp_path, ranks_per_row=2, deadline_s=5.0, missing=1)
    assert "rank 1 of the trainer died or stopped" in first
    assert "within 5 s (trainer.collective_timeout_s)" in first

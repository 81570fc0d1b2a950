"""The trainer reads what generation recorded from the payloads that a batch refers to."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailrace.errors import ModelError, PayloadLost, TrainingError
from tailrace.records import Batch, OpenPayload, PayloadChunk, PayloadRef
from tailrace.records.payload_table import PayloadTableBuilder
from tailrace.reporting.metrics import MetricsAccumulator
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.trainer import Trainer
from tests.support.expert_models import expert_model, plain_routing
from tests.training.tiny import build_batch

LENGTHS = (9, 14, 5, 12)


@pytest.fixture(scope="module", params=["qwen3-moe", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    expert_model(request.param).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own_routing(folder: Path) -> dict[str, NDArray[np.uint8]]:
    """By reference, what the model itself chooses for each sample of the batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    batch = build_batch(lengths=LENGTHS)
    ends = np.cumsum(LENGTHS)
    samples = [batch.token_ids[end - length : end].tolist() for end, length in zip(ends, LENGTHS, strict=True)]
    return {f"test:{i}": plain_routing(model, one).numpy().astype(np.uint8) for i, one in enumerate(samples)}


def recorded_batch(payloads: dict[str, NDArray[np.uint8]], **options: int) -> Batch:
    """The batch with everything recorded but each sample's last token."""
    table = PayloadTableBuilder()
    for length, (uri, payload) in zip(LENGTHS, payloads.items(), strict=True):
        ref = PayloadRef(uri, str(payload.dtype), payload.shape)
        table.add(length, (PayloadChunk(0, length - 1, ref), PayloadChunk(length - 1, length)))
    return dataclasses.replace(build_batch(lengths=LENGTHS, **options), payloads=table.table())


def opens(payloads: dict[str, NDArray[np.uint8]]) -> OpenPayload:
    return lambda ref: payloads[ref.uri]


def make_trainer(folder: Path, open_payload: OpenPayload | None, **settings: object) -> Trainer:
    return Trainer(
        TrainerSettings.model_validate({"learning_rate": 1e-3, **settings}),
        model_name=str(folder),
        max_steps=10,
        max_staleness=4,
        open_payload=open_payload,
    )


def test_what_was_recorded_is_replayed_and_counted(folder: Path, own_routing: dict[str, NDArray[np.uint8]]) -> None:
    trainer = make_trainer(folder, opens(own_routing))
    first = trainer.train_step(recorded_batch(own_routing)).metrics
    assert first["training/replayed_share"] == pytest.approx(1 - len(LENGTHS) / sum(LENGTHS))
    assert first["training/router_agreement"] == 1
    others = {uri: (payload + 1) % 4 for uri, payload in own_routing.items()}
    trainer = make_trainer(folder, opens(others))
    metrics = trainer.train_step(recorded_batch(others)).metrics
    assert metrics["training/router_agreement"] < 1
    assert metrics["training/loss"] != pytest.approx(first["training/loss"], rel=1e-6)
    accumulator = MetricsAccumulator()
    for name, value in metrics.items():
        accumulator.add(name, value)  # each is in the table


def test_the_models_own_choice_trains_as_if_nothing_were_replayed(
    folder: Path, own_routing: dict[str, NDArray[np.uint8]]
) -> None:
    replaying, plain = make_trainer(folder, opens(own_routing)), make_trainer(folder, None)
    left, right = (one.train_step(recorded_batch(own_routing)).metrics for one in (replaying, plain))
    for name in ("training/loss", "training/grad_norm", "training/entropy"):
        assert left[name] == pytest.approx(right[name], rel=1e-4)
    assert "training/replayed_share" not in right
    for (name, one), other in zip(replaying.snapshot().wait().items(), plain.snapshot().wait().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)


def test_off_replays_nothing(folder: Path, own_routing: dict[str, NDArray[np.uint8]]) -> None:
    trainer = make_trainer(folder, opens(own_routing), router_replay="off")
    assert "training/replayed_share" not in trainer.train_step(recorded_batch(own_routing)).metrics


def test_a_payload_that_is_gone_leaves_its_tokens_to_the_router(
    folder: Path, own_routing: dict[str, NDArray[np.uint8]], caplog: pytest.LogCaptureFixture
) -> None:
    def open_payload(ref: PayloadRef) -> NDArray[np.generic]:
        if ref.uri == "test:1":
            raise PayloadLost("test:1 was released")
        return own_routing[ref.uri]

    metrics = make_trainer(folder, open_payload).train_step(recorded_batch(own_routing)).metrics
    assert metrics["training/replayed_share"] == pytest.approx((sum(LENGTHS) - LENGTHS[1] - 3) / sum(LENGTHS))
    assert "test:1 was released" in caplog.text


def test_experts_of_another_model_are_refused_before_a_weight_changes(
    folder: Path, own_routing: dict[str, NDArray[np.uint8]]
) -> None:
    foreign = {uri: payload + 100 for uri, payload in own_routing.items()}
    trainer = make_trainer(folder, opens(foreign))
    before = {name: tensor.clone() for name, tensor in trainer.snapshot().wait().items()}
    with pytest.raises(TrainingError, match="experts that the model lacks"):
        trainer.train_step(recorded_batch(foreign))
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.snapshot().wait().items())


def test_a_dense_model_ignores_experts_by_itself_and_refuses_when_it_must_replay(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_trainer(model_folder, opens({}))
    assert "no routers" in caplog.text
    with pytest.raises(ModelError, match="no routers"):
        make_trainer(model_folder, opens({}), router_replay="on")


def test_a_checkpoint_of_experts_is_a_model_that_trains_on(
    folder: Path, own_routing: dict[str, NDArray[np.uint8]], tmp_path: Path
) -> None:
    trainer = make_trainer(folder, opens(own_routing))
    trainer.train_step(recorded_batch(own_routing))
    resumed = make_trainer(folder, opens(own_routing))
    resumed.restore(trainer.save_checkpoint(tmp_path))
    batches = recorded_batch(own_routing, step=2, version=1)
    assert resumed.train_step(batches).metrics["training/loss"] == pytest.approx(
        trainer.train_step(batches).metrics["training/loss"], rel=1e-5
    )

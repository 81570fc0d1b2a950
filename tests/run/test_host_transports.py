"""The ends of roles that share no memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tailrace.errors import TransportError
from tailrace.lifecycle.launchers.local import LocalLauncher
from tailrace.lifecycle.node_weights import WeightsOfNodes
from tailrace.records import ModelStateDictRef
from tailrace.run.folder import RunPaths
from tailrace.run.host_transports import HostTransports, TransportAddresses, host_transports
from tailrace.transport.keys import CurveKeys
from tailrace.transport.weights.transfer_sockets import TransferPlace
from tailrace.transport.weights.transfers import TransferringModelStateDictStore
from tests.run.runs import tiny_settings

DIES_WITH_MEMORY = """
import os, pathlib, sys
from tailrace.transport.owned_folders import own_shared_memory
print(own_shared_memory("role", pathlib.Path(sys.argv[1])).path, flush=True)
os._exit(9)
"""
ON_GPUS = ("--trainer.device", "cuda", "--generator.engine", "vllm", "--transport.weights", "nccl")


def transports_on_nodes(tmp_path: Path, *overrides: str, weights: WeightsOfNodes | None = None) -> HostTransports:
    where = TransportAddresses(
        epoch="epoch",
        events="tcp://127.0.0.1:1",
        batches="tcp://127.0.0.1:2",
        batch_files=str(tmp_path),
        shared_memory=str(tmp_path),
        payloads=str(tmp_path),
        keys=CurveKeys.make(),
    )
    settings = tiny_settings(*overrides, "--placement", "ray", parent=tmp_path)
    return HostTransports(where, settings, weights=weights)


async def test_weights_between_gpus_are_asked_for_at_the_address_of_the_trainers_node(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    transports = transports_on_nodes(tmp_path, *ON_GPUS)
    async with transports.trainer(0, "tcp://127.0.0.1:0") as ends:
        ref = ends.model_state_dicts.publish({"head": torch.ones(2)}, 1)
        assert ref.uri.startswith("tcp://127.0.0.1:")
        with transports.generator_ends("generator.0") as generator, generator.open(ref) as offered:
            assert offered.version == 1


async def test_a_generator_that_hangs_in_a_transfer_is_given_up_before_those_that_wait_for_it_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls_s: list[float] = []

    class Store(TransferringModelStateDictStore):
        def __init__(self, place: TransferPlace, deadline_s: float) -> None:
            super().__init__(place, deadline_s)
            calls_s.append(deadline_s)

    monkeypatch.setattr("tailrace.run.host_transports.TransferringModelStateDictStore", Store)
    transports = transports_on_nodes(tmp_path, *ON_GPUS, "--generator.router.progress_deadline_s", "20")
    async with transports.trainer(0, "tcp://127.0.0.1:0"):
        assert calls_s == [10]


async def test_weights_on_their_way_from_node_to_node_lie_in_the_memory_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.transport.owned_folders.shared_memory_folder", lambda: tmp_path)
    transports = transports_on_nodes(tmp_path, "--transport.weights", "object_store")
    async with transports.trainer(0, "tcp://127.0.0.7:0") as ends:
        ref = ends.model_state_dicts.publish({"head": torch.ones(2)}, 1)
        host, _, name = ref.uri.partition("/")
        assert host == "127.0.0.7"
        own = ModelStateDictRef(1, name, ref.num_bytes)
        with transports.generator_ends("generator.0", "tcp://127.0.0.7:0") as generator, generator.open(own) as found:
            assert found["head"].tolist() == [1, 1]
        with (
            transports.generator_ends("generator-1.0", "tcp://127.0.0.8:0") as generator,
            pytest.raises(TransportError, match="no model state dict"),
            generator.open(own),
        ):
            pass
    assert [*tmp_path.glob("tailrace-run-*")] == []


async def test_shared_memory_of_a_role_that_was_killed_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr("tailrace.transport.owned_folders.shared_memory_folder", lambda: memory)
    launcher = LocalLauncher("epoch", tmp_path / "logs")
    async with host_transports(tiny_settings(parent=tmp_path), RunPaths(tmp_path / "run"), launcher) as transports:
        command = [sys.executable, "-c", DIES_WITH_MEMORY, str(memory)]
        dead = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)
        assert {str(path) for path in memory.iterdir()} == {dead.stdout.strip(), transports.where.shared_memory}
    launcher.kill()
    assert [*memory.iterdir()] == []


async def test_weights_of_a_life_of_the_trainer_can_be_loaded_until_they_are_forgotten(tmp_path: Path) -> None:
    transports = transports_on_nodes(tmp_path)
    async with transports.trainer() as ends:
        ref = ends.model_state_dicts.publish({"head": torch.ones(2)}, 1)
    with transports.generator_ends("generator.0") as generator, generator.open(ref) as found:
        assert found["head"].tolist() == [1, 1]
    transports.forget_weights(before_life=1)
    assert [*tmp_path.glob("model-state-dict-*")] == []


async def test_weights_that_do_not_come_to_a_node_in_time_are_a_load_that_failed(tmp_path: Path) -> None:
    async def never(host: str) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError(host)

    weights = WeightsOfNodes(never, lambda actor: None)
    deadline = ("--transport.weights", "object_store", "--generator.router.starved_deadline_s", "0.05")
    bring = transports_on_nodes(tmp_path, *deadline, weights=weights).bringing("10.0.0.2")
    assert bring is not None
    with pytest.raises(TransportError, match=r"version 3 did not come to the node 10\.0\.0\.2 within 0\.05 s"):
        await asyncio.wait_for(bring(ModelStateDictRef(3, "10.0.0.1/file", 1)), 20)

"""The ends of roles that share no memory."""

from __future__ import annotations

from pathlib import Path

import torch

from tailrace.run.host_transports import HostTransports, TransportAddresses
from tailrace.transport.keys import CurveKeys
from tests.run.runs import tiny_settings

ON_GPUS = ("--trainer.device", "cuda", "--generator.engine", "vllm", "--transport.weights", "nccl")


async def test_weights_between_gpus_are_asked_for_at_the_address_of_the_trainers_node(tmp_path: Path) -> None:
    where = TransportAddresses(
        epoch="epoch",
        events="tcp://127.0.0.1:1",
        batches="tcp://127.0.0.1:2",
        batch_files=str(tmp_path),
        shared_memory=str(tmp_path),
        payloads=str(tmp_path),
        keys=CurveKeys.make(),
    )
    transports = HostTransports(where, tiny_settings(*ON_GPUS, "--placement", "ray", parent=tmp_path))
    async with transports.trainer(0, "tcp://127.0.0.1:0") as ends:
        ref = ends.model_state_dicts.publish({"head": torch.ones(2)}, 1)
        assert ref.uri.startswith("tcp://127.0.0.1:")
        with transports.generator_ends("generator.0") as generator, generator.open(ref) as offered:
            assert offered.version == 1

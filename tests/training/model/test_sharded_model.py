"""FSDP's hooks sit on modules' forwards: weights that are used past them are shards, and fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tailrace.training.losses import Loss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.training.losses.support import as_any_loss
from tests.training.tiny import build_batch, tiny_model

SHORT = ClippedRatio(ClippedRatioSettings())


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    if distributed.is_initialized():  # vLLM's, of this one process too, is there for good once one of its tests has run
        yield
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def gradients(policy: PolicyModel, loss: Loss) -> dict[str, torch.Tensor]:
    policy(MicroBatch.of(build_batch().row(0), 0), loss).total.backward()
    found = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


@pytest.mark.parametrize("name", ["qwen3", "llama"])  # tied, and with a head of its own
@pytest.mark.parametrize("loss", [SHORT, as_any_loss(SHORT)], ids=["short", "general"])
def test_a_sharded_policy_has_the_gradients_of_a_whole_one(name: str, loss: Loss) -> None:
    expected = gradients(PolicyModel(tiny_model(name), native_kernels=False), loss)
    policy = PolicyModel(tiny_model(name), native_kernels=False)
    mesh = init_device_mesh("cpu", (1,))
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    if name == "llama":
        fully_shard(policy.model.lm_head, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    found = gradients(policy, loss)
    assert found.keys() == expected.keys()
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-7, msg=parameter)

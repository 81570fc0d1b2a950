"""Checkpointed layers keep less for the backward pass, and give the same gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from tailrace.errors import ModelError
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.checkpointed_layers import checkpoint_layers, decoder_layers
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.training.tiny import CONFIGS, build_batch, tiny_model


def trained(model: PreTrainedModel, *, gradient_checkpointing: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the bytes that were kept for them."""
    policy = PolicyModel(model, gradient_checkpointing=gradient_checkpointing)
    row = build_batch(lengths=(120, 90) if policy.packs else (210,), rows=(2,) if policy.packs else (1,)).row(0)
    micro_batch = MicroBatch.of(row, 0)
    kept: dict[int, int] = {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = policy(micro_batch, ClippedRatio(ClippedRatioSettings()))
    (output.total / 100.0).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], sum(kept.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_less_is_kept_and_gradients_stay(name: str) -> None:
    expected, all_bytes = trained(tiny_model(name), gradient_checkpointing=False)
    found, fewer_bytes = trained(tiny_model(name), gradient_checkpointing=True)
    assert fewer_bytes < 0.5 * all_bytes
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="gradient_checkpointing"):
        checkpoint_layers(torch.nn.Linear(2, 2))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=2, n_head=2))
    checkpoint_layers(bloom)
    assert ["forward" in vars(layer) for layer in decoder_layers(bloom)] == [True, True]

"""A layer of native passes gives the losses and gradients of the layer's own code; unknown layers keep theirs."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tailrace.cpu.kernels import find_kernels
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.training.tiny import VOCABULARY, build_batch, tiny_model

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}
SMOOTH = ClippedRatio(ClippedRatioSettings(correction="none"))  # no token sits on the edge of a clip
LENGTHS = (40, 9, 14, 37, 5, 12, 38)


def make(config: PreTrainedConfig, scale: float = 4.0) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale).add_(0.1 * torch.randn_like(parameter))
    return model


def gradients(policy: PolicyModel, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    row = build_batch(lengths=lengths, rows=(len(lengths),), prompt=4).row(0)
    for start in (0, lengths[0]):  # two samples begin alike
        row.token_ids[start : start + 4] = [1, 2, 3, 4]
    micro_batch = MicroBatch.of(row, 0)
    policy.model.zero_grad()
    output = policy(micro_batch, SMOOTH)
    loss = output.total / 10.0
    loss.backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach(), "logprobs": output.logprobs}


needs_kernels = pytest.mark.skipif(find_kernels() is None, reason="no C++ compiler, or several threads")


@needs_kernels
@pytest.mark.parametrize("name", list(CONFIGS))
def test_losses_and_gradients_are_the_layers_own(name: str) -> None:
    plain, fused = PolicyModel(make(CONFIGS[name]), native_kernels=False), PolicyModel(make(CONFIGS[name]))
    assert (plain.num_fused_layers, fused.num_fused_layers) == (0, 2)
    expected, found = gradients(plain, LENGTHS), gradients(fused, LENGTHS)
    assert found.keys() == expected.keys()
    for parameter, value in found.items():
        assert (value - expected[parameter]).norm() <= 1e-4 * expected[parameter].norm(), parameter


@needs_kernels
@pytest.mark.parametrize("name", list(CONFIGS))
def test_in_bfloat16_they_are_as_close_to_exact_ones(name: str) -> None:
    exact = gradients(PolicyModel(make(CONFIGS[name], scale=1.0)), LENGTHS)
    errors = {}
    for native in (False, True):
        policy = PolicyModel(make(CONFIGS[name], scale=1.0), dtype="bfloat16", native_kernels=native)
        found = gradients(policy, LENGTHS)
        errors[native] = torch.stack([(found[key] - exact[key]).norm() / exact[key].norm() for key in exact]).mean()
    assert 0 < errors[True] <= 1.2 * errors[False] < 0.2


@needs_kernels
def test_rows_with_a_long_segment_take_the_layers_own_code() -> None:
    plain, fused = PolicyModel(make(CONFIGS["qwen3"]), native_kernels=False), PolicyModel(make(CONFIGS["qwen3"]))
    expected, found = gradients(plain, (600, 20)), gradients(fused, (600, 20))
    for parameter, value in found.items():
        assert (value - expected[parameter]).norm() <= 1e-4 * expected[parameter].norm(), parameter


@needs_kernels
def test_activation_checkpointing_gives_the_same_gradients() -> None:
    expected = gradients(PolicyModel(make(CONFIGS["qwen3"])), LENGTHS)
    found = gradients(PolicyModel(make(CONFIGS["qwen3"]), gradient_checkpointing=True), LENGTHS)
    for parameter, value in found.items():
        torch.testing.assert_close(value, expected[parameter])


def test_layers_that_compute_something_else_keep_their_own_code() -> None:
    scaled = PolicyModel(make(GraniteConfig(**SIZES, residual_multiplier=0.5)))
    assert (scaled.packs, scaled.num_fused_layers) == (True, 0)
    for name in ("gpt2", "mistral with a sliding window", "gemma2 with soft caps"):
        assert PolicyModel(tiny_model(name)).num_fused_layers == 0

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

from tailrace.cpu.attention import attend, attend_backward
from tailrace.cpu.build import find_compiler
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


def require_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """But for float32's rounding."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


needs_kernels = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: make test-system")


@needs_kernels
@pytest.mark.parametrize("name", list(CONFIGS))
def test_losses_and_gradients_are_the_layers_own(name: str) -> None:
    plain, fused = PolicyModel(make(CONFIGS[name]), native_kernels=False), PolicyModel(make(CONFIGS[name]))
    assert (plain.num_fused_layers, fused.num_fused_layers) == (0, 2)
    require_same(gradients(fused, LENGTHS), gradients(plain, LENGTHS))


@needs_kernels
@pytest.mark.parametrize("name", list(CONFIGS))
def test_in_bfloat16_they_are_as_close_to_exact_ones(name: str) -> None:
    exact = gradients(PolicyModel(make(CONFIGS[name], scale=1.0)), LENGTHS)
    errors = {}
    for native in (False, True):
        policy = PolicyModel(make(CONFIGS[name], scale=1.0), dtype="bfloat16", native_kernels=native)
        assert policy.num_fused_layers == 2 * native
        found = gradients(policy, LENGTHS)
        errors[native] = torch.stack([(found[key] - exact[key]).norm() / exact[key].norm() for key in exact]).mean()
    assert 0 < errors[True] <= 1.2 * errors[False] < 0.2


@needs_kernels
def test_a_long_segment_of_many_blocks_is_as_exact() -> None:
    plain, fused = PolicyModel(make(CONFIGS["qwen3"]), native_kernels=False), PolicyModel(make(CONFIGS["qwen3"]))
    assert fused.num_fused_layers == 2
    require_same(gradients(fused, (980, 20)), gradients(plain, (980, 20)))


@needs_kernels
def test_what_many_blocks_add_to_a_key_is_not_rounded_between_them() -> None:
    """In bfloat16, against float64: each key of the first block gets gradients from every other one."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 1000, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    inputs[0] *= 0.05  # every query looks at all keys
    grad = torch.randn(1, 4, 1000, 16, dtype=torch.bfloat16)
    exact = [one.double().requires_grad_() for one in inputs]
    expanded = [exact[0], *(one.repeat_interleave(2, 1) for one in exact[1:])]
    torch.nn.functional.scaled_dot_product_attention(*expanded, is_causal=True, scale=1.0).backward(grad.double())
    _, kept = attend(*inputs, window=None, kernels=find_kernels())
    assert kept == []
    for one, found in zip(exact, attend_backward((*inputs,), kept, grad, window=None), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - one.grad).norm() < 4.5e-3 * one.grad.norm()


@needs_kernels
def test_rows_with_a_segment_beyond_the_limit_take_the_layers_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = PolicyModel(make(CONFIGS["qwen3"]), native_kernels=False), PolicyModel(make(CONFIGS["qwen3"]))
    monkeypatch.setattr("tailrace.cpu.trainer_layers.MATERIALIZE_UP_TO", 30)
    monkeypatch.setattr("tailrace.cpu.attention.MATERIALIZE_UP_TO", 30)
    monkeypatch.setattr("tailrace.cpu.trainer_layers.attend", lambda *_, **__: pytest.fail("a native layer attends"))
    assert fused.num_fused_layers == 2
    require_same(gradients(fused, LENGTHS), gradients(plain, LENGTHS))


@needs_kernels
def test_activation_checkpointing_gives_the_same_gradients() -> None:
    expected = gradients(PolicyModel(make(CONFIGS["qwen3"])), LENGTHS)
    found = gradients(PolicyModel(make(CONFIGS["qwen3"]), gradient_checkpointing=True), LENGTHS)
    assert found.keys() == expected.keys()
    for parameter, value in found.items():
        torch.testing.assert_close(value, expected[parameter])


def test_layers_that_compute_something_else_keep_their_own_code() -> None:
    scaled = PolicyModel(make(GraniteConfig(**SIZES, residual_multiplier=0.5)))
    assert (scaled.packs, scaled.num_fused_layers) == (True, 0)
    for name in ("gpt2", "mistral with a sliding window", "gemma2 with soft caps"):
        assert PolicyModel(tiny_model(name)).num_fused_layers == 0

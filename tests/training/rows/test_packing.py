"""A packed row gives the losses and gradients of its samples alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel, Qwen2MoeConfig

from tailrace.errors import ModelError
from tailrace.records import Batch
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.model.policy_model import PolicyModel
from tailrace.training.rows.attention import Segments, packed_attention
from tailrace.training.rows.micro_batch import MicroBatch
from tailrace.training.settings.losses import ClippedRatioSettings
from tests.training.tiny import CONFIGS, SIZES, build_batch, samples_of, tiny_model

SETTINGS = ClippedRatioSettings()
LONG_ROPE = Phi3Config(
    **SIZES, original_max_position_embeddings=32, pad_token_id=None,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    },
)  # fmt: skip


def reference(model: PreTrainedModel, batch: Batch, denominator: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Plain autograd, one sample at a time, with the model's own attention and whole logits."""
    model.zero_grad()
    total = 0.0
    for sample in samples_of(batch):
        tokens = MicroBatch.of(sample, 0).tokens
        ids = torch.tensor(sample.token_ids.astype("int64"))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1][torch.tensor(sample.loss_mask[1:])]
        logprobs = torch.log_softmax(logits / float(sample.temperatures[0]), -1)
        logprobs = logprobs.gather(1, tokens.targets[:, None])[:, 0]
        ratio = (logprobs - tokens.logprobs).exp()
        clipped = ratio.clamp(1 - SETTINGS.clip_low, 1 + SETTINGS.clip_high)
        kept = (torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)) == ratio * tokens.advantages
        weight = ratio.clamp(max=SETTINGS.truncation).detach() * kept
        value = -torch.minimum(ratio.clamp(max=SETTINGS.truncation) * tokens.advantages, clipped * tokens.advantages)
        (-(weight * tokens.advantages * logprobs).sum() / denominator).backward()
        total += float(value.detach().sum()) / denominator
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed(model: PreTrainedModel, batch: Batch, denominator: float) -> tuple[float, dict[str, torch.Tensor]]:
    policy = PolicyModel(model)
    model.zero_grad()
    pieces = [batch.row(0)] if policy.packs else samples_of(batch)
    total = 0.0
    for piece in pieces:
        micro_batch = MicroBatch.of(piece, 0)
        loss = policy(micro_batch, ClippedRatio(SETTINGS)).total / denominator
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("lengths", [(40, 9, 14, 37, 5, 12, 38), (20, 20, 20), (33,), (4, 600)])
def test_packed_loss_and_gradients_equal_those_of_samples_alone(name: str, lengths: tuple[int, ...]) -> None:
    if max(lengths) > 512:
        lengths = tuple(min(length, 512) for length in lengths)
    batch = build_batch(lengths=lengths, rows=(len(lengths),), temperature=0.7)
    denominator = float(batch.loss_mask.sum())
    expected_loss, expected = reference(tiny_model(name), batch, denominator)
    loss, gradients = packed(tiny_model(name), batch, denominator)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        scale = float(expected[parameter].abs().max())
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-3, atol=1e-4 * scale, msg=parameter)


def test_plain_architectures_pack_and_special_ones_are_found_out() -> None:
    packs = {name: PolicyModel(tiny_model(name)).packs for name in CONFIGS}
    assert packs == {
        "qwen3": True,
        "llama": True,
        "mistral with a sliding window": True,
        "gpt2": True,
        "gemma2 with soft caps": False,
        "deepseek_v3 with values narrower than keys": True,
    }


@pytest.mark.parametrize("slides", [True, False])
def test_a_sliding_window_that_only_masks_know_is_found_out_where_no_probe_is_as_long(slides: bool) -> None:
    config = Qwen2MoeConfig(
        **SIZES, use_sliding_window=slides, sliding_window=8, max_window_layers=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    assert PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")).packs is not slides


def test_a_sample_that_others_of_its_row_would_be_rotated_as_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(LONG_ROPE, attn_implementation="sdpa")
    policy = PolicyModel(model)
    assert policy.packs
    longest, longer = (build_batch(lengths=(count, 9), rows=(2,)).row(0) for count in (32, 33))
    policy(MicroBatch.of(longest, 0), ClippedRatio(SETTINGS))
    with pytest.raises(ModelError, match="more than 32 of them, and a sample has 33"):
        policy(MicroBatch.of(longer, 0), ClippedRatio(SETTINGS))


def test_values_narrower_than_keys_are_not_for_the_variable_length_kernel() -> None:
    query, key, value = (torch.zeros(1, 4, 5, size, dtype=torch.bfloat16) for size in (16, 16, 8))
    with pytest.raises(ModelError, match="values of 8 to keys of 16"):
        packed_attention(torch.nn.Module(), query, key, value, None, segments=Segments.of((2, 3), padded=False))


def test_segments_longer_than_the_blockwise_limit_agree_too() -> None:
    batch = build_batch(lengths=(500, 505, 510), rows=(3,))
    expected_loss, expected = reference(tiny_model("qwen3"), batch, 100.0)
    loss, gradients = packed(tiny_model("qwen3"), batch, 100.0)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(
        gradients[name], expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max())
    )

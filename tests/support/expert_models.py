"""Tiny random mixture-of-experts models of several of transformers' families."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN3 = {**_SHAPE, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_QWEN3, norm_topk_prob=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4)),
    "qwen3-moe, not normalised, a dense layer": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_QWEN3, norm_topk_prob=False, mlp_only_layers=[1])
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**_SHAPE, num_experts=8)),
}


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """In the order of layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def expert_model(family: str, *, seed: int = 0, router_scale: float = 1.0) -> PreTrainedModel:
    """Routers with small weights are nearly indifferent: the least change of theirs sends tokens to other experts."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for router in routers(model):
            router.weight.mul_(router_scale)
    return model


@torch.no_grad()
def perturb_routers(model: PreTrainedModel, scale: float, seed: int = 1) -> None:
    """Add noise of `scale` times each router's own size; no other weight changes."""
    generator = torch.Generator().manual_seed(seed)
    for router in routers(model):
        noise = torch.randn(router.weight.shape, generator=generator)
        router.weight.add_(noise, alpha=scale * float(router.weight.std()))


@torch.no_grad()
def make_routers_undecided(model: PreTrainedModel) -> None:
    """All experts suit a token almost alike, so that rounding decides for some of them, on any processor."""
    for router in routers(model):
        router.weight.copy_(router.weight[:1] + 0.03 * router.weight)


@torch.no_grad()
def plain_routing(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, layers with experts, top_k]: what the model itself chooses, in one plain pass."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, inputs, answer: chosen.append(answer[2]))
        for router in routers(model)
    ]
    model(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)

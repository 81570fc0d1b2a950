"""What a model's configuration alone says of its size, counted on a model without memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from tailrace.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of weights, tied ones once, and widths of a layer's activations, per token."""

    weights: int
    precise_weights: int
    """Of them, those that stay float32 where others are bfloat16: vectors, embeddings, head."""
    pinned_weights: int
    """What `weights` are in pinned memory: each tensor's number rounded up by `in_pinned_memory`."""
    pinned_precise_weights: int
    inner_matrices: int
    """Of them, those in `inner_matrices`."""
    outer_weights: int
    """Of them, those in no decoder layer."""
    layer_weights: int
    """Of the largest decoder layer."""
    head_weights: int
    """Of the output head, also where it is the embeddings' own."""
    layers: int
    vocabulary: int
    hidden: int
    heads: int
    queries: int
    """All heads of them together."""
    keys: int
    """All heads of them together; values are as wide."""
    intermediate: int
    """Of the feed-forward part: of all experts that one token meets."""
    norms_heads: bool
    """Whether queries and keys are normed (Qwen3)."""

    @property
    def cache_width(self) -> int:
        """Numbers that one token leaves in the cache of a generator."""
        return self.layers * 2 * self.keys


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    """Of a model in transformers' layout, which may be without memory. Raises `ModelError` where nothing attends."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    config: Any = model.config.get_text_config()
    if not getattr(config, "num_attention_heads", None):
        raise ModelError(f"{type(model).__name__} has no attention, which sizes are counted by")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    outer = {id(weight) for end in ends for weight in end.parameters()}
    in_layers = sum(map(count_weights, layers))
    weights, heads = count_weights(model), config.num_attention_heads
    precise = [one.numel() for one in model.parameters() if one.ndim == 1 or id(one) in outer]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelSizes(
        weights=weights,
        precise_weights=sum(precise),
        pinned_weights=sum(in_pinned_memory(one.numel()) for one in model.parameters()),
        pinned_precise_weights=sum(map(in_pinned_memory, precise)),
        inner_matrices=sum(one.numel() for one in inner_matrices(model)),
        outer_weights=weights - in_layers,
        layer_weights=max(map(count_weights, layers), default=0),
        head_weights=count_weights(ends[-1]) if ends else 0,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        heads=heads,
        queries=heads * head_size,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        intermediate=_intermediate(config),
        norms_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
    )


def inner_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Weights that are matrices, but neither embeddings, of tokens or positions, nor head nor stacked experts.

    One row or column is a vector: a shared expert's gate.
    """
    others = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        others |= {id(weight) for weight in head.parameters()}
    return [
        weight
        for name, weight in model.named_parameters()
        if is_matrix(name, weight) and weight.ndim == 2 and min(weight.shape) > 1 and id(weight) not in others
    ]


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether a weight is a matrix or a stack of them, and not the biases of stacked experts, one row for each."""
    return weight.ndim > 1 and not name.endswith("bias")


def state_dict_bytes(
    sizes: ModelSizes, dtype: Literal["float32", "bfloat16"], *, keeps_precise: bool = True, pinned: bool = False
) -> int:
    """Of the weights in `dtype`, where vectors, embeddings and head may stay in float32; `pinned`: in pinned memory."""
    weights, precise = sizes.weights, sizes.precise_weights
    if pinned:
        weights, precise = sizes.pinned_weights, sizes.pinned_precise_weights
    precise = precise if keeps_precise else 0
    return 4 * precise + {"float32": 4, "bfloat16": 2}[dtype] * (weights - precise)


def in_pinned_memory(numbers: int) -> int:
    """What a tensor of so many numbers takes there, in numbers: torch rounds its bytes up to a power of two.

    >>> in_pinned_memory(1024), in_pinned_memory(1025)
    (1024, 2048)
    """
    return 1 << (numbers - 1).bit_length()


def count_weights(module: nn.Module) -> int:
    """Tied ones once."""
    return sum(weight.numel() for weight in module.parameters())


def _intermediate(config: Any) -> int:
    """Experts that a token meets, one after the other, and those that all tokens meet."""
    of_an_expert = getattr(config, "moe_intermediate_size", None)
    met = getattr(config, "num_experts_per_tok", None)
    if not met:
        return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(met * (of_an_expert or config.intermediate_size) + shared)

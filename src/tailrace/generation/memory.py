"""What generating comes to in bytes, by a model's sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.generation.settings import Dtype, GeneratorSettings
from tailrace.models.sizes import ModelSizes, state_dict_bytes

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """Bytes of one generator; under tensor parallelism of all its devices together."""

    weights: int
    cache: int
    """Keys and values of as many requests as run at once, each as long as it may be."""
    loading: int
    """New weights beside the old ones, while they are taken over."""

    @property
    def total(self) -> int:
        """At its peak, but for what one step computes."""
        return self.weights + self.cache + self.loading


def generator_memory(
    sizes: ModelSizes, dtype: Dtype, generator: GeneratorSettings, *, max_model_tokens: int, published: int
) -> GeneratorMemory:
    """Where `published` are the bytes of a model state dict that the trainer sends.

    The torch engine's cache grows to this as contexts do; vLLM takes it at the start, or as much of the device as its
    own `gpu_memory_utilization` says.
    """
    return GeneratorMemory(
        weights=state_dict_bytes(sizes, dtype, keeps_precise=generator.engine == "torch"),
        cache=cache_bytes(sizes, dtype, generator.concurrency * max_model_tokens),
        loading=published,
    )


def cache_bytes(sizes: ModelSizes, dtype: Dtype, num_tokens: int) -> int:
    """Keys and values of so many tokens: a key and a value of each layer (Kwon et al., 2023, section 3)."""
    return _BYTES[dtype] * sizes.cache_width * num_tokens

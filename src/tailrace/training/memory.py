"""What training comes to in bytes, by a model's sizes alone: one function for each term, added up by `trainer_memory`.

    on the device   weights, gradients, moments | gathered for a layer | kept for the backward pass | the head's chunk
    on the host     weights on their way to the generators | a checkpoint while it is written

P weights, T of them trained (all, or those of adapters), N ranks. Weights are float32, and there is no second copy of
them as "master weights": bfloat16 is autocast over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from tailrace.models.sizes import ModelSizes, in_pinned_memory, state_dict_bytes
from tailrace.training.model.adapter import target_layers
from tailrace.training.model.head import chunk_tokens
from tailrace.training.settings.lora import LoraSettings
from tailrace.training.settings.trainer import TrainerSettings
from tailrace.training.step.offloaded_moments import STAGED_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDE_BYTES = 4
"""Of a float32 number: weights, gradients, moments, the residual stream."""

_INPUTS_ON_THE_WAY = 2
"""Of layers, on the device, where the others are offloaded."""
_LOGITS_AT_ONCE = 3
"""Logits of a chunk, their softmax, and what one operation makes of the two."""
_CPU_SCORES_UP_TO = 512
"""Tokens of a sample up to which a CPU keeps its attention's probabilities."""


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Numbers of an adapter's weights, and of those that it is added to."""

    weights: int = 0
    pinned_weights: int = 0
    """In pinned memory, as in `ModelSizes`."""
    layer_weights: int = 0
    """Of the largest decoder layer."""
    added_to: int = 0


NO_ADAPTER = AdapterSizes()


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of one rank of the trainer, rank 0, at their peak. Terms that are not of this run are 0."""

    weights: int
    adapter: int
    """With its gradients and moments."""
    gradients: int
    moments: int
    """Where they are offloaded, those that are there while a step is taken."""
    reference: int
    """Weights of a frozen model beside the policy; none where that is the model under an adapter."""
    gathered: int
    """Of other ranks: weights of the layer at work and of the next, and their gradients before they are summed."""
    kept: int
    """Activations of a row, for its backward pass."""
    head: int
    """Logits of a chunk, and the head's gradient of a row."""
    publication: int
    """On the host: weights on their way to the generators."""
    checkpoint: int
    """On the host: copies that a checkpoint is written from."""
    loading: int
    """On the device: the whole model, before a rank keeps its share."""
    offloaded: int = 0
    """On the host, in pinned memory: activations of a row."""
    offloaded_moments: int = 0
    """On the host, in pinned memory, between steps."""

    @property
    def device(self) -> int:
        """On the device at its peak."""
        held = self.weights + self.adapter + self.gradients + self.moments + self.reference
        return max(held + self.gathered + self.kept + self.head, self.loading)

    @property
    def host(self) -> int:
        """On the host besides, at its peak; where the device is the CPU this is added to it."""
        return self.publication + self.checkpoint + self.offloaded + self.offloaded_moments


def adapter_sizes(model: PreTrainedModel, lora: LoraSettings) -> AdapterSizes:
    """Of the adapters that `lora` asks for; `model` may be without memory. Raises `SettingsError`."""
    if lora.rank is None:
        return NO_ADAPTER
    layers = target_layers(model, lora)
    own = {name: lora.rank * sum(layer.weight.shape) for name, layer in layers.items()}
    pinned = sum(in_pinned_memory(lora.rank * width) for layer in layers.values() for width in layer.weight.shape)
    by_layer: dict[str, int] = {}
    for name, count in own.items():
        block = name.split(".layers.")[-1].partition(".")[0]
        by_layer[block] = by_layer.get(block, 0) + count
    added_to = sum(layer.weight.numel() for layer in layers.values())
    return AdapterSizes(sum(own.values()), pinned, max(by_layer.values()), added_to)


def trainer_memory(
    sizes: ModelSizes,
    settings: TrainerSettings,
    *,
    row_tokens: int,
    sample_tokens: int,
    published: Literal["float32", "bfloat16"],
    adapter: AdapterSizes = NO_ADAPTER,
    reference_weights: int = 0,
) -> TrainerMemory:
    """Of rank 0. `sample_tokens` are those of the longest sample, `published` what generators compute in.

    `reference_weights` are those of a reference model that is another than the one under an adapter.
    """
    trains_all, ranks = adapter.weights == 0, settings.ranks
    trained = sizes.weights if trains_all else 0
    own_moments = share(moment_bytes(sizes, settings, adapter), ranks)
    moments = min(own_moments, STAGED_BYTES) if settings.offload_optimizer else own_moments
    on_gpu = settings.device.startswith("cuda")
    return TrainerMemory(
        weights=share(WIDE_BYTES * sizes.weights, ranks),
        adapter=0 if trains_all else share(2 * WIDE_BYTES * adapter.weights, ranks) + moments,
        gradients=share(WIDE_BYTES * trained, ranks),
        moments=moments if trains_all else 0,
        reference=share(WIDE_BYTES * reference_weights, ranks),
        gathered=gathered_bytes(sizes, adapter) if ranks > 1 else 0,
        kept=kept_bytes(sizes, settings, row_tokens, sample_tokens=sample_tokens, trains_all=trains_all),
        head=head_bytes(sizes, on_gpu=on_gpu, trains_all=trains_all),
        publication=publication_bytes(sizes, settings, published, adapter),
        checkpoint=checkpoint_bytes(sizes, settings, adapter),
        loading=WIDE_BYTES * (sizes.weights + adapter.weights),
        offloaded=offloaded_bytes(sizes, settings, row_tokens),
        offloaded_moments=offloaded_moment_bytes(sizes, settings, adapter),
    )


def share(num_bytes: int, ranks: int) -> int:
    """A rank's part of what all ranks share: each weight is divided by its first dimension, the last part may be less.

    >>> share(4_000, 1), share(4_001, 4)
    (4000, 1001)
    """
    return -(-num_bytes // ranks)


def moment_bytes(sizes: ModelSizes, settings: TrainerSettings, adapter: AdapterSizes) -> int:
    """Of all weights that are trained: two moments each of AdamW (Kingma & Ba, 2015, algorithm 1), one of Muon for its
    matrices."""
    of_muon = sizes.inner_matrices if settings.optimizer == "muon" else 0
    return WIDE_BYTES * (2 * (adapter.weights or sizes.weights) - of_muon)


def offloaded_moment_bytes(sizes: ModelSizes, settings: TrainerSettings, adapter: AdapterSizes) -> int:
    """AdamW's two moments in pinned memory: `training/step/offloaded_moments.py`.

    Exact for one rank. Of several, no less where they divide each weight's first dimension: each rounds its own parts
    up to powers of two, which by the largest power of two among ranks are at most what the whole ones come to.
    """
    ranks = 1 << settings.ranks.bit_length() - 1
    weights = adapter.pinned_weights or sizes.pinned_weights
    return share(2 * WIDE_BYTES * weights, ranks) if settings.offload_optimizer else 0


def gathered_bytes(sizes: ModelSizes, adapter: AdapterSizes) -> int:
    """FSDP2 gathers the layer at work and the next one, embeddings and head: weights, and gradients of those trained.

    Zhao et al., "PyTorch FSDP" (2023), section 3.4: prefetching holds two units at once.
    """
    weights = 2 * (sizes.layer_weights + adapter.layer_weights) + sizes.outer_weights
    trained = weights if adapter.weights == 0 else 2 * adapter.layer_weights
    return WIDE_BYTES * (weights + trained)


def kept_bytes(
    sizes: ModelSizes, settings: TrainerSettings, row_tokens: int, *, sample_tokens: int, trains_all: bool = True
) -> int:
    """Activations of a row of so many tokens, for its backward pass, or of a rank's slice of it.

    With `gradient_checkpointing` each layer's input, and one layer whole, while its forward pass is repeated (Chen et
    al., "Training Deep Nets with Sublinear Memory Cost", 2016); all layers whole otherwise.
    """
    row_tokens = -(-row_tokens // settings.sequence_parallel)
    inside = row_tokens * layer_token_bytes(sizes, settings, sample_tokens, trains_all=trains_all)
    inside += cast_bytes(sizes, settings)
    ends = row_tokens * sizes.hidden * WIDE_BYTES * 2  # the last norm, and the gradient of what predicts tokens
    if settings.gradient_checkpointing:
        layers = min(_INPUTS_ON_THE_WAY, sizes.layers) if settings.offload_activations else sizes.layers
        return layers * row_tokens * sizes.hidden * WIDE_BYTES + inside + ends
    return sizes.layers * inside + ends


def offloaded_bytes(sizes: ModelSizes, settings: TrainerSettings, row_tokens: int) -> int:
    """Inputs of a row's layers in pinned memory: `training/model/offloaded_activations.py`."""
    tokens = -(-row_tokens // settings.sequence_parallel)
    return sizes.layers * WIDE_BYTES * in_pinned_memory(tokens * sizes.hidden) if settings.offload_activations else 0


def layer_token_bytes(sizes: ModelSizes, settings: TrainerSettings, sample_tokens: int, *, trains_all: bool) -> int:
    """What transformers' own code of one decoder layer keeps per token.

    Counted as Korthikanti et al. do, "Reducing Activation Recomputation in Large Transformer Models" (2022), section
    4.1, for norms before each part, rotary positions, SwiGLU, no dropout, and attention that keeps no scores. With h
    hidden, q and k the widths of queries and keys, i of the feed-forward part, c bytes of a product's numbers:

        norms       2 h of float32, and with bfloat16 as many again where their weights are trained
        products    2 h c (under autocast 5 h c: each rounds its own input)
        attention   (2 q + 2 k) c, and on a CPU probabilities of short samples
        norms of heads   (q + k) of float32, and (q + k) c where their weights are trained
        SwiGLU      4 i c

    The fused layers of a CPU keep less.
    """
    on_gpu, casts = settings.device.startswith("cuda"), settings.chosen_dtype == "bfloat16"
    compute = 2 if casts else WIDE_BYTES
    stream = 2 * sizes.hidden * WIDE_BYTES * (2 if on_gpu and trains_all else 1)
    products = (5 if casts else 2) * sizes.hidden * compute
    attention = (2 * sizes.queries + 2 * sizes.keys) * compute
    if not on_gpu:
        scores = sizes.heads * sample_tokens if sample_tokens <= _CPU_SCORES_UP_TO else 0
        attention += (sizes.queries + scores) * compute
    norms = sizes.queries + sizes.keys if sizes.norms_heads else 0
    norms *= WIDE_BYTES + (compute if on_gpu and trains_all else 0)
    return stream + products + attention + norms + 4 * sizes.intermediate * compute


def cast_bytes(sizes: ModelSizes, settings: TrainerSettings) -> int:
    """Weights of one layer in bfloat16, which autocast makes for a forward pass and its backward pass needs."""
    return 2 * sizes.layer_weights if settings.chosen_dtype == "bfloat16" else 0


def head_bytes(sizes: ModelSizes, *, on_gpu: bool, trains_all: bool) -> int:
    """Constant in the row: see `training/model/head.py`."""
    chunk = chunk_tokens(sizes.vocabulary, torch.device("cuda" if on_gpu else "cpu"))
    gradient = sizes.head_weights if trains_all else 0
    return WIDE_BYTES * (_LOGITS_AT_ONCE * chunk * sizes.vocabulary + gradient)


def published_bytes(
    sizes: ModelSizes,
    lora: LoraSettings,
    published: Literal["float32", "bfloat16"],
    adapter: AdapterSizes,
    *,
    pinned: bool = False,
) -> int:
    """Of what generators get after a step; `pinned`: in pinned memory."""
    if lora.publishes_adapters:
        weights = adapter.pinned_weights if pinned else adapter.weights
        return (2 if published == "bfloat16" else WIDE_BYTES) * weights
    return state_dict_bytes(sizes, published, pinned=pinned)


def publication_bytes(
    sizes: ModelSizes, settings: TrainerSettings, published: Literal["float32", "bfloat16"], adapter: AdapterSizes
) -> int:
    """Of `Trainer.snapshot`: pinned copies for a GPU; on a CPU what was gathered, rounded or added up, and no more."""
    on_gpu = settings.device.startswith("cuda")
    whole = published_bytes(sizes, settings.lora, published, adapter, pinned=on_gpu)
    if settings.lora.publishes_adapters or on_gpu or settings.ranks > 1:
        return whole
    if published == "bfloat16":
        return whole - WIDE_BYTES * sizes.precise_weights
    return WIDE_BYTES * adapter.added_to


def checkpoint_bytes(sizes: ModelSizes, settings: TrainerSettings, adapter: AdapterSizes) -> int:
    """Rank 0: all weights, the adapter, and its own share of moments."""
    moments = share(moment_bytes(sizes, settings, adapter), settings.ranks)
    return WIDE_BYTES * (sizes.weights + adapter.weights) + moments

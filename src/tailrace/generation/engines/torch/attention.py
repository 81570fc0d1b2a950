"""The attention that the model calls instead of its own: every token attends to the cache of its own slot.

Registered in transformers' attention interface under `SLOT_ATTENTION`, and under no mask function, so that models build
no mask at all. What it needs to know of a step travels as the keyword argument `slot_step` of the model's forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface

from tailrace.errors import ModelError
from tailrace.generation.engines.torch.cache import LayerShape, SlotCache

SLOT_ATTENTION = "tailrace_slots"


@dataclass(frozen=True, slots=True)
class Segment:
    """A chunk of one row's prompt: packed tokens `[begin, begin + end - start)` are positions `[start, end)`."""

    row: int
    begin: int
    start: int
    end: int


@dataclass(slots=True)
class SlotStep:
    """One forward pass: segments of prompts first, then one token of each of the rows `[0, num_decoding)`."""

    cache: SlotCache
    rows: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    segments: list[Segment]
    num_decoding: int
    longest: int
    """Positions of the cache that decoding reads: the longest context, its new token included, rounded up."""
    dtype: torch.dtype
    _write_indices: dict[int, torch.Tensor] = field(default_factory=dict)
    _decode_masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _segment_masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def write_index(self, kv_heads: int) -> torch.Tensor:
        """Where this step's keys go; computed once for all layers of the same shape."""
        if kv_heads not in self._write_indices:
            self._write_indices[kv_heads] = self.cache.write_index(kv_heads, self.rows, self.positions)
        return self._write_indices[kv_heads]

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, `[slots, kv_heads, room, head_dim]`."""
        return self.cache.keys[layer], self.cache.values[layer]

    def prefill(self, query: torch.Tensor, layer: int, scale: float) -> list[torch.Tensor]:
        """Plain attention of each segment over its row's cache, `[1, length, heads, value_dim]` each."""
        kind = _Kind(layer, scale, window=None, softcap=None)
        return [_prefill(self, index, query, kind) for index in range(len(self.segments))]

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """Additive, `[num_decoding, 1, 1, longest]`: each row sees its own context, or its last `window` tokens."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._decode_masks:
            last = self.positions[len(self.positions) - self.num_decoding :].view(-1, 1, 1, 1)
            columns = torch.arange(self.longest, device=last.device)
            self._decode_masks[window] = _additive(_visible(last, columns, window), self.dtype)
        return self._decode_masks[window]

    def segment_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Additive, `[length, end]`; None when plain causal attention from position 0 says the same."""
        segment = self.segments[index]
        if window is not None and window >= segment.end:
            window = None
        if window is None and segment.start == 0:
            return None
        if (index, window) not in self._segment_masks:
            rows = torch.arange(segment.start, segment.end, device=self.rows.device).unsqueeze(1)
            columns = torch.arange(segment.end, device=self.rows.device)
            self._segment_masks[index, window] = _additive(_visible(rows, columns, window), self.dtype)
        return self._segment_masks[index, window]


@dataclass(slots=True)
class ShapeProbe:
    """Stands in for a step, once, to learn what each layer caches. The attention is plain and causal."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    slides: bool = False
    """Whether some layer was told of a sliding window."""


class _Kind(NamedTuple):
    """What distinguishes one layer's attention from another's."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    slot_step: SlotStep | ShapeProbe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the slots, `[1, num_tokens, heads, value_dim]`; same signature as transformers'."""
    if slot_step is None or attention_mask is not None or s_aux is not None:
        raise ModelError(
            f"{type(module).__name__} cannot run on the torch engine: it "
            + ("uses attention sinks" if s_aux is not None else "does not pass its inputs on to its attention")
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(slot_step, ShapeProbe):
        if layer in slot_step.layers:
            raise ModelError(f"two attentions of {type(module).__name__} call themselves layer {layer}")
        slot_step.layers[layer] = LayerShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1])
        slot_step.slides |= sliding_window is not None
        return attend(query, key, value, None, causal=True, scale=scale, softcap=softcap).transpose(1, 2), None
    query, key, value = (states.to(slot_step.dtype) for states in (query, key, value))
    slot_step.cache.write(layer, slot_step.write_index(key.shape[1]), key, value)
    kind = _Kind(layer, scale, sliding_window, softcap)
    parts = [_prefill(slot_step, index, query, kind) for index in range(len(slot_step.segments))]
    if slot_step.num_decoding:
        parts.append(_decode(slot_step, query, kind))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _decode(step: SlotStep, query: torch.Tensor, kind: _Kind) -> torch.Tensor:
    """One token of each running row; query heads that share a key head are laid out as its queries."""
    count, heads, kv_heads = step.num_decoding, query.shape[1], step.cache.kv_heads[kind.layer]
    queries = query[0, :, query.shape[2] - count :].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, -1)
    keys, values = (cached[:count, :, : step.longest] for cached in step.caches(kind.layer))
    mask = step.decode_mask(kind.window)
    attended = attend(queries, keys, values, mask, causal=False, scale=kind.scale, softcap=kind.softcap)
    return attended.reshape(1, count, heads, -1)


def _prefill(step: SlotStep, index: int, query: torch.Tensor, kind: _Kind) -> torch.Tensor:
    """One segment over its own row's cache, what it just wrote included."""
    segment = step.segments[index]
    queries = query[:, :, segment.begin : segment.begin + segment.end - segment.start]
    keys, values = (cached[segment.row : segment.row + 1, :, : segment.end] for cached in step.caches(kind.layer))
    mask = step.segment_mask(index, kind.window)
    attended = attend(queries, keys, values, mask, causal=mask is None, scale=kind.scale, softcap=kind.softcap)
    return attended.transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Scaled dot-product attention, `[batch, heads, queries, value_dim]`; by hand where logits are soft-capped."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and (softcap is not None or (mask is not None and query.is_cuda)):
        # Of CUDA's kernels the one that takes a mask takes no grouped heads.
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        grouped = False
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    if causal:
        length = query.shape[2]
        mask = torch.full((length, length), -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype), value)


def _visible(positions: torch.Tensor, columns: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = columns <= positions
    return seen if window is None else seen & (columns > positions - window)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


AttentionInterface.register(SLOT_ATTENTION, slot_attention)

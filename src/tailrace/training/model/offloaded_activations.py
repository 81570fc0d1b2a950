"""What checkpointed layers keep for their backward pass, in the host's memory.

    forward    a layer's input ── side stream, beside the layer's own compute ──► pinned memory; freed on the GPU then
    backward   pinned memory ──► GPU, before the layer is computed once more

Two inputs at most lie on the GPU at a time, instead of those of all layers. The host never waits: the GPU's own queues
do, for a copy that takes less time than a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MIN_BYTES = 1 << 16
"""Smaller tensors stay: their copies would cost more than they free."""


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A tensor of a GPU, copied."""

    tensor: Tensor
    device: torch.device
    copied: torch.cuda.Event
    """Recorded behind the copy."""


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """A context around a checkpointed layer: what is saved inside, which are its inputs, lies on the host meanwhile."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._pack, self._unpack)
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None
        """The tensor that is being copied: the GPU's memory of it is not to be used for another one yet."""

    def _pack(self, tensor: Tensor) -> Tensor | _OnHost:
        if tensor.device.type != self._device.type or tensor.nbytes < _MIN_BYTES:
            return tensor
        self._let_go()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            host.copy_(tensor, non_blocking=True)
            copied.record(self._stream)
        self._leaving = tensor, copied
        return _OnHost(host, tensor.device, copied)

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        assert isinstance(kept, _OnHost)
        self._let_go()
        torch.cuda.current_stream(self._device).wait_event(kept.copied)
        return kept.tensor.to(kept.device, non_blocking=True)

    def _let_go(self) -> None:
        """Of the tensor that was copied last: what the GPU computes from here on comes after that copy."""
        if self._leaving is not None:
            _, copied = self._leaving
            torch.cuda.current_stream(self._device).wait_event(copied)
            self._leaving = None

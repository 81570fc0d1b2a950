"""New weights brought close to an engine beside its steps, so that installing them is one copy within its memory.

On a CPU pages are mapped and read where they lie; for a GPU tensors go to staging buffers there, or to pinned memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_PAGE_BYTES = 4096
_SPARE_SHARE = 0.05
"""Of a GPU's memory, left free for what a step allocates."""


def prefetch_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Read one byte of every page of what lies in main memory. Releases the interpreter lock meanwhile."""
    for tensor in tensors.values():
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            tensor.detach().reshape(-1).view(torch.uint8)[::_PAGE_BYTES].sum()


class StagingBuffers:
    """What `Engine.prepare` gives to an engine on one device. Buffers on a GPU are kept, and used for every load."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._buffers: dict[str, Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors where the engine can copy them fastest; on a CPU where they are, read ahead.

        In any thread, once the weights given before are installed (`wait_until_copied`). Blocks.
        """
        prefetch_tensors(tensors)
        if self._device.type != "cuda":
            return tensors
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            filled = {name: self._buffer(name, tensor).copy_(tensor) for name, tensor in tensors.items()}
        self._stream.synchronize()
        return filled

    def wait_until_copied(self) -> None:
        """In the engine's thread, after it queued its copies: until nobody reads the buffers any more."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            free, total = torch.cuda.mem_get_info(self._device)
            has_room = free - like.nbytes > _SPARE_SHARE * total
            buffer = torch.empty(
                like.shape, dtype=like.dtype, device=self._device if has_room else "cpu", pin_memory=not has_room
            )
            self._buffers[name] = buffer
        return buffer

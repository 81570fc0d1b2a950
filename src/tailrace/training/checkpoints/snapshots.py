"""A model's weights as they are after a step, on their way to the generators.

    on a GPU   parameters ── side stream, beside the next forward and backward ──→ pinned memory ──→ store
    on a CPU   parameters, as they are ──→ store; the next step waits for that
    of ranks   parameters, gathered: on a GPU as above, on a CPU fresh tensors that no step waits for
    that stays copies on the same device, for a store that sends them from there

Weights change in the optimizer's step alone, so only the next step waits for the copy to pinned memory: the GPU needs
no second set of weights. The store is written by another thread than the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one version. The next snapshot may reuse their memory."""

    weights: Mapping[str, Tensor]
    """On the CPU, unless they stay where they are; complete after `wait`."""
    version: int
    copied: torch.cuda.Event | None = None
    """Recorded behind the copy on a GPU, or from it."""
    is_copy: bool = False
    """Whether the weights are others than the trainer's own."""

    @property
    def is_detached(self) -> bool:
        """Whether the trainer may take its next step before the store has the weights."""
        return self.is_copy or self.copied is not None

    def wait(self) -> Mapping[str, Tensor]:
        """The weights, once complete. Blocks."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.weights


class HostCopies:
    """Copies a GPU model's weights to pinned memory while it computes. Allocates at the first copy.

    torch rounds each pinned tensor up to a power of two (`models.sizes.in_pinned_memory`): one for all weights, too.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream(device).wait_event(self._copied))

    def take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Queue the copy of weights, which are converted on the GPU while they are iterated; returns at once."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, weight in weights:
                if name not in self._pinned:
                    self._pinned[name] = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
                self._pinned[name].copy_(weight, non_blocking=True)
            self._copied.record()
        return Snapshot(self._pinned, version, self._copied)


def kept_snapshot(weights: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
    """Copies of weights where they are, of which none is ever written to again; returns before a GPU has made them."""
    copies = {name: weight.clone() for name, weight in weights}
    copied = None
    if any(copy.device.type == "cuda" for copy in copies.values()):
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    return Snapshot(copies, version, copied, is_copy=True)

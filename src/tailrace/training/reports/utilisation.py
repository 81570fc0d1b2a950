"""How much of a device's arithmetic a step uses: model FLOPs utilisation (MFU), and the memory that it takes.

    FLOPs of a step = Σ over samples of n tokens   6 P n + Σ over layers  6 heads · head_size · n²
    MFU             = FLOPs of a step / (seconds · ranks · peak of a device)

Where a layer sees a window of w < n tokens, 2 n w - w² stands for n². P counts the entries of matrices that a token is
multiplied by: not norms, biases and embeddings (but a head that is an embedding), and of experts the share that a token
is routed to. A multiplication and an addition are two operations, the backward pass is twice the forward pass, and
causal attention sees half of n² pairs (Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B, which counts all of
them; halved as in prime-rl). What is computed again for lack of memory does not count, and tokens that samples share
count for each sample: this is what the step is worth, not what it did. Of F entries that are frozen, beside an adapter,
no gradient is made: 2 F n less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from tailrace.models.routers import find_routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KNOWN_PEAKS: Final = MappingProxyType(
    {
        "B200": 2250e12,
        "H200": 989e12,
        "H100 NVL": 835e12,
        "H100 PCIe": 756e12,
        "H100": 989e12,
        "A100": 312e12,
        "L40S": 362e12,
        "RTX 4090": 165e12,
        "MI300X": 1307e12,
    }
)
"""FLOP/s of dense bfloat16 products by the makers' data sheets; the first name that is part of the device's counts."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What a token costs."""

    parameters: int
    """P."""
    widths: tuple[tuple[int | None, int], ...]
    """Window (None: all that came before), and heads · head_size summed over the layers of that window."""
    frozen: int = 0
    """F."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Of a transformers model, by its modules and its configuration."""
        config = model.config.get_text_config()
        widths = Counter[int | None]()
        if heads := getattr(config, "num_attention_heads", 0):  # else it attends to nothing
            head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
            for window in _windows(config):
                widths[window] += heads * head_size
        active = _active_parameters(model)
        return cls(sum(active), tuple(widths.items()), frozen=active[1])

    def of_samples(self, lengths: NDArray[np.integer[Any]]) -> float:
        """Forward and backward of samples of these lengths, in tokens.

        >>> ModelFlops(parameters=100, widths=((None, 8), (2, 8))).of_samples(np.array([1, 3]))
        3312.0
        """
        counts, attention = lengths.astype(np.float64), 0.0
        for window, width in self.widths:
            seen = counts if window is None else np.minimum(counts, window)
            attention += width * float((2 * counts * seen - seen**2).sum())
        return 6.0 * (self.parameters * float(counts.sum()) + attention) - 2.0 * self.frozen * float(counts.sum())


def peak_flops(device: torch.device, dtype: Literal["float32", "bfloat16"], chosen: float | None) -> float | None:
    """FLOP/s of a device in `dtype`: as `chosen`, or as known; None where nobody knows."""
    if chosen is not None or device.type != "cuda" or dtype != "bfloat16" or not torch.cuda.is_available():
        return chosen
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in KNOWN_PEAKS.items() if known in name), None)


class MemoryGauge:
    """The most memory that a step takes on its device; on a CPU what the process has when the step ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and torch.cuda.is_available() else None

    def begin(self) -> None:
        """A step begins."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> int:
        """Bytes since then. Waits for nothing."""
        if self._device is None:
            return int(psutil.Process().memory_info().rss)
        return torch.cuda.max_memory_allocated(self._device)


def _windows(config: Any) -> list[int | None]:
    """Of each layer that attends: how many tokens a token sees at most."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        slides = window is not None and getattr(config, "use_sliding_window", True)
        return [window if slides else None] * int(config.num_hidden_layers)
    windows: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    return [windows[kind] for kind in kinds if kind in windows]


def _active_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """P - F and F, of weights that are whole or shared out over ranks."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    left_out = embeddings - ({id(head.weight)} if head is not None else set())
    shares = {f"{router.name.rpartition('.')[0]}.experts.": router for router in find_routers(model)}
    trained = frozen = 0.0
    for name, parameter in model.named_parameters():
        router = next((router for prefix, router in shares.items() if name.startswith(prefix)), None)
        if parameter.ndim > 1 and id(parameter) not in left_out:
            count = parameter.numel() * (1.0 if router is None else router.top_k / router.num_experts)
            trained, frozen = (trained + count, frozen) if parameter.requires_grad else (trained, frozen + count)
    return round(trained), round(frozen)
